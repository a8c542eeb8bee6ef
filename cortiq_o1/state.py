"""A layer's state on the host: its arrays, and the one file they are kept in."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .arrays import Float32, as_index, as_number
from .errors import ArgumentError, CortiqError, StateFileError
from .geometry import MIN_LANDMARKS, Geometry
from .planes import (
    LARGE,
    META_FAR_LEN,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MZ_MAX,
    MZ_RECENT,
    MZ_TOTAL,
    PLANES,
    STATE_PLANES,
    Sizes,
)

FORMAT = "cortiq-o1-state"
VERSION = 1
_HISTORY = ("q", "k", "v")


Fold = Literal["always", "prompt", "never"]
FOLDS: tuple[Fold, ...] = ("always", "prompt", "never")
METHODS: tuple[str, ...] = ("nystrom",)


@dataclass(frozen=True)
class SealOptions:
    """How a prompt is sealed, see `seal`; a layer still too short keeps them for later.

    Raises `ArgumentError` or `ArgumentTypeError` that names the option.
    """

    method: str = "nystrom"
    ridge: float = 1e-6
    fold: Fold = "always"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ArgumentError(f"method: {self.method!r}, expected one of {', '.join(map(repr, METHODS))}")
        if self.fold not in FOLDS:
            raise ArgumentError(f"fold: {self.fold!r}, expected one of {', '.join(map(repr, FOLDS))}")
        ridge = as_number("ridge", self.ridge)
        if not (math.isfinite(ridge) and ridge > 0.0):
            raise ArgumentError(f"ridge: {ridge!r}, expected a positive number")
        object.__setattr__(self, "ridge", ridge)


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
            _planes_problem(geometry, self.planes) if history is None else _history_problem(geometry, history)
        )
        if problem:
            raise ArgumentError(f"state: {problem}")

    @property
    def sealed(self) -> bool:
        """Whether the far field exists; an unsealed layer attends exactly."""
        return self.history is None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.history or self.planes.values()))

    def __repr__(self) -> str:
        kind = "sealed" if self.sealed else "exact"
        return f"LayerState({kind}, rows={self.rows}, nbytes={self.nbytes}, {self.geometry})"

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        if self.history is not None:
            return dict(zip(_HISTORY, self.history, strict=True))
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
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, header=text, **self._arrays())  # type: ignore[arg-type]
        target = Path(path).resolve()  # through a link, to the file that it names
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sealed_bytes(content.getvalue()))
            # mkstemp's file is private; a state is as readable as the user's other files.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(scratch, 0o666 & ~mask)
            os.replace(scratch, target)
        except BaseException:
            os.unlink(scratch)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerState:
        """The state that `save` wrote.

        Raises `StateFileError` (a `ValueError`) for a foreign, truncated or altered file and for an
        unknown version, and says which; `OSError` where it cannot be read.
        """
        content = _unsealed(path, Path(path).read_bytes())
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(arrays.pop("header").tobytes())
            version = header["version"] if header["format"] == FORMAT else None
        except Exception as error:  # the checksum holds, so somebody else wrote it on purpose
            raise StateFileError(f"{path}: not a state file: {error}") from error
        if version != VERSION:
            raise StateFileError(f"{path}: version {version!r}, this library reads version {VERSION}")
        try:
            geometry = Geometry.from_dict(header["geometry"])
            options = SealOptions(**header["options"])
            rows = as_index("rows", header["rows"], 0)
            if header["sealed"]:
                return cls(geometry, options, rows, planes=arrays)
            q, k, v = (arrays[name] for name in _HISTORY)
            return cls(geometry, options, rows, history=(q, k, v))
        except (CortiqError, KeyError, TypeError, ValueError) as error:
            raise StateFileError(f"{path}: no layer can have this state: {error}") from error


_TRAILER = b"cortiq-o1\n"


def sealed_bytes(content: bytes) -> bytes:
    """A file's content with what proves it whole; a reader of `.npz` does not mind."""
    return content + _TRAILER + hashlib.sha256(content).digest()


def _unsealed(path: str | os.PathLike[str], raw: bytes) -> bytes:
    end = len(raw) - hashlib.sha256().digest_size - len(_TRAILER)
    content, trailer, digest = raw[: max(end, 0)], raw[max(end, 0) :][: len(_TRAILER)], raw[-32:]
    if trailer != _TRAILER:
        what = "foreign, truncated or altered" if raw[:2] == b"PK" else "not a state file"
        raise StateFileError(f"{path}: {what}: it does not end as a state file does")
    if hashlib.sha256(content).digest() != digest:
        raise StateFileError(f"{path}: altered: its content does not match its checksum")
    return content


def _planes_problem(geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> str | None:
    """Why the planes cannot be a sealed layer's, None if they can."""
    if set(planes) != set(STATE_PLANES):
        return f"planes {sorted(set(planes) ^ set(STATE_PLANES))} missing or unknown"
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


def _history_problem(geometry: Geometry, history: tuple[Float32, Float32, Float32]) -> str | None:
    """Why the rows cannot be an unsealed layer's, None if they can."""
    rows = len(history[1])
    shapes = (
        (rows, geometry.num_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.head_dim),
        (rows, geometry.num_kv_heads, geometry.value_dim),
    )
    for name, array, shape in zip(_HISTORY, history, shapes, strict=True):
        if array.shape != shape or array.dtype != np.float32:
            return f"{name}: {array.dtype} {array.shape}, expected float32 {shape}"
        if not np.isfinite(array).all():
            return f"{name}: values that are not finite"
    if rows > geometry.exact_rows:
        return f"{rows} rows kept exactly, at most {geometry.exact_rows} are"
    return None
