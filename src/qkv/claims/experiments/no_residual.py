"""H29: a stack of 6 layers whose steps keep only what the branch gives, against one with residuals.

With first weights of unit gain, text goes through stacks that see both ways, as the theorem of Dong et al.
2021 (section 2) has it, and what is measured after each layer is the part of the states that differs
between the tokens of a row: the norm of x - mean over tokens of x by that of x. A third stack has neither
residuals nor feed-forwards. Then language models of characters, which see only what is before, are
trained with and without residuals from the same weights on the same batches. Norms stay before every
branch, so that no signal vanishes for its size alone.

Changed on the way: the two stacks without residuals were to be compared after the last layer, where both are
at float32's round-off (1e-7); they are compared after the last layer where both are above it. No bound moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, spread, within
from qkv.claims.modelling import LENGTH, Reading, reading, trained
from qkv.claims.models import Arrange, initialised, small_lm, small_stack
from qkv.nn import Taps, tap_names

LAYERS = 6
WITH, WITHOUT, PURE = "with residuals", "without residuals", "attention alone, without residuals"


def no_skip(attention: spec.Attention, mixer: spec.Dense, norm: spec.Norm) -> spec.Layer:
    """F(norm(x)) for each mixer in turn."""
    return spec.Layer((spec.step(attention, before=norm, skip=0.0), spec.step(mixer, before=norm, skip=0.0)))


def pure(attention: spec.Attention, mixer: spec.Dense, norm: spec.Norm) -> spec.Layer:
    """F(norm(x)) of the attention, and nothing else."""
    return spec.Layer((spec.step(attention, before=norm, skip=0.0),))


ARRANGED: dict[str, Arrange] = {WITH: spec.pre_norm, WITHOUT: no_skip, PURE: pure}
TRAINED = (WITH, WITHOUT)
ROUND_OFF = 1e-5  # what differs less is the arithmetic's, in float32


def measure(run: Run) -> Figures:
    text = reading(run)
    found: Figures = {"corpus": text.corpus.name, "unigrams": text.unigrams}
    found["differs"] = {name: at_the_start(run, name, text) for name in ARRANGED}
    for name in TRAINED:
        model = small_lm(
            text.corpus.vocab, layers=LAYERS, position=spec.Learned(LENGTH), arrange=ARRANGED[name]
        )
        _, found[name] = trained(run, name, model, text, run.of(600, 3), residual=1)
    return found


def at_the_start(run: Run, name: str, text: Reading) -> list[float]:
    """What differs between tokens, of the embedding and after each layer, before any training."""
    stack = small_stack(
        text.corpus.vocab,
        layers=LAYERS,
        position=spec.Learned(LENGTH),
        mask=spec.Everything(),
        arrange=ARRANGED[name],
    )
    model = spec.Model(stack, None, None)
    network = initialised(model, run.generator("weights"), residual=1)
    names = ["embedding", *(f"layers.{layer}.output" for layer in range(LAYERS))]
    taps = Taps(names, tap_names(model))
    with torch.no_grad():
        network(text.rows[:32, :-1], tap=taps)
    return [differing(taps[name]) for name in names]


def differing(states: Tensor) -> float:
    """The part of states (batch, length, width) that is not the same for all tokens of a row, from 0 to 1."""
    rest = states - states.mean(1, keepdim=True)
    return float((rest.norm(dim=(1, 2)) / states.norm(dim=(1, 2))).mean())


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    last = {name: [each["differs"][name][-1] for each in figures] for name in ARRANGED}
    return (
        within("with residuals, over half of the states differs after the last layer", last[WITH], low=0.5),
        within("attention alone without residuals: under a tenth does", last[PURE], high=0.1),
        slowed(figures),
        below("residuals keep more apart than a feed-forward", last[WITHOUT], last[WITH]),
        stalled(figures),
    )


def slowed(figures: Sequence[Figures]) -> Check:
    """After the last layer where both are above round-off."""
    pairs = []
    for each in figures:
        both = list(zip(each["differs"][PURE], each["differs"][WITHOUT], strict=True))
        pairs.append([pair for pair in both if min(pair) > ROUND_OFF][-1])
    alone, beside = zip(*pairs, strict=True)
    return below("without residuals, a feed-forward keeps more apart than attention alone", alone, beside)


def stalled(figures: Sequence[Figures]) -> Check:
    """A training that diverged came no way at all."""
    what = "without residuals, training comes less than half of the way from unigram entropy"
    ways: list[float | None] = []
    for each in figures:
        start, far, short = each["unigrams"], each[WITH]["held_out"], each[WITHOUT]["held_out"]
        learned = far is not None and far < start
        came = start if short is None else short
        ways.append(100 * (start - came) / (start - far) if learned else None)
    holds = all(way is not None and way < 50 for way in ways)
    return Check(what, spread(ways, ".0f", " %", "learned nothing with residuals"), holds)


def draw(figures: Sequence[Figures]) -> Pictures:
    after = [float(layer) for layer in range(LAYERS + 1)]
    differs = [Series(name, after, [each["differs"][name] for each in figures]) for name in ARRANGED]
    losses = [
        Series(name, figures[0][name]["curve"]["steps"], [each[name]["curve"]["losses"] for each in figures])
        for name in TRAINED
    ]
    loss = Axis("nats a character", marks={"unigram entropy": round(figures[0]["unigrams"], 2)})
    return {
        "states": picture(
            curves(
                "What differs between tokens, at first weights",
                differs,
                Axis("layers", ticks=after),
                Axis("part of the norm", log=True),
            )
        ),
        "loss": picture(curves("Loss in training", losses, Axis("step"), loss)),
    }
