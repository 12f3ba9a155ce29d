"""RNNsearch: the first translation that learns where to look. Bahdanau, Cho and Bengio 2014, arXiv 1409.0473.

Section 3.1 is the decoder with its attention, 3.2 the encoder of both directions, appendix A the
exact units, B the training. A query is the decoder's state *before* the word it helps to choose, and
keys and values are one thing, the annotations, unprojected.

    h_j  = [forward_j; backward_j]                                       Encoder
    e_ij = v . tanh(W_a s_{i-1} + U_a h_j),  a_i = softmax_j(e_ij)       Search
    c_i  = sum_j a_ij h_j
    t_i  = maxout(U_o s_{i-1} + V_o E y_{i-1} + C_o c_i)                 RNNsearch.logits
    p(y_i) = softmax(W_o t_i)
    s_i  = GRU(s_{i-1}; E y_{i-1}, c_i),  s_0 = tanh(W_s backward_1)     RNNsearch.step

The baseline, RNNencdec, is the same with c_i fixed to the forward state at the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.nn import scores
from qkv.nn.build import build
from qkv.nn.linear import Linear


@dataclass(frozen=True)
class Sizes:
    """Appendix A.2: n, m, l and n' of the paper; its 30,000 most frequent words of each language."""

    source_vocab: int = 30_000
    target_vocab: int = 30_000
    hidden: int = 1000
    embedding: int = 620
    maxout: int = 500
    alignment: int = 1000


@dataclass(frozen=True)
class Training:
    """Appendix B.2: Adadelta on batches of 80 sentences, gradients cut to a norm of 1.

    The objective is `translation.negative_log_likelihood`.
    """

    batch: int = 80
    decay: float = 0.95
    epsilon: float = 1e-6
    clip: float = 1.0

    def optimiser(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Adadelta:
        return torch.optim.Adadelta(parameters, lr=1.0, rho=self.decay, eps=self.epsilon)

    def clipped(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
        """Scales the gradients down where their norm is above `clip`; gives the norm that they had."""
        return nn.utils.clip_grad_norm_(parameters, self.clip)


class GRU(nn.Module):
    """The gated unit in the paper's own form, appendix A.1.1 and A.1.2.

    z = sigmoid(in_z + U_z s), r = sigmoid(in_r + U_r s), proposal = tanh(in + U [r * s]),
    s <- (1 - z) * s + z * proposal. torch.nn.GRU keeps z of the old state instead of 1 - z, and
    resets U s instead of s: it cannot hold these weights. `gates` is U_z over U_r.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.gates, self.proposal = Linear(hidden, 2 * hidden), Linear(hidden, hidden)

    def forward(
        self, state: Float[Tensor, "batch hidden"], inputs: Float[Tensor, "batch three_hidden"]
    ) -> Float[Tensor, "batch hidden"]:
        """The next state; `inputs` are what is added for z, for r and for the proposal, side by side."""
        hidden = state.shape[-1]
        of_gates, of_proposal = inputs.split([2 * hidden, hidden], -1)
        update, reset = torch.sigmoid(of_gates + self.gates(state)).chunk(2, -1)
        proposal = torch.tanh(of_proposal + self.proposal(reset * state))
        return (1 - update) * state + update * proposal

    def reset_parameters(self) -> None:
        for matrix in (*self.gates.weight.chunk(2), self.proposal.weight):
            nn.init.orthogonal_(matrix)


class Reader(nn.Module):
    """A GRU over the source in one direction."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.inputs = Linear(sizes.embedding, 3 * sizes.hidden, bias=True)
        self.unit = GRU(sizes.hidden)

    def forward(
        self,
        words: Float[Tensor, "batch source embedding"],
        present: Bool[Tensor, "batch source"],
        backwards: bool,
    ) -> Float[Tensor, "batch source hidden"]:
        """The state at each word; a place where none is keeps the state it is reached with."""
        steps = list(zip(self.inputs(words).unbind(1), present[..., None].unbind(1), strict=True))
        state = words.new_zeros(len(words), self.unit.proposal.weight.shape[0])
        states = []
        for inputs, there in reversed(steps) if backwards else steps:
            state = torch.where(there, self.unit(state, inputs), state)
            states.append(state)
        return torch.stack(states[::-1] if backwards else states, 1)


class Encoder(nn.Module):
    """Each word with what stands before it and what stands after it. Section 3.2."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.source_vocab, sizes.embedding)
        self.ahead, self.back = Reader(sizes), Reader(sizes)

    def forward(
        self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]
    ) -> Float[Tensor, "batch source two_hidden"]:
        words = self.embedding(source.masked_fill(~present, 0))
        return torch.cat([self.ahead(words, present, False), self.back(words, present, True)], -1)


class Context(Protocol):
    """Where c_i comes from: a slot of the decoder. Built from the sizes."""

    width: int

    def remember(
        self, annotations: Float[Tensor, "batch source two_hidden"], present: Bool[Tensor, "batch source"]
    ) -> tuple[Tensor, ...]:
        """What of a source is the same for every target word."""
        ...

    def __call__(
        self, state: Float[Tensor, "batch hidden"], memory: tuple[Tensor, ...]
    ) -> tuple[Float[Tensor, "batch context"], Float[Tensor, "batch source"]]:
        """c_i and the weights of the source in it."""
        ...

    def reset_parameters(self) -> None: ...


class Search(nn.Module):
    """Additive attention from the state s_{i-1} over all annotations. Section 3.1, appendix A.1.2."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.width = 2 * sizes.hidden
        self.score: Any = build(spec.Additive(sizes.alignment), sizes.hidden, self.width)

    def remember(self, annotations: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        return annotations, self.score.prepared(annotations), present

    def forward(self, state: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        annotations, prepared, present = memory
        mixed, weights = scores.attend(self.score(state[:, None], prepared), annotations, present[:, None])
        return mixed[:, 0], weights[:, 0]

    def reset_parameters(self) -> None:
        """v is zero: until it has learned something, the search looks everywhere alike."""
        nn.init.normal_(self.score.query.weight, std=0.001)
        nn.init.normal_(self.score.key.weight, std=0.001)
        nn.init.zeros_(self.score.output.weight)


class Last(nn.Module):
    """The forward state at the last word, whatever is asked: the RNN Encoder-Decoder. Section 2.2, A.2.2."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.width = sizes.hidden

    def remember(self, annotations: Tensor, present: Tensor) -> tuple[Tensor, ...]:
        # the readers hold their state over padding: the row's end has it, wherever the last word stands
        numbers = torch.arange(1, present.shape[1] + 1, device=present.device)
        last = F.one_hot((present * numbers).argmax(1), present.shape[1]).to(annotations.dtype)
        return annotations[:, -1, : self.width], last

    def forward(self, state: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        context, weights = memory
        return context, weights

    def reset_parameters(self) -> None:
        """It has none."""


Memory = tuple[Tensor, ...]
State = tuple[Float[Tensor, "batch hidden"], Memory]


class RNNsearch(nn.Module):
    """Encoder, context and decoder: a `translation.Translator`."""

    def __init__(self, sizes: Sizes = Sizes(), context: Callable[[Sizes], Context] = Search):
        super().__init__()
        self.encoder = Encoder(sizes)
        self.context: Any = context(sizes)
        hidden, width = sizes.hidden, self.context.width
        self.start = Linear(hidden, hidden, bias=True)  # W_s
        self.embedding = nn.Embedding(sizes.target_vocab, sizes.embedding)
        self.inputs = Linear(sizes.embedding, 3 * hidden, bias=True)  # W_z, W_r, W
        self.mixed = Linear(width, 3 * hidden)  # C_z, C_r, C
        self.unit = GRU(hidden)
        self.from_state = Linear(hidden, 2 * sizes.maxout, bias=True)  # U_o
        self.from_word = Linear(sizes.embedding, 2 * sizes.maxout)  # V_o
        self.from_context = Linear(width, 2 * sizes.maxout)  # C_o
        self.output = Linear(sizes.maxout, sizes.target_vocab, bias=True)  # W_o
        self.reset_parameters()

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        annotations = self.encoder(source, present)
        backward = annotations[:, 0, annotations.shape[-1] // 2 :]
        return torch.tanh(self.start(backward)), self.context.remember(annotations, present)

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        before, memory = state
        words = self.embedding(tokens)
        context, _ = self.context(before, memory)
        after = self.step(before, self.inputs(words), context)
        return self.logits(before, words, context), (after, memory)

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        words = self.embedding(target)
        states, contexts, _ = self.walk(source, present, words)
        return self.logits(states, words, contexts)

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        return self.walk(source, present, self.embedding(target))[2]

    def walk(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        words: Float[Tensor, "batch target embedding"],
    ) -> tuple[
        Float[Tensor, "batch target hidden"],
        Float[Tensor, "batch target context"],
        Float[Tensor, "batch target source"],
    ]:
        """For each target word y_{i-1}: s_{i-1}, and c_i with its weights."""
        state, memory = self.begin(source, present)
        states, contexts, weights = [], [], []
        for inputs in self.inputs(words).unbind(1):
            context, weight = self.context(state, memory)
            states.append(state)
            contexts.append(context)
            weights.append(weight)
            state = self.step(state, inputs, context)
        return torch.stack(states, 1), torch.stack(contexts, 1), torch.stack(weights, 1)

    def step(
        self,
        state: Float[Tensor, "batch hidden"],
        inputs: Float[Tensor, "batch three_hidden"],
        context: Float[Tensor, "batch context"],
    ) -> Float[Tensor, "batch hidden"]:
        return self.unit(state, inputs + self.mixed(context))

    def logits(
        self,
        state: Float[Tensor, "*rows hidden"],
        words: Float[Tensor, "*rows embedding"],
        context: Float[Tensor, "*rows context"],
    ) -> Float[Tensor, "*rows vocab"]:
        """A deep output: the greater of each two neighbours goes on. Appendix A.2.2."""
        pairs = self.from_state(state) + self.from_word(words) + self.from_context(context)
        return self.output(pairs.unflatten(-1, (-1, 2)).amax(-1))

    def reset_parameters(self) -> None:
        """Appendix B.1: recurrences orthogonal, W_a and U_a of 0.001, v and biases 0, all else of 0.01."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01)
        for module in self.modules():
            if isinstance(module, GRU):
                module.reset_parameters()
        self.context.reset_parameters()


def rnn_encdec(sizes: Sizes = Sizes()) -> RNNsearch:
    """The baseline of the paper: all else alike, and nothing to look at but one vector."""
    return RNNsearch(sizes, Last)
