"""Every translator of the lineage at one small size, trained alike on one corpus, and scored by length.

Width 128, Adam, equal batches in equal order; dropout 0.1 in ConvS2S and the Transformer, as their papers
have it in every system, and none in the others. Rates are the better of 6e-3 and 2e-3 after 400 or 500
batches from English to Chinese: training losses of 2.2 and 3.2 nats (Bahdanau), 3.0 and 3.7 (Luong), 2.9
and 3.7 (ConvS2S), 4.6 and 3.9 (Transformer). They were chosen after a first run of the claims, with 2e-3 for
all, had left Luong's systems at 3 to 7 BLEU. A claim names its systems and has random numbers of its own:
what stands in two claims differs by chance as well (Luong's general score by 4 BLEU on Chinese).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qkv import spec
from qkv.claims import scores
from qkv.claims.claim import Figures, Run
from qkv.claims.models import initialise
from qkv.claims.scores import Row
from qkv.claims.sentences import Characters, Corpus, Cut, Pair, Pieces, chinese, padded, spanish
from qkv.claims.training import adam, cosine, train, warm_up
from qkv.claims.translating import END, START, Pairs
from qkv.lineage import bahdanau, convs2s, luong, transformer
from qkv.lineage.translation import greedy
from qkv.nn.choice import use
from qkv.nn.sdpa import SDPA

WIDTH, DROPOUT = 128, 0.1
BATCH, RATE = 64, 6e-3
RATES = {"Transformer": 2e-3}  # of those that need another
DRAWS = 200  # of the test's sentences


@dataclass(frozen=True)
class Sides:
    """Both vocabularies, the longest source in tokens, and D of local attention."""

    source: int
    target: int
    longest: int
    window: int


Build = Callable[[Sides], nn.Module]


def recurrent(context: Callable[[bahdanau.Sizes], Any]) -> Build:
    """Bahdanau's encoder and decoder with this context."""

    def build(sides: Sides) -> nn.Module:
        sizes = bahdanau.Sizes(sides.source, sides.target, WIDTH, WIDTH, WIDTH, WIDTH)
        return bahdanau.RNNsearch(sizes, context)

    return build


def luongs(score: Callable[[Sides], spec.Node], looking: Callable[[luong.Sizes], Any]) -> Build:
    """One layer, no input feeding, the source as it is."""

    def build(sides: Sides) -> nn.Module:
        sizes = luong.Sizes(
            sides.source,
            sides.target,
            WIDTH,
            WIDTH,
            layers=1,
            score=score(sides),
            feeding=False,
            window=sides.window,
        )
        return luong.Luong(sizes, looking)

    return build


def convolutional(sides: Sides) -> nn.Module:
    """Three blocks of kernel 3 on both sides; places for twice the longest source."""
    blocks = ((WIDTH, 3),) * 3
    hyper = convs2s.Hyperparameters(WIDTH, blocks, blocks, WIDTH, DROPOUT)
    return convs2s.ConvS2S(sides.source, sides.target, hyper, spec.Learned(2 * sides.longest + 20))


def attentive(sides: Sides) -> nn.Module:
    """Two layers of four heads on both sides, one table for the target and the output."""
    hyper = transformer.Hyperparameters(2, WIDTH, 4 * WIDTH, 4)
    described = transformer.describe(hyper, sides.target)
    encoder = cast(spec.Stack, described.encoder)
    words = replace(cast(spec.Tokens, encoder.input), vocab=sides.source, shared=None)
    model = transformer.Transformer(replace(described, encoder=replace(encoder, input=words)), DROPOUT)
    use(model.network, SDPA())
    return model


def general(sides: Sides) -> spec.Node:
    return spec.General()


SYSTEMS: Mapping[str, Build] = {
    "RNNencdec": recurrent(bahdanau.Last),
    "Bahdanau": recurrent(bahdanau.Search),
    "global, dot": luongs(lambda sides: spec.Dot(), luong.Global),
    "global, general": luongs(general, luong.Global),
    "global, concat": luongs(lambda sides: spec.Concat(WIDTH), luong.Global),
    "global, location": luongs(lambda sides: spec.Location(sides.longest), luong.Global),
    "local-m": luongs(general, luong.LocalMonotonic),
    "local-p": luongs(general, luong.LocalPredictive),
    "ConvS2S": convolutional,
    "Transformer": attentive,
}


def built(name: str, sides: Sides, run: Run) -> nn.Module:
    """A system with first weights; from here on the run's own random numbers, of dropout too.

    Recurrent models start by their number of inputs, which for a table of words is one: the papers' fixed
    spreads are meant for a width of 1000, and at 128 nothing would come through. The others start as their
    papers say.
    """
    torch.manual_seed(run.number(name))
    model = SYSTEMS[name](sides)
    if isinstance(model, bahdanau.RNNsearch | luong.Luong):
        initialise(model, run.generator(name))
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, nn.Embedding):
                    part.weight.mul_(WIDTH**0.5)
    return model


def loss(model: nn.Module) -> Callable[[Pairs], torch.Tensor]:
    """The mean over all target tokens of -log p, in nats."""

    def of(batch: Pairs) -> torch.Tensor:
        logits = model(batch.source, batch.present, batch.target)
        return convs2s.objective(logits, batch.target, batch.there)

    return of


@dataclass(frozen=True)
class Task:
    """A language to translate into, from English.

    `pieces` is the size of the English BPE, `cut` makes the target's tokens from what it is learned from,
    `window` is D of local attention, about a third of a source as in the paper. `edges` part the lengths
    of sources, in words.
    """

    pairs: Callable[[], list[Pair]]
    pieces: int
    cut: Callable[[list[str]], Cut]
    window: int
    edges: tuple[int, ...]
    steps: int


def measured(run: Run, task: Task, systems: Sequence[str]) -> Figures:
    """Trains each of the systems once and scores what it makes of the test, all and by bucket of length.

    A smoke run takes 400 pairs and 20 of the test, all along the corpus.
    """
    pairs = task.pairs()
    corpus = Corpus.of(pairs[:: run.of(1, max(1, len(pairs) // 400))], task.pieces, task.cut)
    corpus = replace(corpus, test=corpus.test[:: run.of(1, max(1, len(corpus.test) // 20))])
    steps, edges = run.of(task.steps, 2), run.of(task.edges, (task.edges[0], task.edges[2], task.edges[-1]))
    sides = Sides(corpus.source.vocab, corpus.target.vocab, corpus.longest(), task.window)
    lengths = [pair.length for pair in corpus.test]
    buckets = [[length for length in lengths if low <= length < high] for low, high in pairwise(edges)]
    found: Figures = {
        "train": len(corpus.train),
        "test": len(corpus.test),
        "vocabularies": [sides.source, sides.target],
        "edges": list(edges),
        "sentences": [len(bucket) for bucket in buckets],
        "lengths": [sum(bucket) / max(1, len(bucket)) for bucket in buckets],
        "epochs": steps * BATCH / len(corpus.train),
        "systems": {},
    }
    with torch.random.fork_rng(devices=[]):
        for name in systems:
            found["systems"][name] = trained(run, name, sides, corpus, steps, edges)
    return found


def trained(run: Run, name: str, sides: Sides, corpus: Corpus, steps: int, edges: Sequence[int]) -> Figures:
    """One system: its size, how it learned, and its scores unless it diverged."""
    model = built(name, sides, run)
    warm = max(steps // 10, 1)
    curve = train(
        model,
        corpus.batches(run.of(BATCH, 8), run.generator("batches")),
        loss(model),
        steps,
        adam(model, RATES.get(name, RATE)),
        schedule=warm_up(warm, cosine(steps - warm, 0.05)),
        told=run.progress,
        note=name,
    )
    found = {"parameters": sum(one.numel() for one in model.parameters()), "curve": curve.data()}
    if curve.diverged is None:
        said = translations(model, corpus, run.of(10, -2 * sides.longest))
        found |= scored(said, corpus.test, edges, run.number("draws"), run.of(DRAWS, 10))
    return found


@torch.no_grad()
def translations(model: nn.Module, corpus: Corpus, longer: int = 10, batch: int = 128) -> list[str]:
    """The likeliest token at each step, up to twice the longest source of a batch and some more."""
    sources = corpus.sources(corpus.test)
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    found = [""] * len(sources)
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        rows, present = padded([sources[place] for place in places])
        said = greedy(cast(Any, model), rows, present, START, END, max(2 * rows.shape[1] + longer, 1))
        for place, tokens in zip(places, said, strict=True):
            found[place] = corpus.target.decode(tokens)
    return found


def scored(
    said: Sequence[str], test: Sequence[Pair], edges: Sequence[int], seed: int, draws: int = DRAWS
) -> Figures:
    """BLEU of symbols and chrF, of all and of each bucket, and of draws of the test's sentences.

    Draws are the same for every system of one seed. Raises RequestError for a bucket without sentences.
    """
    references = [pair.target for pair in test]
    lengths = np.array([pair.length for pair in test])
    buckets = [(lengths >= low) & (lengths < high) for low, high in pairwise(edges)]
    counted: dict[str, tuple[NDArray[np.int64], scores.Score]] = {
        "bleu": (rows_of(said, references, lambda a, b: scores.bleu_row(a.split(), b.split())), scores.bleu),
        "chrf": (rows_of(said, references, scores.chrf_row), scores.chrf),
    }
    found: Figures = {}
    for name, (rows, score) in counted.items():
        parts = [rows[bucket] for bucket in buckets]
        found[name] = {
            "all": scores.corpus(rows, score),
            "buckets": [scores.corpus(part, score) for part in parts],
            "draws": _drawn(rows, score, draws, seed),
            "bucket draws": [_drawn(part, score, draws, seed) for part in parts],
        }
    longest = sorted(range(len(said)), key=lambda place: -lengths[place])[:3]
    found["examples"] = [[test[place].source, references[place], said[place]] for place in longest]
    return found


def _drawn(rows: NDArray[np.int64], score: scores.Score, draws: int, seed: int) -> list[float]:
    return [round(value, 3) for value in scores.resampled(rows, score, draws, seed)]


def rows_of(
    said: Sequence[str], references: Sequence[str], row: Callable[[str, str], Row]
) -> NDArray[np.int64]:
    return np.stack([row(one, other) for one, other in zip(said, references, strict=True)])


def spanish_pieces(sentences: list[str]) -> Pieces:
    return Pieces(sentences, 2000)


CHINESE = Task(chinese, 2000, Characters, 3, (1, 6, 8, 10, 13, 31), 1200)
SPANISH = Task(spanish, 2000, spanish_pieces, 8, (1, 13, 17, 21, 26, 31), 1000)
