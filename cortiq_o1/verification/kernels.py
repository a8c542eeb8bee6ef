"""Each kernel of a plan, alone, against its twin on the same planes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..cpu.executor import run_plan
from ..kernels import KERNELS, Grid
from ..plans import Dispatch, members
from .bounds import expected
from .deviation import NONE, Array, Deviation, compare
from .kernel_cases import KernelCase

RunKernel = Callable[[str, Mapping[str, Array], Mapping[str, int | float], Grid], Mapping[str, Array]]
"""Runs a kernel alone on planes named as its bindings, and returns those it writes."""


@dataclass(frozen=True)
class Step:
    """One dispatch, with copies of its planes, by binding, before and after the twin."""

    dispatch: Dispatch
    before: Mapping[str, Array]
    after: Mapping[str, Array]


def trace(case: KernelCase) -> list[Step]:
    """The case's plan through the twins, dispatch by dispatch."""
    steps: list[Step] = []

    def keep(dispatch: Dispatch, before: dict[str, Array], after: dict[str, Array]) -> None:
        names = [plane for b in KERNELS[dispatch.kernel].bindings for plane in members(b.name)]
        bound = [plane for name in dispatch.planes for plane in members(name)]
        sides = (
            {name: planes[plane] for name, plane in zip(names, bound, strict=True)}
            for planes in (before, after)
        )
        steps.append(Step(dispatch, *sides))

    run_plan(case.plan(), case.planes(), on_dispatch=keep)
    return steps


def check_step(step: Step, run: RunKernel) -> Deviation:
    """Runs a dispatch's kernel on the planes that the twin found, and compares all that it writes.

    Raises what `run` raises, such as `DeviceError` for a write outside of a plane.
    """
    dispatch = step.dispatch
    params = dict(dispatch.params)
    got = run(dispatch.kernel, step.before, params, dispatch.grid)
    worst = NONE
    for name, (want, bound) in expected(dispatch.kernel, params, step.before, step.after, got).items():
        worst = worst.worse(compare(f"{dispatch.kernel}: {name}", got[name], want, bound))
    return worst
