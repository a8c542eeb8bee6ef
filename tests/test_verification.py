"""The comparison itself and the command: what is wrong must be seen, on a kernel and on a twin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

import cortiq_o1 as o1
from cortiq_o1.cli import verify
from cortiq_o1.cli.main import main
from cortiq_o1.cpu import executor
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.errors import ArgumentError, DeviceError, DeviceLostError
from cortiq_o1.gpu.shaders import source as shader_source
from cortiq_o1.kernels import KERNELS
from cortiq_o1.planes import HD_FAR, HD_HAVE, HD_MAX, S_MASS
from cortiq_o1.plans import is_store, members
from cortiq_o1.verification import kernel_cases
from cortiq_o1.verification.deviation import compare
from cortiq_o1.verification.kernels import Step, check_step, trace
from cortiq_o1.verification.suite import Cases, Suite, Target, target_of

Planes = dict[str, np.ndarray]
KERNEL_CASES = {c.name: c for c in kernel_cases.PICKED}


# A kernel, a picked case that must show the fault, the text that is right and the one that is not.
FAULTS = {
    "scale-dropped": ("o1c_score", "two-sub-chunks", "sum4(acc) * params.scale", "sum4(acc)"),
    "slot-off-by-one": ("o1c_sum", "two-sub-chunks", "(group.head + x) %", "(group.head + x + 1u) %"),
    "row-lands-one-early": ("o1c_ring_commit", "ring-fills", "group.len + j)", "group.len + j - 1u)"),
    "far-limit-ignored": ("o1c_meta", "far-closes", "min(evicted, room)", "evicted"),
    "far-limit-folds": ("o1c_far_e", "far-closes", "min(evicted, room)", "evicted"),
    "reduction-stops-early": ("o1c_soft", "two-sub-chunks", "stride > 0u", "stride > 1u"),
    "maximum-of-one-lane": ("o1c_max", "two-sub-chunks", "largest = reduce_max(lane, largest);", ""),
    "spare-landmarks-read": ("o1c_far", "few-landmarks", "lane < landmarks", "lane < params.m"),
    "dropped-far-keeps-its-maximum": ("o1c_far", "noise", "            largest = near;", ""),
    "clamp-forgotten": ("o1c_far", "clamped", "u = max(u, 0.0);", ""),
    "empty-far-counts": ("o1c_add", "noise", "HD_HAVE] > 0.5", "HD_HAVE] > -1.0"),
    "levels-never-join": ("o1c_far_commit", "levels-join", "if (flush) {", "if (flush && params.k > 999u) {"),
    "first-row-only": ("o1c_land", "two-sub-chunks", "params.r0 + i", "i"),
    "later-keys-shift-maxima": ("o1c_far_e", "loud", "min(folds.end, i + 1u)", "folds.end"),
    "copy-one-short": ("o1c_copy", "uncommitted", "x < params.count", "x + 1u < params.count"),
    "panel-of-first-rows": (
        "o1c_gather", "two-sub-chunks-gemm", "params.r0 + column - newest", "column - newest"
    ),
    "heads-too-close": ("o1c_pack", "two-sub-chunks-gemm", "gh * params.kcap + i", "gh * params.k + i"),
    "product-without-scale": ("o1c_qk", "two-sub-chunks-gemm", "sums * params.scale", "sums"),
    "product-one-step-short": (
        "o1c_qk", "two-sub-chunks-gemm", "term < params.d;", "term + TILE_K < params.d;"
    ),
    "product-of-one-step": (
        "o1c_pv", "two-sub-chunks-gemm", "min((split + 1u) * per, params.panel)", "split * per + TILE_K"
    ),
    "later-keys-seen": ("o1c_gmax", "two-sub-chunks-gemm", "is_seen(seen, quad)", "vec4<bool>(true)"),
    "later-keys-weigh": ("o1c_gsoft", "two-sub-chunks-gemm", "is_seen(seen, quad)", "vec4<bool>(true)"),
    "one-split-added": ("o1c_gadd", "splits-4096-gemm", "split < params.splits", "split < 1u"),
    "sinks-forgotten": (
        "o1c_tok_near", "two-sub-chunks-token", "let columns = params.ns + seen", "let columns = seen"
    ),
    "splits-overlap": (
        "o1c_tok_near", "splits-9-token", "min(first + per, columns)", "min(first + per + 1u, columns)"
    ),
    "negative-far-counts": ("o1c_tok_far", "noise-token", "far_len > 0u && far >= 0.0", "far_len > 0u"),
    "far-limit-passed": (
        "o1c_tok_far", "far-closes-token", "evicts && group.far_len < group.far_limit", "evicts"
    ),
    "gain-not-rescaled": ("o1c_tok_far", "loud-token", "= gain * kept;", "= gain;"),
    "evicted-row-forgotten": ("o1c_tok_merge", "two-sub-chunks-token", "have && folds", "have && !folds"),
    "token-levels-never-join": ("o1c_tok_commit", "levels-join-token", "if (flushes) {", "if (false) {"),
    "evictions-uncounted": (
        "o1c_tok_commit", "two-sub-chunks-token", "group.evicted + 1u", "group.evicted"
    ),
    "only-folds-counted": (
        "o1c_meta", "far-closes", "group.evicted + evicted", "group.evicted + folds.end - folds.first"
    ),
    "archive-starts-over": ("o1c_archive", "two-sub-chunks", "(group.evicted + (i - first))", "(i - first)"),
    "archive-of-first-rows": ("o1c_archive", "two-sub-chunks", "params.r0 + i", "i"),
    "archive-of-younger-keys": (
        "o1c_archive", "ring-fills", "ring_row(group, g, i - first)", "ring_row(group, g, i)"
    ),
    "archive-of-rows-that-evict-nothing": ("o1c_archive", "far-empty", "if (i < first)", "if (false)"),
    "head-stands-still": ("o1c_tok_commit", "two-sub-chunks-token", "ring_slot(group, 1u)", "group.head"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_seen(gpu: o1.Device, fault: str) -> None:
    kernel, case, right, wrong = FAULTS[fault]
    source = shader_source(kernel)
    assert right in source
    broken = source.replace(right, wrong)

    def run(kernel: str, planes: Any, params: Any, grid: Any, *, kv: str = "f32") -> Planes:
        return dict(gpu.engine.run_kernel(kernel, planes, params, grid, source=broken, kv=kv))

    steps = [s for s in trace(KERNEL_CASES[case]) if s.dispatch.kernel == kernel]
    found = [check_step(step, run) for step in steps]
    assert not all(d.passed for d in found), "the fault went unseen"
    assert all(check_step(step, gpu.engine.run_kernel).passed for step in steps)


def test_a_write_outside_of_a_plane_is_seen(gpu: o1.Device) -> None:
    source = shader_source("o1c_max").replace("near_max[row] =", "near_max[row + params.nh * params.kcap] =")

    def run(kernel: str, planes: Any, params: Any, grid: Any, *, kv: str = "f32") -> Planes:
        return dict(gpu.engine.run_kernel(kernel, planes, params, grid, source=source, kv=kv))

    (step,) = (s for s in trace(KERNEL_CASES["one-row"]) if s.dispatch.kernel == "o1c_max")
    with pytest.raises(DeviceError, match=r"o1c_max.*behind the end of near_max"):
        check_step(step, run)
    target = Target("broken", "none", {"auto": gpu}, run)
    suite = Suite([target])
    suite.run(Cases((KERNEL_CASES["one-row"],), ()))
    assert target.kernels["o1c_max"].failed == 1
    assert suite.failed


@cache
def traced(case: str) -> list[Step]:
    return trace(KERNEL_CASES[case])


def honest(
    kernel: str, planes: Mapping[str, np.ndarray], params: Any, grid: Any, *, kv: str = "f32"
) -> Planes:
    """An adapter that does exactly what the twins do."""
    own = {name: plane.copy() for name, plane in planes.items()}
    bindings = KERNELS[kernel].bindings
    bound = [tuple(own[m] for m in members(b.name)) if is_store(b.name) else own[b.name] for b in bindings]
    TWINS[kernel](params, grid, *bound)
    return {m: own[m] for b in bindings if b.access == "read_write" for m in members(b.name)}


@pytest.mark.parametrize("case", kernel_cases.PICKED, ids=lambda c: c.name)
def test_the_twins_pass_their_own_check(case: kernel_cases.KernelCase) -> None:
    for step in trace(case):
        found = check_step(step, honest)
        assert (found.error, found.ratio) == (0.0, 0.0), found.where


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0], ids=["nan", "infinite", "off"])
def test_one_wrong_element_is_seen(kernel: str, value: float, rng: np.random.Generator) -> None:
    cases = ("uncommitted", "uncommitted-gemm", "uncommitted-token", "uncommitted-fused", "float16-edges")
    cases += ("uncommitted-flash", "two-sub-chunks")
    step = next(s for case in cases for s in traced(case) if s.dispatch.kernel == kernel)
    written = [b.name for b in KERNELS[kernel].bindings if b.access == "read_write"]
    for name in (plane for binding in written for plane in members(binding)):
        at = int(rng.integers(step.after[name].size))

        def run(
            k: str, planes: Any, params: Any, grid: Any, name: str = name, at: int = at, kv: str = "f32"
        ) -> Planes:
            found = honest(k, planes, params, grid)
            flat = found[name].reshape(-1)
            # An element off by a thousandth, or by one where it is an integer.
            flat[at] = value if value != 1.0 and flat.dtype.kind == "f" else flat[at] * 1.001 + 1
            return found

        assert not check_step(step, run).passed


def test_untouched_elements_must_stay() -> None:
    """The smallest change to what a kernel has no business with counts."""
    (step,) = (s for s in trace(KERNEL_CASES["far-empty"]) if s.dispatch.kernel == "o1c_far")

    def run(k: str, planes: Any, params: Any, grid: Any, *, kv: str = "f32") -> Planes:
        found = honest(k, planes, params, grid)
        found["gains"][0, 0, 0] = np.nextafter(found["gains"][0, 0, 0], np.float32(0))
        return found

    found = check_step(step, run)
    assert found.ratio == np.inf
    assert "gains[0, 0, 0]" in found.where


def _drop_far(k: str, planes: Any, params: Any, grid: Any, *, kv: str = "f32") -> Planes:
    """What `o1c_far` writes where it drops the far field of every row."""
    found = {name: planes[name].copy() for name in ("row_head", "gains", "evict_weights")}
    head = found["row_head"][: params["k"]]
    head[..., HD_MAX] = planes["near_max"][: params["k"]]
    head[..., HD_FAR] = head[..., HD_HAVE] = 0.0
    return found


def test_a_far_mass_that_float32_cannot_sign_may_go_either_way() -> None:
    step = next(s for s in trace(KERNEL_CASES["two-sub-chunks"]) if s.dispatch.kernel == "o1c_far")
    params = dict(step.dispatch.params)
    assert not check_step(step, _drop_far).passed  # here the sign is plain
    before = {name: plane.copy() for name, plane in step.before.items()}
    before["far_rows"][S_MASS] = 0.0
    kept = Step(step.dispatch, before, {**before, **honest("o1c_far", before, params, step.dispatch.grid)})
    dropped = Step(step.dispatch, before, {**before, **_drop_far("o1c_far", before, params, None)})
    assert (kept.after["row_head"][..., HD_HAVE] != dropped.after["row_head"][..., HD_HAVE]).any()
    for found in (kept, dropped):
        for run in (honest, _drop_far):
            assert check_step(found, run).passed


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("o1c_score", lambda p: {**p, "scale": p["scale"] * (1 + 1e-5)}),
        ("o1c_land", lambda p: {**p, "r0": 1}),
        ("o1c_far_e", lambda p: {**p, "scale": p["scale"] * (1 + 1e-5)}),
    ],
)
def test_a_broken_twin_is_seen(
    gpu: o1.Device, monkeypatch: pytest.MonkeyPatch, kernel: str, wrong: Callable[[Any], Any]
) -> None:
    def broken(p: Any, grid: Any, *planes: np.ndarray) -> None:
        TWINS[kernel](wrong(p), grid, *planes)

    monkeypatch.setattr(executor, "TWINS", {**TWINS, kernel: broken})
    steps = [s for s in trace(KERNEL_CASES["uncommitted"]) if s.dispatch.kernel == kernel]
    assert not all(check_step(step, gpu.engine.run_kernel).passed for step in steps)


def test_compare_names_the_worst_element() -> None:
    got = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)
    want = np.array([[1.0, 2.0], [3.25, 4.0]], np.float32)
    found = compare("plane", got, want, np.array([[0.0, 0.0], [1.0, 0.25]]))
    assert (found.error, found.ratio, found.passed) == (0.125, 2.0, False)  # relative above 1
    assert found.where.startswith("plane[1, 1] is 4.5, expected 4.0")
    assert not compare("plane", got[0], want, np.zeros(())).passed
    assert compare("plane", got, got, np.zeros(())).passed


def test_a_lost_device_fails_once_and_ends_its_column() -> None:
    calls = []

    def run(kernel: str, *rest: Any, kv: str = "f32") -> Any:
        calls.append(kernel)
        raise DeviceLostError("gone")

    target = Target("lost", "none", {"auto": o1.open_device("cpu")}, run)
    suite = Suite([target])
    suite.run(Cases.of("quick", 0))
    assert len(calls) == 1
    assert suite.failed
    assert target.problem == "gone"
    assert not target.layers


def test_random_cases_are_built_from_their_name() -> None:
    everything = Cases.of("default", 5)
    one = Cases.of("quick", 0, "random-5-11")
    assert one.kernels[0] in everything.kernels
    assert one.layers[0] in everything.layers
    with pytest.raises(ArgumentError, match="no-such"):
        Cases.of("quick", 0, "no-such")


def test_numpy_has_a_column_of_layers_alone() -> None:
    target = target_of({"direct": o1.open_device("cpu")}, "NumPy", "cpu")
    suite = Suite([target])
    suite.run(Cases.of("quick", 0, "window-1"))
    assert not target.kernels
    assert target.layers["window-1"].checks == 1
    assert not suite.failed


def test_verify_passes_on_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--case", "window-1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert [t["label"] for t in report["targets"]] == ["NumPy", "NumPy twins"]
    assert all(t["layers"]["window-1"]["worst_ratio"] < 1 for t in report["targets"])
    assert [list(t["paths"]) for t in report["targets"]] == [
        ["direct", "float16 windows"],
        ["fused", "token", "flash", "gemm", "stages", "gemm, fast"],
    ]
    assert report["targets"][1]["layers"]["window-1"]["checks"] == 6


def test_verify_of_one_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CORTIQ_O1_PATH", "token")
    assert main(["verify", "--device", "cpu", "--case", "window-1", "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert (target["label"], list(target["paths"])) == ("NumPy twins", ["token"])


def test_a_kernel_that_the_device_lacks_a_feature_for_is_not_ok(
    gpu: o1.Device, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of({"auto": gpu}, "adapter", "none")  # opened with WebGPU's defaults
    assert target.unavailable == {"o1c_qk_f16": "shader-f16", "o1c_pv_f16": "shader-f16"}
    suite = Suite([target])
    suite.run(Cases((KERNEL_CASES["float16-edges"],), ()))
    assert not suite.failed
    assert "o1c_gsoft" in target.kernels
    assert "o1c_qk_f16" not in target.kernels
    verify.render(suite, 1.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "_f16" in line]
    assert len(lines) == 2
    assert all("no shader-f16" in line and "ok" not in line for line in lines)


def test_verify_exits_with_1_and_says_how_to_repeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(p: Any, grid: Any, *planes: np.ndarray) -> None:
        TWINS["o1c_score"]({**p, "scale": 1.01 * p["scale"]}, grid, *planes)

    monkeypatch.setattr(executor, "TWINS", {**TWINS, "o1c_score": broken})
    assert main(["verify", "--device", "cpu", "--case", "clustered"]) == 1
    out = capsys.readouterr().out
    assert "NumPy twins: clustered fails in clustered: stages: call" in out
    assert "cortiq-o1 verify --device cpu --case clustered" in out
    assert "1 failed" in out


def test_verify_of_an_unknown_device_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "no-such-adapter", "--case", "window-1"]) == 3
    assert "no-such-adapter" in capsys.readouterr().err


def test_an_interruption_prints_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_layer = Suite._run_layer
    done: list[Any] = []

    def interrupted(self: Suite, case: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(case)
        run_layer(self, case)

    monkeypatch.setattr(Suite, "_run_layer", interrupted)
    assert main(["verify", "--device", "cpu", "--quick", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"]
    assert all(len(t["layers"]) == 1 for t in report["targets"])
