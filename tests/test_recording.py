"""What a compute pass is told, by C functions and by wgpu-py's methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import GEOMETRY, PROMPT, assert_same_planes
from support import random_rows

import cortiq_o1 as o1
from cortiq_o1.gpu import raw
from cortiq_o1.gpu.context import Context
from cortiq_o1.gpu.executor import GpuEngine

PASS = ("SetPipeline", "SetBindGroup", "DispatchWorkgroups")


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    return o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)


def told(monkeypatch: pytest.MonkeyPatch, engine: GpuEngine, work: Any) -> list[tuple[Any, ...]]:
    """The C calls on compute passes while `work` runs, by whichever way, with pointers as numbers."""
    from wgpu.backends.wgpu_native import _api

    heard: list[tuple[Any, ...]] = []

    def plain(value: Any) -> Any:
        return int(value) if isinstance(value, int) else str(value)

    def listening(name: str, function: Any) -> Any:
        def call(to: Any, *args: Any) -> Any:
            offsets = [int(args[3][i]) for i in range(args[2])] if name == "SetBindGroup" else []
            known = args[:3] if name == "SetBindGroup" else args
            heard.append((name, *map(plain, known), *offsets))
            return function(to, *args)

        return call

    with monkeypatch.context() as patch:
        for name in PASS:
            full = f"wgpuComputePassEncoder{name}"
            patch.setattr(_api.libf, full, listening(name, getattr(_api.libf, full)))
        patch.setattr(
            _api.GPUComputePassEncoder,
            "_set_bind_group_function",
            _api.libf.wgpuComputePassEncoderSetBindGroup,
        )
        calls = engine.context.raw
        if calls is not None:
            for name, attribute in zip(PASS, ("_pipeline", "_group", "_dispatch"), strict=True):
                patch.setattr(calls, attribute, listening(name, getattr(calls, attribute)))
        work()
    return heard


@pytest.mark.parametrize("rows", [1, 3])
def test_both_ways_tell_a_pass_the_same(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    engine: GpuEngine = gpu.engine
    assert engine.context.raw is not None, "wgpu-py does not declare what is expected: see gpu/raw.py"
    layer = gpu.load(state)
    new = random_rows(rng, rows, GEOMETRY)
    layer.attend(*new)  # from here on pipelines and groups are there
    outputs: list[Any] = []

    def work() -> None:
        outputs.append(layer.attend(*new))
        outputs.append(layer.state().planes)

    before = layer.snapshot()
    by_function = told(monkeypatch, engine, work)
    layer.restore(before)
    monkeypatch.setattr(engine.context, "raw", None)
    by_method = told(monkeypatch, engine, work)
    assert by_function == by_method
    assert len(by_function) >= 2 * len(PASS)
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert_same_planes(outputs[1], outputs[3])


def test_the_switch_and_other_declarations_leave_the_methods(
    gpu: o1.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wgpu.backends.wgpu_native import _api

    monkeypatch.setenv(raw.SWITCH, "0")
    assert raw.raw_calls(gpu.gpu) is None
    monkeypatch.delenv(raw.SWITCH)
    assert raw.raw_calls(object()) is None
    assert raw.raw_calls(gpu.gpu) is not None
    raw._found.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(raw._EXPECTED, "wgpuComputePassEncoderSetPipeline", "void(*)(int)")
            assert Context(gpu.gpu).raw is None
        raw._found.cache_clear()
        with monkeypatch.context() as patch:
            patch.delattr(_api, "error_handler")
            assert raw.raw_calls(gpu.gpu) is None
    finally:
        raw._found.cache_clear()


def test_what_wgpu_refuses_in_a_pass_is_raised(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    engine: GpuEngine = gpu.engine
    q, k, v = (engine.context.memory.create(n, 1 << 12) for n in "qkv")
    out = engine.context.memory.create("out", 1 << 12)
    layer = gpu.load(state)
    encoder = gpu.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    compute_pass.end()
    with pytest.raises(o1.DeviceError, match=r"encode"):
        layer.encode(compute_pass, q, k, v, out, 1)
    assert layer.rows == state.rows


def test_a_token_over_the_same_buffers_is_recorded_again(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew as soon as anything else is asked for."""
    engine: GpuEngine = gpu.engine
    context = engine.context
    layer, twin = gpu.load(state), gpu.load(state)
    q, k, v = random_rows(rng, 2, GEOMETRY)
    buffers = [context.memory.create(n, a.nbytes) for n, a in zip("qkv", (q, k, v), strict=True)]
    outs = [context.memory.create("out", q.nbytes) for _ in range(2)]
    for rows in (2, 1):  # the pool's buffers are there from here on
        gpu.load(state).attend(q[:rows], k[:rows], v[:rows])
    planned: list[int] = []
    monkeypatch.setattr(
        engine, "_plan", lambda *args, plan=engine._plan: (planned.append(args[1]), plan(*args))[1]
    )

    def token(rows: int, out: Any) -> np.ndarray:
        for buffer, array in zip(buffers, (q, k, v), strict=True):
            context.write(buffer, array, "test")
        encoder = context.encoder("test")
        compute_pass = encoder.begin_compute_pass()
        layer.encode(compute_pass, *buffers, out, rows)
        compute_pass.end()
        context.submit(encoder, "test")
        found = np.empty((rows, GEOMETRY.num_heads, GEOMETRY.value_dim or 0), np.float32)
        context.download(out, found, "test")
        return found

    new = []
    for rows, out in [(1, 0), (1, 0), (2, 0), (1, 0), (1, 1), (1, 1)]:
        planned.clear()
        found = token(rows, outs[out])
        new.append(bool(planned))
        np.testing.assert_array_equal(found, twin.attend(q[:rows], k[:rows], v[:rows]))
    assert new == [True, False, True, True, True, False]
    assert_same_planes(layer.state().planes, twin.state().planes)
    assert layer.rows == twin.rows
