"""The one training loop of all experiments, and how what came of it is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.claims.claim import Progress
from qkv.errors import RequestError
from qkv.nn import Transformer

Schedule = Callable[[int], float]  # a step, from 1 -> the factor on the learning rate
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Curve:
    """A training loss: means over equal stretches of steps, each named by its last step.

    `norms` are the mean norms of all gradients together, before clipping. A loss or gradient that is
    not finite ends the training: `diverged` is that step, and what came before is kept.
    """

    steps: list[int]
    losses: list[float]
    norms: list[float]
    diverged: int | None = None

    @property
    def last(self) -> float | None:
        """The loss of the last stretch; None where the training diverged."""
        return None if self.diverged is not None or not self.losses else self.losses[-1]

    @property
    def mean(self) -> float | None:
        """The loss over the whole training: the lower, the faster. None where it diverged."""
        return None if self.diverged is not None else sum(self.losses) / len(self.losses)

    def data(self) -> dict[str, Any]:
        """For figures."""
        return {
            "steps": self.steps,
            "losses": self.losses,
            "norms": self.norms,
            "diverged": self.diverged,
            "last": self.last,
            "mean": self.mean,
        }


def constant(step: int) -> float:
    return 1.0


def warm_up(steps: int, then: Schedule = constant) -> Schedule:
    """Linear from 1 / steps to 1 in so many steps; afterwards as `then` says, counted from there."""
    return lambda step: step / steps if step <= steps else then(step - steps)


def cosine(steps: int, end: float = 0.1) -> Schedule:
    """Half a cosine from 1 down to `end` in so many steps. Loshchilov and Hutter 2017, equation 5."""
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2


def adam(model: nn.Module, rate: float = 1e-3, decay: float = 0.0) -> torch.optim.Optimizer:
    """Adam, betas 0.9 and 0.99; the decay is decoupled (Loshchilov and Hutter 2019) and spares vectors."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99))


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[Batch], Tensor],
    steps: int,
    optimiser: torch.optim.Optimizer | None = None,
    *,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    told: Progress | None = None,
    note: str = "",
    points: int = 50,
) -> Curve:
    """Takes so many steps and gives the loss curve in at most `points` stretches; the model is left in eval.

    `loss` gives a scalar of a batch. The default optimiser is `adam(model)`. `clip` bounds the norm of
    all gradients together; None leaves them. `told` hears of each stretch, with the note and the loss.
    Raises RequestError where the batches end before the steps do.
    """
    optimiser = optimiser or adam(model)
    rates = [group["lr"] for group in optimiser.param_groups]
    ends = {round(steps * (i + 1) / min(points, steps)) for i in range(min(points, steps))}
    curve, losses, norms = Curve([], [], []), [], []
    model.train()
    endless = iter(batches)
    for step in range(1, steps + 1):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(step)
        try:
            batch = next(endless)
        except StopIteration:
            raise RequestError(f"The batches ended at step {step:,} of {steps:,}: give more.") from None
        value, norm = _step(model, optimiser, loss(batch), clip)
        if not (math.isfinite(value) and math.isfinite(norm)):
            curve = Curve(curve.steps, curve.losses, curve.norms, diverged=step)
            break
        losses.append(value)
        norms.append(norm)
        if step in ends:
            curve.steps.append(step)
            curve.losses.append(sum(losses) / len(losses))
            curve.norms.append(sum(norms) / len(norms))
            losses, norms = [], []
            if told is not None:
                told(step, steps, f"{note}{', ' if note else ''}loss {curve.losses[-1]:.3f}")
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate
    model.eval()
    return curve


def _step(
    model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor, clip: float | None
) -> tuple[float, float]:
    """The loss, and the norm of all gradients before clipping; what is not finite changes no weight."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip))
    if math.isfinite(norm) and math.isfinite(float(loss.detach())):
        optimiser.step()
    return float(loss.detach()), norm


def windows(
    tokens: Int[Tensor, " corpus"], length: int, batch: int, generator: torch.Generator
) -> Iterator[Int[Tensor, "batch length_and_one"]]:
    """Endless batches of random stretches of a corpus, one token longer than what a model reads."""
    if len(tokens) <= length + 1:
        raise RequestError(f"The corpus has {len(tokens):,} tokens; stretches of {length + 1:,} need more.")
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator)
        yield tokens[starts + offsets]


def held_out(tokens: Int[Tensor, " corpus"], length: int, rows: int) -> Int[Tensor, "rows length_and_one"]:
    """So many stretches that follow one another at the end of a corpus: train on what is before them."""
    if rows * (length + 1) > len(tokens):
        raise RequestError(f"The corpus has {len(tokens):,} tokens, fewer than {rows:,} x {length + 1:,}.")
    return tokens[-rows * (length + 1) :].view(rows, length + 1)


def next_token_loss(network: Transformer) -> Callable[[Int[Tensor, "batch length_and_one"]], Tensor]:
    """The mean cross-entropy, in nats, of each token given those before it."""

    def loss(rows: Int[Tensor, "batch length_and_one"]) -> Tensor:
        logits = network(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    return loss


@torch.no_grad()
def loss_by_position(
    network: Transformer, rows: Int[Tensor, "rows length_and_one"], batch: int = 32
) -> Float[Tensor, " length"]:
    """The mean loss in nats at each place of the rows, float32."""
    total = torch.zeros(rows.shape[1] - 1)
    for part in rows.split(batch):
        logits = network(part[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        total += each.view(len(part), -1).sum(0)
    return total / len(rows)


def mean_loss(network: Transformer, rows: Int[Tensor, "rows length_and_one"], batch: int = 32) -> float:
    """The mean loss in nats over all places of the rows."""
    return float(loss_by_position(network, rows, batch).mean())


def exact(
    predicted: Int[Tensor, "rows length"],
    target: Int[Tensor, "rows length"],
    counts: Bool[Tensor, "rows length"],
) -> Bool[Tensor, " rows"]:
    """Which rows are right in every place that counts."""
    return ((predicted == target) | ~counts).all(-1)


def by_bucket(
    lengths: Int[Tensor, " rows"], hits: Bool[Tensor, " rows"], edges: Sequence[int]
) -> list[float | None]:
    """The share of hits among rows of a length from each edge up to the next; None where there are none."""
    shares: list[float | None] = []
    for low, high in pairwise(edges):
        inside = (lengths >= low) & (lengths < high)
        shares.append(float(hits[inside].float().mean()) if inside.any() else None)
    return shares


def unigram_entropy(tokens: Int[Tensor, " corpus"]) -> float:
    """The loss in nats of who knows how frequent each token is and nothing else."""
    counts = torch.bincount(tokens).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())
