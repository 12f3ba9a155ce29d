"""Masks as pictures: a row a query, a column a key."""

from __future__ import annotations

from dataclasses import replace

from qkv.inspection.drawing import svg
from qkv.inspection.places import places
from qkv.inspection.steps import seer, stacks
from qkv.inspection.words import mask_words
from qkv.spec import Attention, LatentAttention, Mask, Model
from qkv.spec.masks import And, Chunk, Or, Streaming, Strided, Window


def masks(model: Model) -> list[tuple[str, str, str]]:
    """For each kind of layer: where it stands, what it shows in words, and a picture of it."""
    found: dict[tuple[str, str, Mask], list[int]] = {}
    totals = {}
    for name, stack in stacks(model):
        totals[name] = len(stack.layers)
        one = seer(stack, model)
        for i, layer in enumerate(stack.layers):
            for _, mixer in layer.mixers():
                if isinstance(mixer, Attention | LatentAttention):
                    found.setdefault((name, one, mixer.mask), []).append(i)
    pictures = []
    for (name, one, mask), layers in found.items():
        where = places(layers, totals[name])
        stack_and_layers = f"{name}, {where}" if name else where
        pictures.append((stack_and_layers, mask_words(mask, one), mask_picture(mask)))
    return pictures


def mask_picture(mask: Mask, positions: int = 24, cell: int = 7) -> str:
    """Queries down, keys across; wide windows are drawn narrower so that their shape can be seen."""
    import numpy as np  # here: reading a model does not need it

    place = np.arange(positions)
    seen = np.broadcast_to(small(mask).visible(place[:, None], place[None, :]), (positions, positions))
    side = positions * cell
    cells = "".join(
        f'<rect class="{"seen" if seen[q, k] else "hidden"}" x="{k * cell}" y="{q * cell}" '
        f'width="{cell - 1}" height="{cell - 1}"/>'
        for q in range(positions)
        for k in range(positions)
    )
    return svg(side, side, mask_words(mask), cells)


def small(mask: Mask) -> Mask:
    """The same shape with numbers that fit a small picture."""
    match mask:
        case And() | Or():
            return replace(mask, left=small(mask.left), right=small(mask.right))
        case Window():
            return Window(min(mask.before, 6), min(mask.after, 5))
        case Streaming():
            return Streaming(min(mask.first, 2), min(mask.window, 4))
        case Chunk():
            return Chunk(min(mask.size, 8))
        case Strided():
            return Strided(min(mask.stride, 4))
        case _:
            return mask
