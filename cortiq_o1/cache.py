"""The layers of one sequence on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .arrays import as_index
from .capture import Capture, LayerLogs, check_idle
from .device import Device
from .engine import Accepted
from .errors import ArgumentError, ArgumentTypeError, StateError
from .geometry import Geometry
from .layer import Layer
from .planes import SUB_ROWS
from .snapshots import Snapshot
from .state import Fold, LayerState, SealOptions

_T = TypeVar("_T")

DEFAULT_ARCHIVE = 256
"""Evicted rows that a layer keeps for its renewal unless told otherwise."""
MAX_ARCHIVE = 1 << 24
"""Most that it can keep; what a device has room for is mostly less."""


@dataclass(frozen=True, eq=False)
class CacheSnapshot(Mapping[int, Snapshot]):
    """Snapshots of all layers of a cache at one moment, by layer index."""

    name: str
    layers: Mapping[int, Snapshot]

    # A mapping would compare its entries, which are themselves moments and not values.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(snapshot.nbytes for snapshot in self.layers.values())

    def __getitem__(self, index: int) -> Snapshot:
        return _entry(self.layers, index, "snapshot")

    def __contains__(self, index: object) -> bool:
        return index in self.layers

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Cache:
    """The layers of one sequence on one device, by layer index.

    `cache[i] = state` puts a layer there, `cache[i]` is the `Layer`, `del cache[i]` lets go of it; a layer's
    memory is free once nobody holds it or a snapshot of it any more.

    Args:
        device: where the layers live.
        reseal_every: if given, a sealed layer renews its far field from its archive, see `Layer.reseal`,
            before the first `attend` after so many rows since its seal or its last renewal, provided
            that no draft is waiting and that every group has archived enough rows.
        archive: rows that each layer's archive holds, of evicted keys and values and of the queries that
            came as they left; 64 to 2^24. Without `reseal_every` there is no archive.

    Raises:
        ArgumentError, ArgumentTypeError: a number that is not one of these.
    """

    def __init__(
        self, device: Device, reseal_every: int | None = None, archive: int = DEFAULT_ARCHIVE
    ) -> None:
        if not isinstance(device, Device):
            raise ArgumentTypeError(f"device: {type(device).__name__}, expected a Device of open_device")
        self._device = device
        self._reseal_every = None if reseal_every is None else as_index("reseal_every", reseal_every, 1)
        archive = as_index("archive", archive, SUB_ROWS, MAX_ARCHIVE)
        self._archive = archive if reseal_every is not None else 0
        self._layers: dict[int, Layer] = {}
        self._made_from: dict[int, str] = {}
        self._capture: Capture | None = None

    @property
    def device(self) -> Device:
        """Where the layers live."""
        return self._device

    @property
    def rows(self) -> int:
        """Rows of the stream so far, committed ones only, which is the next row's position; 0 without layers.

        Read it before the first layer of a pass attends. Raises `StateError` where the layers have not all
        seen as many, as in the middle of a pass, or after one that failed.
        """
        found = {index: layer.rows for index, layer in self._layers.items()}
        if len(set(found.values())) > 1:
            raise StateError(f"rows: layers have seen different numbers of rows: {found}")
        return next(iter(found.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes that the layers hold: states, archives, drafts, rows of layers that have yet to seal."""
        return sum(layer.nbytes for layer in self._layers.values())

    def __repr__(self) -> str:
        return f"Cache({len(self)} layers, nbytes={self.nbytes}, device={self._device.name!r})"

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __contains__(self, index: object) -> bool:
        return index in self._layers

    def __getitem__(self, index: int) -> Layer:
        return _entry(self._layers, index, "cache")

    def __setitem__(self, index: int, state: LayerState) -> None:
        """Loads a state as layer `index`, in the place of one that is there.

        The state that the layer there was made from is nothing new, however far the layer has moved since:
        it stays as it is, drafts included, so that a loop may assign what it has on every step. Any other
        state, a new seal above all, is uploaded. To go back to a state use `Layer.restore`, or
        `del cache[index]` first.

        Raises what `Device.load` raises; the layer that was there then still is.
        """
        index = as_index("index", index, 0)
        if not isinstance(state, LayerState):
            raise ArgumentTypeError(f"state: {type(state).__name__}, expected a LayerState")
        fingerprint = state.fingerprint
        if self._made_from.get(index) == fingerprint:
            return
        self._put(index, self._device._load(state, self._archive, self._reseal_every))
        self._made_from[index] = fingerprint

    def __delitem__(self, index: int) -> None:
        self[index]._logs = None
        del self._layers[index]
        self._made_from.pop(index, None)

    def seal(
        self,
        index: int,
        q: Any,
        k: Any,
        v: Any,
        geometry: Geometry,
        method: str = "nystrom",
        ridge: float | None = None,
        fold: Fold | None = None,
        progress: Callable[[int, int], object] | None = None,
        rope_theta: float | None = None,
        horizon: int | None = None,
    ) -> Layer:
        """Seals a prompt on the device, see `Device.seal`, as layer `index`, in the place of one there."""
        index = as_index("index", index, 0)
        how = SealOptions(method, ridge, fold, rope_theta, horizon)
        layer = self._device._seal((q, k, v), geometry, how, progress, self._archive, self._reseal_every)
        self._put(index, layer)
        self._made_from.pop(index, None)
        return layer

    def _put(self, index: int, layer: Layer) -> None:
        if index in self._layers:
            self._layers[index]._logs = None
        layer._logs = LayerLogs(self, index, layer.geometry)
        self._layers[index] = layer

    def commit(self, rows: int, draft: str = "") -> None:
        """Accepts the first `rows` rows of a draft in every layer, in one submission; see `Layer.commit`.

        Raises:
            StateError: the cache is empty, or a layer has no uncommitted rows of that name.
            ArgumentError, ArgumentTypeError: `rows` is not an integer from 0 to their number in every
                layer. No layer has moved.
        """
        if not self._layers:
            raise StateError("commit: the cache is empty")
        accepted: list[Accepted] = []
        finishes = []
        for index, layer in self._layers.items():
            try:
                entries, finish = layer._accepting(rows, draft)
            except (StateError, ArgumentError, ArgumentTypeError) as error:
                raise type(error)(f"layer {index}: {error}") from None
            accepted += entries
            finishes.append(finish)
        self._device.engine.commit(accepted)
        for finish in finishes:
            finish()

    def snapshot(self, name: str = "") -> CacheSnapshot:
        """All layers as they are now, see `Layer.snapshot`."""
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name: {name!r}, expected a string")
        return CacheSnapshot(name, {index: layer.snapshot(name) for index, layer in self._layers.items()})

    def restore(self, snapshot: CacheSnapshot) -> None:
        """All layers as the snapshot found them; drafts are forgotten.

        Raises:
            StateError: the snapshot has other layers, or one of another geometry or seal.
            ArgumentTypeError: not a snapshot of a cache. No layer has changed.
        """
        if not isinstance(snapshot, CacheSnapshot):
            raise ArgumentTypeError(f"snapshot: {type(snapshot).__name__}, expected a CacheSnapshot")
        if set(snapshot) != set(self._layers):
            raise StateError(
                f"snapshot {snapshot.name!r}: of layers {sorted(snapshot)}, expected {sorted(self._layers)}"
            )
        self._each(Layer._check, snapshot)
        for finish in self._each(Layer._restoring, snapshot):
            finish()

    def _each(self, step: Callable[[Layer, Snapshot], _T], snapshot: CacheSnapshot) -> list[_T]:
        found = []
        for index, layer in self._layers.items():
            try:
                found.append(step(layer, snapshot[index]))
            except StateError as error:
                raise StateError(f"layer {index}: {error}") from None
        return found

    def capture(
        self, layers: Iterable[int] | None = None, queries: bool = True, rows: bool = True
    ) -> Capture:
        """Keeps the rows that pass inside a `with` block: `with cache.capture() as capture: ...`, then
        `capture.take()`.

        Args:
            layers: of which layers, those that are put into the cache later too; all if None.
            queries: whether layers that have yet to seal themselves keep their queries.
            rows: whether sealed layers keep queries, keys and values.

        Raises:
            ArgumentError, ArgumentTypeError: `layers` is no list of layers' indices, or a flag no bool.
            StateError: on entry, where a capture is at work on this cache already.
        """
        return Capture(self, self._device.engine, layers, queries, rows)

    def _begin(self, capture: Capture) -> None:
        check_idle(self._capture)
        self._capture = capture

    def _end(self, capture: Capture) -> None:
        if self._capture is capture:
            self._capture = None


def _entry(layers: Mapping[int, _T], index: object, where: str) -> _T:
    """`layers[index]`; what can be no index is missing like any other, as in a `dict`."""
    if not isinstance(index, (bool, np.bool_)):
        try:
            return layers[index]  # type: ignore[index]
        except (KeyError, TypeError):
            pass
    raise KeyError(f"layer {index!r}: not in the {where}, which has {sorted(layers)}")
