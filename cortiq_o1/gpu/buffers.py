"""Buffers of one device: planes, scratch that grows, kernel parameters, the way back to the host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .faults import translated

# WebGPU's usage bits, the same for every implementation; naming them here keeps wgpu unimported.
MAP_READ, COPY_SRC, COPY_DST = 0x1, 0x4, 0x8
UNIFORM, STORAGE, QUERY_RESOLVE = 0x40, 0x80, 0x200
PLANE = STORAGE | COPY_SRC | COPY_DST

SLOT = 256
"""Bytes from one kernel's parameters to the next: the largest alignment that WebGPU lets a device ask."""
FIRST_SLOTS, MOST_SLOTS = 256, 16_384
PIECE_BYTES = 32 << 20
"""Most bytes on their way to or from the host at a time: what is written waits in a staging copy."""


class Part(NamedTuple):
    """Some bytes of a buffer that are a plane's, as a whole buffer is another's."""

    buffer: Any
    offset: int
    size: int


Place = Any
"""Where a plane is: a buffer, or a `Part` of one."""


def span(place: Place) -> Part:
    """The buffer, where in it the plane begins, and its bytes with the room behind them."""
    return place if isinstance(place, Part) else Part(place, 0, place.size)


class Memory:
    """Makes the buffers of one device; every failure names the plane and its size."""

    def __init__(self, device: Any, adapter: str) -> None:
        self.device = device
        self.adapter = adapter

    def create(self, plane: str, nbytes: int, usage: int = PLANE) -> Any:
        """A buffer labelled `o1.<plane>` of at least `nbytes` bytes, a multiple of 16.

        Raises:
            DeviceMemoryError: the device has no room, or makes no buffer of that size.
            DeviceLostError: the device is gone.
        """
        size = max(16, -(-nbytes // 16) * 16)
        step = f"buffer of {plane}, {size} bytes"
        with translated(self.device, self.adapter, step):
            return self.device.create_buffer(label=f"o1.{plane}", size=size, usage=usage)


class Pool:
    """Buffers that are shared and grow; one that is replaced is dropped, never destroyed, since
    recorded work may still use it."""

    def __init__(self, memory: Memory, binding_bytes: int) -> None:
        self.memory = memory
        self.binding_bytes = binding_bytes
        self.generation = 0
        """Goes up whenever a buffer is made, hence whenever what was recorded may be out of date."""
        self._buffers: dict[Hashable, Any] = {}

    def get(self, key: Hashable, plane: str, nbytes: int) -> Any:
        """The buffer of `key`, with room for `nbytes`; its contents are lost where it grows."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < nbytes:
            # Doubling keeps a call that gets longer by a row each time from a new buffer each time.
            size = nbytes if buffer is None else max(nbytes, min(2 * buffer.size, self.binding_bytes))
            buffer = self._buffers[key] = self.memory.create(plane, size)
            self.generation += 1
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.size for buffer in self._buffers.values())


class Parameters:
    """Kernel parameters in one uniform buffer; equal parameters share a slot, whoever uses them.

    A slot is never written twice, so what was recorded earlier and is submitted later still finds
    its own parameters; after `MOST_SLOTS` a new buffer takes over.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.generation = 0
        self._slots: dict[bytes, int] = {}
        self.buffer = memory.create("params", FIRST_SLOTS * SLOT, UNIFORM | COPY_DST)

    def place(self, wanted: Iterable[bytes]) -> list[int]:
        """The offset of each parameter block, those of one call all in the buffer as it is after."""
        blocks = list(wanted)
        new = [block for block in dict.fromkeys(blocks) if block not in self._slots]
        if new:
            self._add(new, blocks)
        return [self._slots[block] * SLOT for block in blocks]

    def _add(self, new: list[bytes], blocks: list[bytes]) -> None:
        total = len(self._slots) + len(new)
        capacity = self.buffer.size // SLOT
        first = len(self._slots)
        if total > capacity:
            if total > MOST_SLOTS:
                self._slots = {}
                new = list(dict.fromkeys(blocks))
            else:
                new = [*self._slots, *new]
                self._slots = {}
            first = 0
            self.buffer = self.memory.create("params", max(len(new), 2 * capacity) * SLOT, UNIFORM | COPY_DST)
            self.generation += 1
        packed = bytearray(len(new) * SLOT)
        for at, block in enumerate(new):
            packed[at * SLOT : at * SLOT + len(block)] = block
        device = self.memory.device
        with translated(device, self.memory.adapter, "write of kernel parameters"):
            device.queue.write_buffer(self.buffer, first * SLOT, packed)
        for at, block in enumerate(new):
            self._slots[block] = first + at


class Readback:
    """One mappable buffer through which everything comes back to the host; it grows."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._buffer: Any = None

    def target(self, nbytes: int) -> Any:
        """The buffer to copy into, with room for `nbytes`."""
        if self._buffer is None or self._buffer.size < nbytes:
            self._buffer = self.memory.create("readback", max(nbytes, 1 << 16), MAP_READ | COPY_DST)
        return self._buffer

    def take(self, array: npt.NDArray[Any], step: str) -> None:
        """Waits for the work submitted so far and fills `array` from the buffer's beginning."""
        buffer, self._buffer = self._buffer, None
        with translated(self.memory.device, self.memory.adapter, step):
            # Plain "READ" makes wgpu submit once more; the copy into the buffer has just been.
            # A wait that is interrupted leaves the buffer about to be mapped: it is not taken up again.
            buffer.map_async("READ_NOSYNC", 0, array.nbytes).sync_wait()
            view = buffer.read_mapped(0, array.nbytes, copy=False)
            try:
                array.reshape(-1).view(np.uint8).data[:] = view
            finally:
                # A view that outlives the mapping points nowhere.
                del view
                buffer.unmap()
        self._buffer = buffer


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An array's bytes, ready to upload: wgpu refuses strides and Fortran order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
