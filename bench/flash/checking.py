"""The prototype against the float64 reference and the stages' twins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from pieces import Bench, Shape

import cortiq_o1 as o1
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.planes import STATE_PLANES
from cortiq_o1.reference import ReferenceLayer, StepResult, worst_error
from cortiq_o1.verification.kernel_cases import PICKED, KernelCase, random_case
from cortiq_o1.verification.layers import _check_state

EXACT = ("group_meta", "ring_k", "ring_v")
"""Planes that must come out to the bit."""


def cases(count: int, seed: int) -> list[KernelCase]:
    """The picked cases of the stages, and random ones."""
    found = [case for case in PICKED if case.path == "stages" and case.name != "long-window"]
    found += [random_case(seed, number, 40) for number in range(count)]
    return [
        replace(case, path="stages", precision="exact", commit=True, archive=0, workgroups=256)
        for case in found
    ]


def check(device: o1.Device, case: KernelCase, shapes: dict[str, tuple[Shape, int]]) -> dict[str, float]:
    """The worst error of each shape as a part of its bound; raises `AssertionError` past it."""
    planes = case.planes()
    arrays = {name: planes[name] for name in (*STATE_PLANES, "q", "k_rows", "v_rows")}
    reference = ReferenceLayer.from_planes(case.geometry, arrays)
    results = reference.run(arrays["q"], arrays["k_rows"], arrays["v_rows"])
    twins = {name: array.copy() for name, array in planes.items()}
    for d in case.plan().dispatches:
        TWINS[d.kernel](dict(d.params), d.grid, *(twins[name] for name in d.planes))
    bench = Bench(device, case.geometry, case.rows, arrays)
    found = {}
    for label, (shape, columns) in shapes.items():
        bench.restore()
        found[label] = compare(bench, shape, columns, results, reference, twins, f"{case.name}, {label}")
    return found


def compare(
    bench: Bench, shape: Shape, columns: int, results: list[StepResult], reference: ReferenceLayer,
    twins: dict[str, np.ndarray], where: str,
) -> float:  # fmt: skip
    """Runs a call; the worst error as a part of its bound."""
    bench.run(bench.steps(shape, columns), False, 1, 1)
    out = bench.read("out", twins["out"])
    error, share = worst_error(results, out)
    assert share <= 1.0, f"{where}: off by {error:.2e}, {share:.2f} of the bound"
    planes = {name: bench.read(name, bench.arrays[name]) for name in STATE_PLANES}
    for name in EXACT:
        assert planes[name].tobytes() == twins[name].tobytes(), f"{where}: {name} differs"
    state = SimpleNamespace(sealed=True, history=None, planes=planes)
    for deviation in _check_state(reference, state):  # type: ignore[arg-type]
        assert deviation.ratio <= 1.0, f"{where}: {deviation.where}"
        share = max(share, deviation.ratio)
    return share
