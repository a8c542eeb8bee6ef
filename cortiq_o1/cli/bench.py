"""`cortiq-o1 bench`: the sealed layer beside exact attention, or path beside path, on each adapter."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..benchmark import PRESETS, PathReport, PathSuite, Report, Settings, Suite, find_preset
from ..devices import chosen_path
from ..errors import ArgumentError
from ..paths import PATHS
from ..planes import KV_BYTES
from . import bench_paths, svg
from .bench_report import render
from .choice import choose
from .plan import integers
from .report import DEVICE, INTERRUPTED, OK, err_console, progress, write_json

CONTEXTS, ROWS = (1024, 4096, 16384, 65536), (1, 64, 128)
PATH_ROWS = (1, 16, 64)
BUDGET_SECONDS = 180.0


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench",
        help="time a token and rows a second beside exact attention",
        description=(
            "Times a sealed layer beside exact attention by the same kernels, over every context given, "
            "and compares its outputs with exact attention on real data. With --paths it times the sealed "
            "layer on every path instead."
        ),
        epilog="CORTIQ_O1_PATH forces a path; with --paths it leaves a single one.",
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
        "--rows",
        type=integers,
        metavar="N,N,...",
        help=f"rows of a call; {_default(ROWS)}, with --paths {','.join(map(str, PATH_ROWS))}",
    )
    parser.add_argument("--paths", action="store_true", help="time all paths side by side, sealed layer only")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="with --paths: also each kernel's time, by timestamps where they work",
    )
    for name, default in (("window", 2048), ("sinks", 4), ("landmarks", 32)):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"of the layer that is timed; default {default}",
        )
    parser.add_argument(
        "--kv",
        choices=tuple(KV_BYTES),
        default="f32",
        help="how keys and values are kept, those of exact attention too; --paths times both (default f32)",
    )
    parser.add_argument(
        "--ridge",
        type=float,
        default=1e-6,
        metavar="R",
        help="of the seal over real data, whose window and landmarks are fixed; default 1e-6",
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
    chosen_path()  # an unknown one is wrong usage, not each device's failure
    preset = find_preset(args.preset)
    geometry = preset.geometry(args.window, args.sinks, args.landmarks)
    settings = Settings(
        preset,
        geometry,
        tuple(sorted(set(args.contexts))),
        tuple(sorted(set(args.rows or (PATH_ROWS if args.paths else ROWS)))),
        args.budget,
        args.ridge,
        args.kv,
    )
    if args.profile and not args.paths:
        raise ArgumentError("--profile: expected with --paths")
    if args.kv != "f32" and args.paths:
        raise ArgumentError("--kv: expected without --paths, which times both")
    if args.svg and args.paths:
        raise ArgumentError("--svg: draws time against context, which --paths does not measure")
    if args.svg and (args.svg.is_dir() or not os.access(args.svg.parent, os.W_OK)):
        # Before minutes of measuring, not after.
        raise ArgumentError(f"--svg: {args.svg}: cannot be written")
    candidates = choose(args.device)
    if "all" in args.device and all(info.backend == "cpu" for info in candidates):
        err_console().print(
            "note: no GPU adapter here, only the CPU; `cortiq-o1 adapters` says why. Mesa's software driver "
            "for Vulkan: apt-get install mesa-vulkan-drivers libvulkan1",
            style="yellow",
            soft_wrap=True,
        )
    suite = PathSuite(settings, args.profile) if args.paths else Suite(settings)
    steps = len(PATHS) * len(settings.rows) if args.paths else settings.steps
    try:
        with progress(steps * sum(not info.problem for info in candidates), lines=True) as step:
            suite.run(candidates, step)
    except KeyboardInterrupt:
        suite.report.interrupted = True
    return finish(suite.report, args)


def finish(report: Report | PathReport, args: argparse.Namespace) -> int:
    """Writes and prints a report; returns the exit code."""
    if args.json:
        write_json(report.to_dict())
    elif isinstance(report, PathReport):
        bench_paths.render(report)
    else:
        render(report)
    if args.svg and isinstance(report, Report):  # last, so that a full disk costs the picture alone
        args.svg.write_text(svg.draw(report, report.rows[0]), encoding="utf-8")
        err_console().print(f"drawn: {args.svg}", soft_wrap=True)
    if report.interrupted:
        err_console().print(
            "cortiq-o1 bench: interrupted; the above is what was measured", style="red", soft_wrap=True
        )
        return INTERRUPTED
    failed = [device for device in report.devices if device.failed]
    for device in failed:
        err_console().print(f"cortiq-o1 bench: {device.name}: {device.problem}", style="red", soft_wrap=True)
    return DEVICE if failed else OK
