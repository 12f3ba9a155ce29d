"""H10: which of two tokens came first, from the mean of all states, by every position scheme.

Rows of 12 tokens hold one a, one b and fillers; the two classes have the same bags of tokens. All but the
last variant see both ways. The linear bias of ALiBi is symmetric there, as it is defined for looking back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.charts.pictures import Bar, bars, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import within
from qkv.claims.models import initialised, small_stack
from qkv.claims.tasks import a_or_b_first
from qkv.claims.training import adam, train, warm_up

LENGTH, FILLERS, BATCH = 12, 8, 64
POSITIONS: dict[str, spec.Position | None] = {
    "none": None,
    "learned": spec.Learned(LENGTH),
    "sinusoidal": spec.Sinusoidal(),
    "rotary": spec.Rotary(),
    "Shaw": spec.Shaw(clip=8),
    "T5 buckets": spec.Buckets(),
    "Transformer-XL": spec.RelativeSinusoidal(),
    "ALiBi": spec.Alibi(),
}
CAUSAL = "none, causal"


def described(position: spec.Position | None, mask: spec.Mask = spec.Everything()) -> spec.Model:
    stack = small_stack(2 + FILLERS, width=32, position=position, mask=mask)
    head = spec.SequenceClass(2, spec.Pool("mean"))
    causal = isinstance(mask, spec.Causal)
    return spec.Model(None, stack, head) if causal else spec.Model(stack, None, head)


def measure(run: Run) -> Figures:
    models = {name: described(position) for name, position in POSITIONS.items()}
    models[CAUSAL] = described(None, spec.Causal())
    return {"accuracy": {name: accuracy(run, name, model) for name, model in models.items()}}


def accuracy(run: Run, name: str, model: spec.Model) -> float:
    """On rows that were not trained on, after training on all that are drawn."""
    network = initialised(model, run.generator("weights"))
    draw = run.generator("batches")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield a_or_b_first(draw, BATCH, LENGTH, FILLERS)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1])

    steps = run.of(1200, 3)
    train(
        network,
        batches(),
        loss,
        steps,
        adam(network, 3e-3),
        schedule=warm_up(50),
        told=run.progress,
        note=name,
    )
    tokens, labels = a_or_b_first(run.generator("test"), run.of(2000, 64), LENGTH, FILLERS)
    with torch.no_grad():
        return float((network(tokens).argmax(-1) == labels).float().mean())


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str) -> list[float | None]:
        return [100 * each["accuracy"][name] for each in figures]

    schemes = [name for name, position in POSITIONS.items() if position is not None]
    return (
        within("without positions, 45 to 55 % are right", of("none"), 45, 55, ".1f", " %"),
        *(within(f"{name}: at least 98 % are right", of(name), 98, 100, ".1f", " %") for name in schemes),
        within("without positions but causal, at least 95 % are right", of(CAUSAL), 95, 100, ".1f", " %"),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    rows = [Bar(name, [100 * each["accuracy"][name] for each in figures]) for name in figures[0]["accuracy"]]
    axis = Axis("% right", high=100, marks={"chance": 50})
    return {"accuracy": picture(bars("Which came first, by position scheme", rows, axis))}
