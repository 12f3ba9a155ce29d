"""Which part of the model wrote the logit: the stream is a sum, and the head is linear in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.explanation.lens import readout
from qkv.explanation.metric import Metric
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Evidence, Label
from qkv.nn.layers import Gate, Layer
from qkv.nn.norms import BatchNorm, LayerNorm, RMSNorm, ScaleNorm

Written = Float[Tensor, "components width"]


class Weighted(Metric, Protocol):
    """A metric that is a weighted sum of logits: `Logit` or `Difference`."""

    @property
    def weights(self) -> tuple[tuple[int, float], ...]: ...


def direct_attribution(reading: Reading, metric: Metric) -> Evidence:
    """What each component adds to a logit by itself, at the place that answers. Axis (component).

    Components are the embedding, each attention head ("3.attention.1"), each other mixer with its own
    bias ("3.feed_forward"), and "bias": all that is added to the stream without looking at a token, by
    attention, norms and head. Every norm on the way is held at what it measured there, which makes the
    answer linear in the components; so they sum to the logit (before a cap, where the head has one),
    and `facts["gap"]` is what is missing, of rounding alone. Where layers end in a norm (post-norm) the
    later ones rescale the components of the earlier ones. Of the trunk. Elhage et al. 2021, "Logits".

    Raises UnsupportedError for metrics that are no sum of logits, heads that are not linear, and norms
    that bound each channel (DyT).
    """
    if not hasattr(metric, "weights"):
        raise UnsupportedError(f"A {metric.name} is no sum of logits: take Logit or Difference.")
    read, places = readout(reading.network.head), reading.places(metric)
    own, weights = float(reading.one().value(metric)), cast(Weighted, metric).weights
    names, written = _components(reading, cast(Sequence[int], places)[0] % reading.length())
    values = written @ torch.stack([weight * read.weight[token] for token, weight in weights]).sum(0)
    values[names.index("bias")] += sum(weight * float(read.bias[token]) for token, weight in weights)
    facts = {"own": own} if read.capped else {"own": own, "gap": own - float(values.sum())}
    score = f"share of the {metric.name}" + (", before the cap" if read.capped else "")
    axes, method = (Axis("component", tuple(names)),), "direct attribution"
    return Evidence(method, values.cpu().numpy(), axes, score, "", metric.name, facts)


def _components(reading: Reading, place: int) -> tuple[list[Label], Written]:
    """Names, and what each has written where the head reads, in float64."""
    side = reading.sides[-1]
    points = [f"{side.prefix}embedding"]
    for i, node in enumerate(side.node.layers):
        points += [f"{side.prefix}layers.{i}.{name}.{_point(mixer)}" for name, mixer in node.mixers()]
    values = {
        point.removeprefix(side.prefix): value[0, place].double()
        for point, value in reading.read(points).items()
    }
    stream = _Stream(values["embedding"])
    for i, layer in enumerate(cast(Iterable[Layer], side.stack.layers)):
        for sublayer, step, branches in layer.steps:
            added = [_branch(layer, i, name, branch, values) for name, branch in branches]
            stream.step(layer, sublayer, step, added)
    stream.through(side.stack.norm)
    return stream.names, stream.written


class _Stream:
    """Components of the stream at one place; the first is the bias."""

    def __init__(self, embedding: Float[Tensor, " width"]):
        self.names: list[Label] = ["bias", "embedding"]
        self.written = torch.stack([torch.zeros_like(embedding), embedding])

    def through(self, norm: nn.Module | None) -> None:
        self.written = _through(norm, self.written)

    def step(
        self, layer: Layer, sublayer: spec.Sublayer, step: str, added: Sequence[tuple[list[str], Written]]
    ) -> None:
        """skip * stream + gate * scale * after(the branches), through the norm behind."""
        first = torch.stack([written[0] for _, written in added]).sum(0, keepdim=True)
        new = torch.cat([first, *(written[1:] for _, written in added)])
        new = _through(getattr(layer, f"{step}_after"), new)
        new = _through(getattr(layer, f"{step}_gate"), sublayer.scale * new)
        stream = sublayer.skip * self.written
        stream[0] += new[0]
        self.written = torch.cat([stream, new[1:]])
        for names, _ in added:
            self.names += names
        self.through(getattr(layer, f"{step}_post"))


def _point(mixer: spec.layers.Mixer) -> str:
    return "output" if mixer.role == "feed_forward" else "heads"


def _branch(
    layer: Layer, number: int, name: str, branch: spec.Branch, values: dict[str, Tensor]
) -> tuple[list[str], Written]:
    """What a branch writes: its bias first, without a name, then each head, or all of it."""
    value = values[f"layers.{number}.{name}.{_point(branch.mixer)}"]
    names, written = [f"{number}.{name}"], torch.stack([torch.zeros_like(value), value])
    if branch.mixer.role != "feed_forward":
        output = layer.get_submodule(name).get_submodule("output")
        weight, bias = output.get_parameter("weight").detach().double(), output._parameters.get("bias")
        heads = torch.einsum("hd,whd->hw", value, weight.unflatten(-1, value.shape))
        first = torch.zeros_like(heads[:1]) if bias is None else bias.detach().double()[None]
        written = torch.cat([first, heads])
        names = [f"{names[0]}.{head}" for head in range(len(heads))]
    return names, _through(getattr(layer, f"{name}_norm_after"), written)


def _through(norm: nn.Module | None, written: Written) -> Written:
    """The components behind a norm or gate that is held at what it measures of their sum."""
    if norm is None:
        return written
    if type(norm) not in _HELD:
        raise UnsupportedError(
            f"Shares cannot be followed through a {type(norm).__name__}, which treats each size differently."
        )
    return _HELD[type(norm)](norm, written)


def _layer_norm(norm: LayerNorm, written: Written) -> Written:
    even = written - written.mean(-1, keepdim=True)
    out = even * torch.rsqrt(even.sum(0).square().mean() + norm.eps) * _wide(norm.weight, 1.0)
    out[0] += _wide(norm.bias, 0.0)
    return out


def _rms_norm(norm: RMSNorm, written: Written) -> Written:
    gain = 1.0 if norm.weight is None else norm.offset + _wide(norm.weight, 1.0)
    return written * torch.rsqrt(written.sum(0).square().mean() + norm.eps) * gain


def _scale_norm(norm: ScaleNorm, written: Written) -> Written:
    return written * _wide(norm.weight, 1.0) / written.sum(0).norm().clamp(min=norm.eps)


def _batch_norm(norm: BatchNorm, written: Written) -> Written:
    gain = norm.weight.detach().double() * torch.rsqrt(norm.running_variance.double() + norm.node.eps)
    out = written * gain
    out[0] += norm.bias.detach().double() - norm.running_mean.double() * gain
    return out


def _gate(gate: Gate, written: Written) -> Written:
    return written * gate.activation(gate.weight.detach().double())


_HELD: dict[type[nn.Module], Callable[[Any, Written], Written]] = {
    LayerNorm: _layer_norm,
    RMSNorm: _rms_norm,
    ScaleNorm: _scale_norm,
    BatchNorm: _batch_norm,
    Gate: _gate,
}


def _wide(parameter: Tensor | None, otherwise: float) -> Tensor | float:
    return otherwise if parameter is None else parameter.detach().double()
