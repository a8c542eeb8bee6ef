"""A layer's state on the host: its arrays, and the one file they are kept in."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .arrays import LARGEST, Float32, as_float16, as_index, as_number
from .errors import ArgumentError, CortiqError, StateFileError
from .files import read_arrays, write_arrays
from .geometry import MIN_LANDMARKS, Geometry
from .planes import (
    KV_PLANES,
    LARGE,
    META_EVICTED,
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    PLANES,
    STATE_PLANES,
    STILL_PLANES,
    Sizes,
)

FORMAT = "cortiq-o1-state"
VERSION = 1
HISTORY = ("q", "k", "v")
"""What a layer that is not sealed keeps of its rows."""


Fold = Literal["always", "prompt", "never"]
FOLDS: tuple[Fold, ...] = ("always", "prompt", "never")
RIDGES: Mapping[str, float] = MappingProxyType({"nystrom": 1e-6, "fitted": 1e-3})
"""How landmarks and mixing matrix are made, and the ridge of each unless told otherwise."""
METHODS: tuple[str, ...] = tuple(RIDGES)
FROZEN_WINDOWS = 4
"""Windows from which a prompt's fitted far field takes nothing in after the seal, unless told otherwise: what
comes later does not fit its landmarks."""


@dataclass(frozen=True)
class SealOptions:
    """How a prompt is sealed, see `seal`; a layer still too short keeps them for later.

    `ridge` and `fold` are the method's own where None is given; a `fold` that depends on the prompt stays
    None.

    Raises `ArgumentError` or `ArgumentTypeError` that names the option.
    """

    method: str = "nystrom"
    ridge: float | None = None
    fold: Fold | None = None
    rope_theta: float | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ArgumentError(f"method: {self.method!r}, expected one of {', '.join(map(repr, METHODS))}")
        fold = "always" if self.fold is None and self.method == "nystrom" else self.fold
        if fold is not None and fold not in FOLDS:
            raise ArgumentError(f"fold: {fold!r}, expected one of {', '.join(map(repr, FOLDS))}")
        object.__setattr__(self, "fold", fold)
        object.__setattr__(self, "ridge", self._positive("ridge", self.ridge, RIDGES[self.method]))
        if (self.rope_theta is None) != (self.horizon is None):
            missing = "horizon" if self.horizon is None else "rope_theta"
            raise ArgumentError(f"{missing}: None, expected with the other of rope_theta and horizon")
        if self.rope_theta is not None:
            if self.method != "fitted":
                raise ArgumentError(f"rope_theta: {self.rope_theta!r}, expected with method 'fitted' alone")
            object.__setattr__(self, "rope_theta", self._positive("rope_theta", self.rope_theta, 1.0))
            object.__setattr__(self, "horizon", as_index("horizon", self.horizon, 1))

    @staticmethod
    def _positive(name: str, value: Any, default: float) -> float:
        number = default if value is None else as_number(name, value)
        if not (math.isfinite(number) and number > 0.0):
            raise ArgumentError(f"{name}: {number!r}, expected a positive number")
        return number

    def ridge_of(self) -> float:
        """The ridge, the method's own unless another was given."""
        assert self.ridge is not None
        return self.ridge

    def fold_of(self, rows: int, window: int) -> Fold:
        """What a group's far field takes in, of `rows` rows and a window of `window`."""
        if self.fold is not None:
            return self.fold
        return "never" if rows >= FROZEN_WINDOWS * window else "prompt"


class LayerState:
    """One layer after `rows` rows: sealed (`planes`) or still too short to be (`history`).

    Attributes:
        geometry: the layer's sizes.
        options: how it was sealed, or will be.
        rows: rows of the stream so far.
        planes: the state planes by name, shapes and dtypes as in `planes.PLANES`; empty if not sealed.
        history: `q (T, nh, d)`, `k (T, G, d)`, `v (T, G, dv)` of a layer that is not sealed, else None.
    """

    def __init__(
        self,
        geometry: Geometry,
        options: SealOptions,
        rows: int,
        planes: Mapping[str, npt.NDArray[Any]] | None = None,
        history: tuple[Float32, Float32, Float32] | None = None,
    ) -> None:
        self.geometry = geometry
        self.options = options
        self.rows = rows
        self.planes = dict(planes or {})
        self.history = history
        problem = (
            planes_problem(geometry, self.planes)
            if history is None
            else history_problem(geometry, rows, self._arrays())
        )
        if problem:
            raise ArgumentError(f"state: {problem}")

    @property
    def sealed(self) -> bool:
        """Whether the far field exists; an unsealed layer attends exactly."""
        return self.history is None

    def rounded(self) -> LayerState:
        """The state as a device with `kv="f16"` keeps it: keys and values of window and sinks, or of the rows
        that wait for the seal, rounded to float16. The far field stays.

        Raises `ArgumentError` for values beyond float16's range.
        """
        if self.history is not None:
            q, k, v = self.history
            history = (q, as_float16("k", k), as_float16("v", v))
            return LayerState(self.geometry, self.options, self.rows, history=history)
        rings = {name: as_float16(name, self.planes[name]) for name in KV_PLANES}
        return LayerState(self.geometry, self.options, self.rows, planes={**self.planes, **rings})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.history or self.planes.values()))

    @cached_property
    def epoch(self) -> str | None:
        """Names what the seal made: equal for states of one seal, however far they have moved; None for a
        state that is not sealed. Changes to `planes` after the first reading do not show."""
        return epoch_of(self.geometry, self.planes) if self.sealed else None

    @cached_property
    def fingerprint(self) -> str:
        """Names the state: its seal, its rows, how far it has moved. As for `epoch`, it is read once."""
        import hashlib  # takes long to import

        digest = hashlib.blake2b(repr((self.epoch, self.rows, self.options)).encode(), digest_size=8)
        for array in self._arrays().values():
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        kind = "sealed" if self.sealed else "exact"
        return f"LayerState({kind}, rows={self.rows}, nbytes={self.nbytes}, {self.geometry})"

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        if self.history is not None:
            return dict(zip(HISTORY, self.history, strict=True))
        return self.planes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to one file: a NumPy `.npz` with a JSON header, and a SHA-256 behind it.

        The file appears whole or not at all. Raises `OSError` where it cannot be written.
        """
        header = {
            "format": FORMAT,
            "version": VERSION,
            "geometry": self.geometry.to_dict(),
            "options": asdict(self.options),
            "rows": self.rows,
            "sealed": self.sealed,
        }
        write_arrays(path, header, self._arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerState:
        """The state that `save` wrote.

        Raises `StateFileError` (a `ValueError`) for a foreign, truncated or altered file and for an
        unknown version, and says which; `OSError` where it cannot be read.
        """
        header, arrays = read_arrays(path, FORMAT, VERSION)
        try:
            geometry = Geometry.from_dict(header["geometry"])
            options = SealOptions(**header["options"])
            rows = as_index("rows", header["rows"], 0)
            if not header["sealed"]:
                q, k, v = (arrays.pop(name) for name in HISTORY)
                if arrays:
                    raise ValueError(f"arrays {sorted(arrays)} unknown")
                return cls(geometry, options, rows, history=(q, k, v))
            state = cls(geometry, options, rows, planes=arrays)
            problem = rows_problem(geometry, rows, state.planes["group_meta"])
            if problem:
                raise ValueError(problem)
            return state
        except (CortiqError, KeyError, TypeError, ValueError) as error:
            raise StateFileError(f"{path}: no layer can have this state: {error}") from error


def epoch_of(geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> str:
    """What a seal made and no row moves, as 16 hex digits: landmarks, mixing matrix, their shift,
    how many rows the far field takes."""
    import hashlib  # takes long to import

    digest = hashlib.blake2b(repr(geometry).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(planes["group_meta"][:, [META_FAR_LIMIT, META_LANDMARKS]]).data)
    digest.update(np.ascontiguousarray(planes["far_mz"][:, MZ_SHIFT]).data)
    for name in STILL_PLANES:
        digest.update(np.ascontiguousarray(planes[name]).data)
    return digest.hexdigest()


def planes_problem(
    geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]], names: Sequence[str] = STATE_PLANES
) -> str | None:
    """Why the planes, those of the names given, cannot be a sealed layer's, None if they can.

    The planes that move must be among them.
    """
    if set(planes) != set(names):
        return f"planes {sorted(set(planes) ^ set(names))} missing or unknown"
    sizes = Sizes.of(geometry)
    for name, array in planes.items():
        plane = PLANES[name]
        if array.shape != plane.dims(sizes) or array.dtype != plane.dtype:
            return f"{name}: {array.dtype} {array.shape}, expected {plane.dtype} {plane.dims(sizes)}"
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{name}: values that are not finite"
    meta = planes["group_meta"].astype(np.int64)
    windows = np.array(geometry.group_windows)
    if (meta[:, META_WINDOW] != windows).any():
        return "group_meta: windows differ from the geometry's"
    if (meta[:, META_LEN] > windows).any() or (meta[:, META_HEAD] >= windows).any():
        return "group_meta: a ring position outside its window"
    landmarks = meta[:, META_LANDMARKS]
    if (landmarks < MIN_LANDMARKS).any() or (landmarks > geometry.landmarks).any():
        return (
            f"group_meta: landmarks in use {landmarks.tolist()}, "
            f"expected {MIN_LANDMARKS} to {geometry.landmarks}"
        )
    # The kernels rescale an empty far field like any other, which is right for zeros alone.
    empty = np.repeat(meta[:, META_FAR_LEN] == 0, geometry.heads_per_group)
    mz = planes["far_mz"][empty]
    if (
        mz[:, [MZ_TOTAL, MZ_RECENT]].any()
        or planes["t_hat"][empty].any()
        or (mz[:, MZ_MAX] != np.float32(-LARGE)).any()
    ):
        return "far_mz, t_hat: a far field that took in no row is not empty"
    return None


def rows_problem(geometry: Geometry, rows: int, meta: npt.NDArray[Any]) -> str | None:
    """Why a sealed layer of these `group_meta` cannot have seen so many rows, None if it can."""
    for g, row in enumerate(meta.tolist()):
        kept, evicted, folded = geometry.sinks + row[META_LEN], row[META_EVICTED], row[META_FAR_LEN]
        if rows < kept or (rows - kept - evicted) % 2**32:
            return f"{rows} rows, of which group {g} keeps {kept} and has evicted {evicted}"
        if folded > rows - kept:
            return f"group_meta: {folded} rows folded of the {rows - kept} that group {g} has evicted"
    return None


def history_problem(geometry: Geometry, rows: int, history: Mapping[str, npt.NDArray[Any]]) -> str | None:
    """Why `q`, `k`, `v` cannot be all rows of an unsealed layer that has seen so many, None if they can."""
    if set(history) != set(HISTORY):
        return f"arrays {sorted(set(history) ^ set(HISTORY))} missing or unknown"
    kept = len(history["k"])
    if kept != rows:
        return f"{rows} rows, {kept} of them kept; expected all of them"
    shapes = (
        (rows, geometry.num_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.value_dim),
    )
    for name, shape in zip(HISTORY, shapes, strict=True):
        array = history[name]
        if array.shape != shape or array.dtype != np.float32:
            return f"{name}: {array.dtype} {array.shape}, expected float32 {shape}"
        if not (np.abs(array) <= LARGEST).all():
            return f"{name}: values that are not finite, or larger than {LARGEST:g}"
    if rows > geometry.exact_rows:
        return f"{rows} rows kept exactly, at most {geometry.exact_rows} are"
    return None
