"""A layer's promises, on every device: chunks, commits, the seal inside a call, refused calls."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    ODD,
    SHORT,
    Rows,
    assert_follows,
    assert_same_state,
    geometries,
    part,
    random_rows,
    sealed,
)

import cortiq_o1 as o1
from cortiq_o1.reference import ReferenceLayer, StepResult, worst_error
from cortiq_o1.sealing import empty_planes


@pytest.mark.parametrize("cuts", [[1] * 40, [40], [7, 33], [39, 1], [25, 8, 7]], ids=str)
@pytest.mark.parametrize("rect", ["aggregate", "fm"])
def test_any_cut_of_a_stream_follows_the_reference(
    device: o1.Device, rng: np.random.Generator, cuts: list[int], rect: Any
) -> None:
    geometry = o1.Geometry(**{**ODD.to_dict(), "rect": rect})
    state = sealed(rng, geometry)
    rows = random_rows(rng, 40, geometry)
    layer = device.load(state)
    ends = np.cumsum([0, *cuts])
    out = [layer.attend(*part(rows, slice(a, b))) for a, b in pairwise(ends)]
    assert_follows(state, rows, np.concatenate(out))
    assert layer.rows == state.rows + 40


@given(geometry=geometries(), fold=st.sampled_from(["always", "prompt", "never"]), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
def test_random_layers_follow_the_reference(
    device: o1.Device, geometry: o1.Geometry, fold: Any, data: Any
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    state = sealed(rng, geometry, geometry.exact_rows + data.draw(st.integers(1, 60)), fold=fold)
    rows = random_rows(rng, data.draw(st.integers(1, 90)), geometry)
    first = data.draw(st.integers(0, len(rows[0])))
    layer = device.load(state)
    tried = layer.attend(*part(rows, slice(first)), commit=False)
    layer.commit(first)
    rest = layer.attend(*part(rows, slice(first, None)))
    assert_follows(state, rows, np.concatenate([tried, rest]))


@pytest.mark.parametrize("accepted", [0, 1, 6, 7, 8, 30])
def test_commit_is_what_attend_would_have_done(
    device: o1.Device, rng: np.random.Generator, accepted: int
) -> None:
    state = sealed(rng)
    rows = random_rows(rng, 30, ODD)
    tried, straight = device.load(state), device.load(state)
    out = tried.attend(*rows, commit=False)
    assert tried.pending == 30
    assert_same_state(tried.state(), state)
    assert_follows(state, rows, out)
    tried.commit(accepted)
    assert tried.pending is None
    straight.attend(*part(rows, slice(accepted)))
    assert_same_state(tried.state(), straight.state())
    more = random_rows(rng, 3, ODD)
    np.testing.assert_array_equal(tried.attend(*more), straight.attend(*more))


def test_pending_rows_are_forgotten_by_the_next_call_but_not_by_a_refused_one(
    device: o1.Device, rng: np.random.Generator
) -> None:
    layer = device.load(sealed(rng))
    with pytest.raises(o1.StateError, match="no uncommitted rows"):
        layer.commit(0)
    rows = random_rows(rng, 5, ODD)
    layer.attend(*rows, commit=False)
    with pytest.raises(o1.ArgumentError, match="rows: 6, expected 0 to 5"):
        layer.commit(6)
    with pytest.raises(o1.ArgumentTypeError, match="rows: True"):
        layer.commit(True)
    with pytest.raises(o1.ArgumentError, match="k: shape"):
        layer.attend(rows[0], rows[1][:, :1], rows[2])
    assert layer.pending == 5
    layer.attend(*rows)
    with pytest.raises(o1.StateError, match="no uncommitted rows"):
        layer.commit(1)


@pytest.mark.parametrize(
    ("which", "change", "error"),
    [
        ("q", lambda x: x[:2], o1.ArgumentError),
        ("k", lambda x: x[..., :-1], o1.ArgumentError),
        ("v", lambda x: x[0], o1.ArgumentError),
        ("q", lambda x: x.astype(complex), o1.ArgumentTypeError),
        ("k", lambda x: x > 0, o1.ArgumentTypeError),
        ("v", lambda x: x * np.inf, o1.ArgumentError),
        ("k", lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x), o1.ArgumentError),
        ("q", lambda x: x.astype(np.float64) + 1e39, o1.ArgumentError),
    ],
    ids=["rows", "width", "rank", "complex", "bool", "infinite", "nan", "beyond float32"],
)
def test_a_refused_call_changes_nothing(
    device: o1.Device, rng: np.random.Generator, which: str, change: Any, error: type[Exception]
) -> None:
    state = sealed(rng)
    rows = dict(zip("qkv", random_rows(rng, 4, ODD), strict=True))
    layer, untouched = device.load(state), device.load(state)
    for held in (layer, untouched):
        held.attend(**rows)
    with np.errstate(invalid="ignore"):
        bad = {**rows, which: change(rows[which])}
    with pytest.raises(error, match=f"^{which}:"):
        layer.attend(**bad)
    assert_same_state(layer.state(), untouched.state())
    np.testing.assert_array_equal(layer.attend(**rows), untouched.attend(**rows))


def test_layers_of_one_geometry_do_not_disturb_each_other(
    device: o1.Device, rng: np.random.Generator
) -> None:
    states = [sealed(rng), sealed(rng), sealed(rng, fold="never")]
    layers = [device.load(s) for s in states]
    rows = [random_rows(rng, 12, ODD) for _ in states]
    outs: list[list[np.ndarray]] = [[], [], []]
    for at in range(0, 12, 3):
        for i, layer in enumerate(layers):
            outs[i].append(layer.attend(*part(rows[i], slice(at, at + 3))))
    for state, given_rows, out in zip(states, rows, outs, strict=True):
        assert_follows(state, given_rows, np.concatenate(out))


def test_a_state_moves_between_devices(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng))
    layer.attend(*random_rows(rng, 10, ODD))
    moved = o1.open_device("cpu").load(layer.state())
    rows = random_rows(rng, 10, ODD)
    assert moved.rows == layer.rows
    assert_follows(layer.state(), rows, moved.attend(*rows))


def test_the_callers_arrays_are_neither_kept_nor_changed(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    planes = {name: plane.copy() for name, plane in state.planes.items()}
    layer = device.load(state)
    rows = random_rows(rng, 5, ODD)
    copies = tuple(x.copy() for x in rows)
    layer.attend(*rows, commit=False)
    for x in rows:
        x[:] = 7.0
    layer.commit(5)
    straight = device.load(state)
    straight.attend(*copies)
    assert_same_state(layer.state(), straight.state())
    for name, plane in planes.items():
        np.testing.assert_array_equal(state.planes[name], plane)


def test_no_rows_are_a_call_too(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng)
    layer = device.load(state)
    assert layer.attend(*random_rows(rng, 0, ODD)).shape == (0, 6, 20)
    layer.attend(*random_rows(rng, 0, ODD), commit=False)
    layer.commit(0)
    assert_same_state(layer.state(), state)


def test_a_batch_is_more_groups(device: o1.Device, rng: np.random.Generator) -> None:
    """Two sequences at different places, as the groups of one layer."""
    one = o1.Geometry(4, 2, 8, window=12, sinks=2, landmarks=8)
    both = o1.Geometry(8, 4, 8, window=12, sinks=2, landmarks=8)
    states = [o1.seal(*random_rows(rng, rows, one), one) for rows in (40, 91)]
    planes = {n: np.concatenate([s.planes[n] for s in states]) for n in states[0].planes}
    batch = o1.LayerState(both, states[0].options, 40, planes=planes)
    rows = [random_rows(rng, 20, one) for _ in states]
    joined = tuple(np.concatenate(pair, axis=1) for pair in zip(*rows, strict=True))
    out = device.load(batch).attend(*joined)
    for i, state in enumerate(states):
        assert_follows(state, rows[i], out[:, 4 * i : 4 * i + 4])


@cache
def short_stream() -> tuple[Rows, list[StepResult]]:
    """60 rows and what they give: exact attention up to the bound, then the operator after a seal."""
    rows = random_rows(np.random.default_rng(5), 60, SHORT)
    bound = SHORT.exact_rows
    everything = o1.Geometry(4, 2, 8, 12, window=bound, sinks=0, landmarks=4)
    results = ReferenceLayer.from_planes(everything, empty_planes(everything)).run(*part(rows, slice(bound)))
    after = ReferenceLayer.seal(*part(rows, slice(bound)), SHORT)
    return rows, results + after.run(*part(rows, slice(bound, None)))


@pytest.mark.parametrize("prompt", [0, 1, 18, 19])
@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_short_prompt_attends_exactly_and_seals_itself(device: o1.Device, prompt: int, cut: int) -> None:
    rows, want = short_stream()
    layer = device.load(o1.seal(*part(rows, slice(prompt)), SHORT))
    assert not layer.sealed
    out = [layer.attend(*part(rows, slice(at, min(at + cut, 60)))) for at in range(prompt, 60, cut)]
    error, ratio = worst_error(want[prompt:], np.concatenate(out))
    assert ratio <= 1.0, f"worst error {error:.2e}, {ratio:.2f} times its bound"
    assert layer.sealed
    assert layer.rows == 60


@pytest.mark.parametrize("accepted", [0, 3, 9, 10, 30])
def test_an_uncommitted_call_over_the_seal(device: o1.Device, accepted: int) -> None:
    rows, want = short_stream()
    layer = device.load(o1.seal(*part(rows, slice(10)), SHORT))
    out = layer.attend(*part(rows, slice(10, 40)), commit=False)
    assert worst_error(want[10:40], out)[1] <= 1.0
    assert (layer.rows, layer.sealed, layer.pending) == (10, False, 30)
    layer.commit(accepted)
    assert layer.rows == 10 + accepted
    assert layer.sealed == (10 + accepted > SHORT.exact_rows)
    out = layer.attend(*part(rows, slice(10 + accepted, 60)))
    assert worst_error(want[10 + accepted :], out)[1] <= 1.0


def test_a_short_layers_state_is_its_rows(device: o1.Device) -> None:
    rows, _ = short_stream()
    layer = device.load(o1.seal(*part(rows, slice(4)), SHORT, ridge=1e-3))
    layer.attend(*part(rows, slice(4, 15)))
    assert_same_state(layer.state(), o1.seal(*part(rows, slice(15)), SHORT, ridge=1e-3))


LONG = o1.Geometry(2, 1, 8, window=16, sinks=2, landmarks=8)


@cache
def long_stream() -> tuple[o1.LayerState, Rows, list[StepResult]]:
    rng = np.random.default_rng(11)
    state = o1.seal(*random_rows(rng, 200, LONG), LONG)
    rows = random_rows(rng, 20_000, LONG)
    return state, rows, ReferenceLayer.from_planes(LONG, state.planes).run(*rows)


def test_a_long_stream_keeps_its_error(device: o1.Device) -> None:
    state, rows, want = long_stream()
    layer = device.load(state)
    out = layer.attend(*rows)
    assert worst_error(want, out)[1] <= 1.0
    # No drift: the last rows are about as good as the first. Medians, since single rows cancel.
    errors = np.array([r.error(row) for r, row in zip(want, out, strict=True)])
    first, last = np.median(errors[:1000]), np.median(errors[-1000:])
    assert last <= 2 * first, f"median error {first:.2e} at first, {last:.2e} at last"


def test_encode_belongs_to_gpus(rng: np.random.Generator) -> None:
    layer = o1.open_device("cpu").load(sealed(rng))
    with pytest.raises(o1.DeviceError, match=r"encode: .* has no compute passes; use attend"):
        layer.encode(None, None, None, None, None, 1)
