"""The worst of a comparison, as a part of what rounding explains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Deviation:
    """`error` is absolute, relative to values above 1; `ratio` a part of the bound; `where` says in
    words what was worst.

    A ratio above 1, infinite where something must be equal or is not finite, is a failure.
    """

    error: float
    ratio: float
    where: str

    def __post_init__(self) -> None:
        # A comparison with NaN is false either way: one in the truth must not pass for agreement.
        for name in ("error", "ratio"):
            if np.isnan(getattr(self, name)):
                object.__setattr__(self, name, np.inf)

    @property
    def passed(self) -> bool:
        """Whether everything lies within its bound."""
        return self.ratio <= 1.0

    def worse(self, other: Deviation) -> Deviation:
        """The one with the larger ratio, with the larger of both errors."""
        worst = self if self.ratio >= other.ratio else other
        return Deviation(max(self.error, other.error), worst.ratio, worst.where)


NONE = Deviation(0.0, 0.0, "")


def compare(label: str, got: Array, want: Array, bound: Array) -> Deviation:
    """The worst deviation of `got` from `want`, element by element, where `bound` 0 means equal.

    Another shape, NaN and infinity are infinite deviations.
    """
    if got.shape != want.shape or (got.dtype.kind == "u") != (want.dtype.kind == "u"):
        text = f"{label}: {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
        return Deviation(np.inf, np.inf, text)
    if not got.size:
        return NONE
    finite = np.isfinite(got)
    difference = np.abs(np.where(finite, got, 0).astype(np.float64) - want.astype(np.float64))
    difference = np.where(finite, difference, np.inf)
    allowed = np.broadcast_to(bound, difference.shape)
    exact = np.where(difference > 0.0, np.inf, 0.0)
    ratio = np.where(allowed > 0.0, difference / np.where(allowed > 0.0, allowed, 1.0), exact)
    ratio = np.where(np.isnan(ratio) | np.isnan(allowed), np.inf, ratio)
    at = np.unravel_index(int(ratio.argmax()), ratio.shape)
    where = f"{label}{[int(n) for n in at]} is {got[at]!s}, expected {want[at]!s}"
    if allowed[at] > 0.0:
        where += f" ± {allowed[at]:.3g}"
    error = difference / np.maximum(np.abs(want.astype(np.float64)), 1.0)
    return Deviation(float(error.max()), float(ratio[at]), where)
