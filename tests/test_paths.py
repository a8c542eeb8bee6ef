"""The three paths and their mixture: each against float64, its commits, how one is chosen or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from conftest import adapters
from gpu_support import assert_same_planes
from support import Rows, assert_follows, assert_same_state, part, random_rows

import cortiq_o1 as o1
from cortiq_o1.devices import CPU_LIMITS, PATH_VARIABLE, chosen_path, cpu_info
from cortiq_o1.gpu.buffers import COPY_DST, STORAGE
from cortiq_o1.paths import PATHS
from cortiq_o1.plans import Plan
from cortiq_o1.reference import ReferenceLayer, worst_error
from cortiq_o1.verification.float16 import float16_bound
from cortiq_o1.verification.kernel_cases import PICKED
from cortiq_o1.verification.kernels import check_step, trace

FORCED = tuple(path for path in PATHS if path != "auto")
each_path = pytest.mark.parametrize("path", FORCED)


# Window, heads a group, key width, value width, groups, sinks: each value that models have, at least once.
SHAPES = (
    (1, 1, 32, 64, 2, 0),
    (2, 2, 64, 80, 1, 4),
    (63, 3, 80, 32, 1, 4),
    (65, 4, 96, 128, 2, 1),
    (257, 5, 128, 96, 1, 4),
    (2048, 6, 32, 256, 1, 4),
    (8192, 7, 64, 32, 1, 4),
    (63, 8, 192, 256, 1, 0),
    (65, 9, 256, 192, 1, 4),
    (257, 12, 64, 64, 2, 4),
    (2, 16, 128, 128, 1, 1),
)
ROWS = 18


def shaped(shape: tuple[int, ...]) -> o1.Geometry:
    window, heads, d, dv, groups, sinks = shape
    return o1.Geometry(heads * groups, groups, d, dv, window=window, sinks=sinks, landmarks=16)


@cache
def truth(shape: tuple[int, ...]) -> tuple[o1.LayerState, Rows, list[Any]]:
    """A sealed layer, rows after it, and what they give in float64."""
    geometry = shaped(shape)
    rng = np.random.default_rng(shape)
    state = o1.seal(*random_rows(rng, geometry.exact_rows + 20, geometry), geometry)
    rows = random_rows(rng, ROWS, geometry)
    return state, rows, ReferenceLayer.from_planes(geometry, state.planes).run(*rows)


def follows(device: o1.Device, shape: tuple[int, ...]) -> None:
    state, rows, want = truth(shape)
    layer = device.load(state)
    # A row is a sub-chunk of the token path, so two of them do there.
    first = 2 if device.path in ("fused", "token") else 17
    out = [layer.attend(*part(rows, slice(first))), layer.attend(*part(rows, slice(first, first + 1)))]
    error, ratio = worst_error(want[: first + 1], np.concatenate(out))
    assert ratio <= 1.0, f"worst error {error:.2e}, {ratio:.2f} times its bound"


@each_path
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_path_follows_the_reference(gpu: o1.Device, path: str, shape: tuple[int, ...]) -> None:
    follows(o1.open_device(gpu.gpu, path), shape)


@each_path
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_path_follows_the_reference_on_numpy(path: str, shape: tuple[int, ...]) -> None:
    follows(o1.open_device("cpu", path), shape)


def test_the_shapes_are_those_that_models_have() -> None:
    windows, heads, d, dv, _, _ = map(set, zip(*SHAPES, strict=True))
    assert windows == {1, 2, 63, 65, 257, 2048, 8192}
    assert heads == {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16}
    assert d == {32, 64, 80, 96, 128, 192, 256}
    assert dv == d
    assert any(shape[2] != shape[3] for shape in SHAPES)


# Commits.

COMMITS = o1.Geometry(4, 2, 16, 12, window=80, sinks=3, landmarks=8, windows=(80, 67))
LONG = 257
"""One row more than a submission takes."""


@cache
def stream() -> tuple[o1.LayerState, Rows]:
    rng = np.random.default_rng(17)
    return o1.seal(*random_rows(rng, 150, COMMITS), COMMITS), random_rows(rng, LONG, COMMITS)


def commits_like_attend(device: o1.Device, accepted: int) -> None:
    """Bits of the state and of what comes next, after calls that take one submission and several."""
    state, rows = stream()
    straight = device.load(state)
    straight.attend(*part(rows, slice(accepted)))
    for tried in {min(accepted + 3, LONG), LONG if accepted == 65 else accepted}:
        layer = device.load(state)
        out = layer.attend(*part(rows, slice(tried)), commit=False)
        assert_same_state(layer.state(), state)
        layer.commit(accepted)
        assert_same_state(layer.state(), straight.state())
        if tried < 20:
            assert_follows(state, part(rows, slice(tried)), out)
    again = device.load(straight.state())
    more = part(rows, slice(3))
    np.testing.assert_array_equal(layer.attend(*more), again.attend(*more))


@pytest.mark.parametrize("accepted", [1, 15, 16, 64, 65, LONG])
@pytest.mark.parametrize("path", PATHS)
def test_a_commit_leaves_the_bits_of_attend(gpu: o1.Device, path: str, accepted: int) -> None:
    commits_like_attend(o1.open_device(gpu.gpu, path), accepted)


@pytest.mark.parametrize("accepted", [1, 15, 16, 64, 65, LONG])
@each_path
def test_a_commit_leaves_the_bits_of_attend_on_numpy(path: str, accepted: int) -> None:
    commits_like_attend(o1.open_device("cpu", path), accepted)


@pytest.mark.parametrize("path", PATHS)
def test_an_encoded_call_keeps_what_its_commit_reads(gpu: o1.Device, path: str) -> None:
    state, rows = stream()
    device = o1.open_device(gpu.gpu, path)
    new = part(rows, slice(5))
    layer, straight = device.load(state), device.load(state)
    buffers = []
    for array in new:
        buffers.append(gpu.gpu.create_buffer(size=array.nbytes, usage=STORAGE | COPY_DST))
        gpu.gpu.queue.write_buffer(buffers[-1], 0, array)
    buffers.append(gpu.gpu.create_buffer(size=5 * 4 * 12 * 4, usage=STORAGE))
    encoder = gpu.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    layer.encode(compute_pass, *buffers, 5, commit=False)
    compute_pass.end()
    gpu.gpu.queue.submit([encoder.finish()])
    for buffer, array in zip(buffers, new, strict=False):  # the caller's again once it is submitted
        gpu.gpu.queue.write_buffer(buffer, 0, np.zeros_like(array))
    layer.commit(4)
    straight.attend(*part(new, slice(4)))
    assert_same_planes(layer.state().planes, straight.state().planes)


# Choosing.


def kernels(p: Plan) -> set[str]:
    return {d.kernel for d in p.dispatches}


@pytest.mark.parametrize(
    ("rows", "window", "marks"),
    [
        (1, 128, {"o1c_fu_read"}),
        (2, 128, {"o1c_fl_near"}),
        (15, 128, {"o1c_fl_near"}),
        (16, 128, {"o1c_fl_near"}),
        (64, 128, {"o1c_fl_near"}),
        (65, 128, {"o1c_fl_near", "o1c_fu_read"}),
        (71, 128, {"o1c_fl_near"}),
        (60, 15, {"o1c_fl_near"}),
        (61, 15, {"o1c_fl_near", "o1c_fu_read"}),
        (9, 1, {"o1c_fu_read"}),
    ],
)
def test_auto_picks_by_the_rows_of_a_sub_chunk(rows: int, window: int, marks: set[str]) -> None:
    geometry = o1.Geometry(4, 2, 32, window=window, landmarks=8)
    known = {"o1c_fu_read", "o1c_tok_near", "o1c_score", "o1c_fl_near", "o1c_qk"}
    for commit in (True, False):
        assert kernels(o1.plan(geometry, rows, commit)) & known == marks


@pytest.mark.parametrize(
    ("rows", "marks"), [(1, {"o1c_fu_read"}), (2, {"o1c_score"}), (15, {"o1c_score"}), (16, {"o1c_fl_near"})]
)
def test_auto_goes_by_stages_for_a_few_rows_where_lanes_are_few(rows: int, marks: set[str]) -> None:
    p = o1.plan(o1.Geometry(4, 2, 32, window=128, landmarks=8), rows, limits=o1.Limits(workgroups=4))
    assert kernels(p) & {"o1c_fu_read", "o1c_score", "o1c_fl_near"} == marks


def test_auto_goes_without_products_where_their_scratch_has_no_room() -> None:
    p = o1.plan(TIGHT, 16, limits=TIGHT_LIMITS)
    assert "o1c_qk" not in kernels(p)
    assert all(size <= TIGHT_LIMITS.binding_bytes for size in p.planes.values())


TIGHT = o1.Geometry(64, 1, 4, window=4096, sinks=4, landmarks=4)
TIGHT_LIMITS = o1.Limits(binding_bytes=1_056_000)
"""Room for the scores of one row, not for them on a padded panel."""


def test_a_path_that_cannot_serve_is_refused_with_the_reason() -> None:
    reason = r"panel_scores: 1064960 bytes, the device binds at most 1056000; lower window or num_heads"
    with pytest.raises(o1.GeometryError, match=reason):
        o1.plan(TIGHT, 1, path="gemm", limits=TIGHT_LIMITS)
    with pytest.raises(o1.GeometryError, match=reason):
        o1.plan(TIGHT, 40, path="gemm", limits=TIGHT_LIMITS)
    state = o1.seal(*random_rows(np.random.default_rng(0), 4200, TIGHT), TIGHT)
    with pytest.raises(o1.GeometryError, match=reason):
        o1.Device(cpu_info(), "gemm", TIGHT_LIMITS).load(state)
    o1.Device(cpu_info(), "stages", TIGHT_LIMITS).load(state)


@pytest.mark.parametrize("path", [*PATHS, " Token "])
def test_the_environment_stands_in_for_the_path_auto(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(PATH_VARIABLE, path)
    wanted = path.strip().lower()
    assert chosen_path() == o1.open_device("cpu").path == wanted
    assert o1.open_device("cpu").engine.path == wanted
    assert o1.open_device("cpu", "stages").path == "stages"
    monkeypatch.setenv(PATH_VARIABLE, "")
    assert chosen_path() == "auto"


def test_on_numpy_a_path_runs_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    from cortiq_o1.cpu.direct import DirectEngine
    from cortiq_o1.cpu.executor import PlanEngine

    assert isinstance(o1.open_device("cpu").engine, DirectEngine)
    monkeypatch.setenv(PATH_VARIABLE, "gemm")
    assert isinstance(o1.open_device("cpu").engine, PlanEngine)


def test_an_unknown_path_lists_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "expected one of 'auto', 'fused', 'token', 'flash', 'gemm', 'stages'"
    with pytest.raises(o1.ArgumentError, match=f"path: 'fast', {listed}"):
        o1.open_device("cpu", "fast")
    with pytest.raises(o1.GeometryError, match=f"path: 'fast', {listed}"):
        o1.plan(COMMITS, 1, path="fast")
    monkeypatch.setenv(PATH_VARIABLE, "fast")
    with pytest.raises(o1.ArgumentError, match=f"{PATH_VARIABLE}: 'fast', {listed}"):
        o1.open_device("cpu")


# Precision.


def test_an_unknown_precision_lists_those_that_there_are() -> None:
    with pytest.raises(o1.ArgumentError, match="precision: 'half', expected one of 'exact', 'fast'"):
        o1.open_device("cpu", precision="half")
    with pytest.raises(o1.GeometryError, match="precision: 'half', expected one of 'exact', 'fast'"):
        o1.plan(COMMITS, 1, precision="half")


def test_fast_is_exact_where_there_is_nothing_to_round(gpu: o1.Device) -> None:
    # Opened with WebGPU's defaults, hence without 16-bit floats whatever the adapter has.
    device = o1.open_device(gpu.gpu, "gemm", "fast")
    assert (device.precision, device.engine.precision) == ("exact", "exact")
    assert not device.limits.float16
    assert o1.open_device("cpu", precision="fast").precision == "exact"
    with pytest.raises(o1.ShaderError, match=r"o1c_qk_f16 on .*: needs shader-f16, which the device has not"):
        device.engine.context.pipeline("o1c_qk_f16")
    device.warm_up(o1.Geometry(4, 2, 32, window=128, landmarks=8), 64)
    assert device.engine.context.has_pipeline("o1c_qk")


def test_fast_plans_take_the_float16_products_alone() -> None:
    geometry = o1.Geometry(4, 2, 32, window=128, landmarks=8)
    exact = o1.plan(geometry, 64, path="gemm", limits=CPU_LIMITS)
    fast = o1.plan(geometry, 64, path="gemm", limits=CPU_LIMITS, precision="fast")
    assert kernels(fast) - kernels(exact) == {"o1c_qk_f16", "o1c_pv_f16"}
    assert kernels(exact) - kernels(fast) == {"o1c_qk", "o1c_pv"}
    assert o1.plan(geometry, 64, precision="fast") == o1.plan(geometry, 64)  # no float16 by default


FLOAT16_SHAPES = [shape for shape in SHAPES if shape[0] in (65, 257, 2048)]


def fast_follows(device: o1.Device, exact: o1.Device, shape: tuple[int, ...]) -> None:
    state, rows, want = truth(shape)
    assert device.precision == "fast"
    fast, slow = device.load(state), exact.load(state)
    out, other = fast.attend(*rows), slow.attend(*rows)
    errors = np.array([r.error(row) for r, row in zip(want, out, strict=True)])
    bounds = np.array([r.bound for r in want])
    assert (errors > bounds).any(), "as exact as float32: nothing was rounded"
    reference = ReferenceLayer.from_planes(state.geometry, state.planes)
    assert (errors <= bounds + float16_bound(reference, *rows)).all()
    assert np.abs(out - other).max() < 0.02
    # What is kept of the rows is not rounded.
    assert_same_state(fast.state(), slow.state())


@pytest.mark.parametrize("shape", FLOAT16_SHAPES, ids=str)
def test_fast_keeps_its_bound_on_numpy(shape: tuple[int, ...]) -> None:
    fast_follows(o1.open_device("cpu", "gemm", "fast"), o1.open_device("cpu", "gemm"), shape)


def float16_device(gpu: o1.Device, path: str = "gemm", precision: str = "fast") -> o1.Device:
    """The adapter of `gpu`, opened with its features."""
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    if "shader-f16" not in info.features:
        pytest.skip(f"{info.label} has no shader-f16")
    return o1.open_device(info, path, precision)


@pytest.mark.parametrize("shape", FLOAT16_SHAPES, ids=str)
def test_fast_keeps_its_bound(gpu: o1.Device, shape: tuple[int, ...]) -> None:
    fast_follows(float16_device(gpu), float16_device(gpu, precision="exact"), shape)


@pytest.mark.parametrize("case", [c for c in PICKED if c.precision == "fast"], ids=lambda c: c.name)
def test_float16_products_do_what_their_twins_do(gpu: o1.Device, case: Any) -> None:
    device = float16_device(gpu)
    steps = [s for s in trace(case) if s.dispatch.kernel.endswith("_f16")]
    assert len(steps) >= 2
    for step in steps:
        found = check_step(step, device.engine.run_kernel)
        assert found.passed, f"{found.ratio:.3g} times the bound: {found.where}"


# Where the time goes.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 17])
def test_a_profile_times_every_dispatch(gpu: o1.Device, path: str, rows: int) -> None:
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    state, _ = stream()
    engine = o1.open_device(info, path).engine
    resident = engine.upload(COMMITS, state.planes)
    for commit in (True, False):
        profile = engine.profile_plan(resident, rows, commit, repeats=2)
        expected = o1.plan(COMMITS, rows, commit, path, engine.limits)
        assert [k.kernel for k in profile.kernels] == [d.kernel for d in expected.dispatches]
        assert all(len(k.seconds) == 2 and 0 < min(k.seconds) <= max(k.seconds) < 60 for k in profile.kernels)
        assert profile.clock == ("gpu" if "timestamp-query" in info.features else "wall")


def test_a_profile_without_timestamps_tells_wall_time(gpu: o1.Device) -> None:
    state, _ = stream()
    resident = gpu.engine.upload(COMMITS, state.planes)
    profile = gpu.engine.profile_plan(resident, 2, repeats=1)
    assert profile.clock == "wall"
    assert all(k.seconds[0] > 0 for k in profile.kernels)
