"""An explanation as it was found: everything as data, and as text with the prompt coloured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from qkv.explanation.result import Evidence

UP, DOWN = ((22, 28, 34, 40), (52, 88, 124, 160))  # greens and reds of a terminal's 256 colours


@dataclass(frozen=True)
class Head:
    """A head that matters, how much goes without it, what it does most, and with what share."""

    layer: int
    head: int
    effect: float
    role: str
    share: float


@dataclass(frozen=True)
class Said:
    """What the model would answer if it stopped behind a layer, how likely, and the metric there."""

    layer: str
    answer: str
    probability: float
    metric: float


@dataclass(frozen=True)
class Explained:
    """Evidence for one answer. Every picture of attention stands beside the measured effects.

    `effects` are what the metric loses with each token replaced by `blank`; `gradient` are integrated
    gradients from the same baseline. `attention` is that of the answering place, (layer, head, token).
    """

    model: str
    tokens: tuple[str, ...]
    place: int | None
    target: str
    against: str | None
    probability: float
    answers: tuple[tuple[str, float], ...]  # the likeliest, with their probabilities
    metric: str
    value: float
    blank: str
    effects: Evidence
    gradient: Evidence
    attention: Evidence
    agreement: Evidence
    heads: Evidence
    forwards: Evidence
    best: tuple[Head, ...]
    lens: tuple[Said, ...]
    agrees: dict[str, float]  # Spearman with the effects: of attention's mean, of rollout, of gradients
    removed: dict[str, tuple[float, float]]  # comprehensiveness at a fifth of the tokens, and of random ones

    @property
    def verdict(self) -> str:
        """How far attention agrees with what was measured, in one sentence."""
        mean = self.agrees["attention"]
        best = self.agreement.top(1, key=np.positive)[0]
        ours, chance = self.removed["attention"]
        kind = (
            "agrees well" if mean >= 0.7 else "agrees in part" if mean >= 0.3 else "hardly agrees"
            if mean >= 0 else "does not agree"
        )  # fmt: skip
        beats = "more" if ours > chance else "no more"
        return (
            f"Attention {kind} with the measured effects (Spearman {mean:+.2f}; best of all heads "
            f"{best.value:+.2f}, layer {best.labels['layer']} head {best.labels['head']}), and taking out "
            f"the tokens it looks at most costs {beats} than random ones ({ours:.2f} and {chance:.2f})."
        )

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        names = ("effects", "gradient", "attention", "agreement", "heads", "forwards")
        return {
            "model": self.model,
            "tokens": list(self.tokens),
            "place": self.place,
            "target": self.target,
            "against": self.against,
            "probability": self.probability,
            "answers": [{"answer": answer, "probability": p} for answer, p in self.answers],
            "metric": self.metric,
            "value": self.value,
            "blank": self.blank,
            **{name: getattr(self, name).data() for name in names},
            "best_heads": [vars(head) for head in self.best],
            "lens": [vars(said) for said in self.lens],
            "agrees": self.agrees,
            "removed": {name: list(pair) for name, pair in self.removed.items()},
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return "\n".join(lines(self, colours=False))


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
