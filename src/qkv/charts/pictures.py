"""Pictures as SVG text: curves, bars, heat maps, paths over images, and several of them together.

Each function gives a `Panel`; `picture(*panels)` puts panels side by side where they fit and below one
another where they don't, into one SVG as wide as a phone, so that its text keeps its size there. Colours
follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from qkv.charts.scales import Axis, Scale, number
from qkv.inspection.drawing import BOLD, SMALL, WIDTH, breadth, wrap

MARGIN, LINE, GAP = 8.0, 17.0, 14.0
PLOT = 168.0  # the height of a plot's inside
COLOURS = 6
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 2")  # who sees no colours sees these
STYLE = """
svg{--ink:#1c2430;--soft:#566070;--line:#c3cbd6;--paper:#ffffff;--heat:#2459b3;
--s0:#2459b3;--s1:#c2570c;--s2:#0b7a53;--s3:#8b2fc9;--s4:#a3123f;--s5:#5d6470}
@media (prefers-color-scheme:dark){svg{--ink:#e8edf4;--soft:#b4bfce;--line:#3c4858;--paper:#12161c;
--heat:#8db4ff;--s0:#8db4ff;--s1:#ffa45c;--s2:#5fd3a5;--s3:#d0a2ff;--s4:#ff8fab;--s5:#b5bdc9}}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .title{font-size:13px;font-weight:600;
fill:var(--ink)}svg .page{fill:var(--paper)}svg .axis{stroke:var(--line);fill:none}
svg .mark{stroke:var(--ink);fill:none;stroke-dasharray:3 3}svg .cell{fill:var(--heat)}
svg .frame{fill:none;stroke:var(--line)}svg .curve{fill:none;stroke-width:2}svg .band{opacity:.2}
svg .range{stroke:var(--ink);fill:none}svg .path{fill:none;stroke:var(--s1);stroke-width:1.6}
svg .window{fill:none;stroke:var(--s1)}svg .stop{fill:var(--paper);stroke:var(--s1)}
svg .count{fill:var(--ink);font-size:12px}
""" + "".join(f"svg .l{i}{{stroke:var(--s{i})}}svg .f{i}{{fill:var(--s{i})}}" for i in range(COLOURS))


@dataclass(frozen=True)
class Panel:
    """One drawing from (0, 0) on; `words` say it to who cannot see it."""

    width: float
    height: float
    words: str
    body: str


@dataclass(frozen=True)
class Series:
    """A named curve over x, one row of `runs` a seed: drawn as their median, with a band from least to most.

    None is a gap.
    """

    name: str
    x: Sequence[float]
    runs: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Bar:
    """A named length: the median of what the seeds gave, with a line from least to most.

    Bars of one `kind` have one colour, and the kinds are the legend where there are several.
    """

    name: str
    values: Sequence[float]
    kind: str = ""


def picture(*panels: Panel) -> str:
    """The text of an SVG file."""
    parts, x, y, low = [], MARGIN, MARGIN, 0.0
    for panel in panels:
        if x > MARGIN and x + panel.width > WIDTH - MARGIN + 0.5:
            x, y, low = MARGIN, y + low + GAP, 0.0
        parts.append(f'<g transform="translate({x:g} {y:g})">{panel.body}</g>')
        x, low = x + panel.width + GAP, max(low, panel.height)
    height = y + low + MARGIN
    words = "; ".join(panel.words for panel in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" aria-label="{escape(words)}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{height:g}"/>{"".join(parts)}</svg>'
    )


INSIDE = WIDTH - 2 * MARGIN  # the width of a panel that has a row to itself
HALF = (INSIDE - GAP) / 2  # and of one of two


def curves(title: str, series: Sequence[Series], x: Axis, y: Axis, width: float = INSIDE) -> Panel:
    """Several series over one x. What is not known, or has no logarithm, is a gap."""
    pen = _Pen(width)
    pen.title(title)
    pen.legend([one.name for one in series], y.marks, lines=True)
    shown = [_bands(one, y) for one in series]
    across = Scale.of(x, [value for one in series for value in one.x])
    up = Scale.of(y, [v for rows in shown for _, *three in rows for v in three] + list(y.marks.values()))
    pen.words(y.label)
    left = max(breadth(label) * SMALL for label in up.labels()) + 10
    right, top = width - 10, pen.y + 6
    across, up = across.onto(left, right), up.onto(top + PLOT, top)
    pen.grid(up, across, left, right, top)
    for place, rows in enumerate(shown):
        pen.series([(across(at), up(low), up(mid), up(high)) for at, low, mid, high in rows], place)
    for value in y.marks.values():
        pen.add(f'<path class="mark" d="M{left:g} {up(value):.1f}H{right:g}"/>')
    pen.ticks_below(across, top + PLOT, x.label, width)
    words = f"{title}: {y.label} over {x.label}, for {', '.join(one.name for one in series)}"
    return pen.panel(words)


def _bands(one: Series, y: Axis) -> list[tuple[float, float, float, float]]:
    """(x, least, median, most) where any seed has a value."""
    rows = []
    for place, at in enumerate(one.x):
        found = [run[place] for run in one.runs if place < len(run)]
        known = [value for value in found if value is not None and (not y.log or value > 0)]
        if known:
            rows.append((at, min(known), median(known), max(known)))
    return rows


def bars(title: str, rows: Sequence[Bar], x: Axis, width: float = INSIDE) -> Panel:
    """Bars to the right, each below its name, from 0 (on a logarithmic axis from its low end)."""
    pen = _Pen(width)
    pen.title(title)
    kinds = list(dict.fromkeys(bar.kind for bar in rows))
    pen.legend(kinds if len(kinds) > 1 else [], x.marks)
    values = [value for bar in rows for value in bar.values]
    across = Scale.of(x, [*values, *x.marks.values(), *([] if x.log else [0.0])])
    room = max(breadth(number(median(bar.values))) for bar in rows) * SMALL + 12
    across = across.onto(2, width - room)
    for bar in rows:
        pen.words(bar.name)
        least, mid, most = (across(f(bar.values)) for f in (min, median, max))
        start, y = across(0.0) if not x.log else across.start, pen.y + 1
        left, length = min(start, mid), abs(mid - start)
        kind = kinds.index(bar.kind) % COLOURS
        pen.add(f'<rect class="f{kind}" x="{left:.1f}" y="{y:g}" width="{length:.1f}" height="13" rx="2"/>')
        if len(bar.values) > 1:
            ends = f"M{least:.1f} {y + 3:g}v7M{most:.1f} {y + 3:g}v7"
            pen.add(f'<path class="range" d="M{least:.1f} {y + 6.5:g}H{most:.1f}{ends}"/>')
        label = number(median(bar.values))
        pen.text(max(most, mid, start) + 5, y + 11, label, "count")
        for value in x.marks.values():
            pen.add(f'<path class="mark" d="M{across(value):.1f} {y - 3:g}v19"/>')
        pen.y += 20
    pen.ticks_below(across, pen.y, x.label, width)
    return pen.panel(f"{title}: {x.label} of {', '.join(bar.name for bar in rows)}")


def heat(
    title: str,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    row_axis: str = "",
    column_axis: str = "",
    width: float = INSIDE,
) -> Panel:
    """A matrix, (rows, columns), the darker the greater; in dark mode the brighter. At least 0.

    Names that would overlap are left out at equal steps.
    """
    pen = _Pen(width)
    pen.title(title)
    most = max((value for row in values for value in row), default=0.0) or 1.0
    shade = f"full colour: {number(round(most, 3))}"
    pen.words(f"{row_axis} down, {column_axis} across; {shade}" if row_axis or column_axis else shade)
    left = max((breadth(name) * SMALL for name in rows), default=0.0) + 6
    cell = min((width - left - 2) / len(columns), 26.0)
    upright = max(breadth(name) * SMALL for name in columns) > cell - 2
    head = (max(breadth(name) * SMALL for name in columns) if upright else 12.0) + 6
    top = pen.y + head
    for place, name in _spaced(columns, cell, LINE - 2 if upright else 0):
        at = left + (place + 0.5) * cell
        if upright:
            turn = f'transform="rotate(-90 {at + 4:.1f} {top - 5:.1f})"'
            pen.add(f'<text x="{at + 4:.1f}" y="{top - 5:.1f}" {turn}>{escape(name)}</text>')
        else:
            pen.text(at, top - 5, name, "", "middle")
    for place, name in _spaced(rows, cell, LINE - 2):
        pen.text(left - 5, top + (place + 0.5) * cell + 4, name, "", "end")
    for down, row in enumerate(values):
        for across, value in enumerate(row):
            if value / most > 0.01:
                x, y = left + across * cell, top + down * cell
                pen.add(
                    f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}" '
                    f'opacity="{value / most:.2f}"/>'
                )
    size = f'width="{cell * len(columns):.1f}" height="{cell * len(rows):.1f}"'
    pen.add(f'<rect class="frame" x="{left:.1f}" y="{top:.1f}" {size}/>')
    pen.y = top + cell * len(rows) + 2
    return pen.panel(f"{title}: a map of {len(rows)} by {len(columns)}")


def _spaced(names: Sequence[str], cell: float, room: float) -> list[tuple[int, str]]:
    """Every name, or every second, third, ... so that each has so much room."""
    every = max(1, -int(-room // cell))
    return [(place, name) for place, name in enumerate(names) if place % every == 0]


def path(
    title: str,
    image: Sequence[Sequence[float]],
    points: Sequence[tuple[float, float]],
    sizes: Sequence[float] = (),
    width: float = HALF,
) -> Panel:
    """Where a model looked: an image from 0 (black) to 1, and the places (x, y), in pixels, in their order.

    Around each place stands a square of each of the sizes, in pixels.
    """
    pen = _Pen(width)
    pen.title(title)
    pixel, top = width / len(image[0]), pen.y + 4
    for down, row in enumerate(image):
        for start, end, value in _stretches(row):
            grey = round(255 * min(max(value, 0.0), 1.0))
            pen.add(
                f'<rect x="{start * pixel:.1f}" y="{top + down * pixel:.1f}" '
                f'width="{(end - start) * pixel:.1f}" height="{pixel:.1f}" shape-rendering="crispEdges" '
                f'fill="#{grey:02x}{grey:02x}{grey:02x}"/>'
            )
    at = [(x * pixel, top + y * pixel) for x, y in points]
    for x, y in at:
        for size in sizes:
            side = size * pixel
            pen.add(
                f'<rect class="window" x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" '
                f'width="{side:.1f}" height="{side:.1f}"/>'
            )
    pen.add(f'<path class="path" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>')
    for place, (x, y) in enumerate(at, 1):
        pen.add(f'<circle class="stop" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
        pen.text(x, y + 4, str(place), "count", "middle")
    pen.y = top + pixel * len(image) + 2
    return pen.panel(f"{title}: {len(points)} places in an image, in order")


def _stretches(row: Sequence[float]) -> list[tuple[int, int, float]]:
    """Runs of equal values: start, end, value."""
    found: list[tuple[int, int, float]] = []
    for place, value in enumerate(row):
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], place + 1, value)
        else:
            found.append((place, place + 1, value))
    return found


class _Pen:
    """Draws a panel downwards; `y` is where the next part begins."""

    def __init__(self, width: float):
        self.width, self.y, self.parts = width, 0.0, list[str]()

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        kind = f' class="{kind}"' if kind else ""
        anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}"{kind}{anchor}>{escape(words)}</text>')

    def words(self, words: str, kind: str = "") -> None:
        """Lines across the panel."""
        for row in wrap(words, self.width, BOLD if kind else SMALL) if words else ():
            self.text(0, self.y + 12, row, kind)
            self.y += LINE

    def title(self, words: str) -> None:
        self.words(words, "title")

    def legend(self, names: Sequence[str], marks: Mapping[str, float], lines: bool = False) -> None:
        """What each colour and each marked value stands for, in as many lines as it takes."""
        entries = [(name, _swatch(place, lines)) for place, name in enumerate(names)]
        entries += [(f"{name} ({number(value)})", _MARK) for name, value in marks.items()]
        x = 0.0
        for name, swatch in entries:
            wide = 26 + breadth(name) * SMALL + 12
            if x and x + wide - 12 > self.width:
                x, self.y = 0.0, self.y + LINE
            self.add(f'<g transform="translate({x:.1f} {self.y:.1f})">{swatch}</g>')
            self.text(x + 26, self.y + 12, name)
            x += wide
        if entries:
            self.y += LINE + 3

    def grid(self, up: Scale, across: Scale, left: float, right: float, top: float) -> None:
        for value, label in zip(up.ticks(), up.labels(), strict=True):
            y = up(value)
            self.add(f'<path class="axis" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            self.text(left - 5, y + 4, label, "", "end")

    def series(self, rows: Sequence[tuple[float, float, float, float]], place: int) -> None:
        """A band and a line, or a dot where there is one point alone; few points are dotted."""
        colour, dash = place % COLOURS, DASHES[place % len(DASHES)]
        over = [f"{x:.1f} {high:.1f}" for x, _, _, high in rows]
        under = [f"{x:.1f} {low:.1f}" for x, low, _, _ in reversed(rows)]
        if any(low != high for _, low, _, high in rows):
            self.add(f'<path class="band f{colour}" d="M{"L".join(over + under)}Z"/>')
        line = "L".join(f"{x:.1f} {mid:.1f}" for x, _, mid, _ in rows)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        if len(rows) > 1:
            self.add(f'<path class="curve l{colour}"{dashed} d="M{line}"/>')
        if len(rows) <= 12:
            self.parts += [
                f'<circle class="f{colour}" cx="{x:.1f}" cy="{mid:.1f}" r="3"/>' for x, _, mid, _ in rows
            ]

    def ticks_below(self, across: Scale, y: float, label: str, width: float) -> None:
        """The axis at y, its numbers where they don't overlap, and what it shows."""
        self.add(f'<path class="axis" d="M{across.start:.1f} {y:.1f}H{across.end:.1f}"/>')
        free = float("-inf")
        for value, words in zip(across.ticks(), across.labels(), strict=True):
            half = breadth(words) * SMALL / 2
            at = min(max(across(value), half), width - half)
            if at - half > free:
                self.add(f'<path class="axis" d="M{across(value):.1f} {y:.1f}v4"/>')
                self.text(at, y + 17, words, "", "middle")
                free = at + half + 6
        self.y = y + 22
        self.words(label)

    def panel(self, words: str) -> Panel:
        return Panel(self.width, self.y + 2, words, "".join(self.parts))


_MARK = '<path class="mark" d="M0 8H20"/>'


def _swatch(place: int, line: bool) -> str:
    colour, dash = place % COLOURS, DASHES[place % len(DASHES)]
    if not line:
        return f'<rect class="f{colour}" x="4" y="2" width="12" height="12" rx="2"/>'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="curve l{colour}"{dashed} d="M0 8H20"/>'
