"""Layers: lists of residual steps, and the arrangements the literature has names for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from qkv.spec.attention import Attention, CrossAttention, GatedDelta, LatentAttention, StateSpace
from qkv.spec.feed_forward import Dense, Experts, Gated
from qkv.spec.node import Node, Tensor, node, part, product_flops, vector
from qkv.spec.norms import LayerNorm, Norm

Mixer = Attention | CrossAttention | LatentAttention | GatedDelta | StateSpace | Dense | Gated | Experts


@node
class Branch(Node):
    """A mixer with norms of its own before and after, for steps whose branches are normalised apart."""

    mixer: Mixer
    norm: Norm | None = None
    after: Norm | None = None


@node
class Gate(Node):
    """A learned factor on a step's output: one "scalar" or one a "channel", through an activation if given.

    Flamingo's is a scalar through tanh (Alayrac et al. 2022, section 2.2), CaiT's LayerScale one a channel.
    """

    over: Literal["scalar", "channel"] = "scalar"
    activation: str | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", *(sizes if self.over == "channel" else (1,)))


@node
class Sublayer(Node):
    """One residual step: x <- post(skip * x + gate * scale * after(sum of branch_i(norm_i(before(x))))).

    A gate in place of the last norm multiplies the whole stream (Gemma 4).
    """

    branches: tuple[Branch, ...]
    before: Norm | None = None
    after: Norm | None = None
    post: Norm | Gate | None = None
    skip: float = 1.0
    scale: float = 1.0
    gate: Gate | None = None


@node
class Layer(Node):
    """Any number of residual steps, in order."""

    sublayers: tuple[Sublayer, ...]

    def named(self) -> list[tuple[Sublayer, str, list[tuple[str, Branch]]]]:
        """Each step with its name and its branches' names.

        A branch is called by its mixer's role (attention, cross, feed_forward, mixer; from the
        second of a kind on with a number), a step by its first branch.
        """
        seen: dict[str, int] = {}
        steps = []
        for sublayer in self.sublayers:
            names = []
            for branch in sublayer.branches:
                role = branch.mixer.role
                seen[role] = seen.get(role, 0) + 1
                names.append((role if seen[role] == 1 else f"{role}_{seen[role]}", branch))
            steps.append((sublayer, names[0][0], names))
        return steps

    def mixers(self) -> list[tuple[str, Mixer]]:
        return [(name, branch.mixer) for _, _, names in self.named() for name, branch in names]

    def changed(self, change: Callable[[Mixer], Mixer]) -> Layer:
        """The same layer with each mixer as `change` gives it back."""

        def branch(old: Branch) -> Branch:
            return replace(old, mixer=change(old.mixer))

        steps = (replace(step, branches=tuple(map(branch, step.branches))) for step in self.sublayers)
        return replace(self, sublayers=tuple(steps))

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        for sublayer, step, branches in self.named():
            yield from part(f"{step}_before", sublayer.before, *sizes)
            for name, branch in branches:
                yield from part(f"{name}_norm", branch.norm, *sizes)
                yield from part(name, branch.mixer, *sizes)
                yield from part(f"{name}_norm_after", branch.after, *sizes)
            yield from part(f"{step}_after", sublayer.after, *sizes)
            yield from part(f"{step}_gate", sublayer.gate, *sizes)
            yield from part(f"{step}_post", sublayer.post, *sizes)

    def flops(self, width: int, length: int, source: int = 0) -> int:
        """Of `length` rows, reading `source` rows of another stack: see `Model.flops`."""
        total = 0
        for _, mixer in self.mixers():
            total += mixer.mixing_flops(length, source)
            cross = mixer.role == "cross"
            for tensor in mixer.tensors(width):
                first = tensor.name.split(".")[0]
                if first != "position":
                    rows = source if cross and first in ("key", "value") else length
                    total += rows * product_flops((tensor,))
            if isinstance(mixer, Attention) and mixer.position is not None:
                pairs = mixer.mask.pairs(length)
                total += mixer.position.flops(width, mixer.heads, mixer.head_dim, length, pairs)
        return total

    def children(self) -> dict[str, object]:
        """Named as the parameters are, so that a path reads the same everywhere.

        `steps` says which branches stand side by side (+) and which follow one another.
        """
        steps = ", ".join(" + ".join(name for name, _ in names) for _, _, names in self.named())
        found: dict[str, object] = {"shared": self.shared, "steps": steps}
        for sublayer, step, branches in self.named():
            for slot in ("before", "after", "post", "gate", "skip", "scale"):
                found[f"{step}_{slot}"] = getattr(sublayer, slot)
            for name, branch in branches:
                found[f"{name}_norm"], found[name] = branch.norm, branch.mixer
                found[f"{name}_norm_after"] = branch.after
        return found


def step(*mixers: Mixer, **slots: object) -> Sublayer:
    """A residual step over mixers that share its slots."""
    return Sublayer(tuple(Branch(mixer) for mixer in mixers), **slots)  # type: ignore[arg-type]


def pre_norm(
    *mixers: Mixer, norm: Norm = LayerNorm(), scale: float = 1.0, shared: str | None = None
) -> Layer:
    """x + F(norm(x)) for each mixer in turn; the stack needs a final norm. Xiong et al. 2020."""
    return Layer(tuple(step(mixer, before=norm, scale=scale) for mixer in mixers), shared=shared)


def post_norm(
    *mixers: Mixer, norm: Norm = LayerNorm(), skip: float = 1.0, shared: str | None = None
) -> Layer:
    """norm(x + F(x)): Vaswani et al. 2017. `skip` is the alpha of DeepNorm (Wang et al. 2022)."""
    return Layer(tuple(step(mixer, post=norm, skip=skip) for mixer in mixers), shared=shared)


class DeepNorm(NamedTuple):
    """What keeps a deep post-norm stack trainable. Wang et al. 2022 (DeepNet), figure 2.

    `skip` (the paper's alpha) is the factor on the stream, for `post_norm`. `gain` (beta) multiplies
    the standard deviation that the weights of feed-forwards, values and attention outputs start
    with; queries and keys keep 1.
    """

    skip: float
    gain: float

    @classmethod
    def alone(cls, layers: int) -> DeepNorm:
        """For a stack that is the whole model: an encoder or a decoder."""
        return cls((2 * layers) ** 0.25, (8 * layers) ** -0.25)

    @classmethod
    def pair(cls, encoder: int, decoder: int) -> tuple[DeepNorm, DeepNorm]:
        """For an encoder and the decoder that reads it, of so many layers."""
        both = (encoder**4 * decoder) ** (1 / 16)
        return cls(0.81 * both, 0.87 / both), cls((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)


def sandwich(*mixers: Mixer, norm: Norm = LayerNorm(), shared: str | None = None) -> Layer:
    """x + norm(F(norm(x))): Gemma 2 and 3; Ding et al. 2021 (CogView)."""
    return Layer(tuple(step(mixer, before=norm, after=norm) for mixer in mixers), shared=shared)


def reordered(*mixers: Mixer, norm: Norm = LayerNorm(), shared: str | None = None) -> Layer:
    """x + norm(F(x)): OLMo 2; Liu et al. 2021 (Swin V2)."""
    return Layer(tuple(step(mixer, after=norm) for mixer in mixers), shared=shared)


def parallel(*mixers: Mixer, norm: Norm = LayerNorm(), norms: int = 1, shared: str | None = None) -> Layer:
    """x + F(norm(x)) + G(norm(x)), with one norm for all (GPT-J, Cohere) or one each (GPT-NeoX)."""
    if norms == 1:
        return Layer((step(*mixers, before=norm),), shared=shared)
    return Layer((Sublayer(tuple(Branch(mixer, norm) for mixer in mixers)),), shared=shared)


def arrangement(layer: Layer) -> tuple[str, dict[str, object]] | None:
    """Which of the functions above makes this layer, and with what keywords; None where none does."""
    first = layer.sublayers[0]
    branches = [branch for sublayer in layer.sublayers for branch in sublayer.branches]
    candidates: tuple[tuple[Callable[..., Layer], Norm | Gate | None, dict[str, object]], ...] = (
        (pre_norm, first.before, {"scale": first.scale}),
        (post_norm, first.post, {"skip": first.skip}),
        (sandwich, first.before, {}),
        (reordered, first.after, {}),
        (parallel, first.before, {}),
        (parallel, branches[0].norm, {"norms": len(branches)}),
    )
    for build, norm, keywords in candidates:
        given = {"norm": norm, **keywords, "shared": layer.shared}
        if norm is not None and build(*(branch.mixer for branch in branches), **given) == layer:
            return build.__name__, given
    return None
