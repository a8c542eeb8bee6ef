"""Sealing against the float64 serial reference, and the reference against a peer's own fixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import geometries, random_rows

import cortiq_o1 as o1
from cortiq_o1.planes import META_FAR_LEN, META_FAR_LIMIT, META_HEAD, META_LANDMARKS, META_LEN, NO_FAR_LIMIT
from cortiq_o1.reference import ReferenceLayer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "nystrom_golden.json").read_text())


@pytest.mark.parametrize(("sinks", "key"), [(GOLDEN["sink"], "out"), (0, "out_sink0")])
@pytest.mark.parametrize("sealed_by", ["reference", "library"])
def test_the_peers_golden_fixture(sinks: int, key: str, sealed_by: str) -> None:
    q, k, v = (np.array(GOLDEN[x])[:, None] for x in "qkv")
    p = GOLDEN["p"]
    geometry = o1.Geometry(
        1, 1, GOLDEN["d"], GOLDEN["dv"], window=GOLDEN["w"], sinks=sinks, landmarks=GOLDEN["m"]
    )
    if sealed_by == "reference":
        layer = ReferenceLayer.seal(q[:p], k[:p], v[:p], geometry)
    else:
        layer = ReferenceLayer.from_planes(geometry, o1.seal(q[:p], k[:p], v[:p], geometry).planes)
    out = np.array([r.out[0] for r in layer.run(q[p:], k[p:], v[p:])])
    error = np.abs(out - np.array(GOLDEN[key])[p:])
    # The fixture's own bounds are 1e-3 and 1e-4; measured are 1.5e-6 and 2e-7, its inputs' nine digits.
    assert error.max() < 1e-5
    assert error.mean() < 1e-6


@given(
    geometry=geometries(),
    extra=st.integers(1, 90),
    fold=st.sampled_from(["always", "prompt", "never"]),
    seed=st.integers(0, 999),
)
def test_seal_matches_pushing_the_rows_one_by_one(
    geometry: o1.Geometry, extra: int, fold: Any, seed: int
) -> None:
    rows = random_rows(np.random.default_rng(seed), geometry.exact_rows + extra, geometry)
    state = o1.seal(*rows, geometry, fold=fold)
    assert state.sealed
    assert state.rows == len(rows[0])
    got = ReferenceLayer.from_planes(geometry, state.planes)
    want = ReferenceLayer.seal(*rows, geometry, fold=fold)
    for a, b in zip(got.groups, want.groups, strict=True):
        assert (a.far_len, a.far_limit, a.window) == (b.far_len, b.far_limit, b.window)
        assert len(a.ring) == len(b.ring)
        for x, y in zip((*a.sinks, *a.ring), (*b.sinks, *b.ring), strict=True):
            np.testing.assert_array_equal(x[0], y[0])
            np.testing.assert_array_equal(x[1], y[1])
        np.testing.assert_allclose(a.k_tilde, b.k_tilde, rtol=0, atol=1e-6)
        np.testing.assert_allclose(a.q_tilde, b.q_tilde, rtol=0, atol=1e-6)
        if a.far_len:
            # At one scale: the stored maximum is rounded, and mass and numerator stand at that.
            shift = np.exp(a.far_max + a.shift[:, None] - b.far_max - b.shift[:, None])
            np.testing.assert_allclose(a.far_mass * shift, b.far_mass, rtol=1e-5)
            np.testing.assert_allclose(a.far_num * shift[..., None], b.far_num, rtol=1e-5, atol=1e-4)


def test_positions_after_a_seal(rng: np.random.Generator) -> None:
    geometry = o1.Geometry(2, 2, 8, window=32, sinks=3, landmarks=8, windows=(10, 32))
    meta = o1.seal(*random_rows(rng, 30, geometry), geometry, fold="never").planes["group_meta"]
    # 27 rows after the sinks: the narrow ring is full and folded 17, the wide one still fills.
    assert meta[0, [META_LEN, META_HEAD, META_FAR_LEN, META_FAR_LIMIT]].tolist() == [10, 7, 17, 17]
    assert meta[1, [META_LEN, META_HEAD, META_FAR_LEN, META_FAR_LIMIT]].tolist() == [27, 0, 0, 0]
    assert meta[:, META_LANDMARKS].tolist() == [4, 4]


def test_fold_sets_the_far_limit(rng: np.random.Generator) -> None:
    geometry = o1.Geometry(1, 1, 8, window=10, sinks=3, landmarks=8)
    rows = random_rows(rng, 40, geometry)
    limits = [o1.seal(*rows, geometry, fold=f).planes["group_meta"][0, META_FAR_LIMIT] for f in o1_folds()]
    assert limits == [NO_FAR_LIMIT, 37, 27]


def o1_folds() -> tuple[Any, ...]:
    return ("always", "prompt", "never")


def test_the_shortest_prompt_that_seals(rng: np.random.Generator) -> None:
    geometry = o1.Geometry(1, 1, 8, window=10, sinks=3, landmarks=8)
    assert not o1.seal(*random_rows(rng, 21, geometry), geometry).sealed
    assert o1.seal(*random_rows(rng, 22, geometry), geometry).sealed


def test_landmarks_that_coincide_still_seal() -> None:
    """A prompt of one repeated row makes A^T A singular."""
    geometry = o1.Geometry(1, 1, 8, window=4, sinks=0, landmarks=8)
    ones = np.ones((64, 1, 8), np.float32)
    state = o1.seal(ones, ones, ones, geometry)
    assert np.isfinite(state.planes["mix"]).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": np.zeros((40, 2, 8))}, o1.ArgumentError, r"k: shape \(40, 2, 8\), expected \(rows, 1, 8\)"),
        ({"q": np.zeros((39, 2, 8))}, o1.ArgumentError, r"q: shape \(39, 2, 8\), expected \(40, 2, 8\)"),
        ({"v": np.zeros((40, 1, 8))}, o1.ArgumentError, r"v: shape \(40, 1, 8\), expected \(40, 1, 4\)"),
        ({"v": np.full((40, 1, 4), np.nan)}, o1.ArgumentError, "v: 160 values are not finite"),
        ({"q": np.zeros((40, 2, 8), bool)}, o1.ArgumentTypeError, "q: dtype bool"),
        ({"geometry": {"window": 4}}, o1.ArgumentTypeError, "geometry: dict, expected a Geometry"),
        ({"method": "magic"}, o1.ArgumentError, "method: 'magic', expected one of 'nystrom'"),
        ({"fold": "sometimes"}, o1.ArgumentError, "fold: 'sometimes', expected one of 'always'"),
        ({"ridge": 0.0}, o1.ArgumentError, "ridge: 0.0, expected a positive number"),
        ({"ridge": "small"}, o1.ArgumentTypeError, "ridge: 'small', expected a number"),
        ({"k": np.full((40, 1, 8), 1e15)}, o1.ArgumentError, r"k: 320 values are larger than 1e\+14"),
        ({"ridge": 10**400}, o1.ArgumentError, "ridge: inf, expected a positive number"),
        ({"ridge": np.True_}, o1.ArgumentTypeError, "ridge: .*, expected a number"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": np.ones((40, 2, 8)),
        "k": np.ones((40, 1, 8)),
        "v": np.ones((40, 1, 4)),
        "geometry": o1.Geometry(2, 1, 8, 4, window=8),
    }
    with pytest.raises(error, match=message):
        o1.seal(**{**arguments, **change})


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [5.0, 1e4])
def test_large_logits_seal(sign: float, size: float) -> None:
    """Logits far beyond exp's range are no obstacle to the mixing matrix."""
    geometry = o1.Geometry(1, 1, 4, window=4, sinks=0, landmarks=4, scale=1.0)
    q = np.full((64, 1, 4), size, np.float32)
    state = o1.seal(q, sign * q, q, geometry)
    assert all(np.isfinite(plane).all() for plane in state.planes.values())
