"""Head geometries of real models, as their published `config.json` states them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from ..geometry import Geometry


@dataclass(frozen=True)
class Preset:
    """The attention of one model: `layers` layers with softmax attention, all of one geometry."""

    name: str
    model: str
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def geometry(self, window: int = 2048, sinks: int = 4, landmarks: int = 32) -> Geometry:
        """A sealed layer of this model."""
        return Geometry(
            self.num_heads, self.num_kv_heads, self.head_dim, window=window, sinks=sinks, landmarks=landmarks
        )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        # HuggingFaceTB/SmolLM2-135M: num_hidden_layers, num_attention_heads, num_key_value_heads; the
        # width is hidden_size / heads = 576 / 9.
        Preset("smollm2-135m", "SmolLM2-135M", 30, 9, 3, 64),
        # Qwen/Qwen3-0.6B and Qwen/Qwen3-8B: the same fields and head_dim, which is not hidden_size / heads.
        Preset("qwen3-0.6b", "Qwen3-0.6B", 28, 16, 8, 128),
        Preset("qwen3-8b", "Qwen3-8B", 36, 32, 8, 128),
        # meta-llama/Meta-Llama-3-8B: width 4096 / 32.
        Preset("llama-3-8b", "Llama-3-8B", 32, 32, 8, 128),
        # Qwen/Qwen3.5-27B: 64 layers, of which each fourth has softmax attention; width 256, 6 heads a group.
        Preset("qwen3.5-27b", "Qwen3.5-27B (its 16 softmax layers)", 16, 24, 4, 256),
    )
}


def find_preset(name: str) -> Preset:
    """The preset of that name in any case; raises `ArgumentError` and lists the names."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise ArgumentError(f"preset: {name!r}, expected one of {', '.join(PRESETS)}") from None
