"""wgpu's exceptions as the library's own; wgpu-native and Dawn word the same faults differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CortiqError, DeviceError, DeviceLostError, DeviceMemoryError
from .adapters import forget

_LOST = ("device is lost", "[device] is lost", "device lost")
_MEMORY = (
    "out of memory",
    "not enough memory",
    "maximum buffer size",
    "max buffer size",
    "allocation failed",
)


def reason(error: BaseException) -> str:
    """A backend's message on one line, without its boilerplate."""
    lines = (line.strip() for line in str(error).splitlines())
    kept = [line for line in lines if line and line not in ("Validation Error", "Caused by:")]
    return " | ".join(kept) or type(error).__name__


def is_lost(error: BaseException, device: Any = None) -> bool:
    """Whether the error means that the device went away; asks the device where the text leaves doubt."""
    text = str(error).lower()
    if any(words in text for words in _LOST):
        return True
    if device is None:
        return False
    try:
        device.create_command_encoder(label="o1.probe").finish()
    except Exception as probe:
        return any(words in str(probe).lower() for words in _LOST)
    return False


def is_memory(error: BaseException) -> bool:
    """Whether the error means that a buffer does not fit."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or any(words in str(error).lower() for words in _MEMORY)
    )


@contextmanager
def translated(device: Any, adapter: str, step: str) -> Iterator[None]:
    """Raises what goes wrong inside as a `DeviceError` that names adapter and step."""
    try:
        yield
    except CortiqError:
        raise
    except Exception as error:
        if is_lost(error, device):
            forget(device)
            raise DeviceLostError(
                f"{adapter}: {step}: the device was lost; open it again and load its layers from saved states"
            ) from error
        kind = DeviceMemoryError if is_memory(error) else DeviceError
        raise kind(f"{adapter}: {step}: {reason(error)}") from error
