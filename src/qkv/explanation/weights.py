"""Whether other attention weights would give the same answer, or the same weights another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.parts import ATTENTIONS, Site, sites
from qkv.explanation.reading import Place, Reading
from qkv.explanation.result import Axis, Evidence, numbered


def adversarial_attention(
    reading: Reading,
    layer: int,
    place: int = -1,
    most: float = 0.01,
    steps: int = 200,
    rate: float = 0.3,
    seed: int = 0,
) -> Evidence:
    """The weights of one layer's heads at one token, and others as far from them that answer the same.

    "The same" is a total variation distance of at most `most` (0 to 1) between the answers'
    probabilities at that token. The others are found by Adam on their logarithms, from a random start:
    as far as possible by Jensen-Shannon divergence, mean over the heads, which is at
    most ln 2 = 0.69 nats. Axes (weights, head, key): "own" and "adversarial". `facts`: `divergence`,
    `distance` of the answers. Of the trunk's self-attention. Jain and Wallace 2019, section 4.2.2; that
    such weights exist does not show that the own ones explain nothing (Wiegreffe and Pinter 2019).

    Raises RequestError for a layer without attention, UnsupportedError for a head that gives one answer.
    """
    if not 0 < most < 1 or steps < 1:
        raise RequestError("The answers' distance must be above 0 and below 1, and steps at least 1.")
    try_ = _Trial(reading, _site(reading, layer), _there(reading, place))
    parameters = (try_.own.clamp(min=1e-6).log() + _noise(try_.own, seed)).requires_grad_()
    optimiser = torch.optim.Adam([parameters], lr=rate)
    best, found, answer = 0.0, try_.own, 0.0
    for _ in range(steps):
        optimiser.zero_grad()
        weights = try_.shares(parameters)
        divergence, distance = jensen_shannon(try_.own, weights).mean(), try_.distance(weights)
        if distance.item() <= most and divergence.item() > best:
            best, found, answer = divergence.item(), weights.detach(), distance.item()
        # past the bound back below it, then further away again
        loss = -divergence + (distance / most - 0.8).clamp(min=0)
        (parameters.grad,) = torch.autograd.grad(loss, [parameters])
        optimiser.step()
    values = torch.stack([try_.own, found]).double().cpu().numpy()
    axes = (
        Axis("weights", ("own", "adversarial")),
        numbered("head", values.shape[1]),
        reading.tokens_axis(name="key"),
    )
    facts = {"divergence": best, "distance": answer}
    score = "share of the query's attention, 0 to 1"
    return Evidence("adversarial attention", values, axes, score, "own weights", "answer", facts)


def permuted_attention(reading: Reading, place: int = -1, draws: int = 8, seed: int = 0) -> Evidence:
    """How far the answer at a token moves when a layer's weights change places among the keys each sees.

    The total variation distance of the probabilities, 0 to 1. Axes (layer, draw). Each query of each
    head has its own order. Small where a layer's weights hardly matter. Jain and Wallace 2019,
    section 4.2.1.
    """
    there, found = _there(reading, place), _sites(reading)
    values = np.zeros((len(found), draws))
    for row, site in enumerate(found):
        chance = torch.Generator().manual_seed(seed)
        for draw in range(draws):
            with torch.no_grad():
                values[row, draw] = float(_moved(reading, site, there, partial(permuted, chance)))
    axes = (Axis("layer", tuple(site.label for site in found)), numbered("draw", draws))
    score = "total variation distance of the answer's probabilities, 0 to 1"
    return Evidence("permuted attention", values, axes, score, "own weights", "answer")


def jensen_shannon(a: Float[Tensor, "*rows key"], b: Float[Tensor, "*rows key"]) -> Float[Tensor, "*rows"]:
    """In nats, of shares with the same sum: at most ln 2 = 0.69 times it."""
    middle = (a + b) / 2
    return (_relative(a, middle) + _relative(b, middle)) / 2


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """sum a ln(a / b), where 0 ln 0 is 0."""
    there = a > 0
    safe = torch.where(there, a, 1.0)
    return torch.where(there, safe * (safe / torch.where(there, b, 1.0)).log(), 0.0).sum(-1)


class _Trial:
    """Other weights for the heads of one site at one token."""

    def __init__(self, reading: Reading, site: Site, place: int):
        self.reading, self.site, self.place = reading, site, place
        point = site.point(reading, "weights")
        taps = reading.taps([site.point(reading, "scores"), point])
        with torch.no_grad():
            answer = reading.one().run(taps, start=Place(site.side, site.layer), places=(place,))
        self.own = taps[point][0, :, place]
        self.seen = taps[site.point(reading, "scores")][0, :, place] > float("-inf")
        self.probabilities = answer[0, 0].float().softmax(-1)

    def shares(self, parameters: Float[Tensor, "heads key"]) -> Float[Tensor, "heads key"]:
        """Weights over what is seen that sum to what the own ones sum to (less than one with a sink)."""
        shares = parameters.masked_fill(~self.seen, float("-inf")).softmax(-1)
        return shares * self.own.sum(-1, keepdim=True)

    def distance(self, weights: Float[Tensor, "heads key"]) -> Float[Tensor, ""]:
        def put(value: Tensor) -> Tensor:
            value = value.clone()
            value[:, :, self.place] = weights
            return value

        return _moved(self.reading, self.site, self.place, put, self.probabilities)


def _moved(
    reading: Reading,
    site: Site,
    place: int,
    put: Callable[[Tensor], Tensor],
    own: Tensor | None = None,
) -> Float[Tensor, ""]:
    """Total variation distance that other weights make of the answer."""
    start = Place(site.side, site.layer)
    if own is None:
        own = reading.one().run(start=start, places=(place,))[0, 0].float().softmax(-1)
    taps = reading.taps({site.point(reading, "weights"): put})
    answer = reading.run(taps, start=start, places=(place,))[0, 0].float().softmax(-1)
    return (answer - own).abs().sum() / 2


def permuted(chance: torch.Generator, weights: Tensor) -> Tensor:
    """Each row's weights above 0 in another order; those of 0 stay: they are hidden."""
    out = weights.clone()
    for row in out.view(-1, out.shape[-1]):
        there = row.nonzero()[:, 0]
        row[there] = row[there[torch.randperm(len(there), generator=chance).to(there.device)]]
    return out


def _noise(like: Tensor, seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=chance).to(like)


def _there(reading: Reading, place: int) -> int:
    if reading.spec.head is None or not reading.spec.head.every_token:
        raise UnsupportedError("This model's head gives no answer for a token to compare.")
    return reading.one().tokens_axis().place(place)


def _sites(reading: Reading) -> list[Site]:
    return [site for site in sites(reading, "attention", -1) if isinstance(site.mixer, ATTENTIONS)]


def _site(reading: Reading, layer: int) -> Site:
    for site in _sites(reading):
        if site.layer == layer:
            return site
    raise RequestError(f"Layer {layer} has no attention.")
