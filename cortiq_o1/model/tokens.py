"""A GGUF file's own tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError


def encode(fields: dict[str, Any], text: str) -> npt.NDArray[np.int64]:
    """The tokens of a text, by the byte-level BPE in a GGUF file's metadata; none is put before it.

    Raises:
        ArgumentError: the file has another kind of tokenizer.
        ImportError: the package `tokenizers` is missing.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "")
    if kind != "gpt2":
        raise ArgumentError(f"model: tokenizer {kind!r}, expected 'gpt2', a byte-level BPE")
    vocabulary = {token: at for at, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return np.array(tokenizer.encode(text).ids, np.int64)
