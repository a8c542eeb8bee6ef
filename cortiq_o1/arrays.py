"""Host arrays in: anything that NumPy can view, out: finite, C-contiguous float32."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError, ArgumentTypeError

Float32 = npt.NDArray[np.float32]

# Extension dtypes (bfloat16, float8) have kind "V" but convert exactly.
_NARROW_FLOATS = ("bfloat16", "float8")


def as_float32(name: str, value: Any, shape: tuple[int | str, ...]) -> Float32:
    """`value` as a finite, C-contiguous float32 array of `shape`.

    A string in `shape` stands for any length and is used in the message. Raises `ArgumentTypeError`
    for bool, complex, text and objects, `ArgumentError` for a wrong shape and for values that are
    not finite in float32.
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
    # The sum of finite values can overflow, never become finite from something that is not; so a
    # finite sum of squares proves the array finite in one read-only pass, and only doubt costs more.
    with np.errstate(over="ignore", invalid="ignore"):
        flat = result.reshape(-1)
        proven = math.isfinite(float(np.dot(flat, flat)))
    if not proven and not np.isfinite(result).all():
        bad = np.argwhere(~np.isfinite(result))
        raise ArgumentError(
            f"{name}: {len(bad)} values are not finite in float32, "
            f"the first at index {tuple(map(int, bad[0]))}"
        )
    return result


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
