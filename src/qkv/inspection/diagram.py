"""The structure of a model as one SVG: repeated layers folded, shapes along the arrows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from qkv.inspection.places import places
from qkv.inspection.steps import (
    attention_words,
    feed_forward_words,
    mask_words,
    norm_words,
    position_words,
    stacks,
)
from qkv.spec import (
    Attention,
    CrossAttention,
    Frames,
    LatentAttention,
    Layer,
    Mask,
    Model,
    Patches,
    Stack,
    Sublayer,
    Tokens,
)
from qkv.spec.heads import Language
from qkv.spec.layers import Branch, Mixer
from qkv.spec.masks import And, Chunk, Or, Strided, Window

WIDTH, MARGIN, LINE, PAD, GAP = 460, 16, 17, 9, 26
STYLE = """
svg{--ink:#1c2430;--soft:#5b6676;--line:#9aa5b4;--paper:#ffffff;--fold:#f3f5f8;
--mix:#dcebff;--forward:#e3f4e1;--norm:#fff3d6;--io:#efe6fb}
@media (prefers-color-scheme:dark){svg{--ink:#e8edf4;--soft:#a5b1c2;--line:#6d7a8c;--paper:#12161c;
--fold:#1a2029;--mix:#1d3557;--forward:#1f3d2b;--norm:#453817;--io:#372a4d}}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.soft{fill:var(--soft);font-size:12px}
.title{font-weight:600}rect{stroke:var(--line);stroke-width:1}.page{fill:var(--paper);stroke:none}
.fold{fill:var(--fold)}.mix{fill:var(--mix)}.forward{fill:var(--forward)}.norm{fill:var(--norm)}
.io{fill:var(--io)}path{stroke:var(--soft);fill:none;stroke-width:1.4}.head{fill:var(--soft);stroke:none}
circle{fill:var(--paper);stroke:var(--soft);stroke-width:1.4}
.seen{fill:var(--ink);stroke:none}.hidden{fill:var(--fold);stroke:none}
"""


@dataclass
class Pen:
    """Draws downwards; `y` is where the next part begins."""

    y: float = MARGIN
    body: list[str] | None = None

    def put(self, element: str) -> None:
        if self.body is None:
            self.body = []
        self.body.append(element)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.put(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, width: float, kind: str, title: str, lines: list[str] | None = None) -> float:
        """A box at `y` with a title and smaller lines; gives its height."""
        rows = [row for line in lines or [] for row in wrap(line, width - 2 * PAD)]
        height = 2 * PAD + LINE * (1 + len(rows)) - 4
        self.put(
            f'<rect x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>'
        )
        self.text(x + PAD, self.y + PAD + 10, title, "title")
        for i, row in enumerate(rows):
            self.text(x + PAD, self.y + PAD + 10 + LINE * (i + 1), row, "soft")
        return height

    def arrow(self, x: float, label: str = "", length: float = GAP) -> None:
        """Down by `length`, with what flows along it."""
        end = self.y + length
        self.put(f'<path d="M{x:g} {self.y:g}V{end - 5:g}"/>')
        self.put(f'<path class="head" d="M{x - 4:g} {end - 7:g}h8l-4 7z"/>')
        if label:
            self.text(x + 8, self.y + length / 2 + 3, label, "soft")
        self.y = end


def wrap(words: str, width: float) -> list[str]:
    """Lines of about `width` pixels at the small size."""
    most, lines = int(width / 6.1), [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def diagram(model: Model, title: str = "") -> str:
    """One SVG of the whole model, WIDTH pixels wide; readable in light and dark."""
    pen = Pen()
    if title:
        pen.text(MARGIN, pen.y + 12, title, "title")
        pen.y += 28
    for i, (name, stack) in enumerate(stacks(model)):
        if i:
            pen.y += GAP
        if name:
            pen.text(MARGIN, pen.y + 12, name, "title")
            pen.y += 24
        _stack(pen, stack, model if stack is model.trunk else None)
    height = pen.y + MARGIN
    page = f'<rect class="page" width="{WIDTH}" height="{height:g}"/>'
    return _svg(WIDTH, height, title or "structure of the model", page + "".join(pen.body or []))


def _stack(pen: Pen, stack: Stack, model: Model | None) -> None:
    """One stack from its input to its last norm, and the head where `model` is given."""
    x, width = MARGIN, WIDTH - 2 * MARGIN
    middle = MARGIN + width / 2
    title, lines, flows = _input(stack)
    pen.text(middle + 8, pen.y + 14, flows, "soft")
    pen.arrow(middle)
    pen.y += pen.box(x, width, "io", title, lines)
    stream = f"length x {stack.width:,}"
    for layer, at in _folded(stack):
        pen.arrow(middle, stream)
        _layer(pen, layer, at, len(stack.layers))
    if stack.norm is not None:
        pen.arrow(middle, stream)
        pen.y += pen.box(x, width, "norm", norm_words(stack.norm))
    if model is not None and model.head is not None:
        pen.arrow(middle, stream)
        title, lines, out = _answer(model)
        pen.y += pen.box(x, width, "io", title, lines)
        pen.arrow(middle, out)
    else:
        pen.arrow(middle, stream)


def _input(stack: Stack) -> tuple[str, list[str], str]:
    match stack.input:
        case Tokens() as tokens:
            added = [position_words(tokens.position)] if tokens.position else []
            if tokens.norm is not None:
                added.append(norm_words(tokens.norm))
            if tokens.projection is not None:
                added.append(f"projected to {tokens.projection.width:,}")
            if tokens.scale != 1:
                added.append(f"times {tokens.scale:.4g}")
            shape = f"{tokens.vocab:,} x {tokens.table_width or tokens.width:,}"
            return f"token table {shape}", added, "length token ids"
        case Patches() as patches:
            added = [position_words(patches.position)] if patches.position else []
            rows = f"{patches.rows(0):,} rows of {patches.width:,}"
            height, width = patches.image
            return f"patches of {patches.size} x {patches.size}", [rows, *added], f"image {height} x {width}"
        case Frames() as frames:
            added = [position_words(frames.position)] if frames.position else []
            return f"{len(frames.strides)} convolutions", added, f"frames x {frames.channels}"
    raise TypeError(f"no picture of {stack.input}")


def _answer(model: Model) -> tuple[str, list[str], str]:
    head, width = model.head, model.trunk.width
    if isinstance(head, Language):
        tied = head.shared is not None and head.shared == model.trunk.input.shared
        extra = ["shared with the token table"] if tied else []
        extra += [f"capped at {head.cap:g}"] if head.cap else []
        return f"output matrix {head.vocab:,} x {width:,}", extra, f"length x {head.vocab:,} logits"
    return type(head).__name__, [], "answer"


def _folded(stack: Stack) -> Iterator[tuple[Layer, list[int]]]:
    """Distinct layers in the order they first appear, with the numbers they stand at."""
    found: dict[Layer, list[int]] = {}
    for i, layer in enumerate(stack.layers):
        found.setdefault(layer, []).append(i)
    yield from found.items()


def _layer(pen: Pen, layer: Layer, at: list[int], total: int) -> None:
    """A frame around the layer's steps; its height is known only when they are drawn."""
    top, first = pen.y, len(pen.body or [])
    same = len(at) == total
    title = f"{total} x the same layer" if same else f"{len(at)} of {total} layers"
    rows = [] if same else wrap(places(at, total), WIDTH - 2 * MARGIN - 2 * PAD)
    pen.text(MARGIN + PAD, pen.y + 18, title, "title")
    for i, row in enumerate(rows):
        pen.text(MARGIN + PAD, pen.y + 18 + LINE * (i + 1), row, "soft")
    pen.y += 12 + LINE * (1 + len(rows))
    for sublayer, _, branches in layer.named():
        _sublayer(pen, sublayer, branches)
    pen.y += 8
    frame = (
        f'<rect x="{MARGIN}" y="{top:g}" width="{WIDTH - 2 * MARGIN}" height="{pen.y - top:g}" '
        'rx="10" class="fold"/>'
    )
    if pen.body is not None:
        pen.body.insert(first, frame)


def _sublayer(pen: Pen, sublayer: Sublayer, branches: list[tuple[str, Branch]]) -> None:
    """before -> branches side by side -> after -> + -> post, with the residual line on the left."""
    left, width = MARGIN + 44, WIDTH - 2 * MARGIN - 60
    middle, start, rail = left + width / 2, pen.y, MARGIN + 22
    if sublayer.before is not None:
        pen.arrow(middle, length=18)
        pen.y += pen.box(left, width, "norm", norm_words(sublayer.before))
    pen.arrow(middle, length=18)
    each = (width - 8 * (len(branches) - 1)) / len(branches)
    heights = []
    for i, (_, branch) in enumerate(branches):
        title, lines, kind = _mixer(branch.mixer)
        if branch.norm is not None:
            lines = [f"after {norm_words(branch.norm)}", *lines]
        heights.append(pen.box(left + i * (each + 8), each, kind, title, lines))
    pen.y += max(heights)
    if sublayer.after is not None:
        pen.arrow(middle, length=18)
        pen.y += pen.box(left, width, "norm", norm_words(sublayer.after))
    notes = [f"times {sublayer.scale:.4g}"] if sublayer.scale != 1 else []
    notes += ["through a learned gate"] if sublayer.gate is not None else []
    pen.arrow(middle, ", ".join(notes), length=22)
    pen.y += 10
    pen.put(f'<circle cx="{middle:g}" cy="{pen.y:g}" r="10"/>')
    pen.text(middle, pen.y + 5, "+", "title", "middle")
    pen.put(f'<path d="M{middle:g} {start:g}H{rail:g}V{pen.y:g}H{middle - 10:g}"/>')
    if sublayer.skip != 1:
        pen.text(rail + 4, pen.y - 6, f"x{sublayer.skip:.4g}", "soft")
    pen.y += 10
    if sublayer.post is not None:
        pen.arrow(middle, length=18)
        pen.y += pen.box(left, width, "norm", norm_words(sublayer.post))


def _mixer(mixer: Mixer) -> tuple[str, list[str], str]:
    match mixer:
        case Attention():
            value = mixer.value_dim or mixer.head_dim
            shapes = f"q {mixer.heads} x {mixer.head_dim}; k {mixer.kv_heads} x {mixer.head_dim}"
            shapes += f"; v {mixer.kv_heads} x {value}"
            placed = [position_words(mixer.position, mixer.head_dim)] if mixer.position else []
            return "attention", [shapes, *placed, mask_words(mixer.mask), *_particulars(mixer)], "mix"
        case CrossAttention():
            return "cross-attention", [attention_words(mixer)], "mix"
        case LatentAttention():
            placed = [position_words(mixer.position, mixer.rotary_dim)] if mixer.position else []
            return "latent attention", [attention_words(mixer), *placed, mask_words(mixer.mask)], "mix"
        case _ if mixer.role == "feed_forward":
            return "feed-forward", [feed_forward_words(mixer)], "forward"
        case _:
            return "state mixer", [attention_words(mixer)], "mix"


def _particulars(mixer: Attention) -> list[str]:
    words = attention_words(mixer).split("; ")[1:]
    return ["; ".join(words)] if words else []


def masks(model: Model) -> list[tuple[str, str, str]]:
    """For each kind of layer: where it stands, what it shows in words, and a picture of it."""
    found: dict[tuple[str, Mask], list[int]] = {}
    totals = {}
    for name, stack in stacks(model):
        totals[name] = len(stack.layers)
        for i, layer in enumerate(stack.layers):
            for _, mixer in layer.mixers():
                if isinstance(mixer, Attention | LatentAttention):
                    found.setdefault((name, mixer.mask), []).append(i)
    pictures = []
    for (name, mask), layers in found.items():
        where = places(layers, totals[name])
        pictures.append((f"{name} {where}".strip(), mask_words(mask), mask_picture(mask)))
    return pictures


def mask_picture(mask: Mask, positions: int = 24, cell: int = 7) -> str:
    """Queries down, keys across; wide windows are drawn narrower so that their shape can be seen."""
    place = np.arange(positions)
    seen = np.broadcast_to(small(mask).visible(place[:, None], place[None, :]), (positions, positions))
    side = positions * cell
    cells = "".join(
        f'<rect class="{"seen" if seen[q, k] else "hidden"}" x="{k * cell}" y="{q * cell}" '
        f'width="{cell - 1}" height="{cell - 1}"/>'
        for q in range(positions)
        for k in range(positions)
    )
    return _svg(side, side, mask_words(mask), cells)


def _svg(width: float, height: float, words: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(words)}"><style>{STYLE}</style>{body}</svg>'
    )


def small(mask: Mask) -> Mask:
    """The same shape with numbers that fit a small picture."""
    match mask:
        case And() | Or():
            return replace(mask, left=small(mask.left), right=small(mask.right))
        case Window():
            return Window(min(mask.before, 6), min(mask.after, 5))
        case Chunk():
            return Chunk(min(mask.size, 8))
        case Strided():
            return Strided(min(mask.stride, 4))
        case _:
            return mask
