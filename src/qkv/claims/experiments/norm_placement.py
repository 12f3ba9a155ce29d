"""H15: twelve layers of width 64 on characters, norms after or before each step, with and without warm-up.

Weights start by Glorot's rule without a factor for depth, as in Xiong et al. 2020 (section 3.1), which
trains with Adam too. All variants start from the same weights and read the same batches. A run counts as
stalled where its last loss is within a tenth of that of the characters' frequencies alone, or where it
diverged; as fine where it is not. The warm-up is half of the training: after one of 100 steps, all that
trained for 300 stalled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import characters
from qkv.claims.judging import spread
from qkv.claims.models import Arrange, initialised, small_lm, xavier
from qkv.claims.training import (
    Schedule,
    adam,
    constant,
    next_token_loss,
    train,
    unigram_entropy,
    warm_up,
    windows,
)
from qkv.nn import Transformer

LAYERS, LENGTH, BATCH = 12, 64, 8
RATES = (1e-3, 3e-3)
STALLED = 0.9  # of the loss of frequencies alone
VARIANTS: dict[str, tuple[Arrange, bool]] = {
    "post-norm": (spec.post_norm, False),
    "post-norm, warm-up": (spec.post_norm, True),
    "pre-norm": (spec.pre_norm, False),
}


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    steps = run.of(450, 2)
    found: Figures = {"frequencies": unigram_entropy(corpus.tokens), "gradients": {}, "curves": {}}
    for name, (arrange, warms) in VARIANTS.items():
        model = small_lm(
            corpus.vocab, layers=run.of(LAYERS, 2), position=spec.Learned(LENGTH), arrange=arrange
        )
        schedule: Schedule = warm_up(max(steps // 2, 1)) if warms else constant
        for rate in RATES:
            network = initialised(model, run.generator("weights"), xavier, residual=1)
            batches = windows(corpus.tokens, LENGTH, BATCH, run.generator("batches"))
            loss = next_token_loss(network)
            found["gradients"][name] = gradients(network, loss(next(batches)))
            found["curves"][f"{name}, {rate:g}"] = train(
                network,
                batches,
                loss,
                steps,
                adam(network, rate),
                schedule=schedule,
                told=run.progress,
                note=f"{name}, {rate:g}",
                points=30,
            ).data()
    return found


def gradients(network: Transformer, loss: Tensor) -> list[float]:
    """The gradient norm of each layer's last matrix, from the first layer to the last."""
    loss.backward()
    found = []
    for layer in range(len(network.spec.trunk.layers)):
        weight = network.get_parameter(f"decoder.layers.{layer}.feed_forward.down.weight")
        found.append(float(weight.grad.norm()) if weight.grad is not None else 0.0)
    network.zero_grad(set_to_none=True)
    return found


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    checks = []
    for rate in RATES:
        for name in VARIANTS:
            stalls = name == "post-norm"
            lasts = [each["curves"][f"{name}, {rate:g}"]["last"] for each in figures]
            stalled = [
                last is None or last > STALLED * each["frequencies"]
                for last, each in zip(lasts, figures, strict=True)
            ]
            what = f"{name}{'' if 'warm' in name else ' without warm-up'} at {rate:g}"
            alone = spread([each["frequencies"] for each in figures], ".2f")
            checks.append(
                Check(
                    f"{what} {'stalls or diverges' if stalls else 'learns'}",
                    f"last loss {spread(lasts, '.2f', ' nats')}, of frequencies alone {alone}",
                    all(stalled) if stalls else not any(stalled),
                )
            )
    return tuple(checks)


def draw(figures: Sequence[Figures]) -> Pictures:
    panels = []
    for rate in RATES:
        series = []
        for name in VARIANTS:
            each = [figure["curves"][f"{name}, {rate:g}"] for figure in figures]
            longest = max(each, key=lambda curve: len(curve["steps"]))
            series.append(Series(name, longest["steps"], [curve["losses"] for curve in each]))
        alone = {"frequencies alone": figures[0]["frequencies"]}
        panels.append(
            curves(f"Learning rate {rate:g}", series, Axis("step"), Axis("loss, nats", marks=alone))
        )
    layers = range(1, len(figures[0]["gradients"]["pre-norm"]) + 1)
    norms = [
        Series(name, list(layers), [figure["gradients"][name] for figure in figures])
        for name in ("post-norm", "pre-norm")
    ]
    start = curves("Gradients at the start", norms, Axis("layer"), Axis("norm, of its last matrix", log=True))
    return {"loss": picture(*panels), "gradients": picture(start)}
