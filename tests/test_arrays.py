"""Host arrays: what is taken, what is converted, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cortiq_o1 as o1
from cortiq_o1.arrays import LARGEST, as_float32


class Viewable:
    """What a CPU tensor of another library looks like to NumPy."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(6, dtype=np.float16).reshape(2, 3)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T,
        np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::2],
        np.arange(6, dtype=">f4").reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
        Viewable(),
    ],
    ids=["float64", "int8", "transposed", "strided", "big-endian", "list", "__array__"],
)
def test_numbers_of_any_layout_are_taken(value: Any) -> None:
    got = as_float32("x", value, ("rows", 3))
    assert got.dtype == np.float32
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, np.asarray(value))


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 3), bool), np.zeros((2, 3), complex), np.full((2, 3), "a"), np.full((2, 3), None)],
    ids=["bool", "complex", "text", "object"],
)
def test_other_types_raise(value: Any) -> None:
    with pytest.raises(o1.ArgumentTypeError, match=r"^x: dtype"):
        as_float32("x", value, (2, 3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_values_not_finite_in_float32_are_located(bad: float) -> None:
    value = np.zeros((2, 3))
    value[1, 2] = bad
    with pytest.raises(o1.ArgumentError, match=r"x: 1 values are not finite in float32.*\(1, 2\)"):
        as_float32("x", value, (2, 3))


def test_values_up_to_the_limit_are_taken_and_larger_ones_located() -> None:
    big = np.full((2, 3), np.float32(LARGEST))
    np.testing.assert_array_equal(as_float32("x", big, (2, 3)), big)
    big[1, 0] *= 1.001
    with pytest.raises(
        o1.ArgumentError, match=r"x: 1 values are larger than 1e\+14, the first at .*\(1, 0\)"
    ):
        as_float32("x", big, (2, 3))


@pytest.mark.parametrize("shape", [(2, 4), (6,), (1, 2, 3), ()])
def test_wrong_shapes_say_what_came_and_what_was_expected(shape: tuple[int, ...]) -> None:
    with pytest.raises(o1.ArgumentError, match=r"x: shape .*, expected \(rows, 3\)"):
        as_float32("x", np.zeros(shape), ("rows", 3))
