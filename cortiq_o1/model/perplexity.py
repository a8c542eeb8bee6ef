"""What a seal costs a model: perplexity on windows of a text, beside exact attention and no far field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32, Rows
from ..cache import Cache
from ..device import Device
from ..errors import ArgumentError
from ..geometry import Geometry
from ..planes import KV_PLANES, PLANES, STATE_PLANES, Sizes
from ..sealing import seal
from .llama import Attend, Llama

EXACT, ALONE, SAME_BYTES = "exact", "window alone", "window of the same bytes"
FORMAT, VERSION = "cortiq-o1-ppl", 1
T_95: Mapping[int, float] = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000,
}  # fmt: skip
"""Student's t at 97.5%, by degrees of freedom; of those between, the next lower one's."""
QUARTERS = 4


@dataclass(frozen=True)
class Settings:
    """What is measured: `windows` pieces of a text of `length` tokens, `prefill` of each as prompt."""

    windows: int = 13
    length: int = 512
    prefill: int = 256
    window: int = 128
    sinks: int = 4
    landmarks: int = 32
    seals: tuple[str, ...] = ("nystrom", "fitted")

    def __post_init__(self) -> None:
        for name, low in (("windows", 1), ("prefill", 1), ("length", self.prefill + 2)):
            if getattr(self, name) < low:
                raise ArgumentError(f"{name}: {getattr(self, name)}, expected at least {low}")
        for spelled in self.seals:
            options_of(spelled)

    def geometry(self, model: Llama, window: int | None = None) -> Geometry:
        """Of each layer."""
        config = model.config
        return Geometry(
            config.heads, config.kv_heads, config.head_dim,
            window=window or self.window, sinks=self.sinks, landmarks=self.landmarks,
        )  # fmt: skip


def options_of(spelled: str) -> dict[str, Any]:
    """Options of `seal` from `method`, or from `method:ridge=1e-2,fold=never`.

    Raises `ArgumentError` for what is spelled otherwise; `seal` says what it does not know.
    """
    method, _, rest = spelled.partition(":")
    found: dict[str, Any] = {"method": method}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in ("ridge", "fold", "rope_theta", "horizon"):
            raise ArgumentError(
                f"seal: {part!r} of {spelled!r}, expected ridge=, fold=, rope_theta= or horizon="
            )
        try:
            found[name] = value if name == "fold" else int(value) if name == "horizon" else float(value)
        except ValueError:
            raise ArgumentError(f"seal: {part!r} of {spelled!r}, expected a number") from None
    return found


@dataclass
class Contestant:
    """One way to attend: the state's bytes a layer, and each window's losses `(rows,)` in nats."""

    name: str
    window: int
    nbytes: int
    losses: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def perplexity(self) -> float:
        """Over all rows of all windows so far."""
        return math.exp(float(np.mean(np.concatenate(self.losses))))

    def quarters(self) -> list[float]:
        """Perplexity over each quarter of the rows after the prompt."""
        parts = [np.array_split(loss, QUARTERS) for loss in self.losses]
        return [math.exp(float(np.mean(np.concatenate([p[i] for p in parts])))) for i in range(QUARTERS)]


@dataclass(frozen=True)
class Ratio:
    """A contestant's perplexity over another's, paired by window: the geometric mean and its 95% interval by
    Student's t over the windows' log ratios (none for one window); windows where it is lower; the largest."""

    mean: float
    low: float | None
    high: float | None
    wins: int
    largest: float

    @classmethod
    def of(cls, ours: Contestant, theirs: Contestant) -> Ratio:
        """From the windows that both have."""
        pairs = zip(ours.losses, theirs.losses, strict=False)
        logs = np.array([float(a.mean() - b.mean()) for a, b in pairs])
        mean, wins, largest = float(logs.mean()), int((logs < 0.0).sum()), math.exp(float(logs.max()))
        if len(logs) < 2:
            return cls(math.exp(mean), None, None, wins, largest)
        free = len(logs) - 1
        reach = T_95[max(n for n in T_95 if n <= free)] * float(logs.std(ddof=1)) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), wins, largest)


@dataclass
class Report:
    """What has been measured so far."""

    model: str
    text: str
    device: str
    settings: Settings
    contestants: list[Contestant]
    done: int = 0
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        by_name = {c.name: c for c in self.contestants}
        found: list[dict[str, Any]] = []
        for one in self.contestants:
            entry: dict[str, Any] = {"name": one.name, "window": one.window, "state_bytes": one.nbytes}
            if one.losses:
                entry["perplexity"] = one.perplexity()
                entry["quarters"] = one.quarters()
                entry["losses"] = [float(loss.mean()) for loss in one.losses]
                for key, other in (("over_exact", EXACT), ("over_window_alone", ALONE)):
                    entry[key] = vars(Ratio.of(one, by_name[other]))
            found.append(entry)
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "text": self.text,
            "device": self.device,
            "settings": vars(self.settings),
            "windows_done": self.done,
            "interrupted": self.interrupted,
            "contestants": found,
        }


class Measurement:
    """Windows of a text through a model, once for each contestant; `report` is true to what has run."""

    def __init__(
        self, model: Llama, tokens: npt.NDArray[np.int64], text: str, device: Device, settings: Settings
    ) -> None:
        need = settings.windows * settings.length
        if len(tokens) < need:
            raise ArgumentError(
                f"text: {len(tokens)} tokens, expected at least {need}; lower windows or length"
            )
        self.model, self.device, self.settings = model, device, settings
        self.pieces = [
            tokens[at * settings.length : (at + 1) * settings.length] for at in range(settings.windows)
        ]
        wide = same_bytes_window(settings.geometry(model))
        sealed = _state_bytes(settings.geometry(model))
        per_row = _row_bytes(settings.geometry(model))
        contestants = [
            Contestant(EXACT, settings.length, settings.length * per_row),
            Contestant(ALONE, settings.window, (settings.window + settings.sinks) * per_row),
            Contestant(SAME_BYTES, wide, (wide + settings.sinks) * per_row),
            *(Contestant(spelled, settings.window, sealed) for spelled in settings.seals),
        ]
        self.report = Report(model.name, text, device.name, settings, contestants)

    def run(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """All windows; tells what comes next."""
        for number, piece in enumerate(self.pieces):
            # A window counts whole or not at all, so that all are paired.
            found = list(self._window(piece, f"window {number + 1}: ", tell))
            for contestant, loss in zip(self.report.contestants, found, strict=True):
                contestant.losses.append(loss)
            self.report.done += 1

    def _window(
        self, piece: npt.NDArray[np.int64], where: str, tell: Callable[[str], None]
    ) -> Iterator[npt.NDArray[np.float64]]:
        model, prefill = self.model, self.settings.prefill
        kept: list[Rows] = []

        def first(layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
            kept.append((q, k, v))
            return causal(q, k, v)

        tell(where + "prompt")
        model.hidden(piece[:prefill], 0, first)
        rest, targets = piece[prefill:-1], piece[prefill + 1 :]
        for contestant in self.report.contestants:
            tell(where + contestant.name)
            attend = self._attend(contestant, kept)
            yield model.losses(model.hidden(rest, prefill, attend), targets)

    def _attend(self, contestant: Contestant, kept: Sequence[Rows]) -> Attend:
        """The attention of a contestant after the prompt."""
        if contestant.name in (EXACT, ALONE, SAME_BYTES):
            window = None if contestant.name == EXACT else contestant.window

            def exact(layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
                _, keys, values = kept[layer]
                both = np.concatenate([keys, k]), np.concatenate([values, v])
                return causal(q, *both, window, self.settings.sinks)

            return exact
        geometry, options = self.settings.geometry(self.model), options_of(contestant.name)
        cache = Cache(self.device)

        def sealed(layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
            cache[layer] = seal(*kept[layer], geometry, **options)
            return cache[layer].attend(q, k, v)

        return sealed


def causal(q: Float32, k: Float32, v: Float32, window: int | None = None, sinks: int = 0) -> Float32:
    """Exact attention of the last rows of a stream: `q (T, nh, d)` over `k (S, G, d)`, `v (S, G, dv)`;
    where a window is given, over the first `sinks` rows and the newest `window` alone."""
    rows, heads, _ = q.shape
    out = np.empty((rows, heads, v.shape[2]), np.float32)
    own, columns = np.arange(len(k) - rows, len(k))[:, None], np.arange(len(k))
    hidden = columns > own
    if window is not None:
        hidden |= (columns >= sinks) & (columns <= own - window)
    scale = np.float32(q.shape[2] ** -0.5)
    for head in range(heads):
        group = head * k.shape[1] // heads
        logits = (scale * q[:, head]) @ k[:, group].T
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[:, group] / weights.sum(axis=1, keepdims=True)
    return out


def _row_bytes(geometry: Geometry) -> int:
    return 4 * geometry.num_kv_heads * (geometry.head_dim + (geometry.value_dim or 0))


def _state_bytes(geometry: Geometry) -> int:
    sizes = Sizes.of(geometry)
    return sum(PLANES[name].nbytes(sizes) for name in STATE_PLANES)


def same_bytes_window(geometry: Geometry) -> int:
    """The window that takes, with the far field's bytes added, what the sealed state takes."""
    sizes = Sizes.of(geometry)
    far = _state_bytes(geometry) - sum(PLANES[name].nbytes(sizes) for name in KV_PLANES)
    return geometry.window + far // _row_bytes(geometry)
