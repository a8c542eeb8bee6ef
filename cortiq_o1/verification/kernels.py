"""Each kernel of a plan, alone, against its twin on the same planes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays import LARGEST_FLOAT16, as_float16
from ..cpu.executor import run_plan
from ..kernels import KERNELS, Grid
from ..planes import KV_PLANES, packed, unpacked
from ..plans import Dispatch, members
from .bounds import expected
from .deviation import NONE, Array, Deviation, compare
from .kernel_cases import KernelCase

_ROUNDED = (*KV_PLANES, "k_rows", "v_rows")
_HALF_RANGE = (-LARGEST_FLOAT16, LARGEST_FLOAT16)


class RunKernel(Protocol):
    """Runs a kernel alone on planes named as its bindings, and returns those it writes."""

    def __call__(
        self,
        kernel: str,
        planes: Mapping[str, Array],
        params: Mapping[str, int | float],
        grid: Grid,
        *,
        kv: str = "f32",
    ) -> Mapping[str, Array]: ...


@dataclass(frozen=True)
class Step:
    """One dispatch, with copies of its planes, by binding, before and after the twin."""

    dispatch: Dispatch
    before: Mapping[str, Array]
    after: Mapping[str, Array]
    kv: str = "f32"
    """How the kernel is to take rings."""


def trace(case: KernelCase, kv: str = "f32") -> list[Step]:
    """The case's plan through the twins, dispatch by dispatch; as "f16", over what rings in float16 hold of
    its keys and values, and only the kernels that bind a ring."""
    steps: list[Step] = []

    def keep(dispatch: Dispatch, before: dict[str, Array], after: dict[str, Array]) -> None:
        names = [plane for b in KERNELS[dispatch.kernel].bindings for plane in members(b.name)]
        bound = [plane for name in dispatch.planes for plane in members(name)]
        first, last = (
            {name: planes[plane] for name, plane in zip(names, bound, strict=True)}
            for planes in (before, after)
        )
        if kv == "f32" or KERNELS[dispatch.kernel].binds_ring:
            steps.append(Step(dispatch, first, last, kv))

    planes = case.planes()
    if kv == "f16":
        # What nobody may read is poisoned with more than a float16 holds.
        planes |= {n: as_float16(n, np.clip(planes[n], *_HALF_RANGE)) for n in _ROUNDED if n in planes}
    run_plan(case.plan(), planes, on_dispatch=keep)
    return steps


def _as_kept(step: Step) -> Mapping[str, Array]:
    if step.kv == "f32":
        return step.before
    return {name: packed(a) if name in KV_PLANES else a for name, a in step.before.items()}


def check_step(step: Step, run: RunKernel) -> Deviation:
    """Runs a dispatch's kernel on the planes that the twin found, and compares all that it writes.

    Raises what `run` raises, such as `DeviceError` for a write outside of a plane.
    """
    dispatch = step.dispatch
    params = dict(dispatch.params)
    got = run(dispatch.kernel, _as_kept(step), params, dispatch.grid, kv=step.kv)
    if step.kv == "f16":
        got = {name: unpacked(a) if name in KV_PLANES else a for name, a in got.items()}
    worst = NONE
    for name, (want, bound) in expected(dispatch.kernel, params, step.before, step.after, got).items():
        worst = worst.worse(compare(f"{dispatch.kernel}: {name}", got[name], want, bound))
    return worst
