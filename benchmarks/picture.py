"""The report's picture: bars of SVG, one stream, every engine, the most threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from benchmarks.measure import Measured
from qkv.benching.figures import Spread, chosen

COLOURS = ("#1f6feb", "#d97706", "#059669", "#9333ea", "#64748b", "#be123c")
WIDTH, BAR, GAP, LEFT, TOP = 460, 15, 14, 70, 64  # of one panel, in pixels
STYLE = (
    "text{font:12px sans-serif;fill:#334155}.title{font-size:15px;font-weight:bold}"
    ".limit{stroke:#0f172a;stroke-width:2;stroke-dasharray:3 2}.range{stroke:#0f172a;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#cbd5e1}.limit,.range{stroke:#e2e8f0}}"
)


@dataclass(frozen=True)
class Bar:
    engine: str
    spread: Spread


@dataclass(frozen=True)
class Row:
    """The bars of one type; `limit` is what the memory allows, where that is known."""

    label: str
    bars: tuple[Bar, ...]
    limit: float | None = None


def rows(found: Sequence[Measured], which: str) -> list[Row]:
    """One stream of the first model with the most threads; `which` is "prefill" or "decode"."""
    single = [each for each in found if each.case.streams == 1 and each.case.prompt == 512]
    if not single:
        return []
    model = single[0].case.group.model
    threads = max(each.case.group.threads for each in single)
    made = []
    for each in single:
        if (each.case.group.model, each.case.group.threads) != (model, threads):
            continue
        bars = []
        for engine, outcome in each.outcomes.items():
            values = Spread.of([getattr(sample, which) for sample in chosen(outcome.samples)])
            if values is not None:
                bars.append(Bar(engine, values))
        speeds = [sample.bandwidth for outcome in each.outcomes.values() for sample in outcome.samples]
        known = median(speeds) / each.bytes_per_token if speeds and which == "decode" else None
        made.append(Row(each.case.group.type, tuple(bars), known))
    return made


def panel(title: str, rows: Sequence[Row], engines: Sequence[str], left: float) -> tuple[str, float]:
    """A panel whose bars begin at `left`, and the height that it takes."""
    most = max([bar.spread.high for row in rows for bar in row.bars] + [row.limit or 0 for row in rows])
    scale = (WIDTH - LEFT - 60) / most
    origin, at = left + LEFT, float(TOP)
    parts = [f'<text class="title" x="{origin}" y="{TOP - 16}">{escape(title)}</text>']
    for row in rows:
        height = BAR * len(row.bars)
        middle = at + height / 2 + 4
        parts.append(f'<text x="{origin - 8}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>')
        for place, bar in enumerate(row.bars):
            parts.append(_bar(bar, engines, origin, at + place * BAR, scale))
        if row.limit is not None:
            x = origin + row.limit * scale
            parts.append(f'<path class="limit" d="M{x:.1f} {at - 3:.1f}V{at + height + 3:.1f}"/>')
        at += height + GAP
    return "\n".join(parts), at


def _bar(bar: Bar, engines: Sequence[str], origin: float, top: float, scale: float) -> str:
    colour = COLOURS[engines.index(bar.engine) % len(COLOURS)]
    length, low, high = (scale * value for value in (bar.spread.median, bar.spread.low, bar.spread.high))
    middle = top + BAR / 2 - 1
    return (
        f'<rect x="{origin}" y="{top:.1f}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}">'
        f"<title>{escape(bar.engine)} {bar.spread.median:.1f}</title></rect>"
        f'<path class="range" d="M{origin + low:.1f} {middle:.1f}H{origin + high:.1f}"/>'
        f'<text x="{origin + high + 5:.1f}" y="{top + BAR - 3:.1f}">{bar.spread.median:,.0f}</text>'
    )


def legend(engines: Sequence[str]) -> str:
    parts, x = [], 20.0
    for place, engine in enumerate(engines):
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17}" y="21">{escape(engine)}</text>')
        x += 40 + 7 * len(engine)
    parts.append(f'<path class="limit" d="M{x} 9V23"/><text x="{x + 7}" y="21">what the memory allows</text>')
    return "\n".join(parts)


def draw(found: Sequence[Measured]) -> str:
    """Two panels side by side: decoding, with the memory's limit, and prefill."""
    engines = list(dict.fromkeys(engine for each in found for engine in each.outcomes))
    parts, bottom = [legend(engines)], float(TOP)
    for place, which in enumerate(("decode", "prefill")):
        here = [row for row in rows(found, which) if row.bars]
        if here:
            drawn, height = panel(f"{which}, tokens/s", here, engines, place * WIDTH)
            parts.append(drawn)
            bottom = max(bottom, height)
    size = f'width="{2 * WIDTH}" height="{bottom:.0f}" viewBox="0 0 {2 * WIDTH} {bottom:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"
