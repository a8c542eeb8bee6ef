"""Whole layers, calls and commits and the state afterwards, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from ..devices import Device
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
from ..reference import EPSILON, ROUNDINGS, Float64, ReferenceLayer, StepResult
from ..state import LayerState
from .deviation import NONE, Array, Deviation, compare
from .float16 import float16_bound
from .inputs import Rows
from .layer_cases import LayerCase

Result = TypeVar("Result")


@dataclass(frozen=True)
class Truth:
    """A case in float64: what each call gives, and the layer after the last."""

    case: LayerCase
    state: LayerState
    rows: Rows
    results: tuple[list[StepResult], ...]
    final: ReferenceLayer

    @cached_property
    def float16(self) -> list[Float64]:
        """What float16 products may add to the error of each row and head, call by call."""
        layer = ReferenceLayer.from_planes(self.case.geometry, self.state.planes)
        return _replay(self.case, layer, self.rows, float16_bound)


def truth(case: LayerCase) -> Truth:
    """Runs the reference over a case."""
    state, rows = case.make()
    layer = ReferenceLayer.from_planes(case.geometry, state.planes)
    results = _replay(case, layer, rows, ReferenceLayer.run)
    return Truth(case, state, rows, tuple(results), layer)


def _replay(case: LayerCase, layer: ReferenceLayer, rows: Rows, run: Callable[..., Result]) -> list[Result]:
    """What `run` gives for each call on the layer as it then is; the layer moves over the case."""
    results, at = [], 0
    for call in case.calls:
        accepted = call.rows if call.accepted is None else call.accepted
        tried = layer if call.accepted is None else deepcopy(layer)
        results.append(run(tried, *_part(rows, at, call.rows)))
        if tried is not layer:
            layer.run(*_part(rows, at, accepted))
        at += accepted
    return results


def check_layer(truth: Truth, device: Device) -> Deviation:
    """Runs the case on a device, and compares outputs and the state at the end.

    Raises what the device raises.
    """
    case = truth.case
    layer = device.load(truth.state)
    worst, at = NONE, 0
    for number, (call, results) in enumerate(zip(case.calls, truth.results, strict=True)):
        rows = _part(truth.rows, at, call.rows)
        out = layer.attend(*rows, commit=call.accepted is None)
        bounds = np.minimum([r.bound for r in results], case.most)
        if device.precision == "fast":
            bounds = bounds + truth.float16[number]
        worst = worst.worse(_check_outputs(number, results, out, bounds))
        if call.accepted is not None:
            layer.commit(call.accepted)
        at += call.rows if call.accepted is None else call.accepted
    for found in _check_state(truth.final, layer.state()):
        # The error that is told is that of the outputs; the state has other units.
        worst = worst.worse(Deviation(0.0, found.ratio, found.where))
    return worst


def _part(rows: Rows, at: int, count: int) -> Rows:
    q, k, v = rows
    part = slice(at, at + count)
    return q[part], k[part], v[part]


def _check_outputs(number: int, results: list[StepResult], out: Array, bounds: Array) -> Deviation:
    errors = np.array([r.error(row) for r, row in zip(results, out, strict=True)])
    ratio = errors / bounds
    row, head = np.unravel_index(int(ratio.argmax()), ratio.shape)
    off, most = errors[row, head], bounds[row, head]
    where = f"call {number}, row {row}, head {head}: off by {off:.3g}, bound {most:.3g}"
    return Deviation(float(errors.max()), float(ratio[row, head]), where)


def _check_state(reference: ReferenceLayer, state: LayerState) -> Iterator[Deviation]:
    """The state's planes: rings and counts exactly, far sums within their rounding."""
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
