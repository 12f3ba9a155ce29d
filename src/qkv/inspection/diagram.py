"""The structure of a model as one SVG: repeated layers folded, shapes along the arrows."""

from __future__ import annotations

import math

from qkv.inspection.drawing import GAP, LEFT, MARGIN, PAD, RIGHT, SPINE, WIDTH, Pen, svg
from qkv.inspection.folding import Run, folded
from qkv.inspection.places import places
from qkv.inspection.steps import head_lines, is_tied, joining_words, seer, stacks
from qkv.inspection.words import (
    added_words,
    attention_words,
    convolution_words,
    feed_forward_words,
    mask_words,
    norm_words,
    number,
    particulars,
    position_words,
    project_words,
    scale_of_embedding,
)
from qkv.spec import (
    Attention,
    CrossAttention,
    Frames,
    Gate,
    LatentAttention,
    Model,
    Patches,
    Stack,
    Sublayer,
    Tokens,
)
from qkv.spec.heads import Language
from qkv.spec.layers import Branch, Mixer
from qkv.spec.model import Tower

SHEET = WIDTH - 2 * MARGIN


def diagram(model: Model, title: str = "") -> str:
    """One SVG of the whole model, WIDTH units wide; readable in light and dark."""
    pen = Pen()
    if title:
        pen.y += 4
        pen.y += pen.lines(MARGIN, SHEET, title, []) + 14
    named = stacks(model)
    towers = named[len(named) - len(model.towers) :]
    ordered = [*towers, *named[: len(named) - len(model.towers)]]  # what feeds another stands above it
    for i, (name, stack) in enumerate(ordered):
        if i:
            pen.y += GAP
        if name:
            pen.y += pen.lines(MARGIN, SHEET, name, []) + 12
        whole = i >= len(towers) or model.towers[i].take_layer == -1
        _stack(pen, stack, seer(stack, model), whole)
        if i < len(towers):
            _join(pen, model.towers[i])
        elif stack is model.trunk:
            _answer(pen, model)
        else:
            pen.arrow(f"{_rows(stack)} x {stack.width:,}, read by every cross-attention below")
    height = pen.y + MARGIN
    page = f'<rect class="page" width="{WIDTH}" height="{height:g}"/>'
    return svg(WIDTH, height, title or "structure of the model", page + "".join(pen.body))


def _stack(pen: Pen, stack: Stack, one: str, whole: bool) -> None:
    """One stack from its input to its last norm, which is not there unless `whole`."""
    title, lines, flows = _input(stack)
    pen.arrow(flows)
    pen.y += pen.box(MARGIN, SHEET, "io", title, lines)
    _layers(pen, stack, one)
    if whole and stack.norm is not None:
        pen.arrow(_stream(stack))
        pen.y += pen.box(MARGIN, SHEET, "norm", norm_words(stack.norm))


def _layers(pen: Pen, stack: Stack, one: str) -> None:
    """Each run in a frame; where they repeat, a frame around all of them."""
    fold, stream = folded(stack), _stream(stack)
    words = fold.words()
    pen.arrow(stream)
    top, place = pen.y, len(pen.body)
    if words:
        _caption(pen, MARGIN + PAD, words, [])
    for i, run in enumerate(fold.runs):
        if i and fold.rounds:
            pen.arrow(stream)
        elif i:
            pen.y += 10
        _run(pen, run, len(stack.layers), 6 if words else 0, one)
    if words:
        _close(pen, place, top, "round", 0)


def _run(pen: Pen, run: Run, total: int, inset: int, one: str) -> None:
    """A frame around a layer's steps."""
    top, place = pen.y, len(pen.body)
    several = f"{run.count} x the same layer" if run.count > 1 else "1 layer"
    where = []
    if len(run.at) != total:
        many = "" if len(run.at) == run.count else f"{len(run.at)} of {total}: "
        where = [many + places(run.at, total)]
    _caption(pen, MARGIN + inset + PAD, several, where)
    for sublayer, _, branches in run.layer.named():
        _sublayer(pen, sublayer, branches, one)
    _close(pen, place, top, "fold", inset)


def _caption(pen: Pen, x: float, title: str, lines: list[str]) -> None:
    """What a frame holds, to the left of what flows into it."""
    top = pen.y
    pen.y += PAD
    pen.y += pen.lines(x, SPINE - x - 6, title, lines) + 8
    pen.line(top)


def _close(pen: Pen, place: int, top: float, kind: str, inset: float) -> None:
    """The frame itself; its height is known only when what it holds is drawn."""
    pen.y += 8
    pen.line(pen.y - 8)
    height, pen.y = pen.y - top, top
    pen.frame(place, MARGIN + inset, SHEET - 2 * inset, height, kind)
    pen.y += height


def _sublayer(pen: Pen, sublayer: Sublayer, branches: list[tuple[str, Branch]], one: str) -> None:
    """before -> branches side by side -> after -> + -> post, with the residual line on the left."""
    width, start, rail = RIGHT - LEFT, pen.y, LEFT - 18
    if sublayer.before is not None:
        pen.arrow(length=18)
        pen.y += pen.box(LEFT, width, "norm", norm_words(sublayer.before))
    _branches(pen, branches, one)
    if sublayer.after is not None:
        pen.arrow(length=18)
        pen.y += pen.box(LEFT, width, "norm", norm_words(sublayer.after))
    notes = [f"times {number(sublayer.scale)}"] if sublayer.scale != 1 else []
    notes += ["through a learned gate"] if sublayer.gate is not None else []
    pen.arrow(", ".join(notes), length=22)
    pen.y += 10
    pen.body.append(f'<circle cx="{SPINE:g}" cy="{pen.y:g}" r="10"/>')
    pen.text(SPINE, pen.y + 5, "+", "title", "middle")
    pen.body.append(f'<path d="M{SPINE:g} {start:g}H{rail:g}V{pen.y:g}H{SPINE - 10:g}"/>')
    if sublayer.skip != 1:
        pen.text(rail + 4, pen.y - 6, f"x{number(sublayer.skip)}", "soft")
    pen.y += 10
    if sublayer.post is not None:
        pen.arrow(length=18)
        gate = isinstance(sublayer.post, Gate)
        words = "times one learned factor" if gate else norm_words(sublayer.post)  # type: ignore[arg-type]
        pen.y += pen.box(LEFT, width, "norm", words)


def _branches(pen: Pen, branches: list[tuple[str, Branch]], one: str) -> None:
    """Side by side, each with an arrow of its own; one alone keeps to the spine."""
    each = (RIGHT - LEFT - 8 * (len(branches) - 1)) / len(branches)
    starts = [LEFT + i * (each + 8) for i in range(len(branches))]
    middles = [start + each / 2 for start in starts]
    if len(branches) == 1:
        pen.arrow(length=18)
    else:
        pen.fork(middles)
    bottoms = []
    for start, (_, branch) in zip(starts, branches, strict=True):
        title, lines, kind = _mixer(branch.mixer, one)
        if branch.norm is not None:
            lines = [f"after {norm_words(branch.norm)}", *lines]
        if branch.after is not None:
            lines = [*lines, f"then {norm_words(branch.after)}"]
        bottoms.append(pen.y + pen.box(start, each, kind, title, lines))
    if len(branches) == 1:
        pen.y = bottoms[0]
    else:
        pen.join(middles, bottoms)


def _input(stack: Stack) -> tuple[str, list[str], str]:
    """A stack's input: its title, what else it does, and what flows into it."""
    added = added_words(stack.input)
    lines = [added] if added else []
    match stack.input:
        case Tokens() as tokens:
            lines = [scale_of_embedding(tokens), *lines] if tokens.scale != 1 else lines
            lines += [f"a vector for each of {tokens.types} token types, added"] if tokens.types else []
            lines += [norm_words(tokens.norm)] if tokens.norm is not None else []
            lines += [project_words(tokens.projection)] if tokens.projection is not None else []
            shape = f"{tokens.vocab:,} x {tokens.table_width or tokens.width:,}"
            return f"token table {shape}", lines, "length token ids"
        case Patches() as patches:
            rows, (height, width) = f"{patches.rows(0):,} rows of {patches.width:,}", patches.image
            return f"patches of {patches.size} x {patches.size}", [rows, *lines], f"image {height} x {width}"
        case Frames() as frames:
            return "convolutions", [convolution_words(frames), *lines], f"length frames x {frames.channels}"
    raise TypeError(f"no picture of {stack.input}")


def _rows(stack: Stack) -> str:
    match stack.input:
        case Patches() as patches:
            return f"{patches.rows(0):,}"
        case Frames() as frames if math.prod(frames.strides) > 1:
            return f"(length / {math.prod(frames.strides)})"
        case _:
            return "length"


def _stream(stack: Stack) -> str:
    return f"{_rows(stack)} x {stack.width:,}"


def _join(pen: Pen, tower: Tower) -> None:
    """From a tower's rows to those of the stack it feeds."""
    pen.arrow(_stream(tower.stack))
    *done, where = joining_words(tower).split(", ")
    if done:
        pen.y += pen.box(MARGIN, SHEET, "io", "projector", [", ".join(done)])
        pen.arrow(where)


def _answer(pen: Pen, model: Model) -> None:
    """The head, and what comes out."""
    head, width = model.head, model.trunk.width
    pen.arrow(_stream(model.trunk))
    if head is None:
        return
    title, lines, out = "answer", list(head_lines(model)), ""
    if isinstance(head, Language):
        lines = [] if head.transform is None else [f"first {project_words(head.transform)}"]
        lines += ["with a bias"] if head.bias else []
        lines += ["shared with the token table"] if is_tied(head, model) else []
        lines += [f"logits times {number(head.scale)}"] if head.scale != 1 else []
        lines += [f"logits capped at {head.cap:g}"] if head.cap else []
        title, out = f"output matrix {head.vocab:,} x {width:,}", f"length x {head.vocab:,} logits"
    pen.y += pen.box(MARGIN, SHEET, "io", title, lines)
    pen.arrow(out)


def _mixer(mixer: Mixer, one: str) -> tuple[str, list[str], str]:
    """A mixer's title, lines and colour."""
    match mixer:
        case Attention():
            value = mixer.value_dim or mixer.head_dim
            shapes = f"q {mixer.heads} x {mixer.head_dim}; k {mixer.kv_heads} x {mixer.head_dim}"
            shapes += f"; v {mixer.kv_heads} x {value}"
            placed = [position_words(mixer.position, mixer.head_dim)] if mixer.position else []
            return "attention", [shapes, *placed, mask_words(mixer.mask, one), *particulars(mixer)], "mix"
        case CrossAttention():
            value = mixer.value_dim or mixer.head_dim
            source = f"from the encoder k {mixer.kv_heads} x {mixer.head_dim}; v {mixer.kv_heads} x {value}"
            return (
                "cross-attention",
                [f"q {mixer.heads} x {mixer.head_dim}", source, *particulars(mixer)],
                "mix",
            )
        case LatentAttention():
            placed = [position_words(mixer.position, mixer.rotary_dim)] if mixer.position else []
            lines = [*attention_words(mixer).split("; "), *placed, mask_words(mixer.mask, one)]
            return "latent attention", lines, "mix"
        case _ if mixer.role == "feed_forward":
            return "feed-forward", feed_forward_words(mixer).split("; "), "forward"
        case _:
            return "state mixer", [attention_words(mixer)], "mix"
