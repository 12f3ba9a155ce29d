"""An explanation as text: the prompt coloured by what each token does, and the parts that matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
import numpy as np

from qkv.explanation.explained import Explained

UP, DOWN = ((22, 28, 34, 40), (52, 88, 124, 160))  # greens and reds of a terminal's 256 colours


def lines(found: Explained, colours: bool = True) -> Iterator[str]:
    """Lines; `colours` for a terminal, else numbers alone."""
    rather = f" rather than {found.against!r}" if found.against is not None else ""
    yield f"{found.model}: why {found.target!r}{rather}"
    yield f"{found.metric}: {found.value:.3f}; probability {found.probability:.1%}"
    likely = ", ".join(f"{answer!r} {share:.1%}" for answer, share in found.answers)
    yield f"likeliest: {likely}"
    yield ""
    if colours:
        yield painted(found.tokens, found.effects.values)
        yield ""
    yield f"{'token':<18}{'effect':>9}{'gradient':>10}{'attention':>11}"
    attention = np.nanmean(found.attention.values, axis=(0, 1))
    shift = len(found.tokens) - len(attention)
    for place, token in enumerate(found.tokens):
        seen = f"{attention[place - shift]:>11.3f}" if place >= shift else f"{'':>11}"
        effect, slope = found.effects.values[place], found.gradient.values[place]
        yield f"{token!r:<18.18}{effect:>+9.3f}{slope:>+10.3f}{seen}"
    yield f"effect: {found.effects.score} by {found.blank!r}"
    yield ""
    yield "Heads that matter:"
    for head in found.best:
        sure = f" ({head.share:.0%} of its attention)" if head.share else ""
        yield f"  layer {head.layer:>2} head {head.head:>2}  {head.effect:>+8.3f}  {head.role}{sure}"
    yield "Feed-forwards that matter:"
    for ranked in found.forwards.top(3):
        yield f"  layer {ranked.labels['layer']:>2}          {ranked.value:>+8.3f}"
    yield ""
    yield "What it would answer behind each layer:"
    for said in found.lens:
        yield f"  {said.layer:>9}  {said.answer!r:<18.18} {said.probability:>6.1%}  {said.metric:>9.3f}"
    yield ""
    yield found.verdict


def painted(tokens: Sequence[str], values: np.ndarray) -> str:
    """The tokens on grounds of green where they support the answer, of red where they work against it."""
    most = float(np.abs(values).max()) or 1.0
    parts = []
    for token, value in zip(tokens, values, strict=True):
        strength = min(3, int(4 * abs(value) / most))
        shade = (UP if value > 0 else DOWN)[strength]
        parts.append(click.style(token, fg=255, bg=shade) if abs(value) > most / 20 else token)
    return "".join(parts)
