"""Every kernel alone against its twin, on every adapter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import geometries

import cortiq_o1 as o1
from cortiq_o1.kernels import KERNELS
from cortiq_o1.paths import ATTEND, COMMIT
from cortiq_o1.planes import FLUSH_ROWS, NO_FAR_LIMIT
from cortiq_o1.planning import Limits, serves
from cortiq_o1.verification.deviation import Deviation
from cortiq_o1.verification.inputs import RANDOM_KINDS
from cortiq_o1.verification.kernel_cases import PICKED, Group, KernelCase, random_case
from cortiq_o1.verification.kernels import Step, check_step, trace


@lru_cache(maxsize=2 * len(PICKED))
def traced(case: KernelCase, kv: str = "f32") -> list[Step]:
    return trace(case, kv)


@lru_cache(maxsize=len(PICKED))
def kernels_of(case: KernelCase) -> frozenset[str]:
    return frozenset(d.kernel for d in case.plan().dispatches)


def shown(case: KernelCase, kernel: str) -> bool:
    """Whether the case tells something of the kernel that a case of another path has not told."""
    repeats = case.name.endswith(f"-{case.path}") and kernel in STAGES
    return kernel in kernels_of(case) and not repeats


STAGES = {*ATTEND["stages"], *COMMIT["stages"], "o1c_copy"}
# Devices are opened with WebGPU's defaults here, hence without 16-bit floats: see test_paths.
PLAIN = [name for name, kernel in KERNELS.items() if not kernel.features]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [pytest.param(k, c, id=f"{k}-{c.name}") for k in PLAIN for c in PICKED if shown(c, k)],
)
def test_kernel_does_what_its_twin_does(gpu: o1.Device, kernel: str, case: KernelCase) -> None:
    for step in traced(case):
        if step.dispatch.kernel == kernel:
            check(gpu, step)


@pytest.mark.parametrize("kernel", [k for k in PLAIN if KERNELS[k].binds_ring])
def test_kernel_takes_rings_in_float16_as_well(gpu: o1.Device, kernel: str) -> None:
    """On every picked case of its path: the twin on what the rings hold."""
    cases = [case for case in PICKED if shown(case, kernel)]
    assert cases
    for case in cases[:: 1 + len(cases) // 4]:
        steps = [step for step in traced(case, "f16") if step.dispatch.kernel == kernel]
        assert steps
        for step in steps:
            check(gpu, step)


def check(gpu: o1.Device, step: Step) -> Deviation:
    found = check_step(step, gpu.engine.run_kernel)
    assert found.passed, f"{found.ratio:.3g} times the bound: {found.where}"
    return found


def test_every_kernel_has_a_picked_case() -> None:
    assert {k for c in PICKED for k in kernels_of(c) if k in PLAIN and shown(c, k)} == set(PLAIN)
    assert {k for c in PICKED for k in kernels_of(c)} == set(KERNELS)


def test_random_cases_take_every_path_and_precision() -> None:
    drawn = [random_case(0, number) for number in range(40)]
    assert {(c.path, c.precision) for c in drawn} == {
        ("stages", "exact"), ("token", "exact"), ("fused", "exact"), ("flash", "exact"), ("gemm", "exact"),
        ("gemm", "fast"),
    }  # fmt: skip
    assert {k for c in drawn for k in kernels_of(c)} == set(KERNELS)


@st.composite
def cases(draw: Any) -> KernelCase:
    """Small states in any position, poisoned where nobody may read, and a call on them."""
    geometry = draw(geometries(max_window=20))
    paths = [p for p in sorted(ATTEND) if serves(p, geometry, Limits())]
    path = draw(st.sampled_from(paths))
    a_row_at_a_time = path in ("fused", "token")
    groups = []
    for window in geometry.group_windows:
        far_len = draw(st.sampled_from([0, 1, 300, FLUSH_ROWS - 7]))
        groups.append(
            Group(
                length=window if far_len else draw(st.integers(0, window)),
                head=draw(st.integers(0, window - 1)),
                far_len=far_len,
                far_limit=draw(st.just(NO_FAR_LIMIT) | st.integers(far_len, far_len + 12)),
                landmarks=draw(st.none() | st.integers(4, geometry.landmarks)),
            )
        )
    return KernelCase(
        "drawn",
        geometry,
        rows=draw(st.integers(1, 3 if a_row_at_a_time else 24)),
        groups=tuple(groups),
        kind=draw(st.sampled_from(RANDOM_KINDS)),
        commit=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
        path=path,
        workgroups=draw(st.sampled_from([1, 9, 256])),
    )


@given(case=cases())
@settings(max_examples=24, suppress_health_check=[HealthCheck.too_slow])
def test_kernels_do_what_their_twins_do_on_drawn_states(gpu: o1.Device, case: KernelCase) -> None:
    for step in trace(case):
        check(gpu, step)
