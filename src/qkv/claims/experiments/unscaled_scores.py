"""H9: a language model of characters with one head of 256, with and without the factor 1/sqrt(256).

Weights start with unit gain, so that queries and keys have components of unit variance, which is what the
argument of Vaswani et al. 2017 (section 3.2.1, footnote 4) supposes. Both variants start from the same
weights and read the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import characters
from qkv.claims.judging import below, within
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import held_out, mean_loss, next_token_loss, train, windows
from qkv.nn import Taps, Transformer, tap_names

LENGTH, BATCH, HEAD = 64, 16, 256
SCORES = {"scaled": spec.Score(), "unscaled": spec.Dot()}


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    rows = held_out(corpus.tokens, LENGTH, run.of(128, 8))
    before = corpus.tokens[: -rows.numel()]
    found: Figures = {"corpus": corpus.name}
    for name, score in SCORES.items():
        attention = spec.Attention(1, 1, HEAD, score)
        model = small_lm(corpus.vocab, attention=attention, position=spec.Learned(LENGTH))
        network = initialised(model, run.generator("weights"), residual=1)
        batches = windows(before, LENGTH, BATCH, run.generator("batches"))
        start = at_the_start(network, next(batches))
        steps = run.of(600, 6)
        curve = train(
            network, batches, next_token_loss(network), steps, told=run.progress, note=name, points=40
        )
        found[name] = {**start, "curve": curve.data(), "held_out": mean_loss(network, rows)}
    return found


def at_the_start(network: Transformer, rows: Tensor) -> Figures:
    """Entropies as shares of that of equal weights, and norms of the gradients of queries and keys."""
    taps = Taps("layers.*.attention.weights", tap_names(network.spec))
    logits = network(rows[:, :-1], tap=taps)
    shares = [entropy_share(taps[name].detach()) for name in taps]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    squares = [
        float(parameter.grad.square().sum())
        for name, parameter in network.named_parameters()
        if parameter.grad is not None and name.endswith(("query.weight", "key.weight"))
    ]
    network.zero_grad(set_to_none=True)
    return {"entropy": sum(shares) / len(shares), "gradient": sum(squares) ** 0.5}


def entropy_share(weights: Tensor) -> float:
    """The mean entropy of causal rows (batch, heads, query, key) by ln(keys seen), the first row left out."""
    entropy = -torch.special.xlogy(weights, weights).sum(-1)[..., 1:]
    seen = torch.arange(2, weights.shape[-1] + 1)
    return float((entropy / seen.log()).mean())


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    scaled, unscaled = ([each[name] for each in figures] for name in SCORES)
    return (
        within(
            "without the scale, the softmax starts with under a tenth of the entropy of equal weights",
            [each["entropy"] for each in unscaled],
            high=0.1,
        ),
        below(
            "without the scale, gradients of queries and keys start under a tenth of those with it",
            [each["gradient"] for each in unscaled],
            [each["gradient"] for each in scaled],
            by=10,
        ),
        below(
            "with the scale, the loss over the whole training is lower",
            [each["curve"]["mean"] for each in scaled],
            [each["curve"]["mean"] for each in unscaled],
            ".3f",
            " nats",
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    names = {"scaled": "with 1/sqrt(d_k)", "unscaled": "without"}
    losses = [
        Series(label, figures[0][name]["curve"]["steps"], [each[name]["curve"]["losses"] for each in figures])
        for name, label in names.items()
    ]
    entropies = [Bar(label, [each[name]["entropy"] for each in figures]) for name, label in names.items()]
    gradients = [Bar(label, [each[name]["gradient"] for each in figures]) for name, label in names.items()]
    return {
        "loss": picture(
            curves("Loss in training, d_k = 256", losses, Axis("step"), Axis("nats a character"))
        ),
        "start": picture(
            bars("Entropy of the softmax at the start", entropies, Axis("share of ln n", high=1)),
            bars("Gradients of queries and keys at the start", gradients, Axis("norm")),
        ),
    }
