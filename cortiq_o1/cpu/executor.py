"""Plans on NumPy: every dispatch through its kernel's twin, in the plan's order or a shuffled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import ArgumentError, StateError
from ..geometry import Geometry
from ..planes import MOVING_PLANES, PENDING_PLANES, STATE_PLANES, Sizes
from ..planning import Limits, block_rows, commit_plan, plan
from ..plans import Dispatch, Plan, base_plane
from .twins import TWINS

Array = npt.NDArray[Any]
Hook = Callable[[Dispatch, dict[str, Array], dict[str, Array]], None]
"""Called after each dispatch with copies of the planes it binds, before and after."""

POISON = np.float32(1e37)
"""Fills, with either sign in turn, what nobody has written yet: finite, and far from any result."""


def run_dispatch(dispatch: Dispatch, planes: Mapping[str, Array], on_dispatch: Hook | None = None) -> None:
    """Runs one dispatch; planes that its kernel only reads reach the twin read-only."""
    before = {name: planes[name].copy() for name in dispatch.planes} if on_dispatch else {}
    bound = []
    for name, writes in dispatch.uses():
        view = planes[name].view()
        if not writes:
            view.flags.writeable = False
        bound.append(view)
    TWINS[dispatch.kernel](dict(dispatch.params), dispatch.grid, *bound)
    if on_dispatch:
        on_dispatch(dispatch, before, {name: planes[name].copy() for name in dispatch.planes})


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
    """A layer's state on the host. The arrays are never written: a commit puts others in their place."""

    geometry: Geometry
    planes: dict[str, Array]
    pending: dict[str, Array] | None = None
    """The pending planes of a call that has yet to be committed."""


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

    def upload(self, geometry: Geometry, planes: Mapping[str, Array]) -> PlanResident:
        """Takes copies of the state planes; raises `ArgumentError` for a missing or misshapen one."""
        sizes = Sizes.of(geometry)
        for name in STATE_PLANES:
            _check_plane(name, planes, sizes)
        return PlanResident(geometry, {name: _frozen(planes[name].copy()) for name in STATE_PLANES})

    def attend(self, resident: PlanResident, q: Float32, k: Float32, v: Float32, commit: bool) -> Float32:
        """Outputs `(rows, nh, dv)`, see `engine.Engine`."""
        most = block_rows(resident.geometry, self.limits, self.path)
        if commit and len(q) > most:
            return self._attend_blocks(resident, q, k, v, most)
        steps = plan(resident.geometry, len(q), commit, self.path, self.limits, self.precision)
        planes = self._run(steps, resident, {"q": q, "k_rows": k, "v_rows": v})
        if commit:
            resident.planes = _moved(resident, planes)
        resident.pending = (
            None if commit else {name: _frozen(planes[name]) for name in PENDING_PLANES if name in planes}
        )
        return planes["out"]

    def _attend_blocks(
        self, resident: PlanResident, q: Float32, k: Float32, v: Float32, most: int
    ) -> Float32:
        """A committed call of more rows than one plan should take."""
        moving = PlanResident(resident.geometry, resident.planes)
        blocks = [slice(at, at + most) for at in range(0, len(q), most)]
        out = np.concatenate([self.attend(moving, q[b], k[b], v[b], True) for b in blocks])
        resident.planes, resident.pending = moving.planes, None
        return out

    def commit(self, resident: PlanResident, rows: int) -> None:
        """Moves the state over the first `rows` kept rows and forgets them all.

        Raises `StateError` where no rows are kept, or fewer.
        """
        kept = len(resident.pending["spec_k"]) if resident.pending else 0
        if resident.pending is None or not 0 <= rows <= kept:
            raise StateError(f"rows: {rows}, expected 0 to the {kept} rows of the last uncommitted call")
        if rows:
            steps = commit_plan(resident.geometry, rows, self.path, self.limits)
            planes = self._run(steps, resident, {name: a[:rows] for name, a in resident.pending.items()})
            resident.planes = _moved(resident, planes)
        resident.pending = None

    def read(self, resident: PlanResident) -> dict[str, Array]:
        """Copies of the state planes."""
        return {name: array.copy() for name, array in resident.planes.items()}

    def _run(self, steps: Plan, resident: PlanResident, given: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a plan on copies of what it moves, so that a call that fails has changed nothing."""
        planes: dict[str, Array] = {}
        for name in steps.planes:
            if name in given:
                planes[name] = given[name]
            elif name in MOVING_PLANES and steps.commit:
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
        name: _frozen(planes[name]) if name in MOVING_PLANES else a for name, a in resident.planes.items()
    }
