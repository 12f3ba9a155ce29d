"""What attention weights say by themselves. None of it is an effect: see `ablation` for those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.flow import most_flow
from qkv.explanation.parts import ATTENTIONS, Site, every_mixer, sites
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Evidence, numbered, stacked

OFTEN = 4096  # edges between two layers that a flow is worked out over, at most


def attention_maps(reading: Reading, role: str = "attention", side: int = -1) -> Evidence:
    """The weights. Axes (layer, head, query, key); a head that a layer doesn't have is NaN.

    Rows sum to one, less what a sink takes. `role` is "attention" or "cross".
    """
    found = _with_weights(reading, role, side)
    weights = _weights(reading.one(), found)
    axes = (_layers(found), numbered("head", max(map(len, weights))), *_pairs(reading, role, side))
    return Evidence("attention", stacked(weights), axes, "share of the query's attention, 0 to 1")


def norm_weighted(reading: Reading, role: str = "attention", side: int = -1) -> Evidence:
    """The length of what each key adds to each query: |weight * value W_O|, for each head.

    A large weight on a short vector moves nothing. Axes as `attention_maps`; in the stream's own unit,
    before the sublayer's later norms. Kobayashi et al. 2020, equations 3 and 4, with W_O of the head
    alone and without its bias. Raises UnsupportedError for gated heads, values by position, and values
    that are latent.
    """
    found = _with_weights(reading, role, side)
    for site in found:
        _refuse_norms(site)
    weights = _weights(reading.one(), found)
    values = reading.read([site.point(reading, "value") for site in found])
    lengths = []
    for site, weight in zip(found, weights, strict=True):
        value = values[site.point(reading, "value")][0].float()
        lengths.append(weight * _lengths(reading, site, value).numpy()[:, None])
    axes = (_layers(found), numbered("head", max(map(len, weights))), *_pairs(reading, role, side))
    return Evidence("norm-weighted attention", stacked(lengths), axes, "length of weight * value * W_O")


def rollout(reading: Reading, side: int = -1) -> Evidence:
    """How much of each token's state behind each layer comes from each token, if attention were all.

    The product, up to a layer, of A' = (A + 1) / 2, A the mean over the heads, rows made to sum to one:
    half comes through the residual path. Axes (layer, query, key). Abnar and Zuidema 2020, section 3.1.
    Raises UnsupportedError for a stack in which more than self-attention mixes tokens.
    """
    found, steps = _mixing(reading, side)
    product, layers = np.eye(steps[0].shape[-1]), []
    for step in steps:
        product = step @ product
        layers.append(product)
    axes = (_layers(found), *_pairs(reading, "attention", side))
    return Evidence("attention rollout", np.stack(layers), axes, "share of the token's state, 0 to 1")


def attention_flow(reading: Reading, queries: Sequence[int] = (-1,), side: int = -1) -> Evidence:
    """The most that can flow from each token to a query through the layers, weights being capacities.

    Capacities are A' as in `rollout`; each key's flow is worked out by itself. Axes (query, key), at the
    last layer. Abnar and Zuidema 2020, section 3.2. Raises RequestError for prompts over 64 tokens, for
    which this would take long, and UnsupportedError as `rollout`.
    """
    tokens = reading.tokens_axis(side)
    count = len(tokens.labels)
    if count**2 > OFTEN:
        raise RequestError(f"Flow is worked out for up to 64 tokens, and here are {count:,}: take rollout.")
    _, steps = _mixing(reading, side)
    places = [Axis("query", tokens.labels).place(query) for query in queries]
    values = np.array([[most_flow(steps, query, key) for key in range(count)] for query in places])
    axes = (Axis("query", tuple(tokens.labels[p] for p in places)), Axis("key", tokens.labels))
    return Evidence("attention flow", values, axes, "most that can flow, 0 to 1")


def _mixing(reading: Reading, side: int) -> tuple[list[Site], list[np.ndarray]]:
    """The attentions of a side and (A + 1) / 2 of each, (query, key), rows summing to one."""
    number = side % len(reading.sides)
    for site in every_mixer(reading):
        if site.side == number and site.mixer.role in ("cross", "mixer"):
            raise UnsupportedError(
                f"Layer {site.layer} mixes tokens by {type(site.mixer).__name__} too, which rollout and flow "
                "have no weights for."
            )
    found = _with_weights(reading, "attention", side)
    steps = []
    for weights in _weights(reading.one(), found):
        step = (weights.mean(0) + np.eye(weights.shape[-1])) / 2
        steps.append(step / step.sum(-1, keepdims=True))
    return found, steps


def _weights(reading: Reading, found: Sequence[Site]) -> list[np.ndarray]:
    """(head, query, key) of each site, of the one prompt."""
    points = [site.point(reading, "weights") for site in found]
    values = reading.read(points)
    return [values[point][0].double().cpu().numpy() for point in points]


def _with_weights(reading: Reading, role: str, side: int) -> list[Site]:
    found = [site for site in sites(reading, role, side) if isinstance(site.mixer, ATTENTIONS)]
    if not found:
        raise UnsupportedError("Recurrent mixers have no attention weights.")
    return found


def _layers(found: Sequence[Site]) -> Axis:
    return Axis("layer", tuple(site.label for site in found))


def _pairs(reading: Reading, role: str, side: int) -> tuple[Axis, Axis]:
    """Queries of a side, and what they look at: itself, or the encoder."""
    return reading.tokens_axis(side, "query"), reading.tokens_axis(0 if role == "cross" else side, "key")


def _refuse_norms(site: Site) -> None:
    mixer = site.mixer
    problem = None
    if isinstance(mixer, spec.LatentAttention):
        problem = "makes values of a latent"
    elif isinstance(mixer, spec.Attention | spec.CrossAttention):
        if mixer.projections.gate is not None:
            problem = "gates its heads by the query"
        elif isinstance(mixer.position, spec.Shaw) and mixer.position.values:
            problem = "adds vectors of distances to its values"
    if problem is not None:
        raise UnsupportedError(
            f"Layer {site.layer} {problem}, so that a key's share is no weight * value: take attention_maps."
        )


def _lengths(reading: Reading, site: Site, value: Tensor) -> Tensor:
    """|value W_O| of each head and key, (head, key); `value` is (kv_heads, key, dim)."""
    module = reading.sides[site.side].stack.layers[site.layer].get_submodule(site.name)
    output = module.get_submodule("output").get_parameter("weight").detach().float()
    dim = value.shape[-1]
    by_head = output.unflatten(-1, (-1, dim)).permute(1, 2, 0)  # (head, dim, width)
    shared = value.repeat_interleave(len(by_head) // len(value), 0)
    return torch.linalg.vector_norm(shared @ by_head, dim=-1).cpu()
