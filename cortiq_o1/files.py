"""One file for arrays and a header: whole or not at all, and known to be whole when it is read."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import StateFileError

_TRAILER = b"cortiq-o1\n"
_DIGEST_BYTES = 32


def _digest(content: bytes) -> bytes:
    import hashlib  # takes long to import

    return hashlib.sha256(content).digest()


def sealed_bytes(content: bytes) -> bytes:
    """A file's content with what proves it whole; a reader of `.npz` does not mind."""
    return content + _TRAILER + _digest(content)


def write_arrays(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Writes a NumPy `.npz` with a JSON header and a SHA-256 behind it.

    The file appears whole or not at all. Raises `OSError` where it cannot be written.
    """
    import tempfile  # takes long to import

    text = np.frombuffer(json.dumps(dict(header)).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, header=text, **arrays)  # type: ignore[arg-type]
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


def read_arrays(
    path: str | os.PathLike[str], format: str, version: int
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The header and the arrays that `write_arrays` wrote.

    Raises `StateFileError` for a foreign, truncated or altered file, another format or version, and says
    which; `OSError` where it cannot be read.
    """
    content = _unsealed(path, Path(path).read_bytes())
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        found, have = header["format"], header["version"]
    except Exception as error:  # the checksum holds, so somebody else wrote it on purpose
        raise StateFileError(f"{path}: not a state file: {error}") from error
    if found != format:
        raise StateFileError(f"{path}: a file of format {found!r}, expected {format!r}")
    if have != version:
        raise StateFileError(f"{path}: version {have!r}, this library reads version {version}")
    return header, arrays


def _unsealed(path: str | os.PathLike[str], raw: bytes) -> bytes:
    end = len(raw) - _DIGEST_BYTES - len(_TRAILER)
    content, trailer, digest = raw[: max(end, 0)], raw[max(end, 0) :][: len(_TRAILER)], raw[-_DIGEST_BYTES:]
    if trailer != _TRAILER:
        what = "foreign, truncated or altered" if raw[:2] == b"PK" else "not a state file"
        raise StateFileError(f"{path}: {what}: it does not end as a state file does")
    if _digest(content) != digest:
        raise StateFileError(f"{path}: altered: its content does not match its checksum")
    return content
