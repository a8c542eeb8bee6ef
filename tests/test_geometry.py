"""Geometry: what it derives, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import cortiq_o1 as o1

GOOD: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def test_defaults_and_derived_sizes() -> None:
    geometry = o1.Geometry(**GOOD, windows=(16, 2048))
    assert geometry.value_dim == 64
    assert geometry.scale == 64**-0.5
    assert geometry.heads_per_group == 4
    assert geometry.group_windows == (16, 2048)
    assert geometry.min_window == 16
    assert geometry.exact_rows == 16 + 4 + 8


def test_equal_windows_are_one_spelling() -> None:
    assert o1.Geometry(**GOOD, window=32, windows=(32, 32)) == o1.Geometry(**GOOD, window=32)
    assert hash(o1.Geometry(**GOOD, window=np.int64(32))) == hash(o1.Geometry(**GOOD, window=32))


def test_json_round_trip() -> None:
    geometry = o1.Geometry(**GOOD, value_dim=32, window=64, windows=(8, 64), rect="fm", scale=0.3)
    assert o1.Geometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry
    with pytest.raises(o1.GeometryError, match=r"unknown fields \['colour'\]"):
        o1.Geometry.from_dict({**geometry.to_dict(), "colour": 1})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 7, r"num_heads: 7, expected a multiple of num_kv_heads \(2\)"),
        ("num_heads", 0, "num_heads: 0, expected at least 1"),
        ("num_kv_heads", 0, "num_kv_heads: 0, expected at least 1"),
        ("head_dim", 66, "head_dim: 66, expected a multiple of 4"),
        ("head_dim", 516, "head_dim: 516, expected 4 to 512"),
        ("value_dim", 6, "value_dim: 6, expected a multiple of 4"),
        ("window", 0, "window: 0, expected at least 1"),
        ("sinks", -1, "sinks: -1, expected at least 0"),
        ("landmarks", 3, "landmarks: 3, expected 4 to 64"),
        ("landmarks", 65, "landmarks: 65, expected 4 to 64"),
        ("windows", (8,), "windows: 1 entries, expected one for each of 2 KV heads"),
        ("windows", (8, 4096), r"windows\[1\]: 4096, expected 1 to 2048"),
        ("windows", (8, 0), r"windows\[1\]: 0, expected 1 to 2048"),
        ("rect", "max", "rect: 'max', expected one of 'aggregate', 'fm'"),
        ("scale", 0.0, "scale: 0.0, expected a positive number"),
        ("scale", -1.0, "scale: -1.0, expected a positive number"),
        ("scale", float("nan"), "scale: nan, expected a positive number"),
    ],
)
def test_impossible_sizes_name_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(o1.GeometryError, match=message):
        o1.Geometry(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", True),
        ("num_heads", 8.0),
        ("head_dim", "64"),
        ("windows", 3),
        ("scale", "0.1"),
        ("scale", True),
        ("scale", np.complex64(1)),
        ("scale", b"0.5"),
    ],
)
def test_wrong_types_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(o1.ArgumentTypeError, match=f"^{field}"):
        o1.Geometry(**{**GOOD, field: value})
