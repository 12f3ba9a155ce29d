"""The first generation loop: a batch of prompts to texts, a token of each at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import torch

from qkv.engine.sampling import Sampler, Sampling
from qkv.errors import CapacityError, RequestError, TokenizerError
from qkv.loading import Loaded
from qkv.memory import free_memory
from qkv.nn import ContiguousCache, Layout, NoTap, Tap, Transformer
from qkv.text import StopStrings

CHUNK = 512  # prompt tokens a pass, of all rows together: bounds memory and lets progress be shown


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
    """One answer. `finish_reason` is "stop" (an end token or a stop text) or "length".

    `tokens` are all that were chosen, an end token included; `text` goes on exactly where the
    prompt's ends. `logprobs` are the model's own, before temperature and filters.
    """

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
        self.stops = StopStrings(request.stop)
        self.decoder = loaded.tokenizer.stream() if loaded.tokenizer else None
        for token in request.prompt:  # the text goes on after the prompt's
            self.spell(token)

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def accept(self, logits: np.ndarray) -> str:
        """Chooses the next token; returns the text that is now certain."""
        done = self.completion
        token = self.sampler.choose(logits)
        done.tokens.append(token)
        done.logprobs.append(_logprob(logits, token))
        ended = token in self.loaded.eos_ids and not self.request.ignore_eos
        last = ended or len(done.tokens) >= self.request.max_new_tokens
        text, stopped = self.stops.push("" if ended else self.spell(token))
        if last and stopped is None:
            tail, stopped = self.stops.push(self.decoder.flush() if self.decoder else "")
            text += tail if stopped is not None else tail + self.stops.flush()
        done.text += text
        if ended or stopped is not None:
            done.finish_reason = "stop"
        elif last:
            done.finish_reason = "length"
        return text

    def spell(self, token: int) -> str:
        """The text a token completes: none where the model has more ids than its tokenizer has texts."""
        try:
            return self.decoder.push(token) if self.decoder else ""
        except TokenizerError:
            return ""


def _logprob(logits: np.ndarray, token: int) -> float:
    shifted = np.asarray(logits, np.float64) - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


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
    more = request.max_new_tokens
    if not isinstance(more, Integral) or isinstance(more, bool) or more < 1:
        raise RequestError(f"max_new_tokens is {more!r}; it must be a whole number of at least 1.")
    size = len(request.prompt)
    if loaded.context is not None and size + more > loaded.context:
        raise RequestError(
            f"This request needs {size + more:,} tokens ({size:,} of prompt, {more:,} new) and the context "
            f"holds {loaded.context:,}: ask for fewer, or shorten the prompt."
        )
    StopStrings(request.stop)  # refuses what is no text
    if request.stop and loaded.tokenizer is None:
        raise RequestError("Stop texts need a tokenizer, and this source has none.")


def room(prompt: Sequence[int], loaded: Loaded, wanted: int | None, default: int = 256) -> int:
    """How many tokens to generate: what was asked, or what the model's files say, or the default.

    The latter two as far as the context allows; the default also as far as a `max_length` of the
    files, which counts the prompt, does.
    """
    if wanted is not None:
        return wanted
    size, own, most = len(prompt), loaded.generation.get("max_new_tokens"), loaded.context
    if most is not None and size >= most:
        raise RequestError(f"The prompt has {size:,} tokens and the context holds {most:,}: shorten it.")
    limits = [own or default] + ([] if most is None else [most - size])
    whole = loaded.generation.get("max_length") if own is None else None
    if whole is not None and size >= whole:
        raise RequestError(
            f"The prompt has {size:,} tokens and the model's max_length is {whole:,}: "
            "shorten it, or give max_new_tokens."
        )
    return min(limits if whole is None else [*limits, whole - size])


def stream(
    loaded: Loaded,
    requests: Sequence[Request],
    tap: Callable[[], Tap] = NoTap,
    progress: Callable[[int, int], None] | None = None,
) -> Generator[tuple[int, str, Completion], None, None]:
    """Serves the requests as one batch; gives (row, new text, the completion so far) as they come.

    All are checked at once, before anything runs. A row's result does not depend on its batch
    mates: prompts are padded on the left and padding is invisible. `tap` is asked at every pass.
    Closing the generator frees what it holds.
    """
    for request in requests:
        check(request, loaded)
    longest = max(len(request.prompt) for request in requests)
    capacity = longest + max(request.max_new_tokens for request in requests) - 1
    _check_memory(loaded.model, len(requests), capacity)
    return _serve(loaded, requests, capacity, tap, progress)


def _check_memory(model: Transformer, batch: int, capacity: int) -> None:
    """Before anything is allocated: a process that takes too much is killed without a word."""
    parameter = next(model.parameters())
    # of one token: this cache keeps all of a window layer's too
    one = model.spec.cache_bytes(1, bytes_per_value=parameter.dtype.itemsize)
    need, free = one * batch * capacity, free_memory(parameter.device)
    if free is not None and need > free:
        rows = f" in each of {batch:,} rows" if batch > 1 else ""
        raise CapacityError(
            f"A cache of {capacity:,} tokens{rows} needs {need / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB is free: ask for fewer new tokens, or shorten the prompt."
        )


def _serve(
    loaded: Loaded,
    requests: Sequence[Request],
    capacity: int,
    tap: Callable[[], Tap],
    progress: Callable[[int, int], None] | None,
) -> Generator[tuple[int, str, Completion], None, None]:
    step = _Step(loaded.model, len(requests), capacity, tap)
    started = time.perf_counter()
    rows = [_Row(request, loaded) for request in requests]
    tokens, present = _padded([request.prompt for request in requests])
    longest, size = tokens.shape[1], max(CHUNK // len(rows), 1)
    for at in range(0, longest, size):
        logits = step(tokens[:, at : at + size], present[:, at : at + size], present.sum(-1))
        if progress is not None:
            progress(min(at + size, longest), longest)
    prefill, decode = time.perf_counter() - started, 0.0
    while True:
        started = time.perf_counter()
        said = [(i, row, row.accept(logits[i])) for i, row in enumerate(rows) if not row.finished]
        decode += time.perf_counter() - started
        for i, row, text in said:
            row.completion.prefill_seconds, row.completion.decode_seconds = prefill, decode
            yield i, text, row.completion
        started = time.perf_counter()  # what the reader does with the text is no part of the speed
        going = torch.tensor([[not row.finished] for row in rows])
        if not going.any():
            return
        # a finished row is fed a token that is not there
        logits = step(torch.tensor([[row.completion.tokens[-1]] for row in rows]), going)
        decode += time.perf_counter() - started


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as one batch, padded on the left, and where a token is."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    return tokens, torch.arange(longest) >= longest - lengths


class _Step:
    """One pass over new tokens of every row: the logits of each row's last place, fp32."""

    def __init__(self, model: Transformer, batch: int, capacity: int, tap: Callable[[], Tap]):
        self.model, self.tap = model, tap
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = ContiguousCache(model.spec.trunk, batch, capacity, parameter.dtype, self.device)

    @torch.no_grad()
    def __call__(
        self, tokens: torch.Tensor, present: torch.Tensor, total: torch.Tensor | None = None
    ) -> np.ndarray:
        total = None if total is None else total.to(self.device)
        layout, tokens = Layout.padded(present.to(self.device), total), tokens.to(self.device)
        logits = self.model(tokens, layout=layout, cache=self.cache, tap=self.tap(), last_only=True)
        return logits[:, -1].float().cpu().numpy()
