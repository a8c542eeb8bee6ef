"""Constant-memory attention on any GPU: sinks, an exact window and a landmark far field.

`import cortiq_o1 as o1`, then `o1.seal` a prompt, `o1.open_device().load` its state, and `attend`.
See `docs/operator.md` for what is computed.
"""

from ._version import __version__
from .batch import Batch
from .cache import Cache, CacheSnapshot
from .capture import Capture, Captured
from .device import Device, DeviceInfo
from .devices import FallbackWarning, devices, open_device
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CortiqError,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    GeometryError,
    ShaderError,
    StateError,
    StateFileError,
)
from .geometry import Geometry
from .layer import Layer
from .planning import Limits, plan
from .plans import Plan
from .sealing import seal
from .snapshots import Snapshot
from .state import LayerState
from .warming import WarmUp

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "Cache",
    "CacheSnapshot",
    "Capture",
    "Captured",
    "CortiqError",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceMemoryError",
    "FallbackWarning",
    "Geometry",
    "GeometryError",
    "Layer",
    "LayerState",
    "Limits",
    "Plan",
    "ShaderError",
    "Snapshot",
    "StateError",
    "StateFileError",
    "WarmUp",
    "__version__",
    "devices",
    "open_device",
    "plan",
    "seal",
]
