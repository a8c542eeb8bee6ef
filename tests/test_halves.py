"""Windows kept in float16: rounded once as they come in, the same numbers everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import part, random_rows

import cortiq_o1 as o1
from cortiq_o1.planes import (
    KV_PLANES,
    PLANES,
    STATE_PLANES,
    STORE_ROWS,
    Sizes,
    packed,
    store_ranges,
    unpacked,
)

GEOMETRY = o1.Geometry(4, 2, 12, value_dim=20, window=24, sinks=2, landmarks=8, windows=(24, 17))
PROMPT = 80


@pytest.fixture
def halves(device: o1.Device) -> o1.Device:
    return o1.open_device(device.gpu if device.gpu is not None else "cpu", device.path, kv="f16")


def rounded(rows: Any) -> Any:
    q, k, v = rows
    return q, k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)


def test_packed_words_hold_the_nearest_float16(rng: np.random.Generator) -> None:
    values = rng.standard_normal((3, 8), np.float32) * 10 ** rng.uniform(-7, 4, (3, 8)).astype(np.float32)
    words = packed(values)
    assert (words.shape, words.dtype) == ((3, 4), np.uint32)
    np.testing.assert_array_equal(unpacked(words), values.astype(np.float16).astype(np.float32))


def test_the_state_takes_little_more_than_half() -> None:
    geometry = o1.Geometry(32, 8, 128, window=2048, sinks=4, landmarks=32)
    full, half = (
        sum(PLANES[name].nbytes(Sizes.of(geometry, kv=kv)) for name in STATE_PLANES) for kv in ("f32", "f16")
    )
    assert half < 0.56 * full
    for width in (4, 12):
        for store in ("ring", "far"):
            sizes = Sizes.of(o1.Geometry(2, 1, width, window=5, sinks=0, landmarks=4), kv="f16")
            assert all(at % 256 == 0 for at, _ in store_ranges(store, sizes).values()), STORE_ROWS


def test_layers_hold_rounded_rows_and_are_those_of_rounded_rows(
    device: o1.Device, halves: o1.Device, rng: np.random.Generator
) -> None:
    """A prompt's tail, chunks, drafts, single rows; the same calls in float32 over rounded rows differ by
    float32's rounding alone."""
    assert halves.kv == "f16"
    state = o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)
    new = random_rows(rng, 70, GEOMETRY)
    layer, right = halves.load(state), device.load(state.rounded())
    for one, rows in ((layer, new), (right, rounded(new))):
        one.attend(*part(rows, slice(0, 40)))
        one.attend(*part(rows, slice(40, 50)), commit=False)
        one.commit(7)
        one.attend(*part(rows, slice(50, 51)))
    got, want = layer.attend(*part(new, slice(51, 70))), right.attend(*part(rounded(new), slice(51, 70)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    kept, exact = layer.state().planes, right.state().planes
    for name in KV_PLANES:
        np.testing.assert_array_equal(kept[name], exact[name])
    if device.gpu is not None:
        assert layer.nbytes < right.nbytes


def test_a_state_comes_back_as_it_was_kept(
    halves: o1.Device, rng: np.random.Generator, tmp_path: Path
) -> None:
    state = o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)
    layer = halves.load(state)
    layer.attend(*random_rows(rng, 5, GEOMETRY))
    before = layer.snapshot()
    layer.state().save(tmp_path / "state")
    saved = o1.LayerState.load(tmp_path / "state")
    again = halves.load(saved).state()
    layer.attend(*random_rows(rng, 30, GEOMETRY))
    layer.restore(before)
    for name, plane in layer.state().planes.items():
        np.testing.assert_array_equal(saved.planes[name], plane)
        np.testing.assert_array_equal(again.planes[name], plane)


def test_a_short_stream_seals_itself_over_rounded_rows(
    device: o1.Device, halves: o1.Device, rng: np.random.Generator
) -> None:
    start = o1.seal(*random_rows(rng, 20, GEOMETRY), GEOMETRY)
    new = random_rows(rng, 60, GEOMETRY)
    layer, right = halves.load(start), device.load(start.rounded())
    got, want = layer.attend(*new), right.attend(*rounded(new))
    assert layer.sealed
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_batches(halves: o1.Device, rng: np.random.Generator) -> None:
    states = [o1.seal(*random_rows(rng, PROMPT + 9 * i, GEOMETRY), GEOMETRY) for i in range(3)]
    layers = [halves.load(state) for state in states]
    batch = halves.load(states[:2])
    batch.join(layers[2])
    batch.leave(0)
    new = random_rows(rng, 6, GEOMETRY)
    out = batch.attend(*(np.stack([x, x]) for x in new))
    members = [layers[1], layers[2]]
    for got, layer in zip(out, members, strict=True):
        np.testing.assert_allclose(got, layer.attend(*new), rtol=1e-4, atol=1e-4)


def test_what_has_no_float16_is_refused_before_anything_moves(
    halves: o1.Device, rng: np.random.Generator
) -> None:
    state = o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY)
    layer = halves.load(state)
    before = layer.state().planes
    for name in "kv":
        rows = dict(zip("qkv", random_rows(rng, 2, GEOMETRY), strict=True))
        rows[name][1, 0, 3] = -65505.0
        with pytest.raises(o1.ArgumentError, match=rf"{name}: 1 values are larger than 65504.*\(1, 0, 3\)"):
            layer.attend(**rows)
    for name, plane in layer.state().planes.items():
        np.testing.assert_array_equal(before[name], plane)
    state.planes["ring_v"][0, 1, 2] = 7e4
    with pytest.raises(o1.ArgumentError, match=r"ring_v: 1 values"):
        halves.load(state)


def test_a_callers_rows_are_packed_on_the_device(gpu: o1.Device, rng: np.random.Generator) -> None:
    """Values beyond float16's range become its largest there."""
    device = o1.open_device(gpu.gpu, kv="f16")
    context = device.engine.context
    layer = device.load(o1.seal(*random_rows(rng, PROMPT, GEOMETRY), GEOMETRY))
    q, k, v = random_rows(rng, 3, GEOMETRY)
    v[0, 0, 0] = 1e6
    buffers = [context.memory.create(n, a.nbytes) for n, a in zip("qkv", (q, k, v), strict=True)]
    out = context.memory.create("out", 1 << 12)
    for buffer, array in zip(buffers, (q, k, v), strict=True):
        context.write(buffer, array, "test")
    encoder = gpu.gpu.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    layer.encode(compute_pass, *buffers, out, 3)
    compute_pass.end()
    gpu.gpu.queue.submit([encoder.finish()])
    planes = layer.state().planes
    for name, rows in zip(KV_PLANES, (k, v), strict=True):
        kept = {row.tobytes() for row in planes[name][0, :24]}
        for row in np.clip(rows[:, 0], -65504, 65504).astype(np.float16).astype(np.float32):
            assert row.tobytes() in kept, name


def test_plans_say_how_rings_are_kept() -> None:
    made = o1.plan(GEOMETRY, 3, limits=o1.Limits(kv="f16"))
    assert made.kv == "f16"
    assert o1.Plan.from_json(made.to_json()) == made
    other = o1.plan(GEOMETRY, 3)
    assert 2 * made.planes["ring_k"] == other.planes["ring_k"]
    with pytest.raises(o1.ArgumentError, match=r"kv 'f8'"):
        o1.Plan.from_json(made.to_json().replace('"f16"', '"f8"'))


def test_no_other_kind() -> None:
    with pytest.raises(o1.ArgumentError, match=r"kv: 'int8', expected one of 'f32', 'f16'"):
        o1.open_device("cpu", kv="int8")
