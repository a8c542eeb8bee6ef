"""Host arrays in: anything that NumPy can view, out: finite, C-contiguous float32."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, ArgumentTypeError

Float32 = npt.NDArray[np.float32]
Rows = tuple[Float32, Float32, Float32]
"""Queries, keys and values of the same rows."""

LARGEST = 1e14
"""Largest size of a number that goes into products: a logit then stays finite, whatever the width."""
LARGEST_FLOAT16 = 65504.0

# Extension dtypes (bfloat16, float8) have kind "V" but convert exactly.
_NARROW_FLOATS = ("bfloat16", "float8")


def as_float32(name: str, value: Any, shape: tuple[int | str, ...]) -> Float32:
    """`value` as a finite, C-contiguous float32 array of `shape`, no number larger than `LARGEST`.

    A string in `shape` stands for any length and is used in the message. A masked array counts as its
    data. Raises `ArgumentTypeError` for bool, complex, text and objects, `ArgumentError` for a wrong
    shape, for values that are not finite in float32 and for values whose products might not be.
    """
    try:
        array = np.asarray(value)
    except Exception as error:
        raise ArgumentTypeError(f"{name}: NumPy cannot view a {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "fiu" and not array.dtype.name.startswith(_NARROW_FLOATS):
        raise ArgumentTypeError(f"{name}: dtype {array.dtype}, expected floats or integers")
    matches = array.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not matches:
        expected = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise ArgumentError(f"{name}: shape {array.shape}, expected {expected}")
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.ascontiguousarray(array, dtype=np.float32)
    # A small sum of squares proves every value small and finite in one pass; only doubt costs more.
    with np.errstate(over="ignore", invalid="ignore"):
        flat = result.reshape(-1)
        proven = float(np.dot(flat, flat)) <= LARGEST**2
    if not proven:
        _refuse(name, result, ~np.isfinite(result), "are not finite in float32")
        _refuse(name, result, np.abs(result) > LARGEST, f"are larger than {LARGEST:g}")
    return result


def as_float16(name: str, array: Float32) -> Float32:
    """The array with every value rounded to the nearest float16, in float32.

    Raises `ArgumentError` for values beyond float16's range, with the first one's index.
    """
    too_large = np.abs(array) > LARGEST_FLOAT16
    _refuse(name, array, too_large, f"are larger than {LARGEST_FLOAT16:g}, the largest float16")
    return array.astype(np.float16).astype(np.float32)


def _refuse(name: str, array: Float32, bad: npt.NDArray[np.bool_], what: str) -> None:
    at = np.argwhere(bad)
    if len(at):
        raise ArgumentError(f"{name}: {len(at)} values {what}, the first at index {tuple(map(int, at[0]))}")


def as_number(name: str, value: Any) -> float:
    """`value` as a float; raises `ArgumentTypeError` for what is no real number, infinity for what is
    too large for one."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise ArgumentTypeError(f"{name}: {value!r}, expected a number")


def as_bool(name: str, value: Any) -> bool:
    """`value` as a bool; raises `ArgumentTypeError` for anything but Python's and NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: {value!r}, expected a bool")
    return bool(value)


def as_index(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int within `low..high`; bool and anything without `__index__` is refused."""
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: {value!r}, expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: {value!r}, expected an integer") from None
    if number < low or (high is not None and number > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ArgumentError(f"{name}: {number}, expected {expected}")
    return number
