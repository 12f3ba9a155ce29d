"""Transformer-XL: a language model that reads on where it stopped. Dai et al. 2019 (ACL, 1901.02860).

A text is read in segments. Each layer keeps what it was given for the places before, and lets the
segment look back at it; nothing is learnt through that memory (section 3.2):

    h~ = [SG(memory_n); h_n]                          memory_n: what layer n was given before
    q, k, v = h_n W_q, h~ W_k, h~ W_v                 keys and values of the memory are made anew,
    h_{n+1} = layer(q, k, v)                          so W_k and W_v do learn from it

A place at layer n sees what is one layer below, so N layers reach N memories back. Positions must then
be distances: numbered from 0 in every segment, two places of one number could not be told apart. With
R_d a sinusoid of the distance, the score of i and j (section 3.3) is, over sqrt(head_dim),

    (a) E_i W_q . W_kE E_j + (b) E_i W_q . W_kR R_{i-j} + (c) u . W_kE E_j + (d) v . W_kR R_{i-j}

The layers are qkv.nn's, with `spec.RelativeSinusoidal` for (b), (c) and (d). `explicit_scores` and
`shifted_scores` show the sum and the paper's way of computing it (appendix B) side by side.

The adaptive softmax of the paper's word models is not here: it is about large vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.nn import Layout, NoTap, Tap, Transformer
from qkv.nn.attention import Attention
from qkv.nn.inputs import Tokens
from qkv.nn.layers import Layer
from qkv.nn.norms import LayerNorm


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The 12-layer character model of enwik8 (table 2): 41 million parameters.

    `memory` is how many places each layer keeps between segments. `window`: how many keys a query
    sees at most, its own included; None shows all there are, fewer to the first of a segment.
    `position` is what attention has; `added` is added to the embedding. Both are slots for the
    ablations of table 6: `position=Shaw(16)`, or `position=None, added=Sinusoidal()`, where the
    places of a segment have the numbers that those of its memory had.
    """

    vocab: int = 204
    layers: int = 12
    width: int = 512
    heads: int = 8
    head_dim: int = 64
    hidden: int = 2048
    memory: int = 512
    window: int | None = None
    position: spec.Position | None = spec.RelativeSinusoidal(biases=spec.HeadBiases(shared="biases"))
    added: spec.Position | None = None
    std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the authors train it: Adam, the rate falling to 0 as a cosine; a step is a segment of every row."""

    segment: int = 512
    batch: int = 22
    learning_rate: float = 2.5e-4
    steps: int = 400_000
    dropout: float = 0.1


def describe(settings: Settings) -> spec.Model:
    """Post-norm layers, u and v common to all of them, and a table that is also the output's matrix."""
    mask: spec.Mask = spec.Causal()
    if settings.window is not None:
        mask = mask & spec.Window(settings.window)
    heads, head_dim, scale = settings.heads, settings.head_dim, math.sqrt(settings.width)
    layer = spec.post_norm(
        spec.Attention(heads, heads, head_dim, position=settings.position, mask=mask),
        spec.Dense("relu", settings.hidden),
    )
    tokens = spec.Tokens(settings.vocab, settings.width, scale, settings.added, shared="tokens")
    head = spec.Language(settings.vocab, bias=True, shared="tokens")
    return spec.Model(decoder=spec.Stack(tokens, (layer,) * settings.layers), head=head)


class Memory(NamedTuple):
    """What each layer was given for the places before the next segment. Without gradient."""

    inputs: tuple[Float[Tensor, "batch kept width"], ...]

    @property
    def kept(self) -> int:
        return self.inputs[0].shape[1]


class Read(NamedTuple):
    """What was made of a segment, and what the next one may look back at."""

    logits: Float[Tensor, "batch length vocab"]
    memory: Memory


class TransformerXL(nn.Module):
    """The layers of `describe(settings)`, and the recurrence over segments."""

    def __init__(self, settings: Settings = Settings()):
        super().__init__()
        self.settings = settings
        self.network = Transformer(describe(settings))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02^2), scales of norms N(1, 0.02^2), biases 0: the authors' code."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                scale = isinstance(module, LayerNorm) and name == "weight"
                nn.init.normal_(parameter, float(scale), 0.0 if name == "bias" else self.settings.std)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        memory: Memory | None = None,
        keep: int | None = None,
        tap: Tap = NoTap(),
    ) -> Read:
        """Logits of the token after each, where the segment goes on from what `memory` is of.

        `keep` is how many places the memory that is returned has at most, the settings' number
        where not given: it may be larger in evaluation than in training. Taps are `qkv.nn`'s.
        Raises RequestError for a memory of another batch, or a `keep` below 0.
        """
        keep = self.settings.memory if keep is None else keep
        stack, embedding = self.network.trunk, cast(Tokens, self.network.trunk.embedding)
        memory = self.nothing(len(tokens)) if memory is None else memory
        _check(tokens, memory, keep)
        past = Past(memory)
        layout = past.extend(embedding.layout(tokens))
        x, inputs = tap("embedding", embedding(tokens, layout)), []
        for number, layer in enumerate(stack.layers):
            inputs.append(x)
            past.reading = cast(Layer, layer)
            x = layer(x, layout, past, str(number), tap.at("layers", number))
        logits = tap("logits", cast(nn.Module, self.network.head)(tap("final", x)))
        return Read(logits, _latest(memory, inputs, keep))

    def nothing(self, batch: int) -> Memory:
        """The memory before the first segment."""
        weight = cast(Tensor, self.network.trunk.embedding.weight)
        return Memory((weight.new_empty(batch, 0, self.settings.width),) * self.settings.layers)


def _check(tokens: Tensor, memory: Memory, keep: int) -> None:
    batch = len(memory.inputs[0])
    if len(tokens) != batch:
        raise RequestError(f"The memory is of {batch} rows and the segment has {len(tokens)}.")
    if keep < 0:
        raise RequestError(f"keep is {keep}; a memory has 0 places or more.")


def _latest(memory: Memory, inputs: list[Tensor], keep: int) -> Memory:
    """The last `keep` places of memory and segment, as constants."""
    whole = [torch.cat(pair, 1).detach() for pair in zip(memory.inputs, inputs, strict=True)]
    return Memory(tuple(states[:, max(0, states.shape[1] - keep) :] for states in whole))


class Past:
    """A memory as a layer's cache: it hands out keys and values of the places before, made anew.

    Made anew because a cache of keys and values would teach their projections nothing of the
    memory, and the paper's do learn from it.
    """

    reading: Layer  # the layer that runs now
    places: Int[Tensor, "batch kept"]  # of the memory

    def __init__(self, memory: Memory):
        self.memory = memory

    @property
    def length(self) -> int:
        return self.memory.kept

    def extend(self, layout: Layout) -> Layout:
        """The segment after the memory, whose first place is always 0: positions are distances."""
        batch, length = layout.shape
        places = torch.arange(self.length + length, device=layout.positions.device).expand(batch, -1)
        self.places = places[:, : self.length]
        return Layout(places[:, self.length :], places)

    def store(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        attention = cast(Attention, self.reading.attention)
        held = self.memory.inputs[int(layer.partition(".")[0])]
        key, value = attention.as_keys(held), attention.as_values(held)
        if not attention.position.by_length:  # else all keys are turned at once, after this
            key = attention.placed(key, Layout(self.places, self.places), attention.key_norm)
        return tuple(torch.cat(pair, 2) for pair in zip((key, value), new, strict=True))

    def keep(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        raise self._no("sources")

    def state(self, layer: str) -> tuple[Tensor, ...] | None:
        raise self._no("recurrent states")

    def set_state(self, layer: str, *state: Tensor) -> None:
        raise self._no("recurrent states")

    def truncate(self, length: int) -> None:
        raise self._no("ways back: read from an earlier memory instead")

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        raise self._no("other rows: read from a memory with them instead")

    def _no(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"A memory of layers' inputs has no {what}.")


# --- the relative scores, twice -----------------------------------------------------------------


def explicit_scores(
    query: Float[Tensor, "heads query head_dim"],
    key: Float[Tensor, "heads key head_dim"],
    distance: Float[Tensor, "heads key head_dim"],
    u: Float[Tensor, "heads head_dim"],
    v: Float[Tensor, "heads head_dim"],
) -> Float[Tensor, "heads query key"]:
    """(a) + (b) + (c) + (d), with a vector for every pair. Section 3.3; not divided by sqrt(head_dim).

    The queries are the last of the keys' places. distance[:, d] is W_kR R_d, d = 0 .. keys - 1; a
    key after its query is given that of d = 0, and has to be hidden.
    """
    queries, keys = query.shape[1], key.shape[1]
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    of_pairs = distance[:, behind.clamp(min=0)]
    a = torch.einsum("hid,hjd->hij", query, key)
    b = torch.einsum("hid,hijd->hij", query, of_pairs)
    c = torch.einsum("hd,hjd->hj", u, key)[:, None]
    d = torch.einsum("hd,hijd->hij", v, of_pairs)
    return a + b + c + d


def shifted_scores(
    query: Float[Tensor, "heads query head_dim"],
    key: Float[Tensor, "heads key head_dim"],
    distance: Float[Tensor, "heads key head_dim"],
    u: Float[Tensor, "heads head_dim"],
    v: Float[Tensor, "heads head_dim"],
) -> Float[Tensor, "heads query key"]:
    """The same, with products of queries and distances only. Appendix B.

    (b) + (d) are made for the distances from keys - 1 down to 0, the same ones for every query,
    then row i is shifted to where its own begin. Beyond the causal line the shift leaves what
    belongs to other rows: it has to be hidden.
    """
    content = (query + u[:, None]) @ key.transpose(1, 2)
    falling = (query + v[:, None]) @ distance.flip(1).transpose(1, 2)
    return content + shifted(falling)


def shifted(products: Float[Tensor, "heads query key"]) -> Float[Tensor, "heads query key"]:
    """Row i, of n, moves n - 1 - i to the left: a column of zeros before, read as (keys + 1, queries)."""
    heads, queries, keys = products.shape
    padded = F.pad(products, (1, 0))
    return padded.view(heads, keys + 1, queries)[:, 1:].reshape(heads, queries, keys)


# --- text as streams ------------------------------------------------------------------------------


def streams(tokens: Int[Tensor, " length"], batch: int) -> Int[Tensor, "batch shorter"]:
    """One text as `batch` rows, each a part of it in order; the last tokens that fill no row are left.

    A memory belongs to its row, so rows must be read from left to right and never shuffled.
    Raises RequestError where there is not a token and its next for every row.
    """
    length = len(tokens) // batch if batch > 0 else 0
    if length < 2:
        raise RequestError(f"{len(tokens):,} tokens are not two for each of {batch:,} rows.")
    return tokens[: batch * length].view(batch, length)


def segments(
    rows: Int[Tensor, "batch length"], length: int
) -> Iterator[tuple[Int[Tensor, "batch segment"], Int[Tensor, "batch segment"]]]:
    """Tokens and the tokens after them, `length` at a time, the last time what is left."""
    for start in range(0, rows.shape[1] - 1, length):
        end = min(start + length, rows.shape[1] - 1)
        yield rows[:, start:end], rows[:, start + 1 : end + 1]


def losses(
    logits: Float[Tensor, "batch length vocab"], after: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    """-log p of the token after each, in nats."""
    return F.cross_entropy(logits.float().transpose(1, 2), after, reduction="none")


@torch.no_grad()
def evaluate(model: TransformerXL, rows: Int[Tensor, "batch length"], segment: int, keep: int) -> float:
    """Mean -log p of every token but each row's first, in nats, `segment` at a time with a memory of `keep`.

    The paper evaluates with longer memories than it trains with (1,600 places on WikiText-103, 3,800
    on enwik8), and so reads each token once where a model without memory reads its window anew for each.
    """
    memory, total, count = None, 0.0, 0
    for tokens, after in segments(rows, segment):
        logits, memory = model(tokens, memory, keep)
        total += losses(logits, after).double().sum().item()
        count += after.numel()
    return total / count


class Dropout:
    """Dropout where the authors' code has it, as a tap: `model(tokens, memory, tap=Dropout(0.1))`.

    On embeddings, on what attention and feed-forward add, inside the feed-forward, and before the
    output; the sinusoids, which they drop too, are left whole. The memory keeps what was dropped.
    """

    def __init__(self, share: float, points: frozenset[str] = frozenset({"embedding", "final"})):
        self.share, self.points = share, points

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return F.dropout(value, self.share) if name in self.points else value

    def at(self, *names: str | int) -> Dropout:
        inside = {"attention": {"output"}, "feed_forward": {"hidden", "output"}}
        return Dropout(self.share, frozenset(inside.get(str(names[-1]), ())))

    def wants(self, name: str) -> bool:
        return name in self.points
