"""wgpu-native's C functions for what a compute pass is told, where wgpu-py reaches them.

A method of wgpu-py takes several times as long as the function of `webgpu.h` that it calls: it makes an
array of offsets for each bind group and an error scope for each call, and a token over 32 layers is 192 of
them. So steps keep their arguments as C wants them, and a pass is told many steps in one error scope. Where
wgpu-py does not declare what is expected here, for another implementation's pass, and with
`CORTIQ_O1_RAW=0`, the methods serve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

SWITCH = "CORTIQ_O1_RAW"
"""Environment: "0" leaves this module out."""
_EXPECTED = {
    "wgpuComputePassEncoderSetPipeline": "void(*)(struct WGPUComputePassEncoderImpl *, "
    "struct WGPUComputePipelineImpl *)",
    "wgpuComputePassEncoderSetBindGroup": "void(*)(struct WGPUComputePassEncoderImpl *, uint32_t, "
    "struct WGPUBindGroupImpl *, size_t, uint32_t *)",
    "wgpuComputePassEncoderDispatchWorkgroups": "void(*)(struct WGPUComputePassEncoderImpl *, uint32_t, "
    "uint32_t, uint32_t)",
}
_SCOPE = "cortiq_o1.record"

Call = tuple[Any, Any, int, Any, int, int, int]
"""A dispatch as C wants it: pipeline, bind group, number of dynamic offsets, the offsets, the grid."""


class RawCalls:
    """The functions, and the handler that wgpu-py's own calls report errors to."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._pass_type: type = api.GPUComputePassEncoder
        self._pipeline, self._group, self._dispatch = (getattr(api.lib, name) for name in _EXPECTED)

    def takes(self, compute_pass: Any) -> bool:
        """Whether the pass is one of wgpu-native's."""
        return type(compute_pass) is self._pass_type

    def call(self, pipeline: Any, group: Any, offsets: list[int], grid: tuple[int, int, int]) -> Call:
        """A dispatch's arguments; objects of wgpu-py must outlive it."""
        array = self._api.ffi.new("uint32_t[]", offsets)
        return (pipeline._internal, group._internal, len(offsets), array, *grid)

    def record(self, calls: Iterable[Call], compute_pass: Any) -> None:
        """Tells a pass the dispatches, in order.

        Raises `RuntimeError` where wgpu-native finds fault with one.
        """
        to = compute_pass._internal
        set_pipeline, set_group, dispatch = self._pipeline, self._group, self._dispatch
        last = None
        errors = self._api.error_handler
        errors.capture(_SCOPE)
        try:
            for pipeline, group, count, offsets, x, y, z in calls:
                if pipeline is not last:
                    set_pipeline(to, pipeline)
                    last = pipeline
                set_group(to, 0, group, count, offsets)
                dispatch(to, x, y, z)
        finally:
            found = errors.release(_SCOPE)
        if found is not None:
            raise RuntimeError(found[1])


@cache
def _found() -> RawCalls | None:
    try:
        from wgpu.backends.wgpu_native import _api

        for name, signature in _EXPECTED.items():
            if _api.ffi.typeof(getattr(_api.lib, name)).cname != signature:
                return None
        if not (callable(_api.error_handler.capture) and callable(_api.error_handler.release)):
            return None
        return RawCalls(_api)
    except (ImportError, AttributeError, TypeError):  # another version's insides
        return None


def raw_calls(device: Any) -> RawCalls | None:
    """The functions for a device, None where only its methods serve."""
    if os.environ.get(SWITCH) == "0" or not type(device).__module__.startswith("wgpu."):
        return None
    return _found()
