"""What happens to each position on its own: dense, gated, or a choice of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qkv.spec.node import Node, Tensor, linear, node, part, vector
from qkv.spec.norms import Norm


@node
class ClampedSwish(Node):
    """min(x, limit) * sigmoid(alpha * min(x, limit)), gating clamp(up, -limit, limit) + offset. gpt-oss."""

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0


Activation = str | ClampedSwish


@node
class Dense(Node):
    """down(activation(up(x))). Vaswani et al. 2017, section 3.3."""

    activation: Activation
    hidden: int
    bias: bool = True

    role = "feed_forward"

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from linear("up", self.hidden, width, self.bias)
        yield from linear("down", width, self.hidden, self.bias)

    def mixing_flops(self, length: int, source: int) -> int:
        return 0


@node
class Gated(Node):
    """down(activation(gate(x)) * up(x)). Shazeer 2020: "silu" is SwiGLU, "gelu" GEGLU, "sigmoid" GLU."""

    activation: Activation
    hidden: int
    bias: bool = False

    role = "feed_forward"

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from linear("gate", self.hidden, width, self.bias)
        yield from linear("up", self.hidden, width, self.bias)
        yield from linear("down", width, self.hidden, self.bias)

    def mixing_flops(self, length: int, source: int) -> int:
        return 0


@node
class Router(Node):
    """Which experts a token goes to, and with what weights.

    `score` is "softmax" or "sigmoid" of the logits. `normalise`: the chosen weights are made to
    sum to 1. `scale` multiplies them. `bias`: the logits have a learned bias. `balance`: a bias
    that takes part in choosing but not in weighing (DeepSeek-V3). `groups`: experts are in groups
    of which the best `top_groups` are eligible, ranked by the sum of their `group_best` best scores
    (DeepSeek-V3: 2, V2: 1). `scales` says what the weight multiplies: the expert's "output", or its
    "input" (Llama 4). `norm` is on what the logits are made of, `logit_scale` multiplies them, and
    `gain` is a learned factor on each expert's weight (Gemma 4).

    `chosen_by` says who chooses: each of the "tokens" its experts, or each of the "experts" its tokens
    among all of the sequence (Zhou et al. 2022), so that an output depends on later tokens.
    `capacity`: an expert takes no more than capacity * top_k * length / count tokens of a sequence,
    rounded up, and the later ones go without it (Switch, Fedus et al. 2021). Either needs the whole
    sequence in one call.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: bool = False
    balance: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scales: Literal["output", "input"] = "output"
    chosen_by: Literal["tokens", "experts"] = "tokens"
    capacity: float | None = None
    norm: Norm | None = None
    logit_scale: float = 1.0
    gain: bool = False


@node
class Experts(Node):
    """`count` experts of which each token uses `top_k`, and one shared expert that all tokens use.

    Where experts choose, `top_k` is how many a token has on average. `shared_gate`: the shared
    expert's output is multiplied by the sigmoid of one number a token (Qwen2-MoE). `norm` is on what
    the chosen experts read, not on what the router and the shared one do. `latent`: the chosen
    experts read and write so many dimensions, between two maps that all share (Nemotron 3).
    """

    count: int
    top_k: int
    expert: Dense | Gated
    router: Router = Router()
    shared_expert: Dense | Gated | None = None
    shared_gate: bool = False
    norm: Norm | None = None
    latent: int | None = None

    role = "feed_forward"

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from linear("router", self.count, width, self.router.bias)
        if self.router.balance:
            yield vector("router.balance", self.count)
        if self.router.gain:
            yield vector("router.gain", self.count)
        yield from part("router.norm", self.router.norm, width)
        yield from part("norm", self.norm, width)
        if self.latent is not None:
            yield from linear("latent_down", self.latent, width)
            yield from linear("latent_up", width, self.latent)
        for tensor in part("expert", self.expert, self.latent or width):
            yield tensor._replace(shape=(self.count, *tensor.shape), used=tensor.size * self.top_k)
        yield from part("shared_expert", self.shared_expert, width)
        if self.shared_gate:
            yield from linear("shared_gate", 1, width)

    def mixing_flops(self, length: int, source: int) -> int:
        return 0
