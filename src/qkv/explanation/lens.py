"""What the model would answer if it stopped at a layer: the logit lens (nostalgebraist 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.metric import Metric
from qkv.explanation.reading import Place, Reading
from qkv.explanation.result import Axis, Evidence
from qkv.nn import heads
from qkv.nn.norms import DyT, LayerNorm, RMSNorm, ScaleNorm, through

SCORE = "read off the stream behind a layer, through the last norm and the head"


def logit_lens(reading: Reading, metric: Metric) -> Evidence:
    """The metric of what the head makes of the stream behind each layer, through the last norm.

    Axis (layer): "embedding", then the layers of the trunk; the last is the model's own answer.
    """
    with torch.no_grad():
        found = [float(metric(answer)) for answer in _answers(reading, reading.places(metric))]
    axes, facts = (_layers(reading),), {"own": found[-1]}
    return Evidence("logit lens", np.array(found), axes, f"{metric.name}, {SCORE}", "", metric.name, facts)


def logit_lens_answers(reading: Reading, places: Sequence[int] | None = (-1,)) -> Evidence:
    """All logits behind each layer, at these places. Axes (layer, place, answer).

    `evidence.at(layer=3, place=0).top(5, key=np.positive)` are the five tokens it would say. With
    `places` None those of a head that answers once for the whole sequence, as a classifier's does.
    """
    head = reading.spec.head
    if head is None or head.every_token != (places is not None):
        raise UnsupportedError("This model's head gives no answer for a token: ask logit_lens for a metric.")
    tokens = reading.tokens_axis(name="place") if places is not None else Axis("place", ("whole",))
    chosen = None if places is None else [tokens.place(place) for place in places]
    with torch.no_grad():
        values = np.stack([answer[0].float().cpu().numpy() for answer in _answers(reading, chosen)])
    named = isinstance(reading.spec.head, spec.Language | spec.MultiToken)
    answers = tuple(reading.label(i) if named else i for i in range(values.shape[-1]))
    axes = (
        _layers(reading),
        Axis("place", tuple(tokens.labels[i] for i in (chosen or (0,)))),
        Axis("answer", answers),
    )
    return Evidence("logit lens", values, axes, f"logit, {SCORE}", "", "logits")


def _answers(reading: Reading, places: Sequence[int] | None) -> list[Tensor]:
    """What the head makes of the state before each layer and behind the last, (1, places, answers) each."""
    number = len(reading.sides) - 1
    side = reading.one().sides[number]
    layout = reading.layout(number, 1)
    if reading.network.head is None:
        raise UnsupportedError("This model has no head to read a layer with.")
    return [
        reading.answer(through(side.stack.norm, reading.state(Place(number, layer)), layout), layout, places)
        for layer in range(side.depth + 1)
    ]


def _layers(reading: Reading) -> Axis:
    return Axis("layer", ("embedding", *range(reading.sides[-1].depth)))


class Readout(NamedTuple):
    """A head that is linear in the states: logits = states weight^T + bias, before a cap if it has one."""

    weight: Float[Tensor, "answers width"]
    bias: Float[Tensor, " answers"]
    capped: bool = False


def readout(head: nn.Module | None) -> Readout:
    """A head's matrix, with its scale in it. Raises UnsupportedError for one that is not linear."""
    if isinstance(head, heads.MultiToken):
        head = head.next
    transform = getattr(head, "transform", None)
    if transform is None and isinstance(head, heads.Language):
        weight, bias, scale = cast(Tensor, head.weight), head.bias, head.node.scale
    elif transform is None and isinstance(head, heads.TokenClass):
        weight, bias, scale = cast(Tensor, head.output.weight), head.output.bias, 1.0
    else:
        raise UnsupportedError(
            "This model's head is not linear in the states, so shares would not sum to a logit."
        )
    wide = weight.detach().double()
    none = wide.new_zeros(len(wide))
    moved = none if bias is None else scale * bias.detach().double()
    return Readout(scale * wide, moved, isinstance(head, heads.Language) and head.node.cap is not None)


def folded(norm: nn.Module | None, read: Readout) -> Readout:
    """The same head for a norm without scale and bias: W' = W diag(scale), b' = b + W bias.

    Raises UnsupportedError for norms of other kinds, which measure across tokens.
    """
    if norm is None:
        return read
    if not isinstance(norm, LayerNorm | RMSNorm | ScaleNorm | DyT):
        raise UnsupportedError(f"The scale of a {type(norm).__name__} cannot be folded into a head.")
    weight, bias = norm.weight, getattr(norm, "bias", None)
    gain = read.weight.new_ones(read.weight.shape[-1])
    if weight is not None:
        gain = weight.detach().double() + getattr(norm, "offset", 0.0)
    moved = read.bias if bias is None else read.bias + read.weight @ bias.detach().double()
    return Readout(read.weight * gain, moved, read.capped)


def centred(norm: nn.Module | None, read: Readout) -> Readout:
    """The head without what it reads of the states' mean, which a LayerNorm takes away before.

    Raises RequestError for any other norm, whose answer this would change.
    """
    if not isinstance(norm, LayerNorm):
        kind = "no norm" if norm is None else type(norm).__name__
        raise RequestError(
            f"Only LayerNorm takes the mean away: behind {kind}, centring the head would change its answer."
        )
    return read._replace(weight=read.weight - read.weight.mean(-1, keepdim=True))
