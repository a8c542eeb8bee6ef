"""The fitted seal: landmarks and mixing matrix made for a prompt's attention weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import random_rows

import cortiq_o1 as o1
from cortiq_o1.benchmark.quality import real_layers
from cortiq_o1.fitting import _pivots, _solved, rotate
from cortiq_o1.planes import META_FAR_LEN, META_FAR_LIMIT, NO_FAR_LIMIT

WINDOW, SINKS, PROMPT = 128, 4, 512
GEOMETRY = o1.Geometry(9, 3, 64, window=WINDOW, sinks=SINKS, landmarks=16)
SMALL = o1.Geometry(4, 2, 16, window=20, sinks=2, landmarks=8)


def attention(q: Any, k: Any, v: Any, scale: float, window: int | None = None) -> np.ndarray:
    """Exact attention of the rows after the prompt, or of sinks and window alone, in float64."""
    rows = np.arange(PROMPT, len(k))[:, None]
    columns = np.arange(len(k))[None]
    seen = columns <= rows
    if window is not None:
        seen &= (columns < SINKS) | (columns > rows - window)
    out = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        logits = scale * (q[PROMPT:, head].astype(np.float64) @ k[:, group].astype(np.float64).T)
        weights = np.where(seen, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
        out.append(weights @ v[:, group] / weights.sum(axis=1, keepdims=True))
    return np.stack(out, axis=1)


def off(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))


@pytest.mark.parametrize("fold", ["always", "prompt", "never"])
def test_on_real_rows_it_beats_window_and_segment_means(fold: str) -> None:
    """Rows that the seal has not seen."""
    (layer, *_) = real_layers()
    geometry, prompt = GEOMETRY, slice(PROMPT)
    rows = (layer.q, layer.k, layer.v)
    want = attention(*rows, float(geometry.scale32))
    alone = off(attention(*rows, float(geometry.scale32), WINDOW), want)
    device = o1.open_device("cpu")
    found = {}
    for method, options in {"fitted": {"fold": fold}, "nystrom": {}}.items():
        state = o1.seal(*(x[prompt] for x in rows), geometry, method, **options)
        found[method] = off(device.load(state).attend(*(x[PROMPT:] for x in rows)), want)
    assert found["fitted"] < 0.9 * alone
    assert found["fitted"] < found["nystrom"] + 0.005


def test_weights_of_the_landmarks_rank_are_met(rng: np.random.Generator) -> None:
    """Whatever the sizes of the logits; the product is exact, but for the ridge."""
    left, right = 3 * rng.standard_normal((60, 6)) - 40, 3 * rng.standard_normal((6, 50)) + 30
    mix = rng.standard_normal((6, 6)) * np.exp(10.0)
    weights = np.exp(left) @ mix @ np.exp(right)
    found, shift = _solved(weights, left, right, 1e-12)
    met = np.exp(left) @ found.astype(np.float64) @ np.exp(right - float(shift))
    assert off(met, weights) < 1e-4
    # A ridge that is as large as the kernels themselves leaves less.
    small, _ = _solved(weights, left, right, 1.0)
    assert np.linalg.norm(np.exp(left) @ small @ np.exp(right - float(shift))) < 0.9 * np.linalg.norm(weights)


def test_pivots_are_those_of_the_largest_rests(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((30, 12)) * np.arange(12, 0, -1)
    chosen = _pivots(weights, np.einsum("ij,ij->j", weights, weights), 5)
    left = weights.copy()
    for pivot in chosen:
        assert pivot == int(np.linalg.norm(left, axis=0).argmax())
        unit = left[:, pivot] / np.linalg.norm(left[:, pivot])
        left -= unit[:, None] * (unit @ left)


def test_rotation_turns_scores_by_the_distance_alone(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((2, 1, 8))
    turned = rotate(q, np.array([9]), 100.0) @ rotate(k, np.array([4]), 100.0).T
    np.testing.assert_allclose(turned, rotate(q, np.array([5]), 100.0) @ k.T)
    assert abs((turned - q @ k.T).item()) > 1e-3


@pytest.mark.parametrize(("rows", "fold"), [(79, "prompt"), (80, "never")])
def test_what_it_folds_depends_on_the_prompt(
    device: o1.Device, rng: np.random.Generator, rows: int, fold: str
) -> None:
    prompt = random_rows(rng, rows, SMALL)
    layer = device.seal(*prompt, SMALL, "fitted")
    held = rows - SMALL.sinks - SMALL.window
    limit = held if fold == "never" else rows - SMALL.sinks
    meta = layer.state().planes["group_meta"]
    assert (meta[:, META_FAR_LEN] == held).all()
    assert (meta[:, META_FAR_LIMIT] == limit).all()
    layer.attend(*random_rows(rng, 40, SMALL))
    assert (layer.state().planes["group_meta"][:, META_FAR_LEN] == limit).all()


def test_a_stream_that_seals_itself_and_a_renewal_take_the_method(
    device: o1.Device, rng: np.random.Generator
) -> None:
    start = o1.seal(*random_rows(rng, 10, SMALL), SMALL, "fitted", fold="always")
    layer = device.load(start)
    rows = random_rows(rng, 90, SMALL)
    layer.attend(*rows)
    assert layer.sealed
    layer.reseal(*rows)
    planes = layer.state().planes
    assert (planes["group_meta"][:, META_FAR_LIMIT] == NO_FAR_LIMIT).all()
    assert np.isfinite(layer.attend(*random_rows(rng, 5, SMALL))).all()


def test_the_seal_is_the_same_twice_and_goes_through_a_file(rng: np.random.Generator, tmp_path: Any) -> None:
    prompt = random_rows(rng, 120, SMALL)
    options = {"method": "fitted", "rope_theta": 1e4, "horizon": 400}
    first, second = (o1.seal(*prompt, SMALL, **options) for _ in range(2))
    first.save(tmp_path / "state")
    kept = o1.LayerState.load(tmp_path / "state")
    assert kept.options == first.options
    for name, plane in first.planes.items():
        np.testing.assert_array_equal(plane, second.planes[name])
        np.testing.assert_array_equal(plane, kept.planes[name])
    plain = o1.seal(*prompt, SMALL, "fitted")
    assert not np.array_equal(plain.planes["mix"], first.planes["mix"])


def test_huge_logits_stay_finite(rng: np.random.Generator) -> None:
    q, k, v = random_rows(rng, 120, SMALL)
    state = o1.seal(30 * q, 30 * k, v, SMALL, "fitted", fold="always")
    assert all(np.isfinite(plane).all() for plane in state.planes.values())
    out = o1.open_device("cpu").load(state).attend(30 * q, 30 * k, v)
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, r"method: 'best', expected one of 'nystrom', 'fitted'"),
        ({"method": "fitted", "rope_theta": 1e4}, r"horizon: None, expected with the other"),
        ({"method": "fitted", "horizon": 9}, r"rope_theta: None, expected with the other"),
        (
            {"method": "fitted", "rope_theta": -1, "horizon": 9},
            r"rope_theta: -1.0, expected a positive number",
        ),
        ({"rope_theta": 1e4, "horizon": 9}, r"rope_theta: 10000.0, expected with method 'fitted' alone"),
        ({"method": "fitted", "fold": "some"}, r"fold: 'some'"),
    ],
)
def test_bad_options(rng: np.random.Generator, options: Any, message: str) -> None:
    with pytest.raises(o1.ArgumentError, match=message):
        o1.seal(*random_rows(rng, 60, SMALL), SMALL, **options)
