"""H12: a rotary model trained on 64 characters and stretched to 256, before and after fine-tuning.

One model is trained; each way of stretching starts from its weights. The base is (64 / 2 pi)^(64/41), so
that as large a share of a head's pairs as in LLaMA (23 of 64) turns less than once within 64. Heads have 16
pairs. YaRN's fast pairs are those of 8 turns and more: its own 32 turns do not fit in 64.

"Far above": over its loss at 64, a stretched model's loss rises less than half as much. "About equal":
within 0.02 nats.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import characters
from qkv.claims.judging import below, within
from qkv.claims.lengths import non_overlapping
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import (
    adam,
    cosine,
    held_out,
    loss_by_position,
    next_token_loss,
    train,
    warm_up,
    windows,
)
from qkv.nn import Transformer

SHORT, LONG = 64, 256
FACTOR = LONG / SHORT
HEADS, WIDTH = 2, 64
GROUP = 16  # places whose losses are drawn as one
BASE = (SHORT / 6.283185307179586) ** (64 / 41)
SCALINGS: dict[str, spec.Scaling | None] = {
    "raw": None,
    "PI": spec.Interpolation(FACTOR),
    "NTK": spec.NTK(FACTOR),
    "YaRN": spec.Yarn(FACTOR, SHORT, beta_fast=8.0),
}
STRETCHED = ("PI", "NTK", "YaRN")
FAR, EQUAL = 2.0, 0.02


def described(vocab: int, layers: int, scaling: spec.Scaling | None) -> spec.Model:
    rotary = spec.Rotary(theta=BASE, scaling=scaling)
    return small_lm(vocab, layers=layers, width=WIDTH, heads=HEADS, position=rotary)


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    rows = held_out(corpus.tokens, LONG, run.of(96, 2))
    before, text = corpus.tokens[: -rows.numel()], rows.flatten()
    layers, steps = run.of(3, 1), run.of(2000, 3)
    network = initialised(described(corpus.vocab, layers, None), run.generator("weights"))
    trained = train(
        network,
        windows(before, SHORT, 16, run.generator("batches")),
        next_token_loss(network),
        steps,
        adam(network, 2e-3),
        schedule=warm_up(steps // 20 + 1, cosine(steps)),
        told=run.progress,
        note="trained on 64",
    )
    found: Figures = {
        "corpus": corpus.name,
        "trained": trained.last,
        "short": non_overlapping(network, text, SHORT),
    }
    for name, scaling in SCALINGS.items():
        longer = initialised(described(corpus.vocab, layers, scaling), run.generator("weights"))
        longer.load_state_dict(network.state_dict())
        zero_shot = by_group(longer, rows)
        steps = run.of(150, 2)
        train(
            longer,
            windows(before, LONG, 8, run.generator("longer batches")),
            next_token_loss(longer),
            steps,
            adam(longer, 5e-4),
            schedule=warm_up(steps // 8 + 1),
            told=run.progress,
            note=f"{name}, fine-tuned",
        )
        found[name] = {"zero-shot": zero_shot, "fine-tuned": by_group(longer, rows)}
    return found


def by_group(network: Transformer, rows: Tensor) -> list[float]:
    """The mean loss of each 16 places of rows of 256, in nats."""
    return [float(part.mean()) for part in loss_by_position(network, rows, 16).split(GROUP)]


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, when: str) -> list[float | None]:
        """Over all places."""
        return [sum(each[name][when]) / len(each[name][when]) for each in figures]

    def rise(name: str) -> list[float | None]:
        losses = of(name, "zero-shot")
        return [
            None if loss is None else loss - each["short"] for loss, each in zip(losses, figures, strict=True)
        ]

    def apart(when: str) -> list[float | None]:
        pairs = zip(of("PI", when), of("YaRN", when), strict=True)
        return [None if a is None or b is None else a - b for a, b in pairs]

    unit = " nats"
    return (
        *(
            below(
                f"zero-shot, raw is far above {name}: over its loss at 64, at 256 twice as much",
                rise(name),
                rise("raw"),
                "+.3f",
                unit,
                by=FAR,
            )
            for name in STRETCHED
        ),
        *(
            below(f"zero-shot, {name} is below PI", of(name, "zero-shot"), of("PI", "zero-shot"), ".3f", unit)
            for name in ("YaRN", "NTK")
        ),
        within(
            "fine-tuned, PI and YaRN are within 0.02 nats", apart("fine-tuned"), -EQUAL, EQUAL, "+.3f", unit
        ),
        *(
            below(
                f"fine-tuned, {name} is below NTK",
                of(name, "fine-tuned"),
                of("NTK", "fine-tuned"),
                ".3f",
                unit,
            )
            for name in ("PI", "YaRN")
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    panels = []
    for when in ("zero-shot", "fine-tuned"):
        series = [
            Series(
                name,
                [GROUP * (place + 0.5) for place in range(len(figures[0][name][when]))],
                [each[name][when] for each in figures],
            )
            for name in SCALINGS
        ]
        loss = Axis("loss, nats", marks={"at 64, before": figures[0]["short"]})
        panels.append(curves(f"Trained on 64, read to 256: {when}", series, Axis("place"), loss))
    means = [
        Bar(
            f"{name}, {when}",
            [sum(each[name][when]) / len(each[name][when]) for each in figures],
            when,
        )
        for when in ("zero-shot", "fine-tuned")
        for name in SCALINGS
    ]
    return {
        "places": picture(*panels),
        "loss": picture(bars("Loss over 256 characters", means, Axis("nats"))),
    }
