"""The first generation loop: a batch of prompts to texts, a token of each at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from qkv.engine.sampling import Sampler, Sampling
from qkv.errors import RequestError
from qkv.loading import Loaded
from qkv.nn import ContiguousCache, Layout
from qkv.nn.taps import NoTap, Tap
from qkv.text import StopStrings

CHUNK = 512  # prompt tokens a pass: bounds memory and lets progress be shown


@dataclass(frozen=True)
class Request:
    """What to continue and when to stop."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass
class Completion:
    """One answer. `finish_reason` is "stop" (an end token or a stop text) or "length"."""

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens a second."""
        return len(self.prompt) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first, which the prompt's pass gives."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


class _Row:
    """One request in the batch: its sampler, its decoder, and what it has said."""

    def __init__(self, request: Request, loaded: Loaded):
        self.request, self.loaded = request, loaded
        self.completion = Completion(request.prompt)
        self.sampler = Sampler(request.sampling, request.prompt)
        self.decoder = loaded.tokenizer.stream() if loaded.tokenizer else None
        self.stops = StopStrings(request.stop)

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def accept(self, logits: np.ndarray) -> str:
        """Chooses the next token; returns the text that is now certain."""
        done = self.completion
        token = self.sampler.choose(logits)
        done.tokens.append(token)
        shifted = np.asarray(logits, np.float64) - logits.max()
        done.logprobs.append(float(shifted[token] - np.log(np.exp(shifted).sum())))
        ended = token in self.loaded.eos_ids and not self.request.ignore_eos
        text, stopped = "", None
        if not ended and self.decoder is not None:
            text, stopped = self.stops.push(self.decoder.push(token))
        if ended or stopped is not None:
            done.finish_reason = "stop"
        elif len(done.tokens) >= self.request.max_new_tokens:
            done.finish_reason = "length"
        if self.finished and stopped is None and self.decoder is not None:
            tail, stopped = self.stops.push(self.decoder.flush())
            text += tail + (self.stops.flush() if stopped is None else "")
        done.text += text
        return text


def check(request: Request, loaded: Loaded) -> None:
    """Raises RequestError, with the numbers, for what cannot be served."""
    if not request.prompt:
        raise RequestError("The prompt is empty: give at least one token.")
    vocab = loaded.vocab
    for place, token in enumerate(request.prompt):
        if not 0 <= token < vocab:
            raise RequestError(
                f"Token {token}, at place {place} of the prompt, is outside the vocabulary of {vocab:,}."
            )
    if request.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1.")
    total = len(request.prompt) + request.max_new_tokens
    if loaded.context is not None and total > loaded.context:
        raise RequestError(
            f"A prompt of {len(request.prompt):,} tokens and {request.max_new_tokens:,} new ones do not fit: "
            f"the context holds {loaded.context:,}."
        )
    if any(not stop for stop in request.stop):
        raise RequestError("A stop text is empty.")
    if request.stop and loaded.tokenizer is None:
        raise RequestError("Stop texts need a tokenizer, and this source has none.")


def room(prompt: Sequence[int], loaded: Loaded, wanted: int | None, default: int = 256) -> int:
    """How many tokens to generate: what was asked, or the default as far as the context allows."""
    if wanted is not None:
        return wanted
    if loaded.context is None:
        return default
    if len(prompt) >= loaded.context:
        raise RequestError(
            f"The prompt has {len(prompt):,} tokens and the context holds {loaded.context:,}: shorten it."
        )
    return min(default, loaded.context - len(prompt))


def stream(
    loaded: Loaded,
    requests: Sequence[Request],
    tap: Tap = NoTap(),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, str, Completion]]:
    """Serves the requests as one batch; gives (row, new text, the completion so far) as they come.

    All are checked before anything runs. A row's result does not depend on its batch mates:
    prompts are padded on the left and padding is invisible.
    """
    for request in requests:
        check(request, loaded)
    rows = [_Row(request, loaded) for request in requests]
    longest = max(len(row.request.prompt) for row in rows)
    more = max(row.request.max_new_tokens for row in rows)
    parameter = next(loaded.model.parameters())
    cache = ContiguousCache(
        loaded.model.spec.trunk, len(rows), longest + more - 1, parameter.dtype, parameter.device
    )
    prompts = torch.zeros(len(rows), longest, dtype=torch.long)
    present = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        prompts[i, longest - len(row.request.prompt) :] = torch.tensor(row.request.prompt)
        present[i, longest - len(row.request.prompt) :] = True
    step = _Step(loaded, cache, tap, parameter.device)

    started = time.perf_counter()
    for at in range(0, longest, CHUNK):
        logits = step(prompts[:, at : at + CHUNK], present[:, at : at + CHUNK])
        if progress is not None:
            progress(min(at + CHUNK, longest), longest)
    prefilled = time.perf_counter()
    while True:
        for i, row in enumerate(rows):
            if row.finished:
                continue
            text = row.accept(logits[i])
            row.completion.prefill_seconds = prefilled - started
            row.completion.decode_seconds = time.perf_counter() - prefilled
            yield i, text, row.completion
        going = torch.tensor([[not row.finished] for row in rows])
        if not going.any():
            return
        # a finished row is fed a token that is not there
        latest = torch.tensor([[row.completion.tokens[-1]] for row in rows])
        logits = step(latest, going)


class _Step:
    """One pass over new tokens of every row: the logits of each row's last place, fp32."""

    def __init__(self, loaded: Loaded, cache: ContiguousCache, tap: Tap, device: torch.device):
        self.loaded, self.cache, self.tap, self.device = loaded, cache, tap, device

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, present: torch.Tensor) -> np.ndarray:
        layout = Layout.padded(present.to(self.device))
        tokens = tokens.to(self.device)
        logits = self.loaded.model(tokens, layout=layout, cache=self.cache, tap=self.tap, last_only=True)
        return logits[:, -1].float().cpu().numpy()
