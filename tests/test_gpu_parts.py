"""The parts of the wgpu executor: parameters, readback, one kernel alone, timing, failures."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import adapters
from gpu_support import COPY, GEOMETRY, PROMPT, assert_same_planes
from support import assert_follows, random_rows

import cortiq_o1 as o1
from cortiq_o1.gpu import adapters as listing
from cortiq_o1.gpu import buffers as gpu_buffers
from cortiq_o1.gpu import faults, shaders, timing
from cortiq_o1.gpu.adapters import required_limits
from cortiq_o1.gpu.buffers import SLOT, Parameters
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.planning import plan
from cortiq_o1.sealing import empty_planes
from cortiq_o1.state import SealOptions


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    """A sealed layer with a far field."""
    return o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)


@pytest.fixture
def engine(gpu: o1.Device) -> GpuEngine:
    """The adapter's engine."""
    return gpu.engine


@pytest.fixture
def fresh(gpu: o1.Device) -> Iterator[o1.Device]:
    """A device of the test's own, to be broken."""
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    yield o1.open_device(info.handle.request_device_sync(required_limits=required_limits(info, True)))
    gc.collect()


def test_parameters_share_slots_and_never_move_them(gpu: o1.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_buffers, "FIRST_SLOTS", 2)
    monkeypatch.setattr(gpu_buffers, "MOST_SLOTS", 4)
    context = gpu.engine.context
    parameters = Parameters(context.memory)

    def block(i: int) -> bytes:
        return bytes([i]) * 16

    def held(offset: int) -> bytes:
        # A uniform buffer cannot be read back, so look at what went up.
        return written[id(parameters.buffer)][offset : offset + 16]

    written: dict[int, bytearray] = {}

    class Queue:
        def write_buffer(self, buffer: Any, offset: int, data: bytearray) -> None:
            written.setdefault(id(buffer), bytearray(buffer.size))[offset : offset + len(data)] = data

    parameters.memory = SimpleNamespace(
        device=SimpleNamespace(queue=Queue()), adapter="", create=context.memory.create
    )
    first = parameters.buffer
    assert parameters.place([block(1), block(2), block(1)]) == [0, SLOT, 0]
    kept = bytes(written[id(first)])
    for blocks in ([1, 2, 3], [3, 4], [5, 1]):
        offsets = parameters.place([block(i) for i in blocks])
        assert [held(o) for o in offsets] == [block(i) for i in blocks]
    assert parameters.generation == 2
    assert bytes(written[id(first)]) == kept


def test_an_interrupted_wait_leaves_the_engine_usable(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    readback = gpu.engine.context.readback
    new = random_rows(rng, 2, GEOMETRY)
    expected = gpu.load(state).attend(*new)
    layer = gpu.load(state)
    buffer = readback.target(1 << 16)
    promises = []

    def map_async(*given: Any) -> Any:
        """The mapping is under way when the user has enough."""
        promises.append(type(buffer).map_async(buffer, *given))
        raise KeyboardInterrupt

    buffer.map_async = map_async
    with pytest.raises(KeyboardInterrupt):
        layer.attend(*new, commit=False)
    np.testing.assert_array_equal(layer.attend(*new), expected)
    promises[0].sync_wait()


def test_what_was_recorded_follows_buffers_that_grow(
    fresh: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    layer, context = fresh.load(state), fresh.engine.context
    for rows, grows in ((1, True), (2, True), (1, False), (24, True), (1, False), (2, False)):
        before, new = layer.state(), random_rows(rng, rows, GEOMETRY)
        held = context.pool.nbytes
        assert_follows(before, new, layer.attend(*new))
        assert (context.pool.nbytes > held) == grows


def test_what_was_recorded_follows_buffers_that_another_engine_replaces(
    fresh: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    layer, other = fresh.load(state), o1.open_device(fresh.gpu).load(state)
    layer.attend(*random_rows(rng, 1, GEOMETRY))
    other.attend(*random_rows(rng, 24, GEOMETRY))
    before, new = layer.state(), random_rows(rng, 1, GEOMETRY)
    assert_follows(before, new, layer.attend(*new))


def test_recordings_and_bind_groups_are_used_again(engine: GpuEngine, state: o1.LayerState) -> None:
    resident = engine.upload(GEOMETRY, state.planes)
    two, one = (plan(GEOMETRY, rows, limits=engine.limits) for rows in (3, 2))
    longer = engine.steps(two, resident)
    shorter = engine.steps(one, resident)
    assert engine.steps(two, resident) is longer
    assert all(a.group is b.group for a, b in zip(longer, shorter, strict=True))


# One kernel alone.


def test_a_kernel_runs_alone(engine: GpuEngine) -> None:
    source = np.arange(24, dtype=np.uint32).reshape(6, 4)
    params = {"count": 3, "src_at": 2, "dst_at": 1, "pad0": 0}
    found = engine.run_kernel("o1c_copy", {"src": source, "dst": np.zeros((5, 4), np.uint32)}, params)
    assert list(found) == ["dst"]
    np.testing.assert_array_equal(found["dst"], [[0] * 4, *source[2:5], [0] * 4])


def test_a_canary_tells_of_an_overrun(engine: GpuEngine) -> None:
    planes = {"src": np.ones(4, np.uint32), "dst": np.zeros(4, np.uint32)}
    broken = shaders.source("o1c_copy").replace("dst[params.dst_at + x]", "dst[params.dst_at + x + 1u]")
    assert broken != shaders.source("o1c_copy")
    with pytest.raises(o1.DeviceError, match=r"o1c_copy on .*: wrote 1 words behind the end of dst"):
        engine.run_kernel("o1c_copy", planes, COPY, source=broken)
    assert engine.run_kernel("o1c_copy", planes, COPY)["dst"].tolist() == [1] * 4


def test_a_kernel_alone_wants_its_own_planes_and_parameters(engine: GpuEngine) -> None:
    words = np.zeros(4, np.uint32)
    with pytest.raises(o1.ArgumentError, match=r"planes: .*'from'.*expected"):
        engine.run_kernel("o1c_copy", {"from": words, "dst": words}, COPY)
    with pytest.raises(o1.ArgumentError, match=r"params: .*expected"):
        engine.run_kernel("o1c_copy", {"src": words, "dst": words}, {"count": 1})
    with pytest.raises(o1.ArgumentError, match="4-byte"):
        engine.run_kernel("o1c_copy", {"src": words.astype(np.uint64), "dst": words}, COPY)


# Time.


def test_time_is_told_with_its_clock(gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator) -> None:
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    device = o1.open_device(info)  # with timestamps, where the adapter has them
    engine = device.engine
    residents = [engine.upload(GEOMETRY, state.planes) for _ in range(2)]
    new = random_rows(rng, 4, GEOMETRY)
    out, spent = engine.attend_timed(residents[0], *new, commit=False)
    np.testing.assert_array_equal(out, engine.attend(residents[1], *new, commit=False))
    assert spent is None or 0 < spent < 60e9
    for found in (engine.time_plan(residents[0], 3, False, 4), engine.time_plan(residents, 3, True, 4)):
        assert found.clock == ("gpu" if "timestamp-query" in info.features else "wall")
        assert len(found.seconds) == 4
        assert all(0 < s < 60 for s in found.seconds)
    rate, clock = engine.copy_bandwidth(1 << 20, 3)
    assert rate > 1e6
    assert clock in ("gpu", "wall")


def test_without_timestamps_the_wall_clock_serves(engine: GpuEngine, state: o1.LayerState) -> None:
    assert timing.Stopwatch(engine.context, 1).nanoseconds() is None
    assert engine.time_plan(engine.upload(GEOMETRY, state.planes), 1, True, 3).clock == "wall"


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([[5, 9], [20, 30]], (8.0, 20.0)),
        ([[0, 9], [20, 30]], None),
        ([[5, 9], [30, 20]], None),
        ([[5, 5], [6, 7]], None),
    ],
)
def test_timestamps_that_cannot_be_are_not_believed(
    engine: GpuEngine,
    monkeypatch: pytest.MonkeyPatch,
    ticks: list[list[int]],
    expected: tuple[float, ...] | None,
) -> None:
    watch = timing.Stopwatch(engine.context, 2)
    watch._queries, watch.period, watch._resolved = object(), 2.0, None

    def download(buffer: Any, array: np.ndarray, step: str) -> None:
        array[:] = ticks

    monkeypatch.setattr(engine.context, "download", download)
    assert watch.nanoseconds() == expected


# Failures.


def test_no_room_names_the_plane_and_leaves_the_layer(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (gpu.gpu.limits["max-buffer-size"] + 16, 1 << 40):
        with pytest.raises(
            o1.DeviceMemoryError, match=rf"{re.escape(gpu.name)}.*buffer of mix, {size} bytes"
        ):
            gpu.engine.context.memory.create("mix", size)

    layer = gpu.load(state)
    layer.attend(*random_rows(rng, 1, GEOMETRY))
    before = layer.state()

    def full(**given: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(gpu.gpu, "create_buffer", full)
    other = o1.Geometry(
        num_heads=4, num_kv_heads=2, head_dim=16, value_dim=12, window=24, sinks=3, landmarks=8
    )
    with pytest.raises(o1.DeviceMemoryError, match=r"buffer of ring, \d+ bytes: out of memory"):
        gpu.load(o1.LayerState(other, SealOptions(), 0, planes=empty_planes(other)))
    with pytest.raises(o1.DeviceMemoryError, match=r"buffer of spec_[qk], \d+ bytes"):
        layer.attend(*random_rows(rng, 24, GEOMETRY), commit=False)
    monkeypatch.undo()
    assert_same_planes(layer.state().planes, before.planes)
    new = random_rows(rng, 2, GEOMETRY)
    assert_follows(before, new, layer.attend(*new))


def test_a_kernel_that_does_not_compile_is_named(engine: GpuEngine, gpu: o1.Device) -> None:
    words = np.zeros(4, np.uint32)
    with pytest.raises(o1.ShaderError, match=rf"o1c_copy on {re.escape(gpu.name)}"):
        engine.run_kernel("o1c_copy", {"src": words, "dst": words}, COPY, source="@compute fn main( {")


def test_a_lost_device_is_told_and_forgotten(
    fresh: o1.Device, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_open", {("key",): fresh.gpu})
    layer = fresh.load(state)
    new = random_rows(rng, 2, GEOMETRY)
    layer.attend(*new)
    fresh.gpu.destroy()
    for call in (lambda: layer.attend(*new), layer.state, lambda: fresh.load(state)):
        with pytest.raises(o1.DeviceLostError, match=rf"{re.escape(fresh.name)}.*the device was lost"):
            call()
    assert not listing._open


def test_what_the_backend_says_comes_on_one_line() -> None:
    error = RuntimeError("Validation Error\n\nCaused by:\n  In wgpuDeviceCreateBuffer\n    too bad")
    assert faults.reason(error) == "In wgpuDeviceCreateBuffer | too bad"
    with pytest.raises(o1.DeviceError, match=r"^card: step: In wgpuDeviceCreateBuffer \| too bad$"):
        with faults.translated(None, "card", "step"):
            raise error
