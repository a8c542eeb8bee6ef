"""A Llama's forward pass in NumPy, its weights from a GGUF file, its attention whoever's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Float32
from ..errors import ArgumentError

Attend = Callable[[int, Float32, Float32, Float32], Float32]
"""`(layer, q (T, nh, d), k (T, G, d), v (T, G, d))` after RoPE to `(T, nh, d)`."""

LOGIT_ROWS = 64
"""Rows whose logits are made at a time: a vocabulary is wide."""


@dataclass(frozen=True)
class Config:
    """Sizes of a model, as GGUF's metadata has them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    epsilon: float


class Llama:
    """A model of GGUF's architecture "llama" in float32.

    Args:
        path: the GGUF file, of any quantisation that the package `gguf` can undo.

    Raises:
        ArgumentError: it is no such file, or of another architecture.
        ImportError: the package `gguf` is missing.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import gguf

        try:
            reader = gguf.GGUFReader(os.fspath(path))
        except ValueError as error:
            raise ArgumentError(f"model: {os.fspath(path)}: {error}") from None
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise ArgumentError(f"model: architecture {architecture!r}, expected 'llama'")
        self.config = _config(self.fields)
        self._weights: dict[str, Float32] = {}
        for tensor in reader.tensors:
            # GGUF names dimensions innermost first; the array is the other way round.
            self._weights[tensor.name] = np.ascontiguousarray(
                gguf.dequantize(tensor.data, tensor.tensor_type), np.float32
            ).reshape(tuple(int(n) for n in reversed(tensor.shape)))
        for layer in range(self.config.layers):
            for name, heads in (("attn_q", self.config.heads), ("attn_k", self.config.kv_heads)):
                key = f"blk.{layer}.{name}.weight"
                self._weights[key] = _half_split(self._weights[key], heads)

    @property
    def name(self) -> str:
        """The model's own name."""
        return str(self.fields.get("general.name", "llama"))

    def hidden(self, tokens: npt.NDArray[np.integer[Any]], position: int, attend: Attend) -> Float32:
        """The last layer's normalised output `(T, hidden)` for tokens at positions from `position` on."""
        config, w = self.config, self._weights
        x = w["token_embd.weight"][tokens]
        turn = _angles(config, position, len(tokens))
        for layer in range(config.layers):
            block = f"blk.{layer}."
            y = self._norm(x, block + "attn_norm.weight")
            q, k, v = (
                (y @ w[f"{block}{name}.weight"].T).reshape(len(x), heads, config.head_dim)
                for name, heads in (
                    ("attn_q", config.heads), ("attn_k", config.kv_heads), ("attn_v", config.kv_heads)
                )
            )  # fmt: skip
            out = attend(layer, _turned(q, turn), _turned(k, turn), v)
            x = x + out.reshape(len(x), -1) @ w[block + "attn_output.weight"].T
            y = self._norm(x, block + "ffn_norm.weight")
            gate = y @ w[block + "ffn_gate.weight"].T
            with np.errstate(over="ignore"):
                gate /= 1.0 + np.exp(-gate)
            x = x + (gate * (y @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
        return self._norm(x, "output_norm.weight")

    def losses(self, hidden: Float32, targets: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """`-log p` of each row's target token, in nats."""
        output = self._weights.get("output.weight", self._weights["token_embd.weight"])
        found = np.empty(len(targets))
        for at in range(0, len(targets), LOGIT_ROWS):
            part = slice(at, at + LOGIT_ROWS)
            logits = hidden[part] @ output.T
            top = logits.max(axis=1)
            own = logits[np.arange(len(logits)), targets[part]].astype(np.float64)
            mass = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
            found[part] = top + np.log(mass) - own
        return found

    def _norm(self, x: Float32, name: str) -> Float32:
        scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.config.epsilon)
        return np.asarray(x * scale * self._weights[name], np.float32)


def _config(fields: dict[str, Any]) -> Config:
    def get(name: str, default: Any = None) -> Any:
        found = fields.get(f"llama.{name}", default)
        if found is None:
            raise ArgumentError(f"model: no llama.{name} in its metadata")
        return found

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    return Config(
        int(get("block_count")), hidden, heads, int(get("attention.head_count_kv", heads)),
        int(get("attention.key_length", hidden // heads)), float(get("rope.freq_base", 10_000.0)),
        float(get("attention.layer_norm_rms_epsilon")),
    )  # fmt: skip


def _half_split(weight: Float32, heads: int) -> Float32:
    """Rows so that component i turns with i + d/2: GGUF has those that turn together side by side."""
    rows, width = weight.shape
    return np.ascontiguousarray(
        weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
    )


def _angles(config: Config, position: int, rows: int) -> tuple[Float32, Float32]:
    half = config.head_dim // 2
    angles = np.arange(position, position + rows)[:, None] * config.theta ** (-np.arange(half) / half)
    return np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)


def _turned(x: Float32, turn: tuple[Float32, Float32]) -> Float32:
    cos, sin = turn
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
