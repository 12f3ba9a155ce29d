"""From scores to a token: numpy, one generator a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from qkv.errors import RequestError
from qkv.generation_config import SAMPLING, Bounds

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; otherwise a token is drawn.

    First the logits are changed, in this order (see `qkv.engine.processors`): `logit_bias` is added
    to those of its tokens, -inf forbids one; `repetition_penalty` makes tokens of prompt and answer
    less likely; `frequency_penalty` times its count in the answer, and `presence_penalty` once, are
    taken from each token of the answer. Then temperature divides the logits; top_k keeps that many
    tokens (0: all); top_p keeps the fewest whose probabilities reach it (Holtzman et al. 2019);
    min_p keeps those of at least that share of the most likely one. At least one token always
    stays. The same seed gives the same draws, whatever else runs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if not (bounds.hold(value) or (name == "seed" and value is None)):
                raise RequestError(f"{name} is {value!r}; it must be {bounds}.")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def filters(self) -> bool:
        """Whether any token may be left out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @staticmethod
    def from_defaults(
        defaults: Mapping[str, Any], asked: Mapping[str, Any], several: bool = False
    ) -> Sampling:
        """What was asked for, over what a generation_config.json says, over the defaults above.

        Greedy unless the file says `do_sample`, as its authors' library reads it, or something
        that only sampling has is asked for, `several` samples too: then the temperature is the
        file's, else 1.
        """
        known = {f.name for f in fields(Sampling)}
        for name in asked:
            if name not in known:
                raise RequestError(f"There is no sampling argument {name!r} ({', '.join(sorted(known))}).")
        chosen = {name: value for name, value in defaults.items() if name in known and value is not None}
        asked = {name: value for name, value in asked.items() if value is not None}
        if not (defaults.get("do_sample") or several) and asked.keys() <= GREEDY:
            chosen["temperature"] = 0.0
        return Sampling(**{"temperature": 1.0, **chosen, **asked})


# what also changes which token is the likeliest
GREEDY = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"})
_BOUNDS = {
    **SAMPLING,
    "seed": Bounds(Integral, 0),
    "presence_penalty": Bounds(Real, -2, 2),
    "frequency_penalty": Bounds(Real, -2, 2),
}


def _checked_bias(bias: Any) -> dict[int, float]:
    """Token ids to numbers. Raises RequestError for anything else, plus infinity among it."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; it must map tokens to numbers.")
    for token, value in bias.items():
        if not Bounds(Integral, 0).hold(token):
            raise RequestError(f"logit_bias names {token!r}; it must name tokens by their ids.")
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or math.isnan(value) or value == math.inf:
            raise RequestError(f"logit_bias gives token {token} {value!r}; it must be a number, or -inf.")
    return {int(token): float(value) for token, value in bias.items()}


class Asked(TypedDict, total=False):
    """Sampling as keyword arguments; None leaves the model's default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | None
    seed: int | None


class Sampler:
    """Draws one sample's tokens. Samples of one seed differ, and none depends on how many there are."""

    def __init__(self, sampling: Sampling, sample: int = 0):
        self.sampling = sampling
        # the first sample draws as a request for one does
        seeds = np.random.SeedSequence(sampling.seed, spawn_key=(sample,) if sample else ())
        self.random = np.random.default_rng(seeds)

    def choose(self, scores: Float[np.ndarray, " vocab"], best: int | None = None) -> int:
        """A token, given logits of which at least one is finite and none is NaN or infinite.

        `best` is the first of the likeliest, where that is known.
        """
        if self.sampling.temperature == 0:
            return int(scores.argmax()) if best is None else best
        drawn = self.random.random()
        order, shares = candidates(np.asarray(scores, np.float64), self.sampling, drawn)
        sums = np.cumsum(shares)
        whole = sums[-1] if self.sampling.filters else 1.0
        place = np.searchsorted(sums, drawn * whole, side="right")
        return int(order[min(int(place), len(order) - 1)])


HEAD = 1024  # tokens looked at first: to sort a whole vocabulary takes longer than a small model's step


def candidates(
    logits: NDArray[np.float64], sampling: Sampling, enough: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, most likely first, and their probabilities before renormalising.

    Where nothing is filtered, those whose probabilities sum up to more than `enough` may be all.
    """
    # the top is subtracted first: a tiny temperature then gives 0 and -inf, not an overflow
    logits = (logits - logits.max()) / max(sampling.temperature, 1e-9)
    order = likeliest(logits, sampling.top_k or HEAD)
    shares = np.exp(logits[order])
    total = shares.sum() if sampling.top_k else np.exp(logits).sum()
    shares /= total
    keep = _kept(shares, sampling)
    further = keep[-1] and not sampling.top_k and len(order) < len(logits)
    if further and (sampling.filters or shares.sum() <= enough):
        order = likeliest(logits, len(logits))
        shares = np.exp(logits[order]) / total
        keep = _kept(shares, sampling)
    return order[keep], shares[keep]


def _kept(shares: NDArray[np.float64], sampling: Sampling) -> NDArray[np.bool_]:
    """Which of falling probabilities stay: those before the first that does not."""
    keep = (shares > 0) & (shares >= sampling.min_p * shares[0])
    if sampling.top_p < 1:  # 1 keeps all, also where rounding brings the sum to 1 too soon
        keep &= np.cumsum(shares) - shares < sampling.top_p
    keep[0] = True
    return keep


def likeliest(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """So many ids by falling logit, the lower id first among equals."""
    ids = np.arange(len(logits))
    if count < len(logits):  # sort no more than may stay
        ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
