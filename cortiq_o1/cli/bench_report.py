"""A benchmark's report as text: sizes, then each device's times, then the devices side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ..benchmark.path_results import PathDevice
from ..benchmark.results import CLOCK_TEXT, Cell, DeviceResult, Report, Timing
from .report import (
    Column,
    bandwidth,
    byte_size,
    count_of,
    out_console,
    per_second,
    percent,
    print_lines,
    print_table,
    seconds,
)

NONE = "-"


def render(report: Report) -> None:
    """Prints the whole report on standard output."""
    console = out_console()
    _render_head(console, report)
    for device in report.devices:
        _render_device(console, report, device)
    _render_quality(console, report.devices)
    _render_summary(console, report)


def _render_head(console: Console, report: Report) -> None:
    geometry = report.geometry
    kept = "float32" if report.kv == "f32" else "float32, keys and values kept in float16"
    console.print(f"{report.model}, one attention layer of {report.layers}", style="bold")
    print_lines(
        console,
        [
            f"{geometry.num_heads} heads, {geometry.num_kv_heads} KV heads, width {geometry.head_dim}, "
            f"{kept}; sealed: window {geometry.window:,}, {geometry.sinks} sinks, "
            f"{geometry.landmarks} landmarks.",
            "Exact attention: the same kernels with a window that holds the whole context and no far field.",
            f"A layer seals itself past {geometry.exact_rows:,} rows; up to there it attends exactly.",
            "",
        ],
    )
    sealed = report.state_bytes
    print_table(
        console,
        (
            Column("context", right=True),
            Column("cache, a layer", right=True),
            Column("state, a layer", right=True),
            Column("cache, model", right=True),
            Column("state, model", right=True),
            Column("ratio", right=True),
        ),
        [
            (
                f"{context:,}",
                byte_size(report.cache_bytes(context)),
                byte_size(sealed),
                byte_size(report.layers * report.cache_bytes(context)),
                byte_size(report.layers * sealed),
                ratio(report.cache_bytes(context) / sealed),
            )
            for context in report.contexts
        ],
        "Memory: keys and values of exact attention beside the sealed state",
    )


def print_device(console: Console, device: DeviceResult | PathDevice) -> None:
    """A device's heading, and why it has no figures, if so."""
    mark = ", software" if device.software else ""
    console.print(f"{device.name} ({device.backend}{mark})", style="bold")
    if device.driver and device.driver != device.name:
        print_lines(console, [device.driver])
    if device.problem:
        print_lines(console, [f"{'Failed' if device.failed else 'Cannot be used'}: {device.problem}"])


def _render_device(console: Console, report: Report, device: DeviceResult) -> None:
    print_device(console, device)
    if device.cells:
        print_lines(console, [_clock_line(device), ""])
        _render_times(console, report, device)
        _render_bandwidth(console, device)
    else:
        console.print()


def _clock_line(device: DeviceResult) -> str:
    line = f"Times: {CLOCK_TEXT[device.clock]}; median, ± half the range of the middle half of the calls."
    if device.clock == "wall" and any(cell.gpu for cell in device.cells):
        line += " Timestamps worked for some calls only."
    walls = [
        cell.wall.median for cell in device.cells if cell.wall and cell.context is None and cell.rows == 1
    ]
    if device.clock == "gpu" and walls:
        line += f" A sealed token takes {seconds(walls[0])} of wall time, with transfers and synchronisation."
    return line


def _render_times(console: Console, report: Report, device: DeviceResult) -> None:
    body: list[tuple[str, ...]] = []
    for rows in report.rows:
        sealed = device.sealed(rows)
        sealed_time = sealed.timing(device.clock) if sealed else None
        for context in report.contexts:
            exact = device.exact(context, rows)
            if not sealed and not exact:
                continue
            exact_time = exact.timing(device.clock) if exact else None
            apart = context > report.geometry.exact_rows
            body.append(
                (
                    f"{rows}",
                    f"{context:,}",
                    timing_text(sealed, sealed_time) if apart else "exact",
                    _rate(rows, sealed_time) if apart else NONE,
                    timing_text(exact, exact_time),
                    _rate(rows, exact_time),
                    ratio(exact_time.median / sealed_time.median)
                    if apart and exact_time and sealed_time
                    else NONE,
                )
            )
    print_table(
        console,
        (
            Column("rows", right=True),
            Column("context", right=True),
            Column("sealed", wraps=True, right=True),
            Column("rows/s", right=True),
            Column("exact attention", wraps=True, right=True),
            Column("rows/s", right=True),
            Column("faster", right=True),
        ),
        body,
    )
    if any(cell.left_out_s is not None for cell in device.cells):
        print_lines(console, ["Left out: more time than this adapter had left; --budget gives more.", ""])
    crossings = [(rows, device.crossover(rows)) for rows in report.rows]
    told = [f"{count_of(rows, 'row')}: {found}" for rows, found in crossings if found]
    if told:
        print_lines(console, [f"Context from which sealed is faster: {'; '.join(told)}.", ""])


def _render_bandwidth(console: Console, device: DeviceResult) -> None:
    """GB/s of one-row calls, which move memory and compute little."""
    copy = device.copy_bytes_per_s
    body = []
    if copy:
        clock = "GPU time" if device.copy_clock == "gpu" else "wall time"
        body.append((f"plain copy ({clock})", NONE, bandwidth(copy), "100%"))
    for cell in device.cells:
        timing = cell.timing(device.clock)
        if cell.rows == 1 and timing and cell.moved_bytes:
            rate = cell.moved_bytes / timing.median
            layer = "sealed" if cell.context is None else f"exact over {cell.context:,}"
            body.append(
                (layer, byte_size(cell.moved_bytes), bandwidth(rate), percent(rate / copy) if copy else NONE)
            )
    if not body:
        return
    print_table(
        console,
        (
            Column("a token"),
            Column("must move", right=True),
            Column("bandwidth", right=True),
            Column("of a copy", right=True),
        ),
        body,
    )


def _render_quality(console: Console, devices: Sequence[DeviceResult]) -> None:
    found = [(device, device.quality) for device in devices if device.quality]
    if not found:
        return
    first = found[0][1]
    geometry = first.geometry
    console.print("Error against exact attention in float64, on real data", style="bold")
    print_lines(
        console,
        [
            f"{first.source}: {first.prompt_rows} rows sealed, {first.streamed_rows} streamed; "
            f"window {geometry.window}, {geometry.landmarks} landmarks, ridge {first.ridge:g}. "
            "Median and worst are of all rows and heads."
        ],
    )
    body = [(f"sealed, {device.name} ({device.backend})", quality.sealed) for device, quality in found]
    body.append(("window and sinks alone", first.window_only))
    print_table(
        console,
        (
            Column("layer", wraps=True),
            Column("rms", right=True),
            Column("median", right=True),
            Column("worst", right=True),
        ),
        [(name, percent(e.rms), percent(e.median), percent(e.worst)) for name, e in body],
    )
    if first.sealed.rms > first.window_only.rms:
        print_lines(
            console,
            [
                "Here the far field does worse than none, in the mean of squares: a larger --ridge tames it, "
                "at the cost of a far field that follows the prompt less closely.",
                "",
            ],
        )


def _render_summary(console: Console, report: Report) -> None:
    devices = [device for device in report.devices if device.cells]
    if len(devices) < 2:
        return
    rows = report.rows[0]
    body = []
    for device in devices:
        cell = device.sealed(rows)
        found = device.crossover(rows)
        body.append(
            (
                device.name,
                device.backend + (" (software)" if device.software else ""),
                timing_text(cell, cell.timing(device.clock) if cell else None),
                "GPU" if device.clock == "gpu" else "wall",
                str(found) if found else NONE,
                percent(device.quality.sealed.rms) if device.quality else NONE,
            )
        )
    print_table(
        console,
        (
            Column("adapter", wraps=True),
            Column("backend", wraps=True),
            Column("sealed token" if rows == 1 else f"sealed, {rows} rows", wraps=True, right=True),
            Column("clock"),
            Column("faster from", right=True),
            Column("error", right=True),
        ),
        body,
        "Side by side",
    )


def timing_text(cell: Cell | None, timing: Timing | None) -> str:
    """A cell's time and spread, or why there is none."""
    if timing:
        return f"{seconds(timing.median)} ±{percent(timing.spread / 2)}"
    if cell and cell.left_out_s is not None:
        return f"left out, {seconds(cell.left_out_s)}" if cell.left_out_s else "left out"
    return (cell.problem if cell else None) or NONE


def _rate(rows: int, timing: Timing | None) -> str:
    return per_second(rows / timing.median) if timing else NONE


def ratio(value: float) -> str:
    """How many times as much, three digits."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}x"
