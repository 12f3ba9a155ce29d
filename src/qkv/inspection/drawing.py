"""A pen that draws boxes and arrows downwards, and the style of all pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH, MARGIN, LINE, PAD, GAP = 360, 8, 17, 9, 26  # as wide as a phone, so that text keeps its size there
LEFT, RIGHT = MARGIN + 38, WIDTH - MARGIN - 14  # of the boxes inside a layer
SPINE = (LEFT + RIGHT) / 2  # what flows, flows along it
SMALL, BOLD = 12.0, 13 * 1.13  # pixels an em of the two kinds of text; bold is as wide as a larger size
EMS = {
    one: ems
    for some, ems in ((" ,.:;ijlI|'", 0.32), ("()[]frt-/", 0.41), ("cksvxyz", 0.58), ("mwMW+=", 0.97))
    for one in some
}
STYLE = """
svg{--ink:#1c2430;--soft:#566070;--line:#9aa5b4;--paper:#ffffff;--fold:#f3f5f8;--seen:#3f6fc4;
--mix:#dcebff;--forward:#e3f4e1;--norm:#fff3d6;--io:#efe6fb}
@media (prefers-color-scheme:dark){svg{--ink:#e8edf4;--soft:#b4bfce;--line:#6d7a8c;--paper:#12161c;
--fold:#1a2029;--seen:#7fa8f0;--mix:#1d3557;--forward:#1f3d2b;--norm:#453817;--io:#372a4d}}
svg text{font:13px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft);font-size:12px}
svg .title{font-weight:600}svg rect{stroke:var(--line);stroke-width:1}svg .page{fill:var(--paper);stroke:none}
svg .fold{fill:var(--fold)}svg .round{fill:none;stroke-dasharray:5 4}svg .mix{fill:var(--mix)}
svg .forward{fill:var(--forward)}svg .norm{fill:var(--norm)}svg .io{fill:var(--io)}
svg path{stroke:var(--soft);fill:none;stroke-width:1.4}svg .head{fill:var(--soft);stroke:none}
svg circle{fill:var(--paper);stroke:var(--soft);stroke-width:1.4}
svg .seen{fill:var(--seen);stroke:none}svg .hidden{fill:var(--fold);stroke:none}
"""


@dataclass
class Pen:
    """Draws downwards; `y` is where the next part begins."""

    y: float = MARGIN
    body: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.body.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def lines(self, x: float, width: float, title: str, lines: list[str]) -> float:
        """A title and smaller lines below `y`, each as long as fits; gives their height."""
        rows = [(row, "title") for row in wrap(title, width, BOLD)]
        rows += [(row, "soft") for line in lines for row in wrap(line, width)]
        for i, (row, kind) in enumerate(rows):
            self.text(x, self.y + 10 + LINE * i, row, kind)
        return LINE * len(rows) - 4

    def box(self, x: float, width: float, kind: str, title: str, lines: list[str] | None = None) -> float:
        """A box at `y` with a title and smaller lines; gives its height."""
        place, top = len(self.body), self.y
        self.y += PAD
        height = 2 * PAD + self.lines(x + PAD, width - 2 * PAD, title, lines or [])
        self.y = top
        self.frame(place, x, width, height, kind, 6)
        return height

    def frame(self, place: int, x: float, width: float, height: float, kind: str, round_: int = 10) -> None:
        """A rectangle at `y`, behind all that was drawn since `place`."""
        self.body.insert(
            place,
            f'<rect x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}" rx="{round_}" '
            f'class="{kind}"/>',
        )

    def line(self, top: float) -> None:
        """Down the spine from `top` to `y`."""
        self.body.append(f'<path d="M{SPINE:g} {top:g}V{self.y:g}"/>')

    def fork(self, places: list[float], length: float = 22) -> None:
        """From the spine down to each of these places."""
        beam, end = self.y + 8, self.y + length
        self.body.append(
            f'<path d="M{SPINE:g} {self.y:g}V{beam:g}M{min(places):g} {beam:g}H{max(places):g}"/>'
        )
        for x in places:
            self.body.append(f'<path d="M{x:g} {beam:g}V{end - 5:g}"/>')
            self.body.append(f'<path class="head" d="M{x - 4:g} {end - 7:g}h8l-4 7z"/>')
        self.y = end

    def join(self, places: list[float], tops: list[float]) -> None:
        """From each of these places back to one line on the spine, `y` at the lowest of them."""
        beam = max(tops) + 8
        for x, top in zip(places, tops, strict=True):
            self.body.append(f'<path d="M{x:g} {top:g}V{beam:g}H{SPINE:g}"/>')
        self.y = beam

    def arrow(self, label: str = "", length: float = GAP) -> None:
        """Down the spine by `length`, with what flows along it; longer where the label needs it."""
        rows = wrap(label, WIDTH - MARGIN - SPINE - 8) if label else []
        length = max(length, LINE * len(rows) + 9)
        end, first = self.y + length, self.y + length / 2 + 3 - LINE * (len(rows) - 1) / 2
        self.body.append(f'<path d="M{SPINE:g} {self.y:g}V{end - 5:g}"/>')
        self.body.append(f'<path class="head" d="M{SPINE - 4:g} {end - 7:g}h8l-4 7z"/>')
        for i, row in enumerate(rows):
            self.text(SPINE + 8, first + LINE * i, row, "soft")
        self.y = end


def wrap(words: str, width: float, em: float = SMALL) -> list[str]:
    """Lines of at most `width` pixels, unless a single word is wider."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and breadth(longer) * em > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def breadth(words: str) -> float:
    """Ems of a line in a wide font (DejaVu Sans); no font can be asked here."""
    return sum(EMS.get(one, 0.72 if one.isupper() else 0.635) for one in words)


def svg(width: float, height: float, words: str, body: str) -> str:
    """A picture that stands alone; `words` say it to who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(words)}"><style>{STYLE}</style>{body}</svg>'
    )
