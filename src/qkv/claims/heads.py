"""Attention of small decoders, head by head: reading the weights, and removing heads."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError
from qkv.nn import Taps, Transformer, tap_names
from qkv.nn.taps import NoTap, Replace, Tap

Head = tuple[int, int]  # layer, head


def all_heads(model: spec.Model) -> list[Head]:
    """Every head of a decoder's self-attention, layer by layer."""
    layers = model.decoder.layers if model.decoder is not None else ()
    return [
        (layer, head)
        for layer, node in enumerate(layers)
        for name, mixer in node.mixers()
        if name == "attention" and isinstance(mixer, spec.Attention)
        for head in range(mixer.heads)
    ]


@torch.no_grad()
def weights_by_layer(
    network: Transformer, rows: Int[Tensor, "batch length"]
) -> list[Float[Tensor, "batch heads query key"]]:
    """The attention weights of every layer, first to last."""
    taps = Taps("layers.*.attention.weights", tap_names(network.spec))
    network(rows, tap=taps)
    return [taps[name] for name in taps]


def without(model: spec.Model, heads: Iterable[Head]) -> Taps:
    """Taps under which these heads write nothing: their part of what the last map reads is 0.

    Michel et al. 2019, section 2.3. Raises RequestError for a head that the model does not have.
    """
    removed: dict[int, list[int]] = {}
    there = set(all_heads(model))
    for layer, head in heads:
        if (layer, head) not in there:
            raise RequestError(f"There is no head {head} in layer {layer}; there are {len(there)} heads.")
        removed.setdefault(layer, []).append(head)
    replace: dict[str, Replace | None] = {
        f"layers.{layer}.attention.heads": partial(_zero, which) for layer, which in removed.items()
    }
    return Taps(replace, tap_names(model))


def _zero(which: list[int], heads: Float[Tensor, "batch length heads value_dim"]) -> Tensor:
    changed = heads.clone()
    changed[:, :, which] = 0
    return changed


@torch.no_grad()
def token_losses(
    network: Transformer, rows: Int[Tensor, "batch length_and_one"], tap: Tap = NoTap()
) -> Float[Tensor, "batch length"]:
    """The loss in nats of each token given those before it, under a tap."""
    logits = network(rows[:, :-1], tap=tap)
    return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
