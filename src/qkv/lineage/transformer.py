"""Attention Is All You Need. Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser and Polosukhin 2017.

The model is a description that `qkv.nn` runs, where its mathematics stands; here is what is the paper's own:

    x <- LayerNorm(x + Dropout(Sublayer(x)))                           (section 3.1, 5.4)
    x_0 = Dropout(sqrt(d) E[token] + PE)                               (3.4, 3.5), E also the output's matrix
    rate = d^-.5 min(step^-.5, step warmup^-1.5)                       (5.3, equation 3)
    loss = cross-entropy with (1 - s) onehot + s / V                   (5.4)

The parameters that are saved at the end are the mean of the last checkpoints (6.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError, RequestError, UnsupportedError
from qkv.nn import Layout, NoTap, Tap, Taps, Transformer as Network, tap_names
from qkv.nn.attention import CrossAttention
from qkv.nn.norms import LayerNorm


@dataclass(frozen=True)
class Hyperparameters:
    """The base model of table 3. `averaged` is how many of the last checkpoints, 10 minutes apart, are."""

    layers: int = 6
    width: int = 512
    hidden: int = 2048
    heads: int = 8
    dropout: float = 0.1
    smoothing: float = 0.1
    steps: int = 100_000
    averaged: int = 5


BASE = Hyperparameters()
BIG = Hyperparameters(width=1024, hidden=4096, heads=16, dropout=0.3, steps=300_000, averaged=20)
BIG_ENGLISH_FRENCH = replace(BIG, dropout=0.1)


@dataclass(frozen=True)
class Training:
    """Adam with a rate that rises and falls, sections 5.1 and 5.3. The objective is `smoothed_cross_entropy`.

    A batch holds about `tokens` tokens of either language.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    warmup: int = 4000
    tokens: int = 25_000

    def optimiser(self, parameters: Iterable[nn.Parameter], width: int = 512) -> torch.optim.Adam:
        """At the first step's rate."""
        rate = learning_rate(1, width, self.warmup)
        return torch.optim.Adam(parameters, lr=rate, betas=self.betas, eps=self.eps)

    def schedule(self, optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Equation 3, from its first step: each call of `step`, after the optimiser's, moves the rate on."""

        def times_first(done: int) -> float:
            return min((done + 1) ** -0.5 * self.warmup**1.5, done + 1)

        return torch.optim.lr_scheduler.LambdaLR(optimiser, times_first)


@dataclass(frozen=True)
class Search:
    """Section 6.1, for `translation.beam_search`; `most` is the input's length and `longer`."""

    beams: int = 4
    penalty: float = 0.6
    longer: int = 50


def describe(
    hyper: Hyperparameters = BASE,
    vocab: int = 37_000,
    position: spec.Position | None = spec.Sinusoidal(),
    score: spec.Score = spec.Score(),
) -> spec.Model:
    """The description: one table for both sides and the output, no biases in attention.

    `position` is added to the embeddings of both sides: `spec.Learned(rows)` is row E of table 3,
    None is a model that knows order by its causal mask alone. Raises ConfigError for heads that do
    not divide the width.
    """
    width, heads = hyper.width, hyper.heads
    if width % heads:
        raise ConfigError(f"{heads} heads cannot share a width of {width} evenly.")
    size, feed_forward = width // heads, spec.Dense("relu", hyper.hidden)
    tokens = spec.Tokens(vocab, width, scale=math.sqrt(width), position=position, shared="tokens")
    around = spec.Attention(heads, heads, size, score, mask=spec.Everything())
    earlier = spec.Attention(heads, heads, size, score, mask=spec.Causal())
    cross = spec.CrossAttention(heads, heads, size, source_width=width, score=score)
    return spec.Model(
        encoder=spec.Stack(tokens, (spec.post_norm(around, feed_forward),) * hyper.layers),
        decoder=spec.Stack(tokens, (spec.post_norm(earlier, cross, feed_forward),) * hyper.layers),
        head=spec.Language(vocab, shared="tokens"),
    )


class Dropout:
    """A tap that drops values: of every sublayer's output before it is added, and of the summed embeddings.

    Section 5.4. `weights` is the share of attention weights dropped, after the softmax, so that a row
    sums to 1 on average only; the paper has none, the authors' later code 0.1.
    """

    def __init__(self, rate: float, weights: float = 0.0, inside: str = ""):
        self.rate, self.weights, self.inside = rate, weights, inside

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return F.dropout(value, self._share(name))

    def _share(self, name: str) -> float:
        place = f"{self.inside}.{name}"
        if place.endswith(("attention.weights", "cross.weights")):
            return self.weights
        ends = ("attention.output", "cross.output", "feed_forward.output", "coder.embedding")
        return self.rate if place.endswith(ends) else 0.0

    def at(self, *names: str | int) -> Dropout:
        return Dropout(self.rate, self.weights, ".".join([self.inside, *map(str, names)]))

    def wants(self, name: str) -> bool:
        return self._share(name) > 0


class Transformer(nn.Module):
    """An encoder-decoder of this description, as a `translation.Translator`.

    Any described encoder and decoder of tokens will do: positions, scores and masks are chosen there.
    `network` is the model itself; dropout is active in training mode.
    """

    def __init__(self, node: spec.Model | None = None, dropout: float = 0.1, weight_dropout: float = 0.0):
        super().__init__()
        node = describe() if node is None else node
        if node.encoder is None or node.decoder is None or not isinstance(node.head, spec.Language):
            raise ConfigError("A translator has an encoder, a decoder and a language head; one is missing.")
        self.network = Network(node)
        self.dropout = Dropout(dropout, weight_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform for matrices, N(0, 1/d) for tables, norms 1 and 0, biases 0.

        The paper is silent; this is the authors' code. Times sqrt(d), embeddings have variance 1.
        """
        for name, parameter in self.network.named_parameters():
            if name.endswith(("embedding.weight", "position.weight", "head.weight")):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
        for module in self.network.modules():
            if isinstance(module, LayerNorm) and module.weight is not None:
                nn.init.ones_(module.weight)

    @property
    def tap(self) -> Tap:
        return self.dropout if self.training else NoTap()

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        """Logits of the token after each target token: the target, shifted right by its start token."""
        return self.network(target, source, source_layout=Layout.padded(present), tap=self.tap)

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        """The encoder run, keys and values made of its rows in every layer, and nothing said yet."""
        read = self.network.read(source, Layout.padded(present), tap=self.tap)
        states = cast(Tensor, read.states)
        own, kept = [], []
        for place, mixer in _mixers(self.network.spec):
            if isinstance(mixer, spec.CrossAttention):
                cross = cast(CrossAttention, self.network.get_submodule(f"decoder.layers.{place}"))
                kept.append((cross.as_keys(states), cross.as_values(states)))
            elif isinstance(mixer, spec.Attention):
                sizes = mixer.cached()
                own.append(tuple(states.new_empty(len(states), heads, 0, dim) for heads, dim in sizes))
        return read.positions[:, :0], tuple(own), read.positions, tuple(kept)

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        """Logits of the token after these, and the state with their keys and values."""
        held = _Held(self.network.spec, state)
        logits = self.network(tokens[:, None], cache=held, tap=self.tap)
        return logits[:, 0], held.state_after()

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        """The weights of the last layer that reads the source, as the mean of its heads; without dropout."""
        node = self.network.spec
        place = [place for place, mixer in _mixers(node) if isinstance(mixer, spec.CrossAttention)][-1]
        point = f"decoder.layers.{place}.weights"
        taps = Taps(point, tap_names(node))
        self.network(target, source, source_layout=Layout.padded(present), tap=taps)
        return taps[point].mean(1)


def _mixers(node: spec.Model) -> Iterator[tuple[str, Any]]:
    """The decoder's mixers by layer and name: 0.attention, 0.cross, ..."""
    for i, layer in enumerate(cast(spec.Stack, node.decoder).layers):
        for name, mixer in layer.mixers():
            yield f"{i}.{name}", mixer


# places (batch, said) of the tokens so far; their keys and values of each layer, (batch, heads, said, dim);
# places (batch, source) of what is read, -1: padding; its keys and values of each layer
State = tuple[Tensor, tuple[tuple[Tensor, ...], ...], Tensor, tuple[tuple[Tensor, ...], ...]]


class _Held:
    """A state as the cache of one call. Nothing is written over: a state may be gone on from twice."""

    def __init__(self, node: spec.Model, state: State):
        self.positions, own, read, kept = state
        kinds = {kind: [p for p, m in _mixers(node) if m.role == kind] for kind in ("attention", "cross")}
        self.layers = dict(zip(kinds["attention"], own, strict=True))
        self.kept = dict(zip(kinds["cross"], kept, strict=True)) | {"source": (read,)}

    def state_after(self) -> State:
        """What it came from, and the call's tokens."""
        kept = dict(self.kept)
        (read,) = kept.pop("source")
        return self.positions, tuple(self.layers.values()), read, tuple(kept.values())

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def extend(self, layout: Layout) -> Layout:
        positions = layout.positions + self.length
        self.positions = torch.cat([self.positions, positions], 1)
        return replace(layout, positions=positions, key_positions=self.positions, _memo={})

    def store(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        held = zip(self.layers[layer], new, strict=True)
        self.layers[layer] = tuple(torch.cat([old, more], 2) for old, more in held)
        return self.layers[layer]

    def keep(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return self.kept[name]

    def state(self, layer: str) -> tuple[Tensor, ...] | None:
        raise UnsupportedError("A decoder with recurrent layers does not go token by token here.")

    def set_state(self, layer: str, *state: Tensor) -> None: ...

    def truncate(self, length: int) -> None:
        """After an error the state that the call was given is still what it was."""

    def select(self, rows: Tensor) -> None:
        raise UnsupportedError("The rows of a state are chosen by `translation.reordered`.")


def learning_rate(step: int, width: int = 512, warmup: int = 4000) -> float:
    """Equation 3: linear up to `warmup` steps, then by the root of the step. Steps count from 1.

    Raises RequestError for a step before the first.
    """
    if step < 1:
        raise RequestError(f"The step is {step}; the first is 1.")
    return float(width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def smoothed_cross_entropy(
    logits: Float[Tensor, "batch target vocab"],
    target: Int[Tensor, "batch target"],
    present: Bool[Tensor, "batch target"],
    smoothing: float = 0.1,
    pad: int | None = None,
) -> Float[Tensor, ""]:
    """-sum q log p of a token after the start, in nats: the mean over all tokens that are there.

    `logits` are those of `forward` on the same `target`, start and end included. q is 1 - smoothing
    on the token, and smoothing / V on each of V classes. `pad` is the class that no text holds, if
    the vocabulary has one: it gets nothing, and V does not count it, so that q sums to 1. Section
    5.4; Szegedy et al. 2015, section 7.
    """
    there = present[:, 1:]
    tokens, logs = target[:, 1:].masked_fill(~there, 0), logits[:, :-1].float().log_softmax(-1)
    right = logs.gather(-1, tokens[..., None])[..., 0]
    classes = logs.shape[-1]
    if pad is not None:
        # filled, not multiplied: a logit of -inf for the class is allowed
        logs = logs.masked_fill(torch.arange(classes, device=logs.device) == pad, 0)
        classes -= 1
    losses = -(1 - smoothing) * right
    if smoothing:  # nothing is not nothing times a class that is ruled out by a logit of -inf
        losses = losses - smoothing / classes * logs.sum(-1)
    return losses.masked_fill(~there, 0).sum() / there.sum().clamp(min=1)


def smoothing_floor(classes: int, smoothing: float = 0.1) -> float:
    """The least that `smoothed_cross_entropy` can be, the entropy of its targets, in nats."""
    rest = smoothing / classes
    right = 1 - smoothing + rest
    return -sum(n * q * math.log(q) for n, q in ((1, right), (classes - 1, rest)) if n * q > 0)


def averaged(checkpoints: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every tensor over state dicts of one model, for `load_state_dict`. Section 6.1.

    Summed in fp64. Raises RequestError for none, or for checkpoints of different tensors.
    """
    if not checkpoints:
        raise RequestError("There is no checkpoint to average; give at least one.")
    first = {name: tensor.shape for name, tensor in checkpoints[0].items()}
    for other in checkpoints[1:]:
        if {name: tensor.shape for name, tensor in other.items()} != first:
            raise RequestError("The checkpoints hold different tensors; they must be of one model.")
    total = {name: tensor.double() for name, tensor in checkpoints[0].items()}
    for other in checkpoints[1:]:
        total = {name: held + other[name] for name, held in total.items()}
    return {name: (held / len(checkpoints)).to(checkpoints[0][name].dtype) for name, held in total.items()}
