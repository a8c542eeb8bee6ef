"""`cortiq-o1 bench`: the sealed layer beside exact attention, on each adapter of the machine."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..benchmark import PRESETS, Report, Settings, Suite, find_preset
from ..benchmark.suite import Step
from ..errors import ArgumentError
from . import svg
from .bench_report import render
from .choice import choose
from .plan import integers
from .report import err_console, write_json

CONTEXTS, ROWS = (1024, 4096, 16384, 65536), (1, 64, 128)
BUDGET_SECONDS = 180.0


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time a token and rows a second beside exact attention",
        description=(
            "Times a sealed layer beside exact attention by the same kernels, over every context given, "
            "and compares its outputs with exact attention on real data."
        ),
    )
    parser.add_argument(
        "--device",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help='"all" (default), "auto", a backend, or parts of names as `cortiq-o1 adapters` lists them',
    )
    parser.add_argument(
        "--preset", default="smollm2-135m", metavar="NAME", help=f"{', '.join(PRESETS)}; default the first"
    )
    parser.add_argument(
        "--contexts", type=integers, default=CONTEXTS, metavar="N,N,...", help=_default(CONTEXTS)
    )
    parser.add_argument(
        "--rows", type=integers, default=ROWS, metavar="N,N,...", help=f"rows of a call; {_default(ROWS)}"
    )
    for name, default in (("window", 2048), ("sinks", 4), ("landmarks", 32)):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"of the sealed layer; default {default}",
        )
    parser.add_argument(
        "--ridge", type=float, default=1e-6, metavar="R", help="of the seal over real data; default 1e-6"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_SECONDS,
        metavar="SECONDS",
        help=f"for all devices together; what does not fit is left out; default {BUDGET_SECONDS:.0f}",
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON on standard output")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw time against context, for the first of --rows"
    )
    parser.set_defaults(run=run)


def _default(values: tuple[int, ...]) -> str:
    return f"default {','.join(map(str, values))}"


def run(args: argparse.Namespace) -> int:
    """Measures, then prints; an interruption prints what is there."""
    preset = find_preset(args.preset)
    geometry = preset.geometry(args.window, args.sinks, args.landmarks)
    settings = Settings(
        preset,
        geometry,
        tuple(sorted(set(args.contexts))),
        tuple(sorted(set(args.rows))),
        args.budget,
        args.ridge,
    )
    if args.svg and not args.svg.parent.is_dir():
        raise ArgumentError(f"--svg: {args.svg}: no such directory")
    candidates = choose(args.device)
    suite = Suite(settings)
    try:
        with _progress(settings.steps * sum(not info.problem for info in candidates)) as step:
            suite.run(candidates, step)
    except KeyboardInterrupt:
        suite.report.interrupted = True
    return finish(suite.report, args)


@contextmanager
def _progress(steps: int) -> Iterator[Step]:
    """A progress bar on standard error; without a terminal there, a line for each step."""
    console = err_console()
    if not console.is_terminal:
        yield lambda text: console.print(text)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        begun = itertools.count()
        yield lambda text: progress.update(task, description=text, completed=next(begun))


def finish(report: Report, args: argparse.Namespace) -> int:
    """Writes and prints a report; returns the exit code."""
    if args.svg:
        args.svg.write_text(svg.draw(report, report.rows[0]), encoding="utf-8")
        err_console().print(f"drawn: {args.svg}", soft_wrap=True)
    if args.json:
        write_json(report.to_dict())
    else:
        render(report)
    if report.interrupted:
        err_console().print(
            "cortiq-o1 bench: interrupted; the above is what was measured", style="red", soft_wrap=True
        )
        return 130
    failed = [device for device in report.devices if device.failed]
    for device in failed:
        err_console().print(f"cortiq-o1 bench: {device.name}: {device.problem}", style="red", soft_wrap=True)
    return 3 if failed else 0
