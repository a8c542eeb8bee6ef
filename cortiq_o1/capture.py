"""The rows that pass a cache's layers, kept on the device until somebody asks for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import Float32, as_bool, as_index
from .errors import ArgumentTypeError, StateError
from .geometry import Geometry

if TYPE_CHECKING:
    from .cache import Cache
    from .engine import Engine


class Captured(NamedTuple):
    """Consecutive rows of one layer, in the order of the stream.

    `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`; of rows that passed before the layer's seal just
    the queries, `k` and `v` then are None.
    """

    layer: int
    q: Float32
    k: Float32 | None
    v: Float32 | None


class Capture:
    """Keeps copies of the rows that pass; made by `Cache.capture`, at work inside its `with` block.

    Rows pass when they are committed: those of an `attend` at once, those of a draft with `commit`, as many
    as it accepts. They are copied on the device in the submission that moves the state over them, so
    nothing waits for them until `take`. The block may be entered again; rows that pass between two entries
    are not kept, so what comes after them is a run of its own.
    """

    def __init__(
        self, cache: Cache, engine: Engine, layers: Iterable[int] | None, queries: bool, rows: bool
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._layers = None if layers is None else _indices(layers)
        self._queries = as_bool("queries", queries)
        self._rows = as_bool("rows", rows)
        self._entry = 0
        # One run of rows after another; a layer begins a new one where its stream does not go on, all do
        # where the block is entered again.
        self._runs: dict[tuple[int, int, object, bool], Any] = {}

    def __enter__(self) -> Capture:
        self._cache._begin(self)
        self._entry += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cache._end(self)

    def wants_q(self, layer: int) -> bool:
        """Whether the queries of a layer are kept because it has yet to seal itself.

        Raises `ArgumentError` or `ArgumentTypeError` where `layer` is no layer's index.
        """
        layer = as_index("layer", layer, 0)
        return self._queries and self._wants(layer) and layer in self._cache and not self._cache[layer].sealed

    def take(self) -> list[Captured]:
        """What has passed since the last call, all rows of a layer joined, and forgets it.

        Layers come in the order in which their first rows did. A layer comes more than once where its rows
        are not of one kind or do not follow each other: if it sealed itself on the way (its queries from
        before the seal first), was restored or replaced, or if the block was left and entered again; the
        last of them is the newest. Works after the `with` block too.

        Raises `DeviceError` where the device fails; nothing is forgotten then.
        """
        found = []
        for (layer, *_), log in self._runs.items():
            if log.rows:
                q, *more = self._engine.read_log(log)
                k, v = more if more else (None, None)
                found.append(Captured(layer, q, k, v))
        self._runs.clear()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(log.nbytes for log in self._runs.values())

    def _wants(self, layer: int) -> bool:
        return self._layers is None or layer in self._layers

    def _log(self, layer: int, stretch: object, geometry: Geometry, sealed: bool) -> Any:
        """Where a layer's rows go, None if they are not wanted."""
        if not self._wants(layer) or not (self._rows if sealed else self._queries):
            return None
        key = (layer, self._entry, stretch, sealed)
        if key not in self._runs:
            parts = ("q", "k", "v") if sealed else ("q",)
            self._runs[key] = self._engine.new_log(geometry, parts)
        return self._runs[key]


class LayerLogs:
    """One layer's view of whichever capture is at work on its cache."""

    def __init__(self, cache: Cache, layer: int, geometry: Geometry) -> None:
        # Weakly: who keeps a layer does not keep its cache, and a cache is gone when its last holder is.
        self._cache = weakref.ref(cache)
        self._layer = layer
        self._geometry = geometry
        self._stretch = object()

    def begin(self) -> None:
        """Rows from here on do not follow those that passed before."""
        self._stretch = object()

    def log(self, sealed: bool) -> Any:
        """Where rows go, from before the layer's seal or after it; None if nowhere."""
        cache = self._cache()
        capture = None if cache is None else cache._capture
        if capture is None:
            return None
        return capture._log(self._layer, self._stretch, self._geometry, sealed)


def _indices(layers: Iterable[int]) -> frozenset[int]:
    if isinstance(layers, (str, bytes, bytearray, Mapping)) or not isinstance(layers, Iterable):
        raise ArgumentTypeError(f"layers: {layers!r}, expected a list of integers")
    given = list(layers)
    return frozenset(as_index("layers", i, 0) for i in given)


def check_idle(capture: Capture | None) -> None:
    """Raises `StateError` where a capture is at work already."""
    if capture is not None:
        raise StateError("capture: one is at work on this cache already; leave its with block first")
