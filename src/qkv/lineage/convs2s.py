"""Convolutional Sequence to Sequence Learning. Gehring, Auli, Grangier, Yarats and Dauphin 2017.

    e   = w + p                         words and places, both learned (section 3.1)
    v_l = GLU(conv_l(x_l))              A * sigmoid(B) of 2d channels (3.2)
    d_l = (W_l v_l + b_l + g) sqrt(.5)  what layer l of the decoder asks; g is the e of its side (equation 1)
    a_l = softmax over the source of d_l . z
    c_l = sum of a_l (z + e) sqrt(.5), times m sqrt(1/m) for m source tokens (equation 2, section 3.4)
    x_{l+1} = ((V_l c_l + v_l) sqrt(.5) + x_l) sqrt(.5); in the encoder (v_l + x_l) sqrt(.5)

No recurrence: with teacher forcing all places at once. The encoder pads its inputs on both sides, the
decoder on the left alone, by kernel - 1, so that no output sees a later token. Every factor keeps the
variance of two summed streams, or of a mean of m rows, what it was before. That a layer adds its
context before it adds its input is the order of the authors' code; the paper leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError
from qkv.nn.build import build
from qkv.nn.inputs import Tokens
from qkv.nn.layout import Layout
from qkv.nn.scores import Attended, Dot, attend

HALF = math.sqrt(0.5)  # a sum of two streams of variance 1, times this, has variance 1
Widths = tuple[tuple[int, int], ...]  # channels and kernel of each block


@dataclass(frozen=True)
class Hyperparameters:
    """The model of WMT'16 English-Romanian (section 4.2); all embeddings are `width` wide.

    `output` is the width just before the softmax. The gradient that reaches the encoder through its
    outputs is multiplied by `encoder_gradient` over the number of decoder layers that attend: 1 is
    section 3.4, one half the authors' code.
    """

    width: int = 512
    encoder: Widths = ((512, 3),) * 20
    decoder: Widths = ((512, 3),) * 20
    output: int = 512
    dropout: float = 0.1
    encoder_gradient: float = 1.0

    def __post_init__(self) -> None:
        for side, blocks in (("encoder", self.encoder), ("decoder", self.decoder)):
            if not blocks or any(kernel < 1 for _, kernel in blocks):
                raise ConfigError(
                    f"The {side}'s blocks are {blocks}; it needs one at least, and kernels of at least 1."
                )


_WIDER: Widths = ((512, 3),) * 9 + ((1024, 3),) * 4 + ((2048, 1),) * 2
ENGLISH_ROMANIAN = Hyperparameters()
ENGLISH_GERMAN = Hyperparameters(768, _WIDER, _WIDER)


@dataclass(frozen=True)
class Training:
    """Nesterov's accelerated gradient, section 4.2. The objective is `objective`.

    Gradients longer than `clip` are shortened to it. The rate is divided by ten whenever the
    validation perplexity stops improving, until it is below `least`. `batch` counts sentences.
    """

    rate: float = 0.25
    momentum: float = 0.99
    clip: float = 0.1
    shrink: float = 0.1
    least: float = 1e-4
    batch: int = 64

    def optimiser(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, self.rate, self.momentum, nesterov=True)

    def clipped(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
        """Scales the gradients down where their norm is above `clip`; gives the norm that they had."""
        return nn.utils.clip_grad_norm_(parameters, self.clip)


class Source(NamedTuple):
    """What the decoder reads: z, (z + e) sqrt(.5), and where a token is."""

    keys: Float[Tensor, "batch source width"]
    values: Float[Tensor, "batch source width"]
    present: Bool[Tensor, "batch source"]


Pasts = tuple[Tensor, ...]  # of each block its last kernel - 1 inputs, (batch, kernel - 1, channels)
State = tuple[Tensor, Pasts, Source]  # the next place (batch,), the pasts, what is read


class Convolution(nn.Module):
    """A weight-normalised convolution over time without padding; of kernel 1, an affine map.

    Each output channel's weights are `length` times the direction of `direction`: g v / |v|
    (Salimans and Kingma 2016). They start from N(0, gain * keep / n) for n inputs of which dropout
    keeps the share `keep`: gain 4 where a GLU follows, which halves its input, else 1 (section 3.5).
    """

    def __init__(self, into: int, out: int, kernel: int = 1, gain: float = 1.0, keep: float = 1.0):
        super().__init__()
        self.std = math.sqrt(gain * keep / (kernel * into))
        self.direction = nn.Parameter(torch.empty(out, into, kernel))
        self.length = nn.Parameter(torch.empty(out))
        self.bias = nn.Parameter(torch.empty(out))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.direction, std=self.std)
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.length.copy_(self.direction.flatten(1).norm(dim=1))

    @property
    def kernel(self) -> int:
        return self.direction.shape[-1]

    @property
    def weight(self) -> Float[Tensor, "out into kernel"]:
        share = self.length / self.direction.flatten(1).norm(dim=1)
        return self.direction * share[:, None, None]

    def forward(self, x: Float[Tensor, "batch length into"]) -> Float[Tensor, "batch shorter out"]:
        """kernel - 1 places fewer than there are inputs."""
        if self.kernel == 1:
            return F.linear(x, self.weight[..., 0], self.bias)
        return F.conv1d(x.transpose(1, 2), self.weight, self.bias).transpose(1, 2)


class Block(nn.Module):
    """A * sigmoid(B) of a convolution to twice the channels; `residual` brings its input to as many."""

    def __init__(self, into: int, channels: int, kernel: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.convolution = Convolution(into, 2 * channels, kernel, 4.0, 1 - dropout)
        self.residual = Convolution(into, channels) if into != channels else nn.Identity()

    def forward(self, padded: Float[Tensor, "batch longer into"]) -> Float[Tensor, "batch length channels"]:
        return F.glu(self.convolution(self.dropout(padded)), -1)

    def ended(
        self, x: Float[Tensor, "batch length into"], v: Float[Tensor, "batch length channels"]
    ) -> Float[Tensor, "batch length channels"]:
        """Both together."""
        return (v + self.residual(x)) * HALF


class Attention(nn.Module):
    """One step of multi-step attention (equations 1 and 2): unscaled dot products, one head."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.query = Convolution(channels, width)
        self.score = cast(Dot, build(spec.Dot(), width, width))
        self.output = Convolution(width, channels)

    def forward(
        self,
        v: Float[Tensor, "batch target channels"],
        embedded: Float[Tensor, "batch target width"],
        source: Source,
    ) -> Attended:
        """(V c + v) sqrt(.5), and the weights."""
        asked = (self.query(v) + embedded) * HALF
        scores = self.score(asked, self.score.prepared(source.keys))
        mixed, weights = attend(scores, source.values, source.present[:, None])
        root = source.present.sum(1).to(mixed.dtype).sqrt()  # m sqrt(1/m); padding is not counted
        return Attended((self.output(mixed * root[:, None, None]) + v) * HALF, weights)


def _blocks(widths: Widths, dropout: float) -> nn.ModuleList:
    into = (widths[0][0], *(channels for channels, _ in widths))
    return nn.ModuleList(
        Block(i, channels, kernel, dropout) for i, (channels, kernel) in zip(into, widths, strict=False)
    )


class Encoder(nn.Module):
    """Blocks that see as many places before as after (for an even kernel, one more after)."""

    def __init__(self, vocab: int, hyper: Hyperparameters, position: spec.Position | None):
        super().__init__()
        self.gradient = hyper.encoder_gradient / len(hyper.decoder)
        self.dropout = nn.Dropout(hyper.dropout)
        self.embedding = cast(Tokens, build(spec.Tokens(vocab, hyper.width, position=position)))
        self.into = Convolution(hyper.width, hyper.encoder[0][0], keep=1 - hyper.dropout)
        self.blocks = _blocks(hyper.encoder, hyper.dropout)
        self.output = Convolution(hyper.encoder[-1][0], hyper.width)

    def forward(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> Source:
        embedded = self.dropout(self.embedding(source, Layout.padded(present)))
        z = self.output(self.convolved(self.into(embedded), present))
        if z.requires_grad:  # the decoder's layers all send one back; that of e itself stays (section 3.4)
            z.register_hook(lambda gradient: gradient * self.gradient)
        return Source(z, (z + embedded) * HALF, present)

    def convolved(
        self, x: Float[Tensor, "batch source into"], present: Bool[Tensor, "batch source"]
    ) -> Float[Tensor, "batch source channels"]:
        """What is not there is zeros to every convolution, as what lies beyond the ends is."""
        for block in self.blocks:
            block = cast(Block, block)
            kernel, x = block.convolution.kernel, x.masked_fill(~present[..., None], 0)
            x = block.ended(x, block(F.pad(x, (0, 0, (kernel - 1) // 2, kernel // 2))))
        return x


class Decoder(nn.Module):
    """Blocks that see no later place, each with an attention of its own."""

    def __init__(self, vocab: int, hyper: Hyperparameters, position: spec.Position | None):
        super().__init__()
        keep = 1 - hyper.dropout
        self.dropout = nn.Dropout(hyper.dropout)
        self.embedding = cast(Tokens, build(spec.Tokens(vocab, hyper.width, position=position)))
        self.into = Convolution(hyper.width, hyper.decoder[0][0], keep=keep)
        self.blocks = _blocks(hyper.decoder, hyper.dropout)
        self.attention = nn.ModuleList(Attention(channels, hyper.width) for channels, _ in hyper.decoder)
        self.output = Convolution(hyper.decoder[-1][0], hyper.output)
        self.logits = Convolution(hyper.output, vocab, keep=keep)

    def begin(self, source: Source) -> State:
        """Before the first token: zeros stand left of it, which is the padding."""
        pasts = []
        for block in self.blocks:
            _, into, kernel = cast(Block, block).convolution.direction.shape
            pasts.append(source.keys.new_zeros(len(source.keys), kernel - 1, into))
        return source.present.new_zeros(len(source.present), dtype=torch.long), tuple(pasts), source

    def forward(
        self, tokens: Int[Tensor, "batch length"], state: State
    ) -> tuple[Float[Tensor, "batch length vocab"], list[Tensor], State]:
        """Any number of tokens after the state's: logits, each layer's weights, the state after them."""
        place, pasts, source = state
        positions = place[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.dropout(self.embedding(tokens, Layout(positions, positions)))
        x, weights, kept = self.into(embedded), [], []
        for block, attention, past in zip(self.blocks, self.attention, pasts, strict=True):
            padded = torch.cat([past, x], 1)
            kept.append(padded[:, padded.shape[1] - past.shape[1] :])
            attended = attention(block(padded), embedded, source)
            x = cast(Block, block).ended(x, attended.mixed)
            weights.append(attended.weights)
        logits = self.logits(self.dropout(self.output(x)))
        return logits, weights, (place + tokens.shape[1], tuple(kept), source)


class ConvS2S(nn.Module):
    """The whole, as a `translation.Translator`.

    `position` is what is added to the words of both sides: the paper's table, or None for the
    experiment of section 5.4 without one.
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        hyper: Hyperparameters = Hyperparameters(),
        position: spec.Position | None = spec.Learned(1024),
    ):
        super().__init__()
        self.encoder = Encoder(source_vocab, hyper, position)
        self.decoder = Decoder(target_vocab, hyper, position)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Section 3.5: tables N(0, .1^2), the rest by the number of inputs, biases 0."""
        for module in self.modules():
            if isinstance(module, Convolution):
                module.reset_parameters()
            elif isinstance(module, Tokens):
                for table in module.parameters():
                    nn.init.normal_(table, std=0.1)

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        """Logits of the token after each target token; `target` begins with the start token."""
        return self.decoder(target, self.begin(source, present))[0]

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        """The source read, and nothing said yet."""
        return self.decoder.begin(self.encoder(source, present))

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        """Logits of the token after these, and the state with them: each block reads kernel inputs."""
        logits, _, state = self.decoder(tokens[:, None], state)
        return logits[:, 0], state

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        """The weights, as the mean of those of all layers."""
        return torch.stack(self.decoder(target, self.begin(source, present))[1]).mean(0)


def receptive_field(widths: Widths) -> int:
    """How many inputs an output of these blocks depends on: 25 for six of kernel 5 (section 3.2)."""
    return 1 + sum(kernel - 1 for _, kernel in widths)


def objective(
    logits: Float[Tensor, "batch target vocab"],
    target: Int[Tensor, "batch target"],
    present: Bool[Tensor, "batch target"],
) -> Float[Tensor, ""]:
    """-log p of a token after the start, in nats: the mean over all the batch's tokens (section 4.2).

    `logits` are those of `forward` on the same `target`. Long sentences weigh more than under
    `translation.negative_log_likelihood`'s mean over sentences; padding does not count.
    """
    tokens = target.masked_fill(~present, -100)[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens.flatten(), ignore_index=-100)
