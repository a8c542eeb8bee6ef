"""Plans on NumPy: every dispatch through its kernel's twin, in the plan's order or a shuffled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..engine import Accepted
from ..errors import ArgumentError, StateError
from ..geometry import Geometry
from ..planes import ARCHIVE_PLANES, MOVING_PLANES, PENDING_PLANES, PLANES, STATE_PLANES, Sizes
from ..planning import Limits, block_rows, commit_plan, plan
from ..plans import Dispatch, Plan, base_plane, check_archive, is_store, members
from .batches import joined, place, without
from .logs import Joining, RowLog
from .twins import TWINS

Array = npt.NDArray[Any]
Hook = Callable[[Dispatch, dict[str, Array], dict[str, Array]], None]
"""Called after each dispatch with copies of the planes it binds, before and after."""

_MOVING = (*MOVING_PLANES, *ARCHIVE_PLANES)

POISON = np.float32(1e37)
"""Fills, with either sign in turn, what nobody has written yet: finite, and far from any result."""


def run_dispatch(dispatch: Dispatch, planes: Mapping[str, Array], on_dispatch: Hook | None = None) -> None:
    """Runs one dispatch; planes that its kernel only reads reach the twin read-only."""
    uses = dict(dispatch.uses())
    before = {name: planes[name].copy() for name in uses} if on_dispatch else {}
    views = {name: planes[name].view() for name in uses}
    for name, writes in uses.items():
        if not writes:
            views[name].flags.writeable = False
    # A store reaches the twin as its two planes.
    bound = [tuple(views[m] for m in members(n)) if is_store(n) else views[n] for n in dispatch.planes]
    TWINS[dispatch.kernel](dict(dispatch.params), dispatch.grid, *bound)
    if on_dispatch:
        on_dispatch(dispatch, before, {name: planes[name].copy() for name in uses})


def run_plan(
    plan: Plan,
    planes: Mapping[str, Array],
    shuffle: np.random.Generator | None = None,
    on_dispatch: Hook | None = None,
) -> None:
    """Runs a plan in place.

    Args:
        plan: what to run.
        planes: every plane that the plan binds, in its shape and type of `planes.PLANES`.
        shuffle: if given, dispatches between two barriers run in random order.
        on_dispatch: called after each dispatch.

    Raises:
        ArgumentError: a plane is missing, or has another shape, type or memory order; nothing ran.
    """
    for name in plan.planes:
        _check_plane(name, planes, plan.sizes)
    for stage in plan.stages():
        order = range(len(stage)) if shuffle is None else shuffle.permutation(len(stage))
        for at in order:
            run_dispatch(stage[at], planes, on_dispatch)


def _check_plane(name: str, planes: Mapping[str, Array], sizes: Sizes) -> None:
    if name not in planes:
        raise ArgumentError(f"planes: no {name!r}, expected one")
    plane, array = base_plane(name), planes[name]
    if array.shape != plane.dims(sizes) or array.dtype != plane.dtype or not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name}: {array.dtype} {array.shape}{'' if array.flags.c_contiguous else ' in another order'}, "
            f"expected C-contiguous {plane.dtype} {plane.dims(sizes)}"
        )


@dataclass
class PlanResident:
    """A layer's state on the host. The arrays are never written: a commit puts others in their place, so
    that residents may share them."""

    geometry: Geometry
    planes: dict[str, Array]
    """State planes, and those of the archive if there is one."""
    archive: int = 0
    """Evictions that the archive holds."""
    drafts: dict[str, dict[str, Array]] = field(default_factory=dict)
    """The pending planes of uncommitted calls, by the draft's name."""

    @property
    def nbytes(self) -> int:
        """Bytes of state, archive and drafts."""
        held = [self.planes, *self.drafts.values()]
        return sum(array.nbytes for planes in held for array in planes.values())

    def moving(self) -> dict[str, Array]:
        """What a committed row changes."""
        return {name: a for name, a in self.planes.items() if name in _MOVING}


class PlanEngine:
    """An `engine.Engine` that runs the plans of `planning` through the twins, stage by stage.

    It is there to be compared with, not to be fast.

    Args:
        limits: what the plans may ask for.
        shuffle: if given, dispatches between two barriers run in random order.
        on_dispatch: called after each dispatch.
        poison: fill planes that a plan must write before it reads them with a large finite pattern
            instead of zeros.
        path: the planner's path.
        precision: of the matrix products, see `planning.plan`.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008
        shuffle: np.random.Generator | None = None,
        on_dispatch: Hook | None = None,
        poison: bool = True,
        path: str = "auto",
        precision: str = "exact",
    ) -> None:
        self.limits = limits
        self.path = path
        self.precision = precision
        self.shuffle = shuffle
        self.on_dispatch = on_dispatch
        self.poison = poison

    def upload(self, geometry: Geometry, planes: Mapping[str, Array], archive: int = 0) -> PlanResident:
        """Takes copies of the state planes; raises `ArgumentError` for a missing or misshapen one."""
        archive = check_archive(archive)
        sizes = Sizes.of(geometry, archive=archive or 1)
        for name in STATE_PLANES:
            _check_plane(name, planes, sizes)
        kept = {name: _frozen(planes[name].copy()) for name in STATE_PLANES}
        if archive:
            kept |= {name: _frozen(np.zeros(PLANES[name].dims(sizes), np.float32)) for name in ARCHIVE_PLANES}
        return PlanResident(geometry, kept, archive)

    def attend(
        self,
        resident: PlanResident,
        q: Float32,
        k: Float32,
        v: Float32,
        commit: bool,
        draft: str = "",
        log: RowLog | None = None,
    ) -> Float32:
        """Outputs `(rows, nh, dv)`, see `engine.Engine`."""
        if not commit:
            planes = self._attend(resident, q, k, v, False)
            resident.drafts[draft] = {name: _frozen(planes[name]) for name in PENDING_PLANES}
            return planes["out"]
        moving = PlanResident(resident.geometry, resident.planes, resident.archive)
        joining = Joining()
        joining.add(log, q, k, v)
        most = block_rows(resident.geometry, self.limits, self.path)
        outs = []
        for at in range(0, len(q), most):
            block = slice(at, at + most)
            planes = self._attend(moving, q[block], k[block], v[block], True)
            moving.planes = _moved(moving, planes)
            outs.append(planes["out"])
        resident.planes = moving.planes
        resident.drafts.clear()
        joining.finish()
        return outs[0] if len(outs) == 1 else np.concatenate(outs)

    def _attend(
        self, resident: PlanResident, q: Float32, k: Float32, v: Float32, commit: bool
    ) -> dict[str, Array]:
        """The planes after a plan."""
        # Without a commit nothing is archived, so there is but one such plan.
        archive = resident.archive if commit else 0
        steps = plan(resident.geometry, len(q), commit, self.path, self.limits, self.precision, archive)
        return self._run(steps, resident, {"q": q, "k_rows": k, "v_rows": v})

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Moves each state over the rows accepted and forgets the drafts, all or none.

        Raises `StateError` where a draft has fewer rows.
        """
        moved: list[tuple[PlanResident, dict[str, Array]]] = []
        joining = Joining()
        for one in accepted:
            resident, rows = one.resident, one.rows
            kept = resident.drafts.get(one.draft, {})
            have = len(kept["spec_k"]) if kept else 0
            if not 0 <= rows <= have:
                which = f"draft {one.draft!r}" if one.draft else "the last uncommitted call"
                raise StateError(f"rows: {rows}, expected 0 to the {have} rows of {which}")
            if rows:
                given = {name: array[:rows] for name, array in kept.items()}
                joining.add(one.log, given["spec_q"], given["spec_k"], given["spec_v"])
                steps = commit_plan(resident.geometry, rows, self.path, self.limits, resident.archive)
                moved.append((resident, _moved(resident, self._run(steps, resident, given))))
        for resident, planes in moved:
            resident.planes = planes
        for one in accepted:
            one.resident.drafts.clear()
        joining.finish()

    def absorb(self, resident: PlanResident, k: Float32, v: Float32) -> None:
        """Moves the state over rows without outputs, see `engine.Engine`."""
        moving = PlanResident(resident.geometry, resident.planes)
        most = block_rows(resident.geometry, self.limits, self.path)
        for at in range(0, len(k), most):
            rows = {"spec_k": k[at : at + most], "spec_v": v[at : at + most]}
            count = len(rows["spec_k"])
            # `o1c_tok_far` works out what the far field would give a query: nobody reads that here.
            rows["spec_q"] = np.zeros(
                (count, resident.geometry.num_heads, resident.geometry.head_dim), np.float32
            )
            steps = commit_plan(resident.geometry, count, self.path, self.limits)
            moving.planes = _moved(moving, self._run(steps, moving, rows))
        resident.planes = moving.planes
        resident.drafts.clear()

    def forget(self, resident: PlanResident) -> None:
        """Forgets all drafts."""
        resident.drafts.clear()

    def read(self, resident: PlanResident, names: Sequence[str] = STATE_PLANES) -> dict[str, Array]:
        """Copies of planes; raises `StateError` for those of an archive that is not there."""
        if not resident.archive and not set(ARCHIVE_PLANES).isdisjoint(names):
            raise StateError(f"read: {', '.join(names)} of a layer without an archive")
        return {name: resident.planes[name].copy() for name in names}

    def fork(self, resident: PlanResident) -> PlanResident:
        """A resident of its own, see `engine.Engine`."""
        return PlanResident(resident.geometry, resident.planes, resident.archive)

    def assign(self, resident: PlanResident, source: PlanResident) -> None:
        """What moves, from a fork of the same seal; drafts are forgotten."""
        resident.planes = {**resident.planes, **source.moving()}
        resident.drafts.clear()

    def replaced(self, resident: PlanResident, planes: Mapping[str, Array]) -> PlanResident:
        """A resident with copies of these planes, in the place of `resident`."""
        others = {name: _frozen(array.copy()) for name, array in planes.items()}
        return PlanResident(resident.geometry, {**resident.planes, **others}, resident.archive)

    def join(self, resident: PlanResident | None, one: PlanResident, count: int) -> PlanResident:
        """A resident of `count + 1` sequences, see `engine.Engine`."""
        parts = [one] if resident is None else [resident, one]
        planes = {name: _frozen(joined(name, [p.planes[name] for p in parts])) for name in one.planes}
        return PlanResident(one.geometry.batch(count + 1), planes, one.archive)

    def drop(self, resident: PlanResident, geometry: Geometry, count: int, index: int) -> None:
        """Takes sequence `index` out, see `engine.Engine`."""
        left = geometry.batch(count - 1)
        planes = {
            name: _frozen(without(geometry, name, array, count, index))
            for name, array in resident.planes.items()
        }
        resident.geometry, resident.planes = left, planes
        resident.drafts.clear()

    def take(self, resident: PlanResident, geometry: Geometry, index: int) -> PlanResident:
        """A resident of its own with a copy of sequence `index`."""
        planes = {
            name: _frozen(array[place(geometry, name, index)].copy())
            for name, array in resident.planes.items()
        }
        return PlanResident(geometry, planes, resident.archive)

    def put(self, resident: PlanResident, index: int, one: PlanResident) -> None:
        """What moves of `one` into the place of sequence `index`; drafts are forgotten."""
        moved = {}
        for name, array in one.moving().items():
            moved[name] = resident.planes[name].copy()
            moved[name][place(one.geometry, name, index)] = array
            _frozen(moved[name])
        resident.planes = {**resident.planes, **moved}
        resident.drafts.clear()

    def new_log(self, geometry: Geometry, parts: tuple[str, ...]) -> RowLog:
        """An empty log of rows of a geometry."""
        return RowLog(geometry, parts)

    def read_log(self, log: RowLog) -> tuple[Float32, ...]:
        """Copies of a log's rows, an array a part."""
        return log.read()

    def _run(self, steps: Plan, resident: PlanResident, given: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a plan on copies of what it moves, so that a call that fails has changed nothing."""
        planes: dict[str, Array] = {}
        for name in steps.planes:
            if name in given:
                planes[name] = given[name]
            elif name in _MOVING and steps.commit:
                planes[name] = resident.planes[name].copy()
            elif name in STATE_PLANES:
                planes[name] = resident.planes[name]
            else:
                planes[name] = self._fresh(name, steps.sizes)
        run_plan(steps, planes, self.shuffle, self.on_dispatch)
        return planes

    def _fresh(self, name: str, sizes: Sizes) -> Array:
        plane = base_plane(name)
        array = np.zeros(plane.dims(sizes), np.float32)
        if self.poison:
            array.reshape(-1)[0::2] = POISON
            array.reshape(-1)[1::2] = -POISON
        return array.view(plane.dtype)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _moved(resident: PlanResident, planes: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: _frozen(planes[name]) if name in _MOVING and name in planes else a
        for name, a in resident.planes.items()
    }
