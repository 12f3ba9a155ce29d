"""From logits to a token: numpy, one generator a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from qkv.errors import RequestError


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
        bounds = {
            "temperature": (self.temperature, 0, float("inf")),
            "top_k": (self.top_k, 0, float("inf")),
            "top_p": (self.top_p, 0, 1),
            "min_p": (self.min_p, 0, 1),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high or value == float("inf"):
                upper = "" if high == float("inf") else f" and at most {high}"
                raise RequestError(f"{name} is {value}; it must be at least {low}{upper}.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0.")
        if self.seed is not None and self.seed < 0:
            raise RequestError(f"seed is {self.seed}; it must be at least 0.")

    @staticmethod
    def from_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> Sampling:
        """What was asked for, over what a generation_config.json says, over the defaults above.

        Without `do_sample` in the file its temperature does not apply: it is greedy, as its
        authors' library reads it. Asking for a filter or a seed asks for sampling.
        """
        known = {f.name for f in fields(Sampling)}
        for name in asked:
            if name not in known:
                raise RequestError(f"There is no sampling argument {name!r} ({', '.join(sorted(known))}).")
        chosen = {k: v for k, v in defaults.items() if k in known and v is not None}
        sampled = bool(defaults.get("do_sample"))
        if not sampled:
            chosen.pop("temperature", None)
        elif "temperature" not in chosen:
            chosen["temperature"] = 1.0
        asked = {name: value for name, value in asked.items() if value is not None}
        if "temperature" not in asked and not sampled and asked.keys() & {"top_k", "top_p", "min_p", "seed"}:
            chosen["temperature"] = 1.0
        return Sampling(**{**chosen, **asked})


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
        place = np.searchsorted(np.cumsum(shares), self.random.random() * shares.sum(), side="right")
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
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    shares = np.exp(logits[order])
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    keep = (before < sampling.top_p) & (shares >= sampling.min_p * shares[0])
    keep[0] = True
    return order[keep], shares[keep]
