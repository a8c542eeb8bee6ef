"""The error of a sealed layer on real queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from ..device import Device
from ..geometry import Geometry
from ..sealing import seal
from .results import Errors, Quality

Array = npt.NDArray[Any]

DATA = "smollm2_qkv.npz"
WINDOW, SINKS, LANDMARKS = 128, 4, 32
STREAM_ROWS = 64  # rows of a call while streaming


@dataclass(frozen=True)
class RealLayer:
    """One attention layer's inputs: `q (T, nh, d)`, `k (T, G, d)`, `v (T, G, dv)`, float32."""

    name: str
    q: Array
    k: Array
    v: Array


def real_layers() -> list[RealLayer]:
    """The layers in the package's data."""
    path = resources.files("cortiq_o1") / "data" / DATA
    with path.open("rb") as file, np.load(file) as data:
        return [
            RealLayer(
                f"SmolLM2-135M, layer {layer}",
                *(data[f"{part}_{layer}"].astype(np.float32) for part in "qkv"),
            )
            for layer in data["layers"]
        ]


def attention64(layer: RealLayer, first: int, scale: float, near: tuple[int, int] | None = None) -> Array:
    """Causal attention of rows `first ..` in float64, `(T - first, nh, dv)`.

    Over all earlier rows, or with `near = (sinks, window)` over those alone.
    """
    q, k, v = (part.astype(np.float64) for part in (layer.q[first:], layer.k, layer.v))
    rows, heads = q.shape[:2]
    at, key = np.arange(first, first + rows)[:, None], np.arange(len(k))[None, :]
    seen = key <= at
    if near:
        sinks, window = near
        seen &= (key < sinks) | (key > at - window)
    out = np.empty((rows, heads, v.shape[2]))
    for head in range(heads):
        group = head * k.shape[1] // heads
        logits = np.where(seen, scale * (q[:, head] @ k[:, group].T), -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[:, group] / weights.sum(axis=1, keepdims=True)
    return out


def errors(got: Array, exact: Array) -> Errors:
    """How far outputs `(rows, nh, dv)` lie from the exact ones."""
    off = np.linalg.norm(got - exact, axis=-1)
    size = np.linalg.norm(exact, axis=-1)
    part = off / size
    rms = float(np.sqrt(np.mean(off**2) / np.mean(size**2)))
    return Errors(rms, float(np.median(part)), float(part.max()))


class QualityProbe:
    """Seals the first half of the real rows, streams the rest through a device, compares.

    Several layers of data count as more rows. What no device changes is computed once.
    """

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge
        self.layers = real_layers()
        shape = self.layers[0]
        self.geometry = Geometry(
            shape.q.shape[1],
            shape.k.shape[1],
            shape.q.shape[2],
            shape.v.shape[2],
            window=WINDOW,
            sinks=SINKS,
            landmarks=LANDMARKS,
        )
        self.prompt = len(shape.q) // 2
        scale = float(self.geometry.scale or 0)
        self.exact = np.concatenate([attention64(layer, self.prompt, scale) for layer in self.layers])
        near = (SINKS, WINDOW)
        self.window_only = errors(
            np.concatenate([attention64(layer, self.prompt, scale, near) for layer in self.layers]),
            self.exact,
        )
        self.states = [
            seal(r.q[: self.prompt], r.k[: self.prompt], r.v[: self.prompt], self.geometry, ridge=ridge)
            for r in self.layers
        ]

    def run(self, device: Device) -> Quality:
        """The error on one device."""
        outputs = []
        for rows, state in zip(self.layers, self.states, strict=True):
            layer = device.load(state)
            for at in range(self.prompt, len(rows.q), STREAM_ROWS):
                part = slice(at, at + STREAM_ROWS)
                outputs.append(layer.attend(rows.q[part], rows.k[part], rows.v[part]))
        return Quality(
            source=", ".join(rows.name for rows in self.layers),
            geometry=self.geometry,
            ridge=self.ridge,
            prompt_rows=self.prompt,
            streamed_rows=len(self.layers[0].q) - self.prompt,
            sealed=errors(np.concatenate(outputs), self.exact),
            window_only=self.window_only,
        )
