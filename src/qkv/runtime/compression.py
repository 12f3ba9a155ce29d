"""Caches that keep less than everything: which policy, as data, and what it asks of a model.

First keys and a window are a mask: the description says so, and every runtime computes it. What is
kept by the attention it got needs weights, which only the torch modules show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from qkv.errors import RequestError, UnsupportedError
from qkv.spec import Attention, Causal, DynamicNTK, LongRope, Model, Rotary, Streaming, Window
from qkv.spec.layers import Mixer


@dataclass(frozen=True)
class Sinks:
    """The first keys and the latest ones, `budget` in all. Xiao et al. 2023, section 3.2 (StreamingLLM).

    Places are counted inside the cache, so text can go on without end; it sees no further for that.
    """

    budget: int
    first: int = 4
    weighs = False  # whether it needs attention weights

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.budget:
            raise RequestError(
                f"Of {self.budget} kept tokens the first {self.first} leave none for a window."
            )


@dataclass(frozen=True)
class HeavyHitters:
    """Keys that got most attention so far, and the latest. Zhang et al. 2023, section 4.2 (H2O).

    Each key/value head of each layer keeps its own `budget` tokens, of which the latest `recent`
    (None: half) always. The prompt is read whole; then, after each token, what is too much goes.
    """

    budget: int
    recent: int | None = None
    weighs = True

    def __post_init__(self) -> None:
        if not 0 < self.latest <= self.budget:
            raise RequestError(f"Of {self.budget} kept tokens {self.latest} cannot be the latest.")

    @property
    def latest(self) -> int:
        return -(-self.budget // 2) if self.recent is None else self.recent

    def held(self, prompt: int, tokens: int) -> int:
        """How many tokens are held after so many."""
        return tokens if tokens < prompt else min(tokens, self.budget)

    def counts(self, prompt: int, position: int) -> bool:
        """Whether a query's attention counts."""
        return True


@dataclass(frozen=True)
class SnapKV:
    """Of a prompt, the keys that its last queries look at, and those of these queries. Li et al. 2024.

    Each key/value head of each layer keeps its own `budget` tokens of the prompt: the last `observed`,
    and of those before the ones with most attention from them, after the greatest over `around`
    neighbours is taken for each (section 4.1). What is generated is kept.
    """

    budget: int
    observed: int = 32
    around: int = 7
    weighs = True

    def __post_init__(self) -> None:
        if not 0 < self.observed <= self.budget:
            raise RequestError(f"Of {self.budget} kept tokens {self.observed} cannot be the last ones.")
        if self.around < 1 or self.around % 2 == 0:
            raise RequestError(f"Neighbours are on both sides: {self.around} must be odd.")

    @property
    def latest(self) -> int:
        return self.observed

    def held(self, prompt: int, tokens: int) -> int:
        """How many tokens are held after so many."""
        return tokens if tokens < prompt else min(prompt, self.budget) + tokens - prompt

    def counts(self, prompt: int, position: int) -> bool:
        """Whether a query's attention counts."""
        return prompt - self.observed <= position < prompt


Weighing = HeavyHitters | SnapKV
Compression = Sinks | HeavyHitters | SnapKV
KINDS: dict[str, Callable[[int], Compression]] = {"sinks": Sinks, "h2o": HeavyHitters, "snapkv": SnapKV}


def compression(asked: str | Compression | None) -> Compression | None:
    """A policy by its name and budget of tokens: "sinks:1024", "h2o:1024", "snapkv:1024".

    RequestError for anything else.
    """
    if asked is None or isinstance(asked, Compression):
        return asked
    found = re.fullmatch(r"(\w+):(\d+)", asked.strip()) if isinstance(asked, str) else None
    if found is None or found[1] not in KINDS:
        names = ", ".join(f'"{name}:1024"' for name in KINDS)
        raise RequestError(f"compress is {asked!r}; it must be a policy and a number of tokens: {names}.")
    return KINDS[found[1]](int(found[2]))


def described(model: Model, policy: Compression) -> Model:
    """The model under a policy: as it is, where attention is weighed; else with masks that say so.

    UnsupportedError names what the policy cannot be applied to.
    """
    if model.decoder is None:
        raise UnsupportedError("What is kept of a text can only be less where a decoder writes it.")
    layers = tuple(
        layer.changed(lambda mixer, i=i: _mixer(mixer, i, policy))  # type: ignore[misc]
        for i, layer in enumerate(model.decoder.layers)
    )
    if isinstance(policy, Sinks):
        return replace(model, decoder=replace(model.decoder, layers=layers))
    if model.encoder is not None or model.towers:
        raise UnsupportedError("What attention weighs is kept for decoders of text alone: use sinks here.")
    return model


def _mixer(mixer: Mixer, number: int, policy: Compression) -> Mixer:
    if mixer.role in ("feed_forward", "cross"):
        return mixer

    def refused(what: str) -> UnsupportedError:
        return UnsupportedError(f"decoder.layers.{number} has {what}, of which less cannot be kept yet.")

    if not isinstance(mixer, Attention):
        raise refused(f"a {type(mixer).__name__}")
    position, mask = mixer.position, mixer.mask
    if isinstance(position, Rotary) and isinstance(position.scaling, DynamicNTK | LongRope):
        raise refused("a rotation that depends on the length")
    if isinstance(policy, Sinks):
        windows = [Window(mask.reach)] if mask.reach is not None else []
        if mask not in (
            Causal(),
            *windows,
            *(Causal() & w for w in windows),
            *(w & Causal() for w in windows),
        ):
            raise refused(f"the mask {mask}")
        if mask.reach is not None and mask.reach <= policy.budget:
            return mixer  # keeps less already
        return replace(mixer, mask=Causal() & Streaming(policy.first, policy.budget - policy.first))
    if mask != Causal():
        raise refused(f"the mask {mask}")
    if position is not None and not isinstance(position, Rotary):
        raise refused(f"{type(position).__name__} positions")
    return mixer
