"""`cortiq-o1 verify`: whether each adapter computes the operator right."""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from .._version import __version__
from ..devices import chosen_path
from ..verification.suite import Cases, Cell, Failure, Level, Suite, Target, rows_of, targets
from .choice import choose
from .report import (
    CHECK_FAILED,
    DEVICE,
    INTERRUPTED,
    OK,
    Column,
    count_of,
    err_console,
    out_console,
    print_lines,
    print_table,
    progress,
    write_json,
)

_SHOWN_FAILURES = 12


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "verify",
        help="check every kernel and whole layers on each adapter",
        description=(
            "Runs every kernel against its NumPy twin and whole layers, on every path, against a float64 "
            "reference. Each figure is the worst error as a part of what rounding explains, then the worst "
            "error itself, relative to values above 1."
        ),
        epilog=(
            "CORTIQ_O1_PATH leaves a single path. Exit code 1 if a check or a device fails, 3 if no device "
            "can be opened."
        ),
    )
    parser.add_argument(
        "--device",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help='"all" (default), "auto", a backend, or parts of names as `cortiq-o1 adapters` lists them',
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument(
        "--quick", dest="level", action="store_const", const="quick", help="fewer random cases"
    )
    level.add_argument("--full", dest="level", action="store_const", const="full", help="many random cases")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the random cases; default 0")
    parser.add_argument("--case", metavar="NAME", help="only the cases of this name")
    parser.add_argument("--json", action="store_true", help="the matrix as JSON on standard output")
    parser.set_defaults(run=run, level="default")


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer from 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Checks, then prints; an interruption prints what is there."""
    chosen_path()  # an unknown one is wrong usage, not each device's failure
    level: Level = args.level
    cases = Cases.of(level, args.seed, args.case)
    columns = [target for info in choose(args.device) for target in targets(info)]
    suite = Suite(columns)
    started = time.monotonic()
    try:
        with progress(len(cases), lines=False) as tell:
            suite.run(cases, tell)
    except KeyboardInterrupt:
        suite.interrupted = True
    if args.json:
        write_json(to_dict(suite, level, args.seed, time.monotonic() - started))
    else:
        render(suite, time.monotonic() - started)
    if suite.interrupted:
        err_console().print("cortiq-o1 verify: interrupted; the above is what was checked", style="red")
        return INTERRUPTED
    if not any(target.devices for target in columns):
        return DEVICE
    return CHECK_FAILED if suite.failed else OK


def render(suite: Suite, seconds: float) -> None:
    """Prints the matrices, the failures and how to repeat them, and a last line that says it all."""
    console = out_console()
    print_lines(console, [*(_about(target) for target in suite.targets), _versions(), ""])
    checked = [t for t in suite.targets if t.devices]
    kernels, layers, paths = rows_of(checked)
    for title, rows, cells in (
        ("Kernels against their twins", kernels, [t.kernels for t in checked]),
        ("Layers against float64, the worst of all paths", layers, [t.layers for t in checked]),
        ("The same by path, the worst of all layers", paths, [t.paths for t in checked]),
    ):
        shown = [(t, c) for t, c in zip(checked, cells, strict=True) if c]
        if rows and shown:
            columns = [Column("worst of the bound, worst error"), *(Column(t.label) for t, _ in shown)]
            table = [[row, *(_text(c.get(row), t.unavailable.get(row)) for t, c in shown)] for row in rows]
            styles = ["red" if any(c[row].failed for _, c in shown if row in c) else "" for row in rows]
            print_table(console, columns, table, title, styles)
    for failure in suite.failures[:_SHOWN_FAILURES]:
        lines = [
            f"{failure.target}: {failure.row} fails in {failure.case}: {failure.where}",
            f"  {failure.built_from}",
            f"  repeat: {repeat(failure, suite.targets)}",
        ]
        for line in lines:
            console.print(line, soft_wrap=True, style="red")
    left = len(suite.failures) - _SHOWN_FAILURES
    if left > 0:
        console.print(f"and {count_of(left, 'more failure')}, all in --json", style="red")
    console.print(
        _verdict(suite, seconds), style="red bold" if suite.failed else "green bold", soft_wrap=True
    )


def repeat(failure: Failure, columns: Sequence[Target]) -> str:
    """The command that runs a failed case again, on its device."""
    argument = next(t.argument for t in columns if t.label == failure.target)
    return shlex.join(["cortiq-o1", "verify", "--device", argument, "--case", failure.case])


def _about(target: Target) -> str:
    parts = [str(target.info.get("driver") or "")]
    if target.info.get("software"):
        parts.append("software")
    if target.problem:
        parts.append(("cannot be used: " if target.unusable else "FAILED: ") + target.problem)
    return f"{target.label}: {', '.join(p for p in parts if p)}"


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def versions() -> dict[str, str]:
    """What the results depend on."""
    found = {"cortiq-o1": __version__, "NumPy": np.__version__}
    try:
        found["wgpu"] = metadata.version("wgpu")
    except metadata.PackageNotFoundError:
        found["wgpu"] = "not installed"
    return found


def _text(cell: Cell | None, lacking: str | None) -> str:
    if cell is None:
        return f"no {lacking}" if lacking else "-"
    mark = "FAIL" if cell.failed else "ok"
    worst = cell.worst
    if worst.error == 0.0 and worst.ratio == 0.0:
        return f"{mark} equal"
    ratio = f"{worst.ratio:.2f}" if math.isfinite(worst.ratio) else "inf"
    return f"{mark} {ratio} {worst.error:.0e}"


def _verdict(suite: Suite, seconds: float) -> str:
    cells = [c for t in suite.targets for c in (*t.kernels.values(), *t.layers.values())]
    checks, failed = sum(c.checks for c in cells), sum(c.failed for c in cells)
    devices = sum(bool(t.devices) for t in suite.targets)
    text = f"{count_of(checks, 'check')} in {count_of(devices, 'column')}, {seconds:.0f} s: "
    broken = [t.label for t in suite.targets if t.problem and not t.unusable]
    if broken:
        text += f"{', '.join(broken)} failed, "
    return text + (f"{failed:,} failed" if failed else "all passed" if checks else "nothing checked")


def to_dict(suite: Suite, level: Level, seed: int, seconds: float) -> dict[str, Any]:
    """The whole result for JSON."""
    return {
        "format": "cortiq-o1-verify",
        "version": 1,
        "level": level,
        "seed": seed,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "passed": not suite.failed,
        "interrupted": suite.interrupted,
        "targets": [target.to_dict() for target in suite.targets],
        "failures": [
            {
                "target": failure.target,
                "row": failure.row,
                "case": failure.case,
                "where": failure.where,
                "built_from": failure.built_from,
                "repeat": repeat(failure, suite.targets),
            }
            for failure in suite.failures
        ],
    }
