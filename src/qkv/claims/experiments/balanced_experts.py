"""H20: language models of characters with a choice of experts, and ways of keeping the choice even.

Eight experts, of which a token uses one or two. One of the two is as wide as the dense feed-forward, each of
two half as wide, so that all do the same work for a token but for the router's, 1 % of it. With one expert
its weight is the router's probability (Switch: Fedus et al. 2021), with two both are made to sum to one
(Mixtral). Without balancing; with the loss of Switch, times 0.01; with DeepSeek-V3's bias, moved by 0.001
after each batch. Router weights start like all others.

How even the choice is, on text not trained on, in the mean of the layers: the entropy of the experts' shares
of the choices as a number of experts (its exponential), 8 when even; and the balance loss by Switch's
equation 4, divided by the experts a token uses, so that even is 1 and all to the same is 8 or 4. The bounds:
a collapse is that less than half of the experts are left, and that the loss is over half of the way to its
greatest; balanced is a loss of less than 1.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, within
from qkv.claims.modelling import LENGTH, Reading, reading
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import adam, mean_loss, train, warm_up, windows
from qkv.nn import Layout, NoTap, Taps, Transformer, tap_names
from qkv.nn.experts import Experts, load_balancing, rebalanced

EXPERTS, HIDDEN, BATCH = 8, 256, 16
WEIGHT, RATE = 0.01, 0.001  # of the loss, and of the bias
DENSE = "dense"
WAYS = ("no balancing", "loss", "bias")
CHOICES = (1, 2)
COLLAPSED, EVEN = 0.5, 1.1
POINTS = 40
Loss = Callable[[Tensor], Tensor]


def name_of(top_k: int, way: str) -> str:
    return f"top-{top_k}, {way}"


NAMES = tuple(name_of(top_k, way) for top_k in CHOICES for way in WAYS)


def measure(run: Run) -> Figures:
    text = reading(run)
    found: Figures = {"corpus": text.corpus.name}
    _, found[DENSE] = trained(run, DENSE, described(text, spec.Dense("gelu", HIDDEN)), text)
    for top_k in CHOICES:
        for way in WAYS:
            name = name_of(top_k, way)
            network, found[name] = trained(run, name, described(text, experts(top_k, way)), text, way)
            found[name] |= evenness(network, text.rows[:, :-1])
    return found


def described(text: Reading, mixer: spec.Dense | spec.Experts) -> spec.Model:
    return small_lm(text.corpus.vocab, position=spec.Learned(LENGTH), mixer=mixer)


def experts(top_k: int, way: str) -> spec.Experts:
    router = spec.Router(normalise=top_k > 1, balance=way == "bias")
    return spec.Experts(EXPERTS, top_k, spec.Dense("gelu", HIDDEN // top_k), router)


def trained(
    run: Run, name: str, model: spec.Model, text: Reading, way: str = ""
) -> tuple[Transformer, Figures]:
    """The network after training, and its loss curve, held-out loss and size. All read the same batches."""
    network = initialised(model, run.generator("weights"))
    choices: list[float] = []
    curve = train(
        network,
        windows(text.before, LENGTH, BATCH, run.generator("batches")),
        partial(loss, network, way, choices),
        run.of(500, 3),
        adam(network, 2e-3),
        schedule=warm_up(run.of(50, 1)),
        told=run.progress,
        note=name,
        points=POINTS,
    )
    held_out = mean_loss(network, text.rows) if curve.diverged is None else None
    return network, {
        "curve": curve.data(),
        "held_out": held_out,
        "parameters": model.parameters(),
        "active": model.parameters(active=True),
        "flops": model.flops(LENGTH),
        "left": in_points(choices, len(curve.steps)) if choices else [],
    }


def in_points(values: Sequence[float], points: int) -> list[float]:
    """Means over as many stretches as the loss curve has."""
    return [float(part.mean()) for part in torch.tensor(values).tensor_split(max(points, 1))]


def loss(network: Transformer, way: str, choices: list[float], rows: Tensor) -> Tensor:
    """The cross-entropy, and what balances; `choices` is told how many experts the batch left."""
    taps = router_taps(network)
    logits = network(rows[:, :-1], tap=NoTap() if taps is None else taps)
    total = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    if taps is None:
        return total
    layout, left = Layout.unpadded(*rows[:, :-1].shape), []
    for module, told in zip(routed(network), taps, strict=True):
        routing = module.router(taps[told], layout)
        left.append(experts_left(routing.chosen.sum((0, 1))))
        if way == "loss":
            total = total + WEIGHT * load_balancing(routing.scores, routing.chosen, layout)
        bias = module.router.balance
        if bias is not None:
            bias.data.copy_(rebalanced(bias, routing.chosen, layout, RATE))
    choices.append(sum(left) / len(left))
    return total


def router_taps(network: Transformer) -> Taps | None:
    if not routed(network):
        return None
    return Taps("layers.*.feed_forward.router", tap_names(network.spec))


def routed(network: Transformer) -> list[Experts]:
    return [module for module in network.modules() if isinstance(module, Experts)]


def experts_left(counts: Tensor) -> float:
    """e to the entropy of the shares: as many experts as would have it if they were used evenly."""
    shares = counts.double() / counts.sum()
    return math.exp(float(-torch.special.xlogy(shares, shares).sum()))


@torch.no_grad()
def evenness(network: Transformer, rows: Tensor) -> Figures:
    """Over all rows at once, of each layer: the experts that are left, their shares, the balance loss."""
    taps = router_taps(network)
    if taps is None:
        return {}
    parts = rows.split(64)
    for part in parts:
        network(part, tap=taps)
    layout = Layout.unpadded(*rows.shape)
    found: Figures = {"left_after": [], "balance": [], "shares": []}
    for module, told in zip(routed(network), taps, strict=True):
        routing = module.router(torch.cat(taps.history[told]), layout)
        counts = routing.chosen.sum((0, 1))
        found["left_after"].append(experts_left(counts))
        found["shares"].append((counts / counts.sum()).tolist())
        balance = load_balancing(routing.scores, routing.chosen, layout)
        found["balance"].append(float(balance) / module.router.top_k)
    return found


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        same_work(figures),
        *(check for top_k in CHOICES for check in collapsed(figures, top_k)),
        *(
            within(
                f"{name_of(top_k, way)}: the balance loss goes to 1.0 (under {EVEN})",
                mean_of(figures, name_of(top_k, way), "balance"),
                high=EVEN,
                form=".3f",
            )
            for top_k in CHOICES
            for way in WAYS[1:]
        ),
        *(
            below(
                f"equal work for a token: the loss of {name_of(top_k, way)} is below the dense one",
                losses(figures, name_of(top_k, way)),
                losses(figures, DENSE),
                ".3f",
                " nats",
            )
            for top_k in CHOICES
            for way in WAYS[1:]
        ),
    )


def same_work(figures: Sequence[Figures]) -> Check:
    dense = figures[0][DENSE]["flops"]
    more = [100 * (figures[0][name]["flops"] / dense - 1) for name in NAMES]
    what = "all do the same work for a token, within 2 %"
    holds = all(abs(each) <= 2 for each in more)
    return Check(what, f"{min(more):+.1f} to {max(more):+.1f} % of the dense one's", holds)


def collapsed(figures: Sequence[Figures], top_k: int) -> tuple[Check, ...]:
    name, most = name_of(top_k, WAYS[0]), EXPERTS / top_k
    bound = 1 + COLLAPSED * (most - 1)
    return (
        within(
            f"{name}: the entropy collapses: under {COLLAPSED * EXPERTS:.0f} of {EXPERTS} experts are left",
            mean_of(figures, name, "left_after"),
            high=COLLAPSED * EXPERTS,
            form=".2f",
        ),
        within(
            f"{name}: the balance loss goes to {most:.0f} (over {bound:.2g})",
            mean_of(figures, name, "balance"),
            low=bound,
            form=".2f",
        ),
    )


def mean_of(figures: Sequence[Figures], name: str, what: str) -> list[float]:
    """Over the layers."""
    return [sum(each[name][what]) / len(each[name][what]) for each in figures]


def losses(figures: Sequence[Figures], name: str) -> list[float | None]:
    return [each[name]["held_out"] for each in figures]


def draw(figures: Sequence[Figures]) -> Pictures:
    steps = figures[0][NAMES[0]]["curve"]["steps"]
    left = {
        top_k: curves(
            f"Experts left by entropy, top-{top_k}",
            [Series(way, steps, [each[name_of(top_k, way)]["left"] for each in figures]) for way in WAYS],
            Axis("step"),
            Axis("experts of 8"),
        )
        for top_k in CHOICES
    }
    known = {name: losses(figures, name) for name in (DENSE, *NAMES)}
    rows = [Bar(name, [v for v in values if v is not None]) for name, values in known.items()]
    ends = bars("Loss on text not trained on", [row for row in rows if row.values], Axis("nats a character"))
    shares = [
        Bar(
            f"{name}, expert {place + 1}",
            [sorted(each[name]["shares"][-1], reverse=True)[place] for each in figures],
            name,
        )
        for name in (name_of(1, way) for way in WAYS)
        for place in range(EXPERTS)
    ]
    return {
        "experts-left": picture(*left.values()),
        "loss": picture(ends),
        "shares": picture(bars("Shares of the last layer's choices, top-1", shares, Axis("share"))),
    }
