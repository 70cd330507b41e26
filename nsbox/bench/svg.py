"""Two kinds of plots, drawn by hand: a plotting library costs seconds of import. Widths of labels are estimated."""

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

ROW, BAR, TOP, FOOT = 24, 15, 58, 34
CHAR = 7.2  #: width of a character at 12 px, generously
FONTS = "system-ui, Segoe UI, DejaVu Sans, sans-serif"
PLOT = 520  #: width of the area that bars may fill
GREY, BLUE, ORANGE, INK, FAINT = "#8a93a0", "#2f6fb5", "#d9772b", "#20242a", "#dfe3e8"


def _text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}" fill="{colour}" rx="1.5"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width:g}"/>'


def ticks(most: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to just below or at ``most``."""
    if most <= 0:
        return [0.0]
    raw = most / count
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 10.0 ** -_places(raw)
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * number for number in range(int(most / step) + 1)]


def _places(value: float) -> int:
    places = 0
    while value < 1:
        value, places = value * 10, places + 1
    return places


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if abs(value) >= 100 else f"{value:.3g}"


def _frame(title: str, unit: str, left: float, rows: int, most: float, body: list[str]) -> str:
    """Title, axis with its lines, and the body on top."""
    width, height = left + PLOT + 90, TOP + rows * ROW + FOOT
    bottom = TOP + rows * ROW
    axis = []
    for value in ticks(most):
        x = left + value / most * PLOT
        axis.append(_line(x, TOP - 6, x, bottom, FAINT))
        axis.append(_text(x, bottom + 17, _number(value), size=11, anchor="middle", colour=GREY))
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
            _rect(0, 0, width, height, "#ffffff"),
            _text(16, 24, title, size=16, bold=True),
            _text(16, 42, unit, colour=GREY),
            *axis,
            *body,
            "</svg>",
            "",
        ]
    )


def bars(title: str, unit: str, rows: Sequence[tuple[str, float, float]], mark: str = "") -> str:
    """(label, value, upper value) as horizontal bars with a thin line to the upper value; labels that hold ``mark``
    stand out."""
    left = 28 + max((len(label) for label, _, _ in rows), default=0) * CHAR
    # One outlier among the upper values must not press all the others together: its line leaves the plot.
    longest = max((value for _, value, _ in rows), default=1.0) or 1.0
    most = min(max((upper for _, _, upper in rows), default=longest), 1.5 * longest)
    most = max(most, longest)
    body = []
    for number, (label, value, upper) in enumerate(rows):
        y = TOP + number * ROW
        colour = ORANGE if mark and mark in label else BLUE
        end, top = left + value / most * PLOT, left + min(most, max(value, upper)) / most * PLOT
        body.append(_text(left - 10, y + 12, label, anchor="end", bold=colour == ORANGE))
        body.append(_rect(left, y, end - left, BAR, colour))
        if upper > value:
            body.append(_line(end, y + BAR / 2, top, y + BAR / 2, INK, 1.2))
        if value < upper <= most:
            body.append(_line(top, y + 3, top, y + BAR - 3, INK, 1.2))
        elif upper > most:
            body.append(_line(top - 5, y + 3, top, y + BAR / 2, INK, 1.2))
            body.append(_line(top - 5, y + BAR - 3, top, y + BAR / 2, INK, 1.2))
        body.append(_text(top + 6, y + 12, _number(value), size=11))
    return _frame(title, unit, left, len(rows), most, body)


def waterfall(title: str, unit: str, rows: Sequence[tuple[str, float]]) -> str:
    """(label, value) as bars that begin where the one before ends; the last row is the sum."""
    left = 28 + max((len(label) for label, _ in rows), default=0) * CHAR
    most = sum(value for _, value in rows) or 1.0
    body, at = [], 0.0
    for number, (label, value) in enumerate([*rows, ("together", most)]):
        y, whole = TOP + number * ROW, number == len(rows)
        start = left + (0.0 if whole else at) / most * PLOT
        end = start + value / most * PLOT
        body.append(_text(left - 10, y + 12, label, anchor="end", bold=whole))
        body.append(_rect(start, y, end - start, BAR, ORANGE if whole else BLUE))
        if not whole:
            body.append(_line(end, y + BAR, end, y + ROW, GREY, 0.8))
        body.append(_text(end + 6, y + 12, _number(value), size=11))
        at += value
    return _frame(title, unit, left, len(rows) + 1, most, body)


def stack(plots: Sequence[str]) -> str:
    """Several plots below each other, as one."""
    width, height, body = 0.0, 0.0, []
    for plot in plots:
        size = re.search(r' width="(\d+)" height="(\d+)"', plot)
        assert size is not None, "a plot of ours says how large it is"
        body.append(plot.replace("<svg ", f'<svg y="{height:g}" ', 1).rstrip())
        width, height = max(width, float(size[1])), height + float(size[2])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">'
    return "\n".join([head, *body, "</svg>", ""])
