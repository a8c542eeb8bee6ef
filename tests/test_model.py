"""A model around the library: its file, its forward pass, and how perplexities are compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cortiq_o1 as o1
from cortiq_o1.benchmark.quality import real_layers
from cortiq_o1.cli import ppl
from cortiq_o1.cli.main import main
from cortiq_o1.model import perplexity as pp

WORDS = ["a", "b", "c", "d", "Ġ", "ab", "cd", "Ġab", "Ġcd", "Ċ", "1", "2"]
MERGES = ["a b", "c d", "Ġ ab", "Ġ cd"]
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8
HIDDEN = HEADS * WIDTH


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small random Llama."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_merges(MERGES)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * WIDTH, HIDDEN), "attn_v": (KV_HEADS * WIDTH, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (48, HIDDEN), "ffn_up": (48, HIDDEN),
            "ffn_down": (HIDDEN, 48),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        writer.add_tensor(f"{name}.weight", (scale * rng.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_forward_pass_in_parts_is_that_of_the_whole(tiny: Path) -> None:
    from cortiq_o1.model.llama import Llama

    model = Llama(tiny)
    assert (model.name, model.config.layers, model.config.head_dim) == ("tiny", LAYERS, WIDTH)
    tokens = np.arange(10) % len(WORDS)
    whole = model.hidden(tokens, 0, lambda layer, q, k, v: pp.causal(q, k, v))
    kept: dict[int, list[Any]] = {}

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        kept.setdefault(layer, []).append((k, v))
        return pp.causal(q, *(np.concatenate(side) for side in zip(*kept[layer], strict=True)))

    parts = [model.hidden(tokens[at], at.start, attend) for at in (slice(0, 4), slice(4, 10))]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=2e-4, atol=2e-4)
    # Positions count: the same tokens later give something else.
    later = model.hidden(tokens[:4], 7, lambda layer, q, k, v: pp.causal(q, k, v))
    np.testing.assert_allclose(later, whole[:4], rtol=2e-4, atol=2e-4)  # RoPE is relative
    losses = model.losses(whole[:-1], tokens[1:])
    logits = whole[:-1] @ model._weights["token_embd.weight"].T
    want = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)) - logits[np.arange(9), tokens[1:]]
    np.testing.assert_allclose(losses, want, rtol=1e-4)


def test_the_real_model_gives_what_its_capture_holds() -> None:
    """Queries, keys and values of layer 14 after 15 layers, from another program, kept in float16."""
    pytest.importorskip("gguf")
    try:
        path = ppl.shipped_model()
    except o1.ArgumentError as missing:
        pytest.skip(str(missing))
    from cortiq_o1.model.llama import Llama

    (layer, *_) = real_layers()
    data = np.load(Path(o1.__file__).parent / "data" / "smollm2_qkv.npz")
    tokens = data["tokens"][:48].astype(np.int64)
    seen = {}

    def attend(number: int, q: Any, k: Any, v: Any) -> Any:
        seen[number] = (q, k, v)
        return pp.causal(q, k, v)

    Llama(path).hidden(tokens, 0, attend)
    for got, want in zip(seen[14], (layer.q, layer.k, layer.v), strict=True):
        assert np.abs(got - want[:48]).max() < 1e-3 * np.abs(want[:48]).max()


def test_a_text_of_the_models_own_pieces(tiny: Path) -> None:
    pytest.importorskip("tokenizers")
    from cortiq_o1.model.llama import Llama
    from cortiq_o1.model.tokens import encode

    found = encode(Llama(tiny).fields, "ab cd ab\n12")
    assert [WORDS[t] for t in found] == ["ab", "Ġcd", "Ġab", "Ċ", "1", "2"]


def test_window_and_sinks_alone(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((n, 2, 4), np.float32) for n in (3, 9, 9))
    got = pp.causal(q, k, v, window=3, sinks=2)
    for row in range(3):
        own = 6 + row
        seen = [0, 1, *range(own - 2, own + 1)]
        for head in range(2):
            weights = np.exp(0.5 * k[seen, head] @ q[row, head])
            np.testing.assert_allclose(
                got[row, head], weights @ v[seen, head] / weights.sum(), rtol=1e-5, atol=1e-6
            )


def test_ratios_are_paired() -> None:
    ours, theirs = (pp.Contestant(n, 1, 1, [np.array(x) for x in xs]) for n, xs in (
        ("a", ([1.0, 1.2], [2.0], [3.1])), ("b", ([1.0, 1.0], [2.2], [3.0]))
    ))  # fmt: skip
    found = pp.Ratio.of(ours, theirs)
    logs = np.array([0.1, -0.2, 0.1])
    assert found.mean == pytest.approx(math.exp(logs.mean()))
    reach = 4.303 * logs.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx(
        (math.exp(logs.mean() - reach), math.exp(logs.mean() + reach))
    )
    assert (found.wins, found.largest) == (1, pytest.approx(math.exp(0.1)))
    assert pp.Ratio.of(pp.Contestant("c", 1, 1, [np.ones(2)]), theirs).low is None
    assert ours.perplexity() == pytest.approx(math.exp(np.mean([1.0, 1.2, 2.0, 3.1])))


def test_a_window_of_the_same_bytes() -> None:
    geometry = o1.Geometry(9, 3, 64, window=128, sinks=4, landmarks=32)
    rng = np.random.default_rng(0)
    rows = tuple(rng.standard_normal((200, n, 64), np.float32) for n in (9, 3, 3))
    state = o1.seal(*rows, geometry).nbytes
    wide = pp.same_bytes_window(geometry)
    assert 4 * 3 * 128 * (wide + 4) <= state < 4 * 3 * 128 * (wide + 5)


def test_the_command_on_a_small_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text"
    text.write_text("ab cd ab cd cd\n" * 60, encoding="utf-8")
    sizes = {"windows": 2, "length": 96, "prefill": 60, "window": 16, "landmarks": 4}
    command = ["ppl", "--model", str(tiny), "--text", str(text)]
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    command += ["--seal", "nystrom", "fitted:fold=always"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in report["contestants"]] == [
        pp.EXACT, pp.ALONE, pp.SAME_BYTES, "nystrom", "fitted:fold=always",
    ]  # fmt: skip
    assert report["windows_done"] == 2
    assert report["contestants"][0]["over_exact"]["mean"] == 1.0
    assert all(1.0 < c["perplexity"] < 1e4 and len(c["quarters"]) == 4 for c in report["contestants"])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "fitted:fold=always" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "900"], "tokens, expected at least"),
        (["--seal", "nystrom:depth=2"], "'depth=2' of 'nystrom:depth=2', expected ridge="),
        (["--seal", "nystrom:ridge=x"], "expected a number"),
        (["--prefill", "600"], "length: 512, expected at least 602"),
        (["--model", "no-such-file"], "no-such-file"),
    ],
)
def test_wrong_usage(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text").write_text("ab " * 400, encoding="utf-8")
    command = ["ppl", "--model", str(tiny), "--text", str(tmp_path / "text"), *options]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ppl, "PACKAGES", ("no_such_package",))
    assert main(["ppl"]) == 2
    assert 'no no_such_package; pip install "cortiq-o1[model]"' in capsys.readouterr().err
