"""One device's share of everything: pipelines, bind groups, buffers, and the one way to submit."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..kernels import KERNELS, Constants
from ..planning import Limits
from . import shaders
from .adapters import describe, device_limits
from .buffers import PIECE_BYTES, Memory, Parameters, Place, Pool, Readback, as_bytes, span
from .faults import translated
from .raw import raw_calls

Range = tuple[Any, int, int]
"""A buffer, an offset into it and a size, in bytes."""
GroupKey = tuple[str, tuple[tuple[int, int, int], ...]]
"""A kernel and its ranges, each buffer by its serial."""


class BindGroups:
    """Bind groups by kernel and buffers; those of a buffer that nobody holds any more are dropped.

    A bind group keeps its buffers' memory on the device alive, hence not one longer than need be.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.generation = 0
        """Goes up when groups are dropped."""
        self._groups: dict[GroupKey, Any] = {}
        self._users: dict[int, set[GroupKey]] = {}
        self._serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last = 0
        # Filled by the garbage collector whenever it likes, emptied by `tidy` when nothing is under way.
        self._gone: deque[int] = deque()

    def serial(self, buffer: Any) -> int:
        """A number for a buffer that no other one gets, unlike its `id`."""
        serial = self._serials.get(buffer)
        if serial is None:
            serial = self._last = self._last + 1
            self._serials[buffer] = serial
            weakref.finalize(buffer, self._gone.append, serial).atexit = False
        return serial

    @property
    def untidy(self) -> bool:
        """Whether `tidy` has something to drop."""
        return bool(self._gone)

    def tidy(self) -> None:
        """Drops the groups of buffers that are gone."""
        while self._gone:
            for key in list(self._users.get(self._gone.popleft(), ())):
                self.discard(key)
                self.generation += 1

    def discard(self, key: GroupKey) -> None:
        """Drops a group that no recording is kept of, so that those that are stay valid."""
        self._groups.pop(key, None)
        for serial, _, _ in key[1]:
            users = self._users.get(serial, set())
            users.discard(key)
            if not users:
                self._users.pop(serial, None)

    def key(self, kernel: str, ranges: Sequence[Range]) -> GroupKey:
        """What `get` keeps a group by."""
        return kernel, tuple((self.serial(b), offset, size) for b, offset, size in ranges)

    def get(self, kernel: str, layout: Any, ranges: Sequence[Range]) -> Any:
        """The group of a kernel over `(buffer, offset, size)` ranges, binding 0 first."""
        key = self.key(kernel, ranges)
        group = self._groups.get(key)
        if group is None:
            entries = [
                {"binding": i, "resource": {"buffer": b, "offset": offset, "size": size}}
                for i, (b, offset, size) in enumerate(ranges)
            ]
            group = self.device.create_bind_group(label=kernel, layout=layout, entries=entries)
            self._groups[key] = group
            for serial, _, _ in key[1]:
                self._users.setdefault(serial, set()).add(key)
        return group

    def __len__(self) -> int:
        return len(self._groups)


class Context:
    """What all engines of one device share. Takes a device of wgpu or of wgpudawn."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.adapter = describe(device.adapter)
        self.label = self.adapter.label
        self.limits: Limits = device_limits(device)
        self.lock = threading.RLock()
        self.memory = Memory(device, self.label)
        self.pool = Pool(self.memory, self.limits.binding_bytes)
        self.parameters = Parameters(self.memory)
        self.readback = Readback(self.memory)
        self.groups = BindGroups(device)
        self.raw = raw_calls(device)
        self._fence = self.memory.create("fence", 16)
        self._pipelines: dict[tuple[str, Constants, str], tuple[Any, Any]] = {}

    @property
    def generation(self) -> int:
        """Goes up whenever an earlier recording may bind something that has been replaced."""
        return self.pool.generation + self.parameters.generation + self.groups.generation

    def translated(self, step: str) -> Any:
        """Context manager: what goes wrong inside is raised as a `DeviceError` naming the step."""
        return translated(self.device, self.label, step)

    def pipeline(self, kernel: str, constants: Constants = (), kv: str = "f32") -> tuple[Any, Any]:
        """A kernel's pipeline for values of its constants and a way to keep rings, and its bind group layout;
        compiled on first use.

        Raises:
            ShaderError: it does not compile; names kernel and adapter.
        """
        key = _pipeline_key(kernel, constants, kv)
        found = self._pipelines.get(key)
        if found is None:
            found = self._pipelines[key] = self.build(kernel, constants, kv=key[2])
        return found

    def has_pipeline(self, kernel: str, constants: Constants = (), kv: str = "f32") -> bool:
        """Whether `pipeline` has nothing left to compile."""
        return _pipeline_key(kernel, constants, kv) in self._pipelines

    def build(
        self, kernel: str, constants: Constants = (), source: str | None = None, kv: str = "f32"
    ) -> tuple[Any, Any]:
        """A pipeline of `source`, the kernel's own WGSL if None, kept by nobody."""
        pipeline = shaders.compile(self.device, kernel, source, constants, kv)
        with self.translated(f"{kernel}: bind group layout"):
            return pipeline, pipeline.get_bind_group_layout(0)

    def encoder(self, label: str) -> Any:
        """A new command encoder."""
        with self.translated(label):
            return self.device.create_command_encoder(label=label)

    def submit(self, encoder: Any, step: str) -> None:
        """The one place that submits.

        wgpu-native aborts the process when a submission fails, past every `except`: so commands are
        finished right before, which raises where the device is lost, and submitted just once.
        """
        with self.translated(step):
            commands = encoder.finish()
            self.device.queue.submit([commands])

    def fence(self, encoder: Any) -> None:
        """Records what `arrive` waits for: wgpu's own call for that fails in some of its versions."""
        encoder.copy_buffer_to_buffer(self._fence, 0, self.readback.target(16), 0, 16)

    def arrive(self, step: str) -> None:
        """Returns when the submission with the `fence`, hence every earlier one, is done."""
        self.readback.take(np.empty(4, np.uint32), step)

    def flush(self, step: str) -> None:
        """Sends what was written on its way and returns when all that was submitted is done."""
        encoder = self.encoder(step)
        with self.translated(step):
            self.fence(encoder)
        self.submit(encoder, step)
        self.arrive(step)

    def write(self, buffer: Any, array: np.ndarray, step: str) -> None:
        """Puts an array at the beginning of a buffer, before anything submitted later."""
        if array.nbytes:  # wgpu refuses an empty write
            with self.translated(step):
                self.device.queue.write_buffer(buffer, 0, array)

    def upload(self, pairs: Sequence[tuple[Place, np.ndarray]], step: str) -> None:
        """Fills planes from arrays in bounded pieces: what is written waits in staging memory."""
        waiting = 0
        for place, array in pairs:
            buffer, begin, _ = span(place)
            data = as_bytes(array)
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                with self.translated(step):
                    self.device.queue.write_buffer(buffer, begin + at, piece)
                waiting += len(piece)
                if waiting >= PIECE_BYTES:
                    self.flush(step)
                    waiting = 0
        self.flush(step)

    def download(self, place: Place, array: np.ndarray, step: str) -> None:
        """Fills an array from a plane in bounded pieces, after everything submitted so far."""
        buffer, begin, _ = span(place)
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, flat.size, PIECE_BYTES):
            piece = flat[at : at + PIECE_BYTES]
            encoder = self.encoder(step)
            with self.translated(step):
                target = self.readback.target(piece.size)
                encoder.copy_buffer_to_buffer(buffer, begin + at, target, 0, piece.size)
            self.submit(encoder, step)
            self.readback.take(piece, step)


def _pipeline_key(kernel: str, constants: Constants, kv: str) -> tuple[str, Constants, str]:
    # A kernel that binds no ring has one form.
    return kernel, constants, kv if KERNELS[kernel].binds_ring else "f32"


_contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def context_of(device: Any, make: Callable[[Any], Context] = Context) -> Context:
    """The device's context, the same one for all its engines."""
    # A live context holds its device, so the device's id is not given to another in the meantime.
    found = _contexts.get(id(device))
    if found is None:
        found = _contexts[id(device)] = make(device)
    return found
