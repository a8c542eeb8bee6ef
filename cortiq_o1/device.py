"""A device as it is listed, and as layers live on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from .arrays import Rows, as_float16
from .engine import Engine
from .errors import ArgumentTypeError
from .geometry import Geometry
from .gpu.adapters import AdapterInfo
from .planning import Limits, chunk_rows

if TYPE_CHECKING:
    from .batch import Batch
    from .layer import Layer
    from .state import Fold, LayerState, SealOptions
    from .warming import WarmUp


@dataclass(frozen=True)
class DeviceInfo:
    """One thing to compute on; `open_device` takes it.

    `backend` is "vulkan", "metal", "d3d12", "gl" or "cpu"; `kind` "discrete", "integrated", "other" or
    "cpu"; `software` is true for a renderer without hardware; `problem` says why it cannot be used.
    """

    name: str
    backend: str
    kind: str
    software: bool
    vendor: str = ""
    driver: str = ""
    features: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict, compare=False)
    problem: str | None = None
    adapter: AdapterInfo | None = field(default=None, repr=False)

    @classmethod
    def of(cls, adapter: AdapterInfo) -> DeviceInfo:
        """The description of an adapter."""
        return cls(
            adapter.name, adapter.backend, adapter.kind, adapter.software, adapter.vendor, adapter.driver,
            adapter.features, adapter.limits, adapter.problem, adapter,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """`name (backend)`, for messages."""
        return f"{self.name} ({self.backend})"

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {
            "name": self.name,
            "backend": self.backend,
            "kind": self.kind,
            "software": self.software,
            "vendor": self.vendor,
            "driver": self.driver,
            "features": list(self.features),
            "limits": dict(self.limits),
            "problem": self.problem,
        }


class Device:
    """Where layers live: a GPU, a software renderer, or NumPy. Made by `open_device`."""

    def __init__(
        self,
        info: DeviceInfo,
        path: str,
        limits: Limits,
        gpu: Any = None,
        precision: str = "exact",
        kv: str = "f32",
    ) -> None:
        self._info = info
        self._path = path
        # NumPy's planes are float32 whatever their values are rounded to.
        self._limits = limits if gpu is None else replace(limits, kv=kv)
        self._kv = kv
        products = gpu is not None or path != "auto"  # NumPy without a plan has none to round for
        self._precision = precision if products and limits.float16 else "exact"
        self._gpu = gpu
        self._engine: Engine | None = None

    @property
    def name(self) -> str:
        """The adapter's name, or the processor's."""
        return self._info.name

    @property
    def described(self) -> DeviceInfo:
        """The device as `devices` lists it; `open_device` takes it."""
        return self._info

    @property
    def backend(self) -> str:
        """ "vulkan", "metal", "d3d12", "gl" or "cpu"."""
        return self._info.backend

    @property
    def kind(self) -> str:
        """ "discrete", "integrated", "other" or "cpu"."""
        return self._info.kind

    @property
    def software(self) -> bool:
        """Whether it is a renderer without hardware."""
        return self._info.software

    @property
    def limits(self) -> Limits:
        """What the device grants to the planner."""
        return self._limits

    @property
    def path(self) -> str:
        """The planner's path."""
        return self._path

    @property
    def precision(self) -> str:
        """The precision in force: "fast" only where the device has 16-bit floats."""
        return self._precision

    @property
    def kv(self) -> str:
        """How keys and values of window and sinks are kept, "f32" or "f16"."""
        return self._kv

    @property
    def gpu(self) -> Any:
        """The device object of wgpu or wgpudawn, None for the CPU."""
        return self._gpu

    @property
    def engine(self) -> Any:
        """What computes, made on first use; the `cortiq_o1.engine.Engine` protocol."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def _make_engine(self) -> Engine:
        # Each of these is only needed by those who come here.
        if self._gpu is not None:
            from .gpu.executor import GpuEngine

            return GpuEngine(self._gpu, self._path, self._precision, self._kv)
        if self._path != "auto":
            from .cpu.executor import PlanEngine

            return PlanEngine(self._limits, poison=False, path=self._path, precision=self._precision)
        from .cpu.direct import DirectEngine

        return DirectEngine()

    @overload
    def load(self, state: LayerState) -> Layer: ...

    @overload
    def load(self, state: Sequence[LayerState]) -> Batch: ...

    def load(self, state: LayerState | Sequence[LayerState]) -> Layer | Batch:
        """A layer of its own with a copy of the state on this device; of a list of states, a batch.

        Raises:
            ArgumentTypeError: `state` is no `LayerState` nor a list of them.
            ArgumentError: states of different geometries.
            GeometryError: a plane passes the device's limits, or the device's path cannot serve; names
                the field to lower. Nothing has been allocated.
            DeviceMemoryError: the device has no room.
        """
        from .batch import Batch
        from .state import LayerState

        if isinstance(state, LayerState):
            return self._load(state)
        if isinstance(state, (list, tuple)):
            return Batch(self, state)
        raise ArgumentTypeError(f"state: {type(state).__name__}, expected a LayerState or a list of them")

    def _load(self, state: LayerState, archive: int = 0, reseal_every: int | None = None) -> Layer:
        from .layer import Layer

        self._check_geometry(state.geometry)
        return Layer._of(self, self._kept_state(state), archive, reseal_every)

    def _kept_state(self, state: LayerState) -> LayerState:
        """A state as the device keeps it."""
        return state.rounded() if self._kv == "f16" else state

    def _kept_rows(self, rows: Rows) -> Rows:
        """Queries, keys and values as the device takes them in."""
        if self._kv == "f32":
            return rows
        q, k, v = rows
        return q, as_float16("k", k), as_float16("v", v)

    def _check_geometry(self, geometry: Geometry) -> None:
        # Of two rows: one row alone may take a path of its own.
        chunk_rows(geometry, 2, self._path, self._limits)

    def warm_up(self, geometry: Geometry, rows: int | Iterable[int] = (1, 64)) -> WarmUp:
        """Compiles what calls of so many rows need, ahead of the first: `attend`, `encode` and `commit` of
        layers of the geometry, and of batches of them.

        Otherwise the first call compiles what it needs, no more. The device keeps what is compiled for all
        its layers; a driver with a cache of its own has it the next time.

        Args:
            geometry: the layers' sizes; widths are compiled in.
            rows: rows of a call, one number or several. Calls of other lengths mostly need the same.

        Raises:
            ArgumentTypeError: `geometry` is none.
            ArgumentError, ArgumentTypeError: `rows` are not positive integers.
            GeometryError: the device's limits or its path do not serve; names the field to lower.
            ShaderError: a kernel does not compile.
        """
        from .warming import warm_up

        return warm_up(self.engine, geometry, rows, self._path, self._limits)

    def seal(
        self,
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
        """`cortiq_o1.seal` and `load` in one, for long prompts: the far field is folded on the device.

        Memory beside the prompt's own does not grow with it, and no dispatch takes more than 64 rows.
        Landmarks and mixing matrix are made on the host in float64, the far field's sums are float32.

        Args:
            q: queries `(T, nh, d)`, as the attention sees them (after RoPE), not scaled.
            k: keys `(T, G, d)`.
            v: values `(T, G, dv)`.
            geometry: the layer's sizes.
            method, ridge, fold, rope_theta, horizon: see `cortiq_o1.seal`.
            progress: called with the rows done and all rows, first with 0. What it raises ends the seal.

        Raises what `cortiq_o1.seal` and `load` raise.
        """
        from .state import SealOptions

        how = SealOptions(method, ridge, fold, rope_theta, horizon)
        return self._seal((q, k, v), geometry, how, progress)

    def _seal(
        self,
        rows: tuple[Any, Any, Any],
        geometry: Geometry,
        options: SealOptions,
        progress: Callable[[int, int], object] | None,
        archive: int = 0,
        reseal_every: int | None = None,
    ) -> Layer:
        from .layer import Layer
        from .sealing import check_rows

        if not isinstance(geometry, Geometry):
            raise ArgumentTypeError(f"geometry: {type(geometry).__name__}, expected a Geometry")
        if progress is not None and not callable(progress):
            raise ArgumentTypeError(f"progress: {type(progress).__name__}, expected a callable")
        checked = self._kept_rows(check_rows(*rows, geometry))
        self._check_geometry(geometry)
        return Layer._of_prompt(self, checked, geometry, options, progress, archive, reseal_every)

    def info(self) -> dict[str, Any]:
        """What reports say of the device, ready for JSON."""
        return {
            **self._info.to_dict(),
            "path": self._path,
            "precision": self._precision,
            "kv": self._kv,
            "binding_bytes": self._limits.binding_bytes,
            "workgroups": self._limits.workgroups,
        }

    def __repr__(self) -> str:
        fast = f", precision={self._precision!r}" if self._precision != "exact" else ""
        halves = f", kv={self._kv!r}" if self._kv != "f32" else ""
        return f"Device({self.name!r}, {self.backend!r}, path={self._path!r}{fast}{halves})"
