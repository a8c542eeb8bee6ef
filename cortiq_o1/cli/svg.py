"""Time a call against context length, drawn as SVG without any library.

Both axes are logarithmic. The background is transparent and the colours are of middle lightness, so
that the picture stands on white and on black; lines bear their names at their right end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ..benchmark.results import DeviceResult, Report

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 76, 270, 64, 60
LABEL_GAP = 15.0
_NAME = 22  # characters
COLOURS = ("#3b82c4", "#d9722e", "#2f9e6e", "#b65fb0", "#c2a01e", "#d1495b", "#3aa6b9", "#8a8f3c")

_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #24292f; }
  .grid { stroke: #8b949e; stroke-opacity: 0.25; }
  .axis { stroke: #8b949e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9da7b1; }
    .title { fill: #e6edf3; }
  }
"""


@dataclass(frozen=True)
class _Line:
    """One curve: `(context, seconds)` points, ascending."""

    label: str
    colour: str
    dashed: bool
    points: tuple[tuple[float, float], ...]


class _Scale:
    """A logarithmic axis from data to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.log(low), math.log(max(high, low * 1.001))
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        part = (math.log(value) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def draw(report: Report, rows: int) -> str:
    """The picture of a report for calls of `rows` rows; says so where nothing was timed."""
    lines = _lines(report, rows)
    what = "a token" if rows == 1 else f"a call of {rows} rows"
    title = f"{report.model}: time of {what} in one attention layer, by context"
    body = [_text(LEFT, 24, title, "title")]
    window = report.geometry.window
    body.append(
        _text(LEFT, 43, f"solid: exact attention over the whole context; dashed: sealed, window {window:,}")
    )
    if lines:
        body += _chart(lines)
    else:
        body.append(_text(WIDTH / 2, HEIGHT / 2, "nothing was timed", anchor="middle"))
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _lines(report: Report, rows: int) -> list[_Line]:
    found = []
    for at, device in enumerate(report.devices):
        colour = COLOURS[at % len(COLOURS)]
        exact = device.exact_points(rows)
        if exact:
            found.append(_Line(f"{_name(device)}, exact", colour, False, tuple(exact)))
        cell = device.sealed(rows)
        timing = cell.timing(device.clock) if cell else None
        if timing:
            # A layer is sealed only once its context has outgrown it.
            start = report.geometry.exact_rows + 1
            end = max(start * 2, *report.contexts)
            points = ((start, timing.median), (end, timing.median))
            found.append(_Line(f"{_name(device)}, sealed", colour, True, points))
    return found


def _name(device: DeviceResult) -> str:
    """The adapter's name, short enough for the margin, and its backend."""
    name = device.name if len(device.name) <= _NAME else device.name.split(" (")[0]
    if len(name) > _NAME:
        name = name[: _NAME - 1].rstrip() + "…"
    return f"{name}, {device.backend}"


def _chart(lines: Sequence[_Line]) -> list[str]:
    contexts = [c for line in lines for c, _ in line.points]
    times = [t for line in lines for _, t in line.points]
    x_low, x_high = min(contexts), max(contexts)
    y_low, y_high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times) * 1.0001))
    x = _Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    y = _Scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    body = _axes(x, y, x_low, x_high, y_low, y_high)
    for line in lines:
        points = [(x(c), y(t)) for c, t in line.points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2" '
            f'stroke-linejoin="round"{dash}/>'
        )
        if not line.dashed:
            body += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{line.colour}"/>' for px, py in points]
    return body + _labels(lines, x, y)


def _axes(x: _Scale, y: _Scale, x_low: float, x_high: float, y_low: float, y_high: float) -> list[str]:
    body = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for exponent in range(round(math.log10(y_low)), round(math.log10(y_high)) + 1):
        at = y(10.0**exponent)
        body.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        body.append(_text(LEFT - 8, at + 4, _time(exponent), anchor="end"))
    last = -math.inf
    for power in range(math.ceil(math.log2(x_low)), math.floor(math.log2(x_high)) + 1):
        at = x(2.0**power)
        if at - last < 52:  # as wide as its number
            continue
        last = at
        body.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        body.append(_text(at, bottom + 18, f"{2**power:,}", anchor="middle"))
    body.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    body.append(_text((LEFT + right) / 2, HEIGHT - 18, "context, rows", anchor="middle"))
    return body


def _labels(lines: Sequence[_Line], x: _Scale, y: _Scale) -> list[str]:
    """Names at the right, moved apart where lines end close together, with a leader to each end."""
    wanted = sorted((y(line.points[-1][1]), at) for at, line in enumerate(lines))
    places: list[float] = []
    for height, _ in wanted:
        places.append(max(height, places[-1] + LABEL_GAP) if places else max(height, TOP))
    # Whatever was pushed out below goes back up, and pushes in turn.
    limit = float(HEIGHT - BOTTOM)
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], limit)
        limit = places[at] - LABEL_GAP
    body = []
    start = WIDTH - RIGHT + 18
    for (height, at), place in zip(wanted, places, strict=True):
        line = lines[at]
        end = x(line.points[-1][0]) + 5
        body.append(
            f'<polyline points="{end:.1f},{height:.1f} {start - 10},{place:.1f} {start - 3},{place:.1f}" '
            f'fill="none" stroke="{line.colour}" stroke-opacity="0.5"/>'
        )
        body.append(_text(start, place + 4, line.label, colour=line.colour))
    return body


def _time(exponent: int) -> str:
    unit, base = (("s", 0), ("ms", -3), ("µs", -6), ("ns", -9))[min(3, max(0, -(exponent // 3)))]
    return f"{10 ** (exponent - base):,} {unit}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", colour: str = "") -> str:
    extra = (f' class="{kind}"' if kind else "") + (f' style="fill: {colour}"' if colour else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
