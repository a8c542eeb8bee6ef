"""Rendering that the commands share: consoles, tables that lose nothing, figures with units."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OK, CHECK_FAILED, USAGE, DEVICE, INTERRUPTED = 0, 1, 2, 3, 130
"""The exit codes, see `main`."""
_UNBOUNDED = 100_000
_TEXT_WIDTH = 16  # what a column of running text needs to be legible


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves the exit code to `main`; rich's own is that of a failed check."""
        raise BrokenPipeError


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width of its own; there a line is as long as it is, unless COLUMNS says otherwise.
    bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Console(
        file=stream,
        width=None if bounded else _UNBOUNDED,
        markup=False,
        highlight=False,
        emoji=False,
    )


def out_console() -> Console:
    """Standard output, for results."""
    return _console(stderr=False)


def err_console() -> Console:
    """Standard error, for progress, notes and failures."""
    return _console(stderr=True)


def write_json(data: Any) -> None:
    """One JSON document on standard output."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


@dataclass(frozen=True)
class Column:
    """A table's column: `wraps` for running text, else figures and names that stay on one line."""

    head: str
    wraps: bool = False
    right: bool = False


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    title: str = "",
    styles: Sequence[str] = (),
) -> None:
    """A table, or one record a row where the console is too narrow for it: no cell is ever cut."""
    if title:
        console.print(title, style="bold")
    widths = [
        max([cell_len(column.head), *(_width(row[at]) for row in rows)]) for at, column in enumerate(columns)
    ]
    least = [min(w, _TEXT_WIDTH) if c.wraps else w for w, c in zip(widths, columns, strict=True)]
    if sum(least) + 2 * len(columns) > console.width:
        _print_records(console, columns, rows)
        return
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for column, width in zip(columns, least, strict=True):
        table.add_column(
            column.head, min_width=width, overflow="fold", justify="right" if column.right else "left"
        )
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*row, style=style)
    console.print(table)
    console.print()


def _print_records(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            if cell:
                console.print(f"{column.head}: {' / '.join(cell.splitlines())}", overflow="fold")
        console.print()


def _width(cell: str) -> int:
    return max((cell_len(line) for line in cell.splitlines()), default=0)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Running text, wrapped at words where the console has a width."""
    for line in lines:
        console.print(line, overflow="fold")


def figure(value: float, unit: str) -> str:
    """Three significant digits and a unit, without an exponent."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def seconds(value: float) -> str:
    """A time, from microseconds to seconds."""
    for size, unit in ((1e-6, "us"), (1e-3, "ms")):
        if value < 999.5 * size:
            return figure(value / size, unit)
    return figure(value, "s")


def byte_size(value: float) -> str:
    """Bytes, with the binary units in which limits are given."""
    if value < 1024:
        return f"{value:.0f} B"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if value < 1024 ** (power + 1):
            return figure(value / 1024**power, unit)
    return figure(value / 1024**3, "GiB")


def bandwidth(value: float) -> str:
    """Bytes a second, in decimal gigabytes."""
    return figure(value / 1e9, "GB/s")


def count_of(number: int, one: str, many: str = "") -> str:
    """A number and its noun, plural where it is not one."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(value: float) -> str:
    """A part of one."""
    return f"{100 * value:.1f}%" if abs(value) < 0.0995 else f"{100 * value:.0f}%"


def per_second(value: float) -> str:
    """Rows a second, three digits."""
    if value < 1e4:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    for size, unit in ((1e3, "k"), (1e6, "M")):
        if value < 999.5 * size:
            return figure(value / size, unit)
    return figure(value / 1e9, "G")


@contextmanager
def progress(steps: int, lines: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that is told what begins; without a terminal there, a line for each step,
    or nothing where those would be too many (`lines` false)."""
    console = err_console()
    if not console.is_terminal:
        yield lambda text: console.print(text) if lines else None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        begun = itertools.count()
        yield lambda text: bar.update(task, description=text, completed=next(begun))
