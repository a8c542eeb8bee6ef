"""Whole layers, their calls one by one and the state afterwards, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..arrays import as_float16
from ..device import Device
from ..layer import Layer
from ..planes import (
    META_FAR_LEN,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    T_RECENT,
    T_TOTAL,
)
from ..reference import EPSILON, ROUNDINGS, Float64, ReferenceLayer, ReferenceStream, StepResult
from ..sealing import check_rows, sealed_planes
from ..snapshots import Snapshot
from ..state import LayerState
from .deviation import NONE, Array, Deviation, compare
from .float16 import float16_bound
from .inputs import Rows
from .layer_cases import Drafts, LayerCase, Restore, TakeSnapshot, reach

Result = TypeVar("Result")
Given = TypeVar("Given", covariant=True)
Reference = ReferenceLayer | ReferenceStream


class _Player(Protocol[Given]):
    """What a case's calls are made on."""

    def attend(self, rows: Rows) -> Given: ...
    def draft(self, name: str, rows: Rows) -> Given: ...
    def accept(self, name: str, rows: Rows) -> None: ...
    def snapshot(self, name: str) -> None: ...
    def restore(self, name: str) -> None: ...


def _play(case: LayerCase, rows: Rows, player: _Player[Result]) -> Iterator[tuple[str, Result]]:
    """Makes the calls; what each `attend` among them gives, and in words which one it was."""
    at = 0
    for number, call in enumerate(case.calls):
        where = f"call {number}"
        if isinstance(call, TakeSnapshot):
            player.snapshot(call.name)
        elif isinstance(call, Restore):
            player.restore(call.name)
        elif isinstance(call, Drafts):
            for i, count in enumerate(call.rows):
                yield f"{where}, draft {i}", player.draft(str(i), _part(rows, at + i, count))
            player.accept(str(call.taken), _part(rows, at + call.taken, call.accepted))
        elif call.accepted is None:
            yield where, player.attend(_part(rows, at, call.rows))
        else:
            yield where, player.draft("", _part(rows, at, call.rows))
            player.accept("", _part(rows, at, call.accepted))
        at += reach(call)[1]


class _Serial(Generic[Result]):
    """The reference as a player: a draft runs on a copy, and what is accepted runs once more."""

    def __init__(self, layer: Reference, run: Callable[..., Result]) -> None:
        self.layer = layer
        self._run = run
        self._snapshots: dict[str, Reference] = {}

    def attend(self, rows: Rows) -> Result:
        return self._run(self.layer, *rows)

    def draft(self, name: str, rows: Rows) -> Result:
        return self._run(deepcopy(self.layer), *rows)

    def accept(self, name: str, rows: Rows) -> None:
        self.layer.run(*rows)

    def snapshot(self, name: str) -> None:
        self._snapshots[name] = deepcopy(self.layer)

    def restore(self, name: str) -> None:
        self.layer = deepcopy(self._snapshots[name])


class _OnDevice:
    """A device's layer as a player."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._snapshots: dict[str, Snapshot] = {}

    def attend(self, rows: Rows) -> Array:
        return self.layer.attend(*rows, commit=True)

    def draft(self, name: str, rows: Rows) -> Array:
        return self.layer.attend(*rows, commit=False, draft=name)

    def accept(self, name: str, rows: Rows) -> None:
        self.layer.commit(len(rows[1]), name)

    def snapshot(self, name: str) -> None:
        self._snapshots[name] = self.layer.snapshot(name)

    def restore(self, name: str) -> None:
        self.layer.restore(self._snapshots[name])


@dataclass(frozen=True)
class Truth:
    """A case in float64: what each `attend` gives, and the layer after the last."""

    case: LayerCase
    state: LayerState
    rows: Rows
    results: tuple[list[StepResult], ...]
    final: Reference

    @cached_property
    def float16(self) -> list[Float64]:
        """What float16 products may add to the error of each row and head, one `attend` after another."""
        player = _Serial(_reference(self.state), float16_bound)
        return [bound for _, bound in _play(self.case, self.rows, player)]


def truth(case: LayerCase, kv: str = "f32") -> Truth:
    """Runs the reference over a case; over what a device with rings of `kv` takes in of it.

    Raises `ArgumentError` where keys or values are too large for such rings.
    """
    state, rows = case.make()
    if kv == "f16":
        q, k, v = rows
        state, rows = state.rounded(), (q, as_float16("k", k), as_float16("v", v))
    player = _Serial(_reference(state), lambda layer, *new: layer.run(*new))
    results = [result for _, result in _play(case, rows, player)]
    return Truth(case, state, rows, tuple(results), player.layer)


def _reference(state: LayerState) -> Reference:
    """The layer in float64. Landmarks and mixing matrix are the library's own, rounded as they are, also
    those of a seal that is yet to come: the kernels see the same."""
    geometry, options = state.geometry, state.options
    if state.history is None:
        return ReferenceLayer.from_planes(geometry, state.planes)

    def sealed(q: Float64, k: Float64, v: Float64) -> ReferenceLayer:
        rows = check_rows(q, k, v, geometry)
        return ReferenceLayer.from_planes(geometry, sealed_planes(*rows, geometry, options))

    stream = ReferenceStream(geometry, sealed)
    stream.run(*state.history)
    return stream


def check_layer(truth: Truth, device: Device) -> Deviation:
    """Runs the case on a device, and compares outputs and the state at the end.

    Raises what the device raises.
    """
    case = truth.case
    player = _OnDevice(device.load(truth.state))
    worst = NONE
    for number, (where, out) in enumerate(_play(case, truth.rows, player)):
        results = truth.results[number]
        bounds = np.minimum([r.bound for r in results], case.most)
        if device.precision == "fast":
            bounds = bounds + truth.float16[number]
        worst = worst.worse(_check_outputs(where, results, out, bounds))
    for found in _check_state(truth.final, player.layer.state()):
        # The error that is told is that of the outputs; the state has other units.
        worst = worst.worse(Deviation(0.0, found.ratio, found.where))
    return worst


def _part(rows: Rows, at: int, count: int) -> Rows:
    q, k, v = rows
    part = slice(at, at + count)
    return q[part], k[part], v[part]


def _check_outputs(call: str, results: list[StepResult], out: Array, bounds: Array) -> Deviation:
    errors = np.array([r.error(row) for r, row in zip(results, out, strict=True)])
    ratio = errors / bounds
    row, head = np.unravel_index(int(ratio.argmax()), ratio.shape)
    off, most = errors[row, head], bounds[row, head]
    where = f"{call}, row {row}, head {head}: off by {off:.3g}, bound {most:.3g}"
    return Deviation(float(errors.max()), float(ratio[row, head]), where)


def _check_state(reference: Reference, state: LayerState) -> Iterator[Deviation]:
    """The state's planes: rings and counts exactly, far sums within their rounding; before the seal the
    rows, exactly."""
    sealed = isinstance(reference, ReferenceLayer) or reference.sealed
    if state.sealed != sealed:
        yield Deviation(np.inf, np.inf, f"sealed is {state.sealed}, expected {sealed}")
        return
    if state.history is not None:
        assert isinstance(reference, ReferenceStream)
        for name, got, want in zip("qkv", state.history, reference.history(), strict=True):
            yield compare(f"{name} kept", got, want, np.zeros(()))
        return
    geometry, planes = reference.geometry, state.planes
    heads, unit = geometry.heads_per_group, ROUNDINGS * EPSILON
    for g, group in enumerate(reference.groups):
        meta = planes["group_meta"][g]
        want = np.array([len(group.ring), group.far_len], np.uint32)
        yield compare(f"group {g}: length, far length", meta[[META_LEN, META_FAR_LEN]], want, np.zeros(2))
        slots = (int(meta[META_HEAD]) + np.arange(len(group.ring))) % group.window
        sinks = np.arange(geometry.window, geometry.window + geometry.sinks)
        for side, name in enumerate(("ring_k", "ring_v")):
            kept = np.array([pair[side] for pair in (*group.ring, *group.sinks)])
            got = planes[name][g, np.concatenate([slots, sinks])]
            yield compare(f"group {g}: {name} by age", got, kept.reshape(got.shape), np.zeros(()))
        if group.far_len:
            own, live = slice(g * heads, (g + 1) * heads), slice(int(meta[META_LANDMARKS]))
            mz, t = planes["far_mz"][own, :, live], planes["t_hat"][own, :, live].astype(np.float64)
            # Sums stand at the scale of the maximum that the device found.
            shift = np.exp(mz[:, MZ_MAX].astype(np.float64) - group.far_max)
            mass = (mz[:, MZ_TOTAL].astype(np.float64) + mz[:, MZ_RECENT]) * shift
            yield compare(f"group {g}: far mass", mass, group.far_mass, unit * group.mass_rounding)
            num = (t[:, T_TOTAL] + t[:, T_RECENT]) * shift[..., None]
            bound = unit * np.maximum(group.num_rounding, 1e-30)
            yield compare(f"group {g}: far numerator", num, group.far_num, bound)
