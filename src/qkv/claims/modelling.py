"""Small language models of one text that differ in one thing, trained and measured alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Figures, Run
from qkv.claims.data import Corpus, characters
from qkv.claims.models import initialised
from qkv.claims.training import held_out, mean_loss, next_token_loss, train, unigram_entropy, warm_up, windows
from qkv.nn import Transformer

LENGTH, BATCH = 64, 32


@dataclass(frozen=True, eq=False)
class Reading:
    """A text in two parts: what is trained on, and rows after it that are not."""

    corpus: Corpus
    before: Int[Tensor, " before"]
    rows: Int[Tensor, "rows length_and_one"]

    @property
    def unigrams(self) -> float:
        """The loss in nats of who knows how frequent each token is and nothing else."""
        return unigram_entropy(self.before)


def split(corpus: Corpus, rows: int) -> Reading:
    """The last `rows` stretches of a corpus are held out."""
    last = held_out(corpus.tokens, LENGTH, rows)
    return Reading(corpus, corpus.tokens[: -last.numel()], last)


def reading(run: Run) -> Reading:
    """A million characters, of which 128 stretches are held out."""
    return split(characters(run.of(1_000_000, 20_000)), run.of(128, 8))


def trained(
    run: Run,
    name: str,
    model: spec.Model,
    text: Reading,
    steps: int,
    residual: float | None = None,
) -> tuple[Transformer, Figures]:
    """The network after so many steps, and its loss curve, loss on what is held out and parameters.

    All that a run trains starts from the same random numbers and reads the same batches. The loss is None
    where the training diverged.
    """
    network = initialised(model, run.generator("weights"), residual=residual)
    batches = windows(text.before, LENGTH, BATCH, run.generator("batches"))
    schedule = warm_up(100)
    curve = train(
        network,
        batches,
        next_token_loss(network),
        steps,
        schedule=schedule,
        told=run.progress,
        note=name,
        points=40,
    )
    loss = mean_loss(network, text.rows) if curve.diverged is None else None
    return network, {"curve": curve.data(), "held_out": loss, "parameters": model.parameters()}


def losses_drawn(figures: Sequence[Figures], names: Mapping[str, str]) -> str:
    """What `trained` gave of several seeds: losses in training, and on what is held out where none diverged.

    `names` are the models' keys in the figures, and what they are called.
    """
    training = [
        Series(name, figures[0][key]["curve"]["steps"], [each[key]["curve"]["losses"] for each in figures])
        for key, name in names.items()
    ]
    held = {name: [each[key]["held_out"] for each in figures] for key, name in names.items()}
    ends = [Bar(name, losses) for name, losses in held.items() if None not in losses]
    axis = Axis("nats a character")
    panels = [bars("Loss on text not trained on", ends, axis)] if ends else []
    return picture(curves("Loss in training", training, Axis("step"), axis), *panels)
