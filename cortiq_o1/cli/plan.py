"""`cortiq-o1 plan`: the dispatches of a call and the barriers between them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..benchmark.presets import PRESETS, find_preset
from ..devices import chosen_path
from ..errors import ArgumentError
from ..geometry import RECTS, Geometry
from ..paths import PATHS
from ..planes import KV_BYTES
from ..planning import PRECISIONS, Limits, plan
from ..plans import Barrier, Dispatch, Plan, base_plane
from .report import Column, byte_size, count_of, out_console, print_lines, print_table

_SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "sinks", "landmarks")


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "plan",
        help="the dispatches of a call, and its barriers",
        description="Prints what a call dispatches, plane by plane, and where it has to wait.",
    )
    add_geometry_options(parser)
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows of the call (default 1)")
    parser.add_argument("--no-commit", action="store_true", help="leave the state where it is")
    parser.add_argument(
        "--path", choices=PATHS, default="auto", help="which kernels (default auto, or CORTIQ_O1_PATH)"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="exact",
        help="of the matrix products; fast takes a device with 16-bit floats for granted (default exact)",
    )
    parser.add_argument(
        "--kv", choices=tuple(KV_BYTES), default="f32", help="how rings are kept (default f32)"
    )
    parser.add_argument(
        "--archive",
        type=int,
        default=0,
        metavar="N",
        help="evictions that the layer's archive holds (default 0)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the plan as JSON, as `Plan.from_json` reads it")
    form.add_argument("--mermaid", action="store_true", help="the plan as a Mermaid flowchart")
    parser.set_defaults(run=run)


def add_geometry_options(parser: argparse.ArgumentParser) -> None:
    """Options for every field of `Geometry`, and `--preset` for a model's."""
    group = parser.add_argument_group(
        "geometry", "a preset, or the sizes; a size given beside a preset replaces its own"
    )
    group.add_argument("--preset", metavar="NAME", help=", ".join(PRESETS))
    for name in _SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    group.add_argument("--windows", type=integers, metavar="N,N,...", help="each KV head's own window")
    group.add_argument("--rect", choices=RECTS)
    group.add_argument("--scale", type=float, metavar="S")


def integers(text: str) -> tuple[int, ...]:
    """A list of integers between commas, for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected integers between commas") from None


def geometry_of(args: argparse.Namespace) -> Geometry:
    """The geometry that the options name; raises `ArgumentError` where sizes are missing."""
    fields: dict[str, Any] = {}
    if args.preset is not None:
        fields = find_preset(args.preset).geometry().to_dict()
        del fields["value_dim"], fields["scale"]  # they follow the width, also one given here
    for name in (*_SIZES, "windows", "rect", "scale"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    missing = [name for name in _SIZES[:3] if name not in fields]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ArgumentError(
            f"geometry: no {options}; give all sizes, or --preset with one of {', '.join(PRESETS)}"
        )
    return Geometry(**fields)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    made = plan(
        geometry_of(args),
        args.rows,
        commit=not args.no_commit,
        path=chosen_path(args.path),
        limits=Limits(float16=args.precision == "fast", kv=args.kv),
        precision=args.precision,
        archive=args.archive,
    )
    if args.json:
        sys.stdout.write(made.to_json() + "\n")
    elif args.mermaid:
        sys.stdout.write(mermaid(made))
    else:
        _render(made)
    return 0


def _render(made: Plan) -> None:
    console = out_console()
    rows: list[tuple[str, ...]] = []
    styles: list[str] = []
    count = 0
    for step in made.steps:
        if isinstance(step, Barrier):
            rows.append(("", "-- barrier --", "", ", ".join(step.planes), ""))
            styles.append("dim")
        else:
            count += 1
            reads = ", ".join(name for name, writes in step.uses() if not writes)
            writes = ", ".join(name for name, writes in step.uses() if writes)
            rows.append((str(count), step.kernel, "x".join(map(str, step.grid)), reads, writes))
            styles.append("")
    columns = (
        Column("#", right=True),
        Column("kernel"),
        Column("workgroups"),
        Column("reads", wraps=True),
        Column("writes", wraps=True),
    )
    print_table(console, columns, rows, _headline(made), styles)
    print_table(
        console,
        (Column("plane"), Column("kind"), Column("size", right=True)),
        [(name, base_plane(name).role, byte_size(size)) for name, size in made.planes.items()],
        "Planes",
    )
    total = sum(made.planes.values())
    print_lines(console, [f"All planes together: {byte_size(total)}"])


def _headline(made: Plan) -> str:
    geometry = made.geometry
    return (
        f"{geometry.num_heads} heads, {geometry.num_kv_heads} KV heads, width {geometry.head_dim}, "
        f"window {geometry.window}, {geometry.landmarks} landmarks: "
        f"{count_of(made.rows, 'row')} in sub-chunks of {made.chunk}, path {made.path}, "
        f"{'commits' if made.commit else 'leaves the state'}: "
        f"{count_of(len(made.dispatches), 'dispatch', 'dispatches')}, "
        f"{count_of(len(made.barriers), 'barrier')}"
    )


def mermaid(made: Plan) -> str:
    """The plan as a Mermaid flowchart: a box of dispatches between two barriers, an arrow from the
    last writer of a plane to each dispatch that uses it."""
    lines = ["flowchart TD", f"  %% {_headline(made)}"]
    number = 0
    last_writer: dict[str, int] = {}
    arrows: list[str] = []
    for at, stage in enumerate(made.stages(), 1):
        lines.append(f'  subgraph s{at}["stage {at}"]')
        for dispatch in stage:
            number += 1
            lines.append(f'    d{number}["{dispatch.kernel}<br/>{"x".join(map(str, dispatch.grid))}"]')
            arrows += _arrows(dispatch, number, last_writer)
        lines.append("  end")
    return "\n".join([*lines, *arrows]) + "\n"


def _arrows(dispatch: Dispatch, number: int, last_writer: dict[str, int]) -> list[str]:
    planes: dict[int, list[str]] = {}
    for plane, _ in dispatch.uses():
        if plane in last_writer:
            planes.setdefault(last_writer[plane], []).append(plane)
    for plane, writes in dispatch.uses():
        if writes:
            last_writer[plane] = number
    return [f'  d{source} -->|"{"<br/>".join(names)}"| d{number}' for source, names in planes.items()]
