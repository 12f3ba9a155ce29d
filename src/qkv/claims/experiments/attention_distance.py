"""H31: how far a layer looks, by its depth: in a small model trained here, and in SmolLM2-135M.

The distance is that of Vig and Belinkov 2019, |query - key| weighted by attention, over text. The first
token of a row is left out, as a query and as a key: heads rest on it when they look at nothing (Xiao et al.
2024), and from wherever they do. The small model has 6 layers and reads 64 pieces of a BPE, SmolLM2 has 30
and reads 256 of its tokens; each seed reads other stretches. SmolLM2 is read where its package is
installed; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Panel, Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import any_text, pieces
from qkv.claims.heads import weights_by_layer
from qkv.claims.judging import below, within
from qkv.claims.modelling import LENGTH, split, trained
from qkv.claims.models import small_lm
from qkv.errors import SourceError
from qkv.explanation import roles
from qkv.nn import Transformer
from qkv.sources import PACKAGED

VOCAB, LAYERS = 512, 6
READ, ROWS = 256, 4  # of SmolLM2: tokens a row, and rows
SMALL, LARGE = "trained here", "SmolLM2-135M"


def measure(run: Run) -> Figures:
    corpus = pieces(VOCAB, run.of(1_000_000, 20_000))
    text = split(corpus, run.of(128, 4))
    model = small_lm(corpus.vocab, layers=LAYERS, position=spec.Rotary())
    network, found = trained(run, SMALL, model, text, run.of(1000, 2))
    return {
        **found,
        "corpus": corpus.name,
        "equal": float(roles.distance(roles.equal(LENGTH)[..., 1:, 1:])),
        SMALL: distances(network, text.rows[:64, :-1]),
        LARGE: of_smollm2(run) if run.of(installed(), False) else None,
    }


def installed() -> bool:
    return find_spec(PACKAGED["smollm2"].package.replace("-", "_")) is not None


def of_smollm2(run: Run) -> list[list[float]]:
    """Over stretches of the text that begin at random places."""
    import qkv

    model = qkv.load("smollm2", runtime="torch")
    if model.tokenizer is None:
        raise SourceError("The file of SmolLM2 has no tokenizer, so no text can be read with it.")
    _, words = any_text(1_000_000)
    draw, rows = run.generator("stretches"), []
    for _ in range(ROWS):
        start = int(torch.randint(len(words) - 8 * READ, (1,), generator=draw))
        rows.append(model.tokenizer.encode(words[start : start + 8 * READ])[:READ])
    return distances(model.network, torch.tensor(rows))


def distances(network: Transformer, rows: Tensor) -> list[list[float]]:
    """In tokens, [layer][head], without each row's first token."""
    return [roles.distance(weights[..., 1:, 1:]).tolist() for weights in weights_by_layer(network, rows)]


def by_layer(heads: Sequence[Sequence[float]]) -> list[float]:
    return [sum(layer) / len(layer) for layer in heads]


def thirds(heads: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean distance of the first and of the last third of the layers."""
    means = by_layer(heads)
    third = max(len(means) // 3, 1)
    return sum(means[:third]) / third, sum(means[-third:]) / third


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    checks: list[Check] = []
    for name in (SMALL, LARGE):
        deeper = f"{name}: the last third of the layers looks farther than the first"
        differ = f"{name}: in over half of the layers, one head looks over twice as far as another"
        if any(each[name] is None for each in figures):
            checks += [
                Check(what, "not measured: its package is not installed", False) for what in (deeper, differ)
            ]
            continue
        first, last = zip(*(thirds(each[name]) for each in figures), strict=True)
        checks += [
            below(deeper, first, last, ".1f", " tokens"),
            within(differ, [wide(each[name]) for each in figures], low=0.5 + 1e-9, form=".2f"),
        ]
    return tuple(checks)


def wide(heads: Sequence[Sequence[float]]) -> float:
    """The share of layers whose farthest head looks over twice as far as its nearest."""
    return sum(max(layer) > 2 * min(layer) for layer in heads) / len(heads)


def draw(figures: Sequence[Figures]) -> Pictures:
    panels = [shown(name, [each[name] for each in figures]) for name in (SMALL, LARGE) if figures[0][name]]
    return {"distance": picture(*panels)}


def shown(name: str, runs: Sequence[Sequence[Sequence[float]]]) -> Panel:
    """The nearest and farthest head of each layer, and the mean of all."""
    layers = [float(layer) for layer in range(len(runs[0]))]
    lines = {"farthest head": _most, "mean": by_layer, "nearest head": _least}
    series = [Series(label, layers, [line(run) for run in runs]) for label, line in lines.items()]
    return curves(f"Distance of attention, {name}", series, Axis("layer"), Axis("tokens", low=0))


def _most(heads: Sequence[Sequence[float]]) -> list[float]:
    return [max(layer) for layer in heads]


def _least(heads: Sequence[Sequence[float]]) -> list[float]:
    return [min(layer) for layer in heads]
