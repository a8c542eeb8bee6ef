"""The wgpu executor: buffers, bindings, recording into other passes, timing, and its failures."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_support import COPY, GEOMETRY, PROMPT, assert_same_planes
from support import assert_follows, part, random_rows

import cortiq_o1 as o1
from cortiq_o1.engine import Accepted
from cortiq_o1.gpu import context as gpu_context
from cortiq_o1.gpu import recording
from cortiq_o1.gpu.adapters import find_dawn_adapters
from cortiq_o1.gpu.buffers import COPY_DST, COPY_SRC, STORAGE
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.hazards import buffer_of, implied
from cortiq_o1.paths import PATHS
from cortiq_o1.planning import BLOCK_ROWS, commit_plan, plan


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    """A sealed layer with a far field."""
    return o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)


@pytest.fixture
def engine(gpu: o1.Device) -> GpuEngine:
    """The adapter's engine."""
    return gpu.engine


def input_buffers(gpu: o1.Device, rows: tuple[np.ndarray, ...], out_bytes: int) -> list[Any]:
    """The caller's own buffers for `encode`, filled, the output last."""
    device = gpu.gpu
    made = []
    for array in rows:
        made.append(device.create_buffer(size=array.nbytes, usage=STORAGE | COPY_DST))
        device.queue.write_buffer(made[-1], 0, array)
    return [*made, device.create_buffer(size=out_bytes, usage=STORAGE | COPY_SRC)]


def encoded(gpu: o1.Device, layer: o1.Layer, rows: tuple[np.ndarray, ...], commit: bool) -> np.ndarray:
    """What `attend` gives, by way of a pass of the caller's."""
    shape = (len(rows[0]), GEOMETRY.num_heads, GEOMETRY.value_dim)
    buffers = input_buffers(gpu, rows, 4 * int(np.prod(shape)))
    encoder = gpu.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    layer.encode(compute_pass, *buffers, len(rows[0]), commit)
    compute_pass.end()
    gpu.gpu.queue.submit([encoder.finish()])
    return np.frombuffer(gpu.gpu.queue.read_buffer(buffers[-1]), np.float32).reshape(shape)


# What comes back.


@pytest.mark.parametrize("rows", [1, 7, 24, 25, 61])
def test_rows_follow_the_reference(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, rows: int
) -> None:
    new = random_rows(rng, rows, GEOMETRY)
    assert_follows(state, new, gpu.load(state).attend(*new))


def test_a_state_comes_back_as_it_went_up(
    engine: GpuEngine, state: o1.LayerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_context, "PIECE_BYTES", 512)  # many pieces, and a last one that is short
    found = engine.read(engine.upload(GEOMETRY, state.planes))
    assert_same_planes(found, state.planes)
    assert all(found[name].dtype == state.planes[name].dtype for name in found)


@pytest.mark.parametrize("rows", [5, 50, BLOCK_ROWS + 50])
@pytest.mark.parametrize("accepted", [1, 33, BLOCK_ROWS + 20])
def test_a_commit_leaves_what_attend_leaves(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, rows: int, accepted: int
) -> None:
    accepted = min(accepted, rows)
    new = random_rows(rng, rows, GEOMETRY)
    one, two = (engine.upload(GEOMETRY, state.planes) for _ in range(2))
    speculative = engine.attend(one, *new, commit=False)
    assert_same_planes(engine.read(one), state.planes)
    engine.commit([Accepted(one, accepted)])
    outputs = engine.attend(two, *part(new, slice(accepted)), commit=True)
    assert_same_planes(engine.read(one), engine.read(two))
    # Fewer rows may come on another path, which rounds in another way.
    for out in (speculative[:accepted], outputs):
        assert_follows(state, part(new, slice(accepted)), out)


def test_more_rows_than_are_kept_cannot_be_committed(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    resident = engine.upload(GEOMETRY, state.planes)
    new = random_rows(rng, 3, GEOMETRY)
    engine.attend(resident, *new, commit=False)
    with pytest.raises(o1.StateError, match="4 rows of draft '', 3 are kept"):
        engine.commit([Accepted(resident, 4)])
    with pytest.raises(o1.StateError, match="1 rows of draft 'other', 0 are kept"):
        engine.commit([Accepted(resident, 1, "other")])
    assert resident.drafts[""].rows == 3  # the refused calls forgot nothing
    with pytest.raises(o1.ArgumentError, match="twice"):
        engine.commit([Accepted(resident, 1), Accepted(resident, 1)])
    assert_same_planes(engine.read(resident), state.planes)
    engine.attend(resident, *new, commit=True)
    with pytest.raises(o1.StateError, match="1 rows of draft '', 0 are kept"):
        engine.commit([Accepted(resident, 1)])


def test_layers_of_one_geometry_share_scratch_and_not_state(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    new = random_rows(rng, 20, GEOMETRY)
    alone = gpu.load(state).attend(*new)
    one, two = gpu.load(state), gpu.load(state)
    held = gpu.engine.context.pool.nbytes
    for at in range(0, 20, 5):
        rows = part(new, slice(at, at + 5))
        np.testing.assert_array_equal(one.attend(*rows), two.attend(*rows))
    assert gpu.engine.context.pool.nbytes == held
    np.testing.assert_allclose(one.attend(*new), two.attend(*new), rtol=0, atol=0)
    assert alone.shape == (20, 4, 12)


# Recording into a pass of the caller's.


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
def test_encode_gives_the_bits_of_attend(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator, rows: int, commit: bool
) -> None:
    new = random_rows(rng, rows, GEOMETRY)
    one, two = gpu.load(state), gpu.load(state)
    np.testing.assert_array_equal(encoded(gpu, one, new, commit), two.attend(*new, commit=commit))
    if not commit:
        one.commit(rows)
        two.commit(rows)
    assert_same_planes(one.state().planes, two.state().planes)


def test_several_layers_share_a_pass(gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator) -> None:
    new = random_rows(rng, 3, GEOMETRY)
    expected = gpu.load(state).attend(*new)
    layers = [gpu.load(state) for _ in range(3)]
    buffers = [input_buffers(gpu, new, expected.nbytes) for _ in layers]
    encoder = gpu.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    for layer, mine in zip(layers, buffers, strict=True):
        layer.encode(compute_pass, *mine, 3)
    # A longer call in between replaces the scratch that the recorded work still uses.
    gpu.load(state).attend(*random_rows(rng, 24, GEOMETRY))
    compute_pass.end()
    gpu.gpu.queue.submit([encoder.finish()])
    for mine in buffers:
        found = np.frombuffer(gpu.gpu.queue.read_buffer(mine[-1]), np.float32).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)


def test_encode_refuses_before_it_records(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    class Untouched:
        """A pass that nothing may be recorded into."""

        _device = gpu.gpu

        def dispatch_workgroups(self) -> None:
            raise AssertionError("recorded")

    layer = gpu.load(state)
    new = random_rows(rng, 4, GEOMETRY)
    q, k, v, out = input_buffers(gpu, new, 4 * 4 * 4 * 12)
    small = gpu.gpu.create_buffer(size=16, usage=STORAGE)
    uniform = gpu.gpu.create_buffer(size=4096, usage=0x40)
    foreign = SimpleNamespace(size=4096, usage=STORAGE, _device=object())
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((small, k, v, out), "q_buffer: 16 bytes, expected at least 1024"),
        ((q, uniform, v, out), "k_buffer: usage 0x40, expected a storage buffer"),
        ((q, k, foreign, out), "v_buffer: of another device"),
        ((q, k, v, np.zeros(3)), "out_buffer: ndarray, expected a buffer"),
        ((out, k, v, out), "out_buffer: the same buffer"),
    ]
    for given, message in bad:
        with pytest.raises(o1.ArgumentError, match=message):
            layer.encode(Untouched(), *given, 4)
    with pytest.raises(o1.ArgumentTypeError, match="compute_pass: NoneType, expected a compute pass"):
        layer.encode(None, q, k, v, out, 4)
    with pytest.raises(o1.ArgumentError, match="compute_pass: of another device"):
        layer.encode(SimpleNamespace(_device=object(), dispatch_workgroups=None), q, k, v, out, 4)
    assert_same_planes(layer.state().planes, state.planes)


# What is bound, and what is kept.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 25, 50])
@pytest.mark.parametrize("commit", [True, False])
def test_the_bindings_imply_the_plans_barriers(
    gpu: o1.Device, state: o1.LayerState, rows: int, commit: bool, path: str
) -> None:
    engine: GpuEngine = o1.open_device(gpu.gpu, path).engine
    resident = engine.upload(GEOMETRY, state.planes)
    plans = [plan(GEOMETRY, rows, commit, path, engine.limits)]
    if not commit:
        plans.append(commit_plan(GEOMETRY, rows, engine.path, engine.limits))
    for todo in plans:
        steps = engine.steps(todo, resident)
        assert [s.kernel for s in steps] == [d.kernel for d in todo.dispatches]
        last: dict[int, str] = {}
        for step, expected in zip(steps, implied(todo), strict=True):
            waits = {
                buffer_of(b.plane, todo)
                for b in step.bound
                if b.buffer in last and "read_write" in (last[b.buffer], b.access)
            }
            assert waits == set(expected), step.kernel
            last.update({b.buffer: b.access for b in step.bound})


def test_two_hundred_calls_make_nothing_new(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    import wgpu

    layer = gpu.load(state)
    new = random_rows(rng, 2, GEOMETRY)
    context = gpu.engine.context

    def counts() -> tuple[Any, ...]:
        gc.collect()
        native = wgpu.diagnostics.get_dict()["wgpu_native_counts"]
        objects = {n: native[n]["count"] for n in ("Buffer", "BindGroup", "ComputePipeline", "CommandBuffer")}
        return (len(context.groups), context.generation, context.parameters.buffer.size, objects)

    layer.attend(*new)
    layer.attend(*part(new, slice(1)))
    before = counts()
    for i in range(200):
        layer.attend(*part(new, slice(1 + i % 2)))
    assert counts() == before


def test_recordings_are_kept_by_the_steps_that_they_have(
    gpu: o1.Device, state: o1.LayerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: GpuEngine = o1.open_device(gpu.gpu, "token").engine
    resident = engine.upload(GEOMETRY, state.planes)
    few, more = (plan(GEOMETRY, rows, True, "token", engine.limits) for rows in (2, 5))
    engine.steps(more, resident)  # makes the pool's buffers
    monkeypatch.setattr(recording, "MOST_STEPS", len(few.dispatches) + len(more.dispatches))
    first, second = engine.steps(few, resident), engine.steps(more, resident)
    assert engine.steps(few, resident) is first
    assert engine.steps(more, resident) is second
    monkeypatch.setattr(recording, "MOST_STEPS", len(more.dispatches) + 1)
    third = engine.steps(plan(GEOMETRY, 1, True, "token", engine.limits), resident)
    assert len(third) == 4
    assert engine.steps(few, resident) is not first
    # One recording is kept however long it is.
    monkeypatch.setattr(recording, "MOST_STEPS", 1)
    longest = engine.steps(plan(GEOMETRY, 3, True, "token", engine.limits), resident)
    assert engine.steps(plan(GEOMETRY, 3, True, "token", engine.limits), resident) is longest


def test_a_layers_bind_groups_go_with_it(
    gpu: o1.Device, state: o1.LayerState, rng: np.random.Generator
) -> None:
    new = random_rows(rng, 1, GEOMETRY)
    context = gpu.engine.context
    keeper = gpu.load(state)
    keeper.attend(*new)
    gc.collect()
    context.groups.tidy()
    before = len(context.groups)
    layer = gpu.load(state)
    layer.attend(*new)
    assert len(context.groups) > before
    del layer
    gc.collect()
    keeper.attend(*new)
    assert len(context.groups) == before


# The source itself.


def test_one_place_submits_and_nothing_is_destroyed() -> None:
    """wgpu-native aborts the process where a submission uses what was destroyed."""
    package = Path(o1.__file__).parent
    text = {p: p.read_text(encoding="utf-8") for p in sorted(package.rglob("*.py"))}
    assert [p.name for p, t in text.items() for _ in re.findall(r"\.submit\(\[", t)] == ["context.py"]
    assert not [p.name for p, t in text.items() if re.search(r"\.destroy\(", t)]
    assert not [p.name for p, t in text.items() if "read_buffer(" in t]


# Dawn.


def open_dawn() -> o1.Device:
    """A device of Dawn's with WebGPU's default limits; skips the test where there is no Dawn."""
    found, why = find_dawn_adapters()
    if not found:
        if os.environ.get("CI"):
            raise AssertionError(why)
        pytest.skip(why)
    return o1.open_device(found[0].handle.request_device_sync(required_limits={}))


@pytest.mark.dawn
def test_a_device_of_dawn_serves_as_well(state: o1.LayerState, rng: np.random.Generator) -> None:
    device = open_dawn()
    layer = device.load(state)
    new = random_rows(rng, 40, GEOMETRY)
    assert_follows(state, new, layer.attend(*new, commit=False))
    layer.commit(30)
    after = layer.state()
    more = random_rows(rng, 1, GEOMETRY)
    assert_follows(after, more, layer.attend(*more))
    words = np.zeros(4, np.uint32)
    with pytest.raises(o1.ShaderError, match="o1c_copy"):
        device.engine.run_kernel("o1c_copy", {"src": words, "dst": words}, COPY, source="@compute fn main( {")
    with pytest.raises(o1.DeviceMemoryError, match="buffer of mix"):
        device.engine.context.memory.create("mix", 1 << 50)
