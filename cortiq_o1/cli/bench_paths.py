"""A comparison of the paths as text: each device's times by rows and way, then by kernel."""

from __future__ import annotations

from rich.console import Console

from ..benchmark.path_results import PathCell, PathDevice, PathReport
from ..benchmark.results import CLOCK_TEXT, Clock
from .bench_report import NONE, print_device, ratio, timing_text
from .report import Column, count_of, out_console, per_second, percent, print_lines, print_table, seconds

_PROFILE_TEXT: dict[Clock, str] = {
    "gpu": "GPU time of each dispatch in a compute pass of its own, so the sum is more than a call takes",
    "wall": "wall time of each dispatch in a submission of its own, since timestamps do not work here: "
    "mostly the submission, not the kernel",
}


def render(report: PathReport) -> None:
    """Prints the whole report on standard output."""
    console = out_console()
    geometry = report.geometry
    console.print(f"{report.model}, one sealed attention layer, every path", style="bold")
    print_lines(
        console,
        [
            f"{geometry.num_heads} heads, {geometry.num_kv_heads} KV heads, width {geometry.head_dim}, "
            f"float32; window {geometry.window:,}, {geometry.sinks} sinks, {geometry.landmarks} landmarks.",
            "",
        ],
    )
    for device in report.devices:
        _render_device(console, report, device)


def _render_device(console: Console, report: PathReport, device: PathDevice) -> None:
    print_device(console, device)
    if not device.cells:
        console.print()
        return
    print_lines(
        console,
        [f"Times: {CLOCK_TEXT[device.clock]}; median, ± half the range of the middle half of the calls.", ""],
    )
    print_table(
        console,
        (
            Column("rows", right=True),
            Column("path"),
            Column("dispatches", right=True),
            Column("time", wraps=True, right=True),
            Column("rows/s", right=True),
            Column("to the best", right=True),
        ),
        [_row(device, cell) for cell in device.cells],
    )
    if report.profile:
        for cell in device.cells:
            _render_profile(console, cell)


def _row(device: PathDevice, found: PathCell) -> tuple[str, ...]:
    cell = found.cell
    timing, best = cell.timing(device.clock), device.best(cell.rows)
    return (
        f"{cell.rows}",
        found.way,
        f"{found.dispatches}" if found.dispatches else NONE,
        timing_text(cell, timing),
        per_second(cell.rows / timing.median) if timing else NONE,
        ratio(timing.median / best) if timing and best else NONE,
    )


def _render_profile(console: Console, found: PathCell) -> None:
    if not found.kernels or found.profile_clock is None:
        return
    total = sum(k.seconds for k in found.kernels)
    console.print(f"{count_of(found.cell.rows, 'row')} on {found.way}, by kernel", style="bold")
    print_lines(console, [f"{_PROFILE_TEXT[found.profile_clock]}."])
    print_table(
        console,
        (
            Column("kernel"),
            Column("dispatches", right=True),
            Column("time", right=True),
            Column("of the sum", right=True),
        ),
        [
            *(
                (k.kernel, f"{k.dispatches}", seconds(k.seconds), percent(k.seconds / total))
                for k in found.kernels
            ),
            ("all", f"{sum(k.dispatches for k in found.kernels)}", seconds(total), percent(1.0)),
        ],
    )
