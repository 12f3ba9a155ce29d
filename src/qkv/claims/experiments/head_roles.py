"""H14: what each head of a small language model looks at, and what the loss is without it.

A model of 4 layers with 4 heads each is trained on a text in pieces of a BPE. Every head has three scores:
its weight on the previous token and on separators (pieces of punctuation or line ends without a letter),
over text that was not trained on; and prefix matching over random pieces that are repeated, where nothing
but induction draws attention to what followed (Olsson et al. 2022). Beside each stands the score of
equal attention. A head is ablated as in Michel et al. 2019: its part of what the output map reads is 0.

Few matter, by two bounds that were set before: the median head's ablation raises the loss by less than
1 %, and the quarter of the heads that raise it most make over half of all that is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import HALF, heat, picture
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import pieces
from qkv.claims.heads import all_heads, token_losses, weights_by_layer, without
from qkv.claims.judging import within
from qkv.claims.modelling import LENGTH, split, trained
from qkv.claims.models import small_lm
from qkv.claims.tasks import repeated
from qkv.explanation import roles
from qkv.nn import Transformer

VOCAB, LAYERS, HEADS = 512, 4, 4
SEPARATORS = set(".,;:!?\n")
SCORES = ("previous token", "separators", "induction")


def measure(run: Run) -> Figures:
    corpus = pieces(VOCAB, run.of(1_000_000, 20_000))
    text = split(corpus, run.of(128, 4))
    model = small_lm(corpus.vocab, layers=run.of(LAYERS, 2), heads=HEADS, position=spec.Rotary())
    network, found = trained(run, "model", model, text, run.of(1500, 3))
    again = repeated(run.generator("repeated"), run.of(64, 4), LENGTH, corpus.vocab, 16, 28).tokens
    marks = separators(corpus.entries)
    return {
        **found,
        "corpus": corpus.name,
        **scored(network, text.rows[:64, :-1], again, marks),
        "ablated": ablated(network, text.rows),
    }


def separators(entries: Sequence[str]) -> Tensor:
    """The pieces that are punctuation or ends of lines, spaces beside."""
    marks = [place for place, entry in enumerate(entries) if separates(entry)]
    return torch.tensor(marks)


def separates(entry: str) -> bool:
    kept = set(entry) - {" "}
    return bool(kept) and kept <= SEPARATORS


def scored(network: Transformer, text: Tensor, again: Tensor, marks: Tensor) -> Figures:
    """Scores by name: [layer][head], and that of equal attention over the same rows."""
    same = roles.equal(text.shape[1])
    of_text, of_again = weights_by_layer(network, text), weights_by_layer(network, again)
    measured = {
        "previous token": [roles.previous_token(each) for each in (*of_text, same)],
        "separators": [roles.on_tokens(each, text, marks) for each in (*of_text, same)],
        "induction": [roles.prefix_matching(each, again) for each in (*of_again, same)],
    }
    return {
        name: {"heads": [each.tolist() for each in scores[:-1]], "equal": float(scores[-1])}
        for name, scores in measured.items()
    }


def ablated(network: Transformer, rows: Tensor) -> list[list[float]]:
    """By how many per cent the loss rises without each head, [layer][head]."""
    whole = float(token_losses(network, rows).mean())
    heads = all_heads(network.spec)
    rises: list[list[float]] = [[] for _ in range(1 + max(layer for layer, _ in heads))]
    for head in heads:
        loss = float(token_losses(network, rows, without(network.spec, [head])).mean())
        rises[head[0]].append(100 * (loss / whole - 1))
    return rises


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def best(name: str) -> list[float]:
        return [max(score for layer in each[name]["heads"] for score in layer) for each in figures]

    def times(name: str) -> list[float]:
        return [most / each[name]["equal"] for most, each in zip(best(name), figures, strict=True)]

    rises = [[rise for layer in each["ablated"] for rise in layer] for each in figures]
    return (
        within("a head gives the previous token over half of its weight", best("previous token"), low=0.5),
        within("a head gives separators over twice what equal attention does", times("separators"), low=2),
        within("a head's prefix matching is over twice that of equal attention", times("induction"), low=2),
        within(
            "the median head's ablation raises the loss by less than 1 %",
            [median(each) for each in rises],
            high=1,
            unit=" %",
        ),
        within(
            "a quarter of the heads makes over half of all that ablations raise",
            [share_of_quarter(each) for each in rises],
            low=0.5,
            form=".2f",
        ),
    )


def share_of_quarter(rises: Sequence[float]) -> float:
    """The share of the greatest quarter in all that is raised; what falls counts as nothing."""
    ordered = sorted((max(rise, 0.0) for rise in rises), reverse=True)
    total = sum(ordered)
    return sum(ordered[: max(len(rises) // 4, 1)]) / total if total else 0.0


def draw(figures: Sequence[Figures]) -> Pictures:
    first = figures[0]
    layers = [f"layer {layer}" for layer in range(len(first["ablated"]))]
    heads = [str(head) for head in range(HEADS)]
    maps = {name.capitalize(): first[name]["heads"] for name in SCORES}
    maps["Ablated: loss, %"] = [[max(rise, 0.0) for rise in layer] for layer in first["ablated"]]
    panels = [heat(name, values, layers, heads, "layer", "head", HALF) for name, values in maps.items()]
    return {"heads": picture(*panels)}
