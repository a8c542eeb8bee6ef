"""The sizes of a sealed layer: what they are, what they may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .arrays import as_index, as_number
from .errors import ArgumentError, ArgumentTypeError, GeometryError

Rect = Literal["aggregate", "fm"]
RECTS: tuple[Rect, ...] = ("aggregate", "fm")

MAX_WIDTH = 512  # of a key or value row, in floats
MAX_SCALE = 10_000.0
"""Largest factor of a logit, and one over the smallest."""
MIN_LANDMARKS, MAX_LANDMARKS = 4, 64
# A prompt must exceed the narrowest window and the sinks by this many rows to be sealed.
SEAL_MARGIN = 8


@dataclass(frozen=True)
class Geometry:
    """Sizes and constants of one layer's attention; a batch of sequences is more groups.

    Args:
        num_heads: query heads `nh`, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads ("groups") `G`; query head `g * H + h` reads group `g`.
        head_dim: key and query width `d`, a multiple of 4, at most 512.
        value_dim: value width `dv`, the same bounds; `head_dim` if None.
        window: ring capacity `w`, the newest rows kept exactly, at least 1.
        sinks: first rows of the stream kept exactly, at least 0.
        landmarks: most landmarks `m` a seal may use, 4 to 64.
        windows: each group's own window, 1 to `window`; `window` for all if None.
        rect: "aggregate" drops a row's far field where its mass is negative, "fm" clamps each
            landmark's weight at zero.
        scale: factor `s` of every logit, positive; `head_dim ** -0.5` if None.

    Raises:
        GeometryError: a size that no layer can have; names the field, the value, what was expected.
        ArgumentTypeError: a field that is no number.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int = 2048
    sinks: int = 4
    landmarks: int = 32
    windows: tuple[int, ...] | None = None
    rect: Rect = "aggregate"
    scale: float | None = None

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        def size(field: str, value: Any, low: int, high: int | None = None) -> int:
            try:
                return as_index(field, value, low, high)
            except ArgumentError as error:
                raise GeometryError(str(error)) from None

        put("num_kv_heads", size("num_kv_heads", self.num_kv_heads, 1))
        put("num_heads", size("num_heads", self.num_heads, 1))
        if self.num_heads % self.num_kv_heads:
            raise GeometryError(
                f"num_heads: {self.num_heads}, expected a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.value_dim is None:
            put("value_dim", self.head_dim)
        for field in ("head_dim", "value_dim"):
            width = size(field, getattr(self, field), 4, MAX_WIDTH)
            if width % 4:
                raise GeometryError(f"{field}: {width}, expected a multiple of 4")
            put(field, width)
        put("window", size("window", self.window, 1))
        put("sinks", size("sinks", self.sinks, 0))
        put("landmarks", size("landmarks", self.landmarks, MIN_LANDMARKS, MAX_LANDMARKS))
        put("windows", self._checked_windows(size))
        if self.rect not in RECTS:
            raise GeometryError(f"rect: {self.rect!r}, expected one of {', '.join(map(repr, RECTS))}")
        put("scale", self._checked_scale())

    def _checked_windows(self, size: Any) -> tuple[int, ...] | None:
        if self.windows is None:
            return None
        try:
            given = tuple(self.windows)
        except TypeError:
            raise ArgumentTypeError(f"windows: {self.windows!r}, expected a sequence of integers") from None
        if len(given) != self.num_kv_heads:
            raise GeometryError(
                f"windows: {len(given)} entries, expected one for each of {self.num_kv_heads} KV heads"
            )
        each = tuple(size(f"windows[{g}]", w, 1, self.window) for g, w in enumerate(given))
        # One spelling of one geometry, so that equal layers share plans and scratch.
        return None if all(w == self.window for w in each) else each

    def _checked_scale(self) -> float:
        if self.scale is None:
            return float(self.head_dim**-0.5)
        scale = as_number("scale", self.scale)
        if not 1 / MAX_SCALE <= scale <= MAX_SCALE:
            raise GeometryError(
                f"scale: {scale!r}, expected a positive number, {1 / MAX_SCALE} to {MAX_SCALE}"
            )
        return scale

    @cached_property
    def heads_per_group(self) -> int:
        """Query heads `H` of one KV head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def group_windows(self) -> tuple[int, ...]:
        """The window `w_g` of each group, `(G,)`."""
        return self.windows or (self.window,) * self.num_kv_heads

    @cached_property
    def min_window(self) -> int:
        """The narrowest group's window."""
        return min(self.group_windows)

    @cached_property
    def exact_rows(self) -> int:
        """The longest stream, in rows, that is too short to be sealed."""
        return self.min_window + self.sinks + SEAL_MARGIN

    @cached_property
    def scale32(self) -> np.float32:
        """The scale as the kernels see it."""
        return np.float32(self.scale)

    def batch(self, count: int) -> Geometry:
        """The geometry of `count` sequences of this one as one layer: their groups one after another."""
        windows = None if self.windows is None else self.windows * count
        return replace(
            self,
            num_heads=self.num_heads * count,
            num_kv_heads=self.num_kv_heads * count,
            windows=windows,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON; `Geometry.from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geometry:
        """The geometry that `to_dict` wrote; unknown fields raise `GeometryError`."""
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise GeometryError(f"geometry: unknown fields {sorted(unknown)}")
        return cls(**data)
