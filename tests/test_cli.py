"""The command line: what it prints and what it returns. Times nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import cortiq_o1 as o1
from cortiq_o1 import benchmark as bm
from cortiq_o1.benchmark import measure, suite
from cortiq_o1.cli import adapters, choice, main
from cortiq_o1.cli.plan import mermaid
from cortiq_o1.devices import cpu_info
from cortiq_o1.gpu.adapters import AdapterInfo
from cortiq_o1.paths import PATHS

SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8", "--window", "16"]
BENCH = ["bench", "--device", "cpu", "--window", "32", "--contexts", "64,128", "--rows", "1,4"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line, `columns` wide or into a pipe; returns its code, output and errors."""

    def call(*argv: str, columns: int | None = None) -> tuple[int, str, str]:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        code = main.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements as short as they get; no test looks at their values."""
    monkeypatch.setattr(suite, "CELL_SECONDS", 1e-6)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "COPY_SECONDS", 1e-6)


def fake_adapter(
    name: str, backend: str, problem: str | None = None, software: bool = False
) -> o1.DeviceInfo:
    """An adapter that is only there to be listed."""
    limits = {"max-storage-buffer-binding-size": 4 << 30, "max-buffer-size": 1 << 30}
    features = ("timestamp-query", "subgroups")
    return o1.DeviceInfo.of(
        AdapterInfo(
            name,
            backend,
            "cpu" if software else "discrete",
            software,
            "",
            f"driver of {name}",
            features,
            limits,
            problem,
        )
    )


LISTED = [
    fake_adapter("NVIDIA GeForce RTX 4090 Laptop GPU [rev a1]", "vulkan"),
    fake_adapter("llvmpipe (LLVM 15.0.6, 256 bits)", "gl", software=True),
    fake_adapter("Antique", "gl", problem="max-storage-buffers-per-shader-stage 4, needs 8"),
    cpu_info(),
]


def words(text: str) -> set[str]:
    return set(text.split())


def assert_fits(text: str, columns: int) -> None:
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text


# What every command shares.


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cortiq-o1 {o1.__version__}\n", "")


@pytest.mark.parametrize("command", ["adapters", "plan", "bench"])
def test_help(run: Run, command: str) -> None:
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert "--json" in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["plan"], "--num-heads"),
        (["plan", "--preset", "gpt-9"], "smollm2-135m"),
        (["plan", *SMALL, "--rows", "0"], "rows: 0"),
        (["plan", *SMALL, "--num-heads", "5"], "multiple of num_kv_heads"),
        (["plan", *SMALL, "--windows", "4,x"], "'4,x'"),
        (["plan", *SMALL, "--json", "--mermaid"], "not allowed with"),
        (["bench", "--contexts", "1024,many"], "'1024,many'"),
        (["bench", "--contexts", "0,4"], "contexts"),
        (["bench", "--rows", "0"], "rows"),
        (["bench", "--budget", "0"], "budget"),
        (["bench", "--ridge", "-1", "--device", "cpu"], "ridge"),
        (["bench", "--preset", "gpt-9"], "smollm2-135m"),
        (["bench", "--profile"], "--profile: expected with --paths"),
        (["bench", "--paths", "--svg", "a.svg"], "--svg"),
        (["plan", *SMALL, "--path", "quick"], "'quick'"),
        (["bench", "--svg", "/no/such/directory/a.svg"], "/no/such/directory/a.svg: cannot be written"),
    ],
)
def test_bad_usage_is_code_2_and_two_lines(run: Run, argv: Sequence[str], told: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert told in err
    assert 1 <= len(err.splitlines()) <= 2


def test_unknown_device_is_code_3(run: Run) -> None:
    code, out, err = run("bench", "--device", "no such card")
    assert (code, out) == (3, "")
    assert "no such card" in err
    assert len(err.splitlines()) == 1


def test_module_and_closed_pipe() -> None:
    command = [sys.executable, "-m", "cortiq_o1", "plan", "--preset", "qwen3-8b", "--rows", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_plain_output_in_an_ascii_terminal() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "cortiq_o1", "plan", "--preset", "qwen3-8b"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "o1c_fu_read" in done.stdout
    assert "\\" not in done.stdout


# adapters


def test_adapters_lists_this_machine(run: Run) -> None:
    code, out, _ = run("adapters", "--json")
    assert code == 0
    listed = json.loads(out)["devices"]
    assert [d["name"] for d in listed] == [d.name for d in o1.devices()]
    assert listed[-1]["backend"] == "cpu"
    assert "BLAS" in listed[-1]["blas"]


def test_adapters_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "devices", lambda: LISTED)
    code, piped, err = run("adapters")
    assert (code, err) == (0, "")
    for info in LISTED:
        assert info.name in piped
        assert info.driver in piped
    assert "cannot be used: max-storage-buffers-per-shader-stage 4, needs 8" in piped
    assert piped.count("software") == 1
    assert "uses timestamp-query" in piped
    assert "bindings up to 2.00 GiB of 4.00 GiB" in piped
    for columns in (40, 80):
        _, out, _ = run("adapters", columns=columns)
        assert_fits(out, columns)
        for info in LISTED:
            assert words(f"{info.name} {info.driver}") <= words(out)


def test_adapters_says_why_there_are_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "devices", lambda: [cpu_info()])
    monkeypatch.setattr(adapters, "find_adapters", lambda: ([], "wgpu is on holiday"))
    code, out, err = run("adapters", "--json")
    assert code == 0
    assert len(json.loads(out)["devices"]) == 1
    assert err == "note: wgpu is on holiday\n"


# plan


@pytest.mark.parametrize(
    "extra", [[], ["--rows", "40"], ["--rows", "40", "--no-commit"], ["--path", "stages"]]
)
def test_plan_json_is_the_plan(run: Run, extra: list[str]) -> None:
    code, out, err = run(
        "plan", *SMALL, "--sinks", "2", "--windows", "16,8", "--rect", "fm", *extra, "--json"
    )
    assert (code, err) == (0, "")
    geometry = o1.Geometry(4, 2, 8, window=16, sinks=2, windows=(16, 8), rect="fm")
    rows = 40 if "--rows" in extra else 1
    path = extra[extra.index("--path") + 1] if "--path" in extra else "auto"
    assert o1.Plan.from_json(out) == o1.plan(geometry, rows, "--no-commit" not in extra, path)


def test_a_size_beside_a_preset_replaces_its_own(run: Run) -> None:
    _, out, _ = run("plan", "--preset", "Qwen3-8B", "--head-dim", "64", "--json")
    assert o1.Plan.from_json(out).geometry == o1.Geometry(32, 8, 64)


@pytest.mark.parametrize("columns", [None, 80, 30])
def test_plan_loses_nothing(run: Run, columns: int | None) -> None:
    code, out, _ = run("plan", *SMALL, "--rows", "40", columns=columns)
    plan = o1.plan(o1.Geometry(4, 2, 8, window=16), 40)
    assert code == 0
    if columns:
        assert_fits(out, columns)
    found = [word.strip(",") for word in out.split()]
    for kernel in {d.kernel for d in plan.dispatches}:
        assert found.count(kernel) == sum(d.kernel == kernel for d in plan.dispatches)
    assert out.count("-- barrier --") == len(plan.barriers)
    for plane in plan.planes:
        # Where it is bound, where a barrier names it, and in the list of planes.
        bound = sum(d.planes.count(plane) for d in plan.dispatches)
        assert found.count(plane) == bound + sum(b.planes.count(plane) for b in plan.barriers) + 1


def test_mermaid_draws_stages_and_dependences(run: Run) -> None:
    code, out, err = run("plan", *SMALL, "--rows", "20", "--path", "stages", "--mermaid")
    plan = o1.plan(o1.Geometry(4, 2, 8, window=16), 20, path="stages")
    assert (code, err) == (0, "")
    assert out == mermaid(plan)
    lines = out.splitlines()
    assert lines[0] == "flowchart TD"
    nodes = [line.split("[")[0].strip() for line in lines if line.startswith("    d")]
    assert nodes == [f"d{i}" for i in range(1, len(plan.dispatches) + 1)]
    assert sum(line.startswith("  subgraph ") for line in lines) == len(plan.stages())
    arrows = [line.split() for line in lines if "-->" in line]
    assert all(a[0] in nodes and a[-1] in nodes for a in arrows)
    kernels = [d.kernel for d in plan.dispatches]
    first, second = kernels.index("o1c_score") + 1, kernels.index("o1c_max") + 1
    assert f'  d{first} -->|"scores"| d{second}' in lines


# bench


@pytest.mark.usefixtures("quick")
def test_bench_goes_on_where_one_context_has_no_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure.measure_cell

    def crowded(
        device: o1.Device, state: o1.LayerState, rows: int, context: int | None, *rest: object
    ) -> bm.Cell:
        if context == 64:
            raise o1.DeviceMemoryError("ring_k: no room for 49152 bytes")
        return measured(device, state, rows, context, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "measure_cell", crowded)
    code, out, _ = run(*BENCH, "--json")
    (device,) = json.loads(out)["devices"]
    problems = {(c["context"], c["rows"]): c["problem"] for c in device["cells"]}
    assert (code, device["problem"], len(problems)) == (0, None, 6)
    assert problems[64, 1] == "ring_k: no room for 49152 bytes"
    assert problems[128, 1] is None


def test_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "devices", lambda: LISTED)
    assert choice.choose(["all"]) == LISTED
    assert choice.choose(["gl"]) == [LISTED[1]]
    assert choice.choose(["cpu", "rtx", "vulkan"]) == [LISTED[0], LISTED[3]]
    with pytest.raises(o1.DeviceError, match=r"Antique.*needs 8"):
        choice.choose(["antique"])


@pytest.mark.usefixtures("quick")
def test_bench_on_the_cpu(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "bench.svg"
    code, out, err = run(*BENCH, "--json", "--svg", str(target))
    assert code == 0, err
    report = json.loads(out)
    assert (report["contexts"], report["rows"], report["interrupted"]) == ([64, 128], [1, 4], False)
    assert report["cache_bytes"] == {"64": 64 * 3 * 128 * 4, "128": 128 * 3 * 128 * 4}
    (device,) = report["devices"]
    assert (device["backend"], device["clock"], device["problem"]) == ("cpu", "wall", None)
    cells = {(c["layer"], c["context"], c["rows"]) for c in device["cells"]}
    assert cells == {("sealed", None, r) for r in (1, 4)} | {
        ("exact", c, r) for c in (64, 128) for r in (1, 4)
    }
    for cell in device["cells"]:
        assert cell["wall"]["repeats"] >= 3
        assert cell["rows_per_s"] == pytest.approx(cell["rows"] / cell["wall"]["median_s"])
    assert set(device["crossover"]) == {"1", "4"}
    assert ET.parse(target).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("quick")
def test_bench_as_text(run: Run) -> None:
    code, out, err = run(*BENCH, columns=80)
    assert code == 0
    assert_fits(out, 80)
    assert "SmolLM2-135M" in out
    assert "the same kernels" in out
    assert "wall time" in out
    assert "window and sinks alone" in out
    assert "plain copy" in out
    assert "copy bandwidth" in err


@pytest.mark.gpu
@pytest.mark.usefixtures("quick")
def test_bench_on_an_adapter(gpu: o1.Device, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SOFTWARE_COPY_BYTES", 1 << 20)
    code, out, err = run(
        *[
            "bench",
            "--device",
            f"{gpu.backend}:{gpu.name}",
            "--window",
            "32",
            "--contexts",
            "64",
            "--rows",
            "1",
            "--json",
        ]
    )
    assert code == 0, err
    (device,) = json.loads(out)["devices"]
    assert (device["name"], device["backend"]) == (gpu.name, gpu.backend)
    assert device["clock"] in ("gpu", "wall")
    assert all(cell["wall"] for cell in device["cells"])
    assert device["copy_bytes_per_s"] > 0


@pytest.mark.usefixtures("quick")
def test_bench_says_why_a_cell_is_empty(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(info: o1.DeviceInfo, kv: str) -> o1.Device:
        return o1.Device(info, "stages", o1.Limits(binding_bytes=200_000))

    monkeypatch.setattr(suite, "open_device", narrow)
    code, out, _ = run("bench", "--device", "cpu", "--window", "32", "--contexts", "64,4096", "--rows", "1")
    assert code == 0
    assert "ring_k: 3145728 bytes, the device binds at most 200000; lower window" in out


@pytest.mark.usefixtures("quick")
def test_bench_leaves_out_what_passes_the_budget(run: Run) -> None:
    code, out, _ = run(*BENCH, "--budget", "1e-6", "--json")
    assert code == 0
    (device,) = json.loads(out)["devices"]
    assert all(cell["problem"] == "left out: the budget is spent" for cell in device["cells"])
    assert device["crossover"] == {"1": None, "4": None}


@pytest.mark.usefixtures("quick")
def test_bench_of_all_goes_past_an_adapter_that_cannot_be_used(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "devices", lambda: LISTED[2:])
    code, out, err = run("bench", "--window", "32", "--contexts", "64", "--rows", "1")
    assert code == 0, err
    assert "Cannot be used: max-storage-buffers-per-shader-stage 4, needs 8" in out
    assert cpu_info().name in out


def interrupting(after: int, error: BaseException) -> Callable[..., bm.Cell]:
    """A measurement that works so many times."""
    measured = measure.measure_cell
    calls = iter(range(after + 1))

    def measure_or_fail(*args: object) -> bm.Cell:
        if next(calls) == after:
            raise error
        return measured(*args)  # type: ignore[arg-type]

    return measure_or_fail


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("form", [["--json"], []])
def test_ctrl_c_prints_what_is_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: list[str]
) -> None:
    monkeypatch.setattr(measure, "measure_cell", interrupting(3, KeyboardInterrupt()))
    target = tmp_path / "part.svg"
    code, out, err = run(*BENCH, "--svg", str(target), *form)
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    ET.parse(target)
    if form:
        report = json.loads(out)
        assert report["interrupted"]
        assert len(report["devices"][0]["cells"]) == 3
    else:
        assert "64" in out


def test_ctrl_c_elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[o1.DeviceInfo]:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapters, "devices", interrupt)
    assert run("adapters") == (130, "", "cortiq-o1 adapters: interrupted\n")


@pytest.mark.usefixtures("quick")
def test_a_device_that_fails_is_code_3_and_keeps_its_figures(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure, "measure_cell", interrupting(1, o1.DeviceLostError("the card fell off the bus"))
    )
    code, out, err = run(*BENCH, "--json")
    assert code == 3
    assert "fell off the bus" in err
    (device,) = json.loads(out)["devices"]
    assert device["problem"] == "the card fell off the bus"
    assert len(device["cells"]) == 1


# bench --paths

PATHS_BENCH = ["bench", "--paths", "--window", "32", "--rows", "1,17"]


@pytest.mark.usefixtures("quick")
def test_bench_paths_times_them_side_by_side(gpu: o1.Device, run: Run) -> None:
    adapter = f"{gpu.backend}:{gpu.name}"
    code, out, err = run(*PATHS_BENCH, "--device", adapter, "--profile", "--json")
    assert code == 0, err
    report = json.loads(out)
    (device,) = report["devices"]
    assert (report["format"], report["rows"], report["profile"]) == ("cortiq-o1-bench-paths", [1, 17], True)
    assert (device["name"], device["backend"], device["problem"]) == (gpu.name, gpu.backend, None)
    ways = [*PATHS, "float16 windows"]
    ways += ["gemm, fast"] if any(c["way"] == "gemm, fast" for c in device["cells"]) else []
    assert [(c["rows"], c["way"]) for c in device["cells"]] == [(r, w) for r in (1, 17) for w in ways]
    geometry = bm.find_preset("smollm2-135m").geometry(window=32)
    for cell in device["cells"]:
        assert cell["problem"] is None
        assert cell["wall"]["median_s"] > 0
        assert cell["profile_clock"] in ("gpu", "wall")
        assert sum(k["dispatches"] for k in cell["kernels"]) == cell["dispatches"]
        if cell["way"] in PATHS:
            expected = o1.plan(geometry, cell["rows"], path=cell["way"])
            assert [k["kernel"] for k in cell["kernels"]] == list(
                dict.fromkeys(d.kernel for d in expected.dispatches)
            )


@pytest.mark.usefixtures("quick")
def test_bench_paths_as_text(gpu: o1.Device, run: Run) -> None:
    code, out, err = run(
        *PATHS_BENCH[:-1], "1", "--device", f"{gpu.backend}:{gpu.name}", "cpu", "--profile", columns=100
    )
    assert code == 0, err
    assert_fits(out, 100)
    for word in (*PATHS, "direct", "o1c_tok_near", "o1c_qk", "o1c_score"):
        assert word in out
    assert "1.00x" in out
    assert "row on token, by kernel" in out


@pytest.mark.usefixtures("quick")
def test_bench_paths_of_one_path(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(*PATHS_BENCH, "--device", "cpu", "--json")
    assert code == 0
    assert {c["way"] for c in json.loads(out)["devices"][0]["cells"]} == {"direct"}
    monkeypatch.setenv("CORTIQ_O1_PATH", "token")
    code, out, _ = run(*PATHS_BENCH, "--device", "cpu", "--json")
    (device,) = json.loads(out)["devices"]
    assert (code, device["cells"]) == (0, [])
    assert "unset CORTIQ_O1_PATH" in device["problem"]


@pytest.mark.usefixtures("quick")
def test_bench_paths_leaves_out_what_passes_the_budget(run: Run) -> None:
    code, out, _ = run(*PATHS_BENCH, "--device", "cpu", "--budget", "1e-6", "--json")
    assert code == 0
    (device,) = json.loads(out)["devices"]
    assert [c["problem"] for c in device["cells"]] == ["left out: the budget is spent"] * 2


@pytest.mark.parametrize("command", [["plan", *SMALL], BENCH, [*PATHS_BENCH, "--device", "cpu"], ["verify"]])
def test_an_unknown_path_in_the_environment_is_wrong_usage(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("CORTIQ_O1_PATH", "quick")
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert (
        "CORTIQ_O1_PATH: 'quick', expected one of 'auto', 'fused', 'token', 'flash', 'gemm', 'stages'" in err
    )


def test_plan_takes_path_and_precision(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = o1.Geometry(4, 2, 8, window=16)
    _, out, _ = run("plan", *SMALL, "--rows", "16", "--path", "gemm", "--precision", "fast", "--json")
    limits = o1.Limits(float16=True)
    assert o1.Plan.from_json(out) == o1.plan(geometry, 16, path="gemm", limits=limits, precision="fast")
    assert "o1c_qk_f16" in out
    monkeypatch.setenv("CORTIQ_O1_PATH", "stages")
    _, out, _ = run("plan", *SMALL, "--rows", "16", "--json")
    assert o1.Plan.from_json(out) == o1.plan(geometry, 16, path="stages")
    _, out, _ = run("plan", *SMALL, "--rows", "16", "--path", "token", "--json")
    assert o1.Plan.from_json(out) == o1.plan(geometry, 16, path="token")
