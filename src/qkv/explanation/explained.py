"""An explanation as it was found: everything as data, and as text with the prompt coloured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from qkv.explanation.asking import Said
from qkv.explanation.faithfulness import spearman
from qkv.explanation.result import Evidence, Label
from qkv.explanation.words import Word

UP, DOWN = ((22, 28, 34, 40), (52, 88, 124, 160))  # greens and reds of a terminal's 256 colours


@dataclass(frozen=True)
class Head:
    """A head that matters, how much goes without it, what it does most, and with what share.

    `direct` is what goes by the direct way alone, `repair` what of that later layers make up for; None of
    an encoder's heads, which have no direct way to a decoder's answer.
    """

    layer: Label
    head: int
    effect: float
    direct: float | None
    repair: float | None
    role: str
    share: float


@dataclass(frozen=True, eq=False)
class Pairs:
    """Two texts token by token: measured `effects` (row, column), and attention beside them if there is any.

    `agreement` says how far each head looks where the effects are, and `others` what each token of the
    second text does by itself.
    """

    what: str
    effects: Evidence
    weights: Evidence | None = None
    agreement: Evidence | None = None
    others: Evidence | None = None

    @property
    def agrees(self) -> float | None:
        """Spearman of attention, in the mean over the heads, with the effects: the mean over the rows."""
        if self.weights is None:
            return None
        rows = [spearman(*both) for both in zip(self.weights.values, self.effects.values, strict=True)]
        there = [row for row in rows if not np.isnan(row)]
        return float(np.mean(there)) if there else None

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        parts = {name: getattr(self, name) for name in ("effects", "weights", "agreement", "others")}
        each = {name: None if part is None else part.data() for name, part in parts.items()}
        return {"what": self.what, **each, "agrees": self.agrees}

    def lines(self) -> Iterator[str]:
        """For each token of the first text, what of the second does most to it, and where attention is."""
        yield f"{self.effects.method.capitalize()}, {self.what}:"
        rows, columns = (axis.labels for axis in self.effects.axes)
        for i, row in enumerate(rows):
            at = int(self.effects.values[i].argmax())
            line = f"  {row!r:<18.18} {columns[at]!r:<18.18}{self.effects.values[i, at]:>+9.3f}"
            if self.weights is not None:
                most = int(self.weights.values[i].argmax())
                line += f"   attention {columns[most]!r:<18.18}{self.weights.values[i, most]:>7.3f}"
            yield line
        if self.agrees is not None:
            yield f"  cross-attention and effects agree by {self.agrees:+.2f} (Spearman, mean over the rows)"
        if self.others is not None:
            shares = zip(columns, self.others.values, strict=True)
            yield "  by itself: " + ", ".join(f"{column!r} {value:+.3f}" for column, value in shares)


@dataclass(frozen=True)
class Explained:
    """Evidence for one answer. Every picture of attention stands beside the measured effects.

    `effects` are what the metric loses with each token replaced by `blank`; `gradient` are integrated
    gradients from the same baseline. `attention` is that of the answering place, (layer, head, token);
    where a decoder reads a source, `tokens` are the source's and then its own, and attention is over the
    source. `probability` and `answers` are of a model that chooses between answers.
    """

    model: str
    tokens: tuple[str, ...]
    place: int | None
    target: str
    against: str | None
    probability: float | None
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
    pairs: Pairs | None = None
    words: tuple[Word, ...] = ()

    @property
    def verdict(self) -> str:
        """How far attention agrees with what was measured, in one sentence."""
        mean, best = self.agrees["attention"], self.agreement.top(1, key=np.positive)
        if np.isnan(mean) or not best:
            return "There are too few tokens to say whether attention agrees with the measured effects."
        ours, chance = self.removed["attention"]
        kind = (
            "agrees well" if mean >= 0.7 else "agrees in part" if mean >= 0.3 else "hardly agrees"
            if mean >= 0 else "does not agree"
        )  # fmt: skip
        beats = "more" if ours > chance else "no more"
        where = f"layer {best[0].labels['layer']} head {best[0].labels['head']}"
        return (
            f"Attention {kind} with the measured effects (Spearman {mean:+.2f}; best of all heads "
            f"{best[0].value:+.2f}, {where}), and taking out "
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
            "agrees": {name: None if np.isnan(value) else value for name, value in self.agrees.items()},
            "removed": {name: list(pair) for name, pair in self.removed.items()},
            "words": [vars(word) for word in self.words],
            "pairs": None if self.pairs is None else self.pairs.data(),
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return "\n".join(lines(self, colours=False))


def lines(found: Explained, colours: bool = True) -> Iterator[str]:
    """Lines; `colours` for a terminal, else numbers alone."""
    yield from heading(found)
    yield ""
    if colours:
        yield painted(found.tokens, found.effects.values)
        yield ""
    yield from measured(found)
    yield ""
    yield found.verdict


def heading(found: Explained) -> Iterator[str]:
    """What is explained."""
    yield f"{found.model}: {asked(found)}"
    likely = "" if found.probability is None else f"; probability {found.probability:.1%}"
    yield f"{found.metric}: {found.value:.3f}{likely}"
    if found.answers:
        yield "likeliest: " + ", ".join(f"{answer!r} {share:.1%}" for answer, share in found.answers)


def asked(found: Explained) -> str:
    """The question, in words."""
    rather = f" rather than {found.against!r}" if found.against is not None else ""
    like = "like " if found.probability is None else ""
    return f"why {like}{found.target!r}{rather}"


def measured(found: Explained) -> Iterator[str]:
    """All that was found: tokens, heads, feed-forwards, layers, pairs."""
    yield f"{'token':<18}{'effect':>9}{'gradient':>10}{'attention':>11}"
    attention = np.nanmean(found.attention.values, axis=(0, 1))
    for place, token in enumerate(found.tokens):
        seen = f"{attention[place]:>11.3f}" if place < len(attention) else ""
        effect, slope = found.effects.values[place], found.gradient.values[place]
        yield f"{token!r:<18.18}{effect:>+9.3f}{slope:>+10.3f}{seen}"
    yield f"effect: {found.effects.score} by {found.blank!r}"
    if found.words:
        yield ""
        yield f"{'word':<18}{'effect':>9}{'':>10}{'attention':>11}"
        for word in found.words:
            yield f"{word.word!r:<18.18}{word.effect:>+9.3f}{'':>10}{word.attention:>11.3f}"
    yield ""
    yield from _parts(found)
    yield ""
    yield "Behind each layer:" if found.probability is None else "What it would answer behind each layer:"
    for said in found.lens:
        answer = "" if said.answer is None else f"{said.answer!r:<18.18} {said.probability:>6.1%}  "
        yield f"  {said.layer:>9}  {answer}{said.metric:>9.3f}"
    if found.pairs is not None:
        yield ""
        yield from found.pairs.lines()


def _parts(found: Explained) -> Iterator[str]:
    width = max(2, *(len(str(head.layer)) for head in found.best))
    yield f"Heads that matter:{'effect':>{width + 9}}  directly  made up"
    for head in found.best:
        ways = f"{'':>20}" if head.direct is None else f"{head.direct:>+10.3f}{head.repair:>+10.3f}"
        sure = f" ({head.share:.0%} of its attention)" if head.share else ""
        name = f"  layer {head.layer:>{width}} head {head.head:>2}"
        yield f"{name}  {head.effect:>+8.3f}{ways}  {head.role}{sure}"
    yield "directly: with all later layers held as they were; made up: what those then add to the answer"
    yield "Feed-forwards that matter:"
    for ranked in found.forwards.top(3):
        yield f"  layer {ranked.labels['layer']:>{width}}          {ranked.value:>+8.3f}"


def painted(tokens: Sequence[str], values: np.ndarray) -> str:
    """The tokens on grounds of green where they support the answer, of red where they work against it."""
    most = float(np.abs(values).max()) or 1.0
    parts = []
    for token, value in zip(tokens, values, strict=True):
        strength = min(3, int(4 * abs(value) / most))
        shade = (UP if value > 0 else DOWN)[strength]
        parts.append(click.style(token, fg=255, bg=shade) if abs(value) > most / 20 else token)
    return "".join(parts)
