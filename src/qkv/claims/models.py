"""Small models for experiments: described with `qkv.spec`, built from `qkv.nn`, and given first weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.nn import Transformer, norms
from qkv.nn.choice import use
from qkv.nn.experts import Router
from qkv.nn.recurrent import Recurrent
from qkv.nn.sdpa import SDPA

Spread = Callable[[Tensor], float]  # a matrix (..., out, into) -> the standard deviation it starts with
Arrange = Callable[..., spec.Layer]  # pre_norm, post_norm, sandwich, ...
TABLE = "shared embedding"  # what a model and its head call the table that they share


def fan_in(weight: Tensor) -> float:
    """1 / sqrt(inputs): an output of unit variance from inputs of unit variance. LeCun et al. 1998, 4.6."""
    return float(weight.shape[-1] ** -0.5)


def xavier(weight: Tensor) -> float:
    """sqrt(2 / (inputs + outputs)). Glorot and Bengio 2010, equation 12."""
    return float((2 / (weight.shape[-1] + weight.shape[-2])) ** 0.5)


def small_stack(
    vocab: int,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    position: spec.Position | None = None,
    mask: spec.Mask = spec.Causal(),
    norm: spec.Norm = spec.LayerNorm(),
    mixer: spec.Dense | spec.Gated | spec.Experts | None = None,
    attention: spec.Attention | None = None,
    arrange: Arrange = spec.pre_norm,
) -> spec.Stack:
    """A stack of equal layers. The position goes where it acts: to the input, or to every attention.

    `mixer` None is GELU over 4 * width. `attention` None has heads of width / heads; one that is
    given keeps all it says but its position and mask, which are this call's. A layer that `arrange`
    normalises afterwards needs no norm at the end; one that leaves the stream as it is does.
    """
    added = position if isinstance(position, spec.Sinusoidal | spec.Learned) else None
    inside = None if added is position else position
    given = attention or spec.Attention(heads, heads, width // heads)
    placed = spec.Attention(
        given.heads,
        given.kv_heads,
        given.head_dim,
        given.score,
        inside,
        mask,
        given.projections,
        given.value_dim,
    )
    layer = arrange(placed, mixer or spec.Dense("gelu", 4 * width), norm=norm)
    bare = layer.sublayers[-1].post is None
    # a table that is tied to the head starts at 1 / sqrt(width): scaled, it is as large as positions are
    scale = width**0.5 if isinstance(added, spec.Sinusoidal) else 1.0
    return spec.Stack(
        spec.Tokens(vocab, width, scale=scale, position=added, shared=TABLE),
        (layer,) * layers,
        norm if bare else None,
    )


def small_lm(vocab: int, **stack: object) -> spec.Model:
    """A decoder over `vocab` tokens whose head is its embedding; all else is as for `small_stack`."""
    decoder = small_stack(vocab, **stack)  # type: ignore[arg-type]
    return spec.Model(decoder=decoder, head=spec.Language(vocab, shared=TABLE))


def attention_only(attention: spec.Attention, mixer: object, norm: spec.Norm) -> spec.Layer:
    """For `arrange`: pre-norm layers that leave the feed-forward out."""
    return spec.pre_norm(attention, norm=norm)


def initialised(
    model: spec.Model,
    generator: torch.Generator,
    spread: Spread = fan_in,
    residual: float | None = None,
) -> Transformer:
    """The network of a description with first weights, on torch's fused attention where that can run it.

    Matrices and tables are normal with the spread of each, biases 0, norms the identity. What ends a
    residual step is multiplied by `residual`: None is 1 / sqrt(number of steps), as in GPT-2 (Radford
    et al. 2019, section 2.3); 1 leaves it.
    Raises UnsupportedError for recurrent mixers, whose decays have first values of their own.
    """
    network = Transformer(model)
    with torch.no_grad():
        initialise(network, generator, spread)
        for stack in (model.encoder, model.decoder):
            steps = sum(len(layer.sublayers) for layer in stack.layers) if stack else 1
            factor = steps**-0.5 if residual is None else residual
            part = network.encoder if stack is model.encoder else network.decoder
            for name, parameter in part.named_parameters() if part is not None else ():
                if name.endswith(("attention.output.weight", "cross.output.weight", "down.weight")):
                    parameter.mul_(factor)
    with suppress(UnsupportedError):  # then it stays on the reference
        use(network, SDPA())
    return network


def initialise(module: nn.Module, generator: torch.Generator, spread: Spread = fan_in) -> None:
    """First weights for any module, of qkv or of torch, in the order of its parameters."""
    done: set[int] = set()
    with torch.no_grad():
        for part in module.modules():
            _refuse(part)
            for name, parameter in part.named_parameters(recurse=False):
                if id(parameter) not in done:  # what is shared starts once
                    done.add(id(parameter))
                    _fill(part, name, parameter, generator, spread)


NORMS = (norms.LayerNorm, norms.RMSNorm, norms.DyT, norms.BatchNorm, nn.LayerNorm, nn.BatchNorm1d)


def _fill(
    part: nn.Module, name: str, parameter: nn.Parameter, generator: torch.Generator, spread: Spread
) -> None:
    if isinstance(part, NORMS):
        if name == "weight":
            parameter.fill_(1 - getattr(part, "offset", 0))
        elif name == "bias":
            parameter.zero_()
    elif isinstance(part, norms.ScaleNorm):
        raise UnsupportedError("ScaleNorm starts at sqrt(width), which it does not know: fill it yourself.")
    elif isinstance(part, Router) and name == "gain":
        parameter.fill_(1)
    elif parameter.ndim == 1:
        parameter.zero_()
    else:
        parameter.normal_(0, spread(parameter), generator=generator)


def _refuse(part: nn.Module) -> None:
    if isinstance(part, Recurrent):
        raise UnsupportedError(f"{type(part).__name__} has decays, and no first values for them here.")
