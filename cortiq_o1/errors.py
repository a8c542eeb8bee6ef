"""Every exception that the library raises on purpose.

All of them are a `CortiqError`; each also is the built-in class that a caller would catch without
knowing this library.
"""


class CortiqError(Exception):
    """Base of the library's exceptions."""


class ArgumentError(CortiqError, ValueError):
    """An argument has the wrong value or shape; the message says which, what came, what was expected."""


class ArgumentTypeError(CortiqError, TypeError):
    """An argument has a type that cannot be taken for numbers of the kind expected."""


class GeometryError(ArgumentError):
    """Sizes that no layer can have, or that the device's limits rule out."""


class StateError(CortiqError, RuntimeError):
    """The call does not fit what the layer holds now, such as `commit` without rows to commit."""


class StateFileError(CortiqError, ValueError):
    """A state file is foreign, truncated, altered or of an unknown version."""


class DeviceError(CortiqError, RuntimeError):
    """A device cannot be found, opened or used; the message names adapter and step."""


class DeviceLostError(DeviceError):
    """The device went away; what it held must be loaded again from a saved state."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has no room for a buffer; the message names the plane and its size."""


class ShaderError(DeviceError):
    """A kernel does not compile or link on an adapter; the message names both."""
