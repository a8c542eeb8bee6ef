"""Streams that begin short: exact attention, the seal in the midst of it, the operator from then on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from support import Rows, part, paths_of, random_rows

import cortiq_o1 as o1
from cortiq_o1.planes import META_FAR_LEN
from cortiq_o1.reference import ReferenceLayer, ReferenceStream, StepResult, worst_error
from cortiq_o1.state import Fold, SealOptions

AFTER = 40
"""Rows that every stream goes on for after its seal."""

TINY = o1.Geometry(2, 1, 8, window=6, sinks=0, landmarks=4)
UNEVEN = o1.Geometry(4, 2, 8, 12, window=30, sinks=4, landmarks=8, windows=(30, 11))
WIDE = o1.Geometry(2, 1, 16, 8, window=200, sinks=4, landmarks=8)
WIDE_UNEVEN = o1.Geometry(4, 2, 8, window=230, sinks=0, landmarks=32, windows=(197, 230))
GEOMETRIES = (
    TINY,
    o1.Geometry(3, 3, 4, 8, window=1, sinks=4, landmarks=4, rect="fm"),
    UNEVEN,
    WIDE,
    WIDE_UNEVEN,
)


def name_of(geometry: o1.Geometry) -> str:
    return f"windows-{'-'.join(map(str, geometry.group_windows))}-sinks-{geometry.sinks}"


@cache
def stream(geometry: o1.Geometry) -> tuple[Rows, list[StepResult]]:
    """Rows from the very first one on, and what they give in float64."""
    rows = random_rows(np.random.default_rng(geometry.exact_rows), geometry.exact_rows + AFTER, geometry)
    return rows, ReferenceStream(geometry).run(*rows)


def assert_rows(geometry: o1.Geometry, at: int, out: np.ndarray) -> None:
    """`out` is what the stream gives from row `at` on, each row and head within its own bound."""
    want = stream(geometry)[1][at : at + len(out)]
    error, ratio = worst_error(want, out)
    assert ratio <= 1.0, f"from row {at}: worst error {error:.2e}, {ratio:.2f} times its bound"


def begin(device: o1.Device, geometry: o1.Geometry, prompt: int) -> o1.Layer:
    return device.load(o1.seal(*part(stream(geometry)[0], slice(prompt)), geometry))


def follow(layer: o1.Layer, cuts: Iterable[int], start: int = 0) -> None:
    """Attends in chunks that end at `cuts`, each checked as it comes."""
    geometry = layer.geometry
    rows, _ = stream(geometry)
    for a, b in pairwise([start, *cuts]):
        assert_rows(geometry, a, layer.attend(*part(rows, slice(a, b))))
        assert (layer.rows, layer.sealed) == (b, b > geometry.exact_rows)


def test_the_totals_reach_from_one_to_a_few_hundred() -> None:
    ends = [g.exact_rows + AFTER for g in GEOMETRIES]
    assert min(ends) < 60 < 240 < max(ends)
    assert {g.sinks for g in GEOMETRIES} == {0, 4}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
def test_every_total_a_row_at_a_time(device: o1.Device, geometry: o1.Geometry) -> None:
    layer = begin(device, geometry, 0)
    follow(layer, range(1, geometry.exact_rows + AFTER + 1))


@pytest.mark.parametrize("geometry", [TINY, UNEVEN], ids=name_of)
def test_every_prompt_too_short_to_be_sealed(device: o1.Device, geometry: o1.Geometry) -> None:
    end = geometry.exact_rows + AFTER
    for prompt in range(geometry.exact_rows + 1):
        layer = begin(device, geometry, prompt)
        assert (layer.rows, layer.sealed, layer.epoch) == (prompt, False, None)
        follow(layer, [end], prompt)


@pytest.mark.parametrize("geometry", [TINY, UNEVEN, WIDE_UNEVEN], ids=name_of)
@pytest.mark.parametrize("size", [1, 2, 7, 17, 64, 70])
def test_the_seal_at_the_first_a_middle_and_the_last_row_of_a_chunk(
    device: o1.Device, geometry: o1.Geometry, size: int
) -> None:
    first_sealed, end = geometry.exact_rows, geometry.exact_rows + AFTER
    for before in sorted({0, size // 2, size - 1}):
        start = max(0, first_sealed - before)
        follow(begin(device, geometry, 0), [*([start] if start else []), min(start + size, end), end])


@pytest.mark.parametrize("size", [1, 3, 16, 17])
def test_the_seal_on_every_path(device: o1.Device, size: int) -> None:
    end = UNEVEN.exact_rows + AFTER
    for way in paths_of(device):
        follow(begin(way, UNEVEN, 9), [*range(9 + size, end, size), end], 9)


@pytest.mark.parametrize("geometry", [TINY, UNEVEN, WIDE_UNEVEN], ids=name_of)
@pytest.mark.parametrize("beyond", [-3, -1, 0, 1, 2, 12])
def test_tried_first_and_committed_then(device: o1.Device, geometry: o1.Geometry, beyond: int) -> None:
    """`beyond`: how many of the rows accepted come after the seal; -1 and 0 stop right before it."""
    start, accepted_to = geometry.exact_rows - 6, geometry.exact_rows + beyond
    rows, _ = stream(geometry)
    layer = begin(device, geometry, start)
    out = layer.attend(*part(rows, slice(start, geometry.exact_rows + 20)), commit=False)
    assert_rows(geometry, start, out)
    assert (layer.rows, layer.sealed, layer.pending) == (start, False, 26)
    layer.commit(accepted_to - start)
    assert (layer.rows, layer.sealed, layer.pending) == (accepted_to, beyond > 0, None)
    follow(layer, [accepted_to + 5, geometry.exact_rows + AFTER], accepted_to)


def test_a_draft_tried_again_after_the_seal_begins_there(device: o1.Device) -> None:
    """Drafts over the seal, forgotten time after time, leave no trace."""
    rows, _ = stream(UNEVEN)
    start = UNEVEN.exact_rows - 2
    layer = begin(device, UNEVEN, start)
    for length in (1, 2, 3, 20):
        for name in ("", "other"):
            out = layer.attend(*part(rows, slice(start, start + length)), commit=False, draft=name)
            assert_rows(UNEVEN, start, out)
        layer.commit(0)
        assert (layer.rows, layer.sealed, layer.drafts) == (start, False, {})
    follow(layer, [UNEVEN.exact_rows + AFTER], start)


@pytest.mark.parametrize("fold", ["always", "prompt", "never"])
def test_the_layer_seals_over_all_its_rows_as_it_was_told_to(device: o1.Device, fold: Fold) -> None:
    """As if its rows had been one prompt, of exactly so many rows."""
    geometry = UNEVEN
    rows, _ = stream(geometry)
    seen = geometry.exact_rows
    layer = device.load(o1.seal(*part(rows, slice(3)), geometry, ridge=1e-4, fold=fold))
    layer.attend(*part(rows, slice(3, seen + 30)))
    want = ReferenceStream(
        geometry, lambda q, k, v: ReferenceLayer.seal(q, k, v, geometry, ridge=1e-4, fold=fold)
    )
    results = want.run(*rows)
    out = layer.attend(*part(rows, slice(seen + 30, None)))
    assert worst_error(results[seen + 30 :], out)[1] <= 1.0
    assert layer.state().options == SealOptions("nystrom", 1e-4, fold)
    meta = layer.state().planes["group_meta"]
    assert meta[:, META_FAR_LEN].tolist() == [group.far_len for group in want.groups]


def test_a_seal_of_one_row_less_would_be_seen() -> None:
    rows, want = stream(UNEVEN)
    seen = UNEVEN.exact_rows - 1
    early = ReferenceLayer.seal(*part(rows, slice(seen)), UNEVEN)
    out = np.array([r.out for r in early.run(*part(rows, slice(seen, None)))])
    assert worst_error(want[seen:], out)[1] > 1.0
