"""From logits to a token: numpy, one generator a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from qkv.errors import RequestError
from qkv.generation_config import SAMPLING, Bounds


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; otherwise the filters apply in the order listed.

    repetition_penalty: logits of tokens already in prompt or answer are divided by it where
    positive, multiplied where negative (Keskar et al. 2019). temperature divides the logits.
    top_k keeps that many (0: all). top_p keeps the fewest whose probabilities reach it (Holtzman
    et al. 2019). min_p keeps those of at least that share of the most likely one. At least one
    token always stays. The same seed gives the same draws, whatever else runs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            value = getattr(self, name)
            if not (bounds.hold(value) or (name == "seed" and value is None)):
                raise RequestError(f"{name} is {value!r}; it must be {bounds}.")

    @staticmethod
    def from_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> Sampling:
        """What was asked for, over what a generation_config.json says, over the defaults above.

        Greedy unless the file says `do_sample`, as its authors' library reads it, or something
        that only sampling has is asked for: then the temperature is the file's, else 1.
        """
        known = {f.name for f in fields(Sampling)}
        for name in asked:
            if name not in known:
                raise RequestError(f"There is no sampling argument {name!r} ({', '.join(sorted(known))}).")
        chosen = {name: value for name, value in defaults.items() if name in known and value is not None}
        asked = {name: value for name, value in asked.items() if value is not None}
        if not defaults.get("do_sample") and asked.keys() <= {"repetition_penalty"}:
            chosen["temperature"] = 0.0
        return Sampling(**{"temperature": 1.0, **chosen, **asked})


_BOUNDS = {**SAMPLING, "seed": Bounds(Integral, 0)}


class Asked(TypedDict, total=False):
    """Sampling as keyword arguments; None leaves the model's default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None


class Sampler:
    """Chooses one request's tokens."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = ()):
        self.sampling = sampling
        self.random = np.random.default_rng(sampling.seed)
        self.seen = set(prompt) if sampling.repetition_penalty != 1 else set()

    def choose(self, logits: Float[np.ndarray, " vocab"]) -> int:
        """A token, given fp32 logits. Raises RequestError if there is no number among them to choose."""
        logits = np.asarray(logits, np.float64)
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            raise RequestError("The model's logits are not numbers; its weights or its type overflow.")
        if self.seen:
            logits = penalised(logits, self.seen, self.sampling.repetition_penalty)
        token = int(logits.argmax()) if self.sampling.temperature == 0 else self.draw(logits)
        if self.sampling.repetition_penalty != 1:
            self.seen.add(token)
        return token

    def draw(self, logits: NDArray[np.float64]) -> int:
        order, shares = candidates(logits, self.sampling)
        sums = np.cumsum(shares)
        place = np.searchsorted(sums, self.random.random() * sums[-1], side="right")
        return int(order[min(int(place), len(order) - 1)])


def penalised(logits: NDArray[np.float64], seen: Iterable[int], penalty: float) -> NDArray[np.float64]:
    """Logits of seen tokens made less likely, whichever their sign."""
    logits = logits.copy()
    at = np.fromiter(seen, np.int64)
    logits[at] = np.where(logits[at] > 0, logits[at] / penalty, logits[at] * penalty)
    return logits


def candidates(
    logits: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, most likely first, and their probabilities before renormalising."""
    # the top is subtracted first: a tiny temperature then gives 0 and -inf, not an overflow
    logits = (logits - logits.max()) / max(sampling.temperature, 1e-9)
    order = _likeliest(logits, sampling.top_k or len(logits))
    shares = np.exp(logits[order])
    shares /= shares.sum()
    keep = (shares > 0) & (shares >= sampling.min_p * shares[0])
    if sampling.top_p < 1:  # 1 keeps all, also where rounding brings the sum to 1 too soon
        keep &= np.cumsum(shares) - shares < sampling.top_p
    keep[0] = True
    return order[keep], shares[keep]


def _likeliest(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """So many ids by falling logit, the lower id first among equals."""
    ids = np.arange(len(logits))
    if count < len(logits):  # sort no more than may stay
        ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
