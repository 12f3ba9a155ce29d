"""What a context is good for: the loss of a long text by position, facts found again, and text copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from qkv.context.reading import Reader
from qkv.text import Tokenizer

Told = Callable[[str], None]  # what is measured next
ASKED = " The pass key is"
SPAN = 256  # tokens whose loss is taken


@dataclass(frozen=True)
class Given:
    """Mean loss of the same tokens when so many tokens before them were read; its gain over the fewest.

    `error` is the standard error of the gain over the texts, None of one text.
    """

    context: int
    loss: float
    gain: float
    error: float | None


@dataclass(frozen=True)
class Bucket:
    """Positions from `start` to before `end` of one text, and the mean loss of their tokens."""

    start: int
    end: int
    loss: float


@dataclass(frozen=True)
class Found:
    """How many of the pass keys planted at a depth (0: first, 1: last) of so many tokens came back."""

    length: int
    depth: float
    right: int
    asked: int


@dataclass(frozen=True)
class Copied:
    """Mean loss of tokens that stood so many tokens before, and of the same tokens the first time."""

    distance: int
    again: float
    first: float


def by_context(
    reader: Reader, text: Sequence[int], lengths: Sequence[int], times: int, told: Told
) -> list[Given]:
    """The loss of the same tokens with more and more of what stands before them.

    `times` stretches of SPAN tokens, spread over the text: what is read differs in nothing else.
    """
    ends = [round(len(text) - i * (len(text) - lengths[-1]) / max(1, times)) for i in range(times)]
    losses = np.zeros((times, len(lengths)))
    for number, end in enumerate(ends):
        for place, length in enumerate(lengths):
            told(f"loss with {length:,} tokens read, text {number + 1} of {times}")
            losses[number, place] = reader.losses(text[end - length : end])[-SPAN:].mean()
    gains = losses[:, :1] - losses
    errors = (gains.std(0, ddof=1) / times**0.5).tolist() if times > 1 else [None] * len(lengths)
    means = zip(lengths, losses.mean(0).tolist(), gains.mean(0).tolist(), errors, strict=True)
    return [Given(*each) for each in means]


def by_position(losses: np.ndarray) -> list[Bucket]:
    """Losses of one text, (tokens - 1,), in buckets that double."""
    start, buckets = 0, list[Bucket]()
    while start < len(losses):
        end = min(len(losses), max(64, 2 * start))
        buckets.append(Bucket(start, end, float(losses[start:end].mean())))
        start = end
    return buckets


def retrieval(
    reader: Reader,
    tokenizer: Tokenizer,
    filler: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    times: int,
    told: Told,
) -> list[Found]:
    """Pass keys of five digits, planted in a text and asked for at its end. Mohtashami and Jaggi 2023."""
    found = []
    for length in lengths:
        for depth in depths:
            told(f"pass keys, {length:,} tokens at depth {depth:.0%}")
            right = sum(_asked(reader, tokenizer, filler, length, depth, n) for n in range(times))
            found.append(Found(length, depth, right, times))
    return found


def _asked(
    reader: Reader, tokenizer: Tokenizer, filler: Sequence[int], length: int, depth: float, number: int
) -> bool:
    random = Random(f"{length}/{depth}/{number}")
    key = str(random.randrange(10_000, 100_000))
    planted = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
    asked = tokenizer.encode("\n\nWhat is the pass key?" + ASKED)
    answer = tokenizer.encode(f"{ASKED} {key}")[len(tokenizer.encode(ASKED)) :]
    room = max(0, length - len(planted) - len(asked) - len(answer))
    start = random.randrange(max(1, len(filler) - room))
    around = list(filler[start : start + room])
    at = round(depth * len(around))
    text = [*around[:at], *planted, *around[at:], *asked]
    return reader.said(text, len(answer)) == answer


def copying(reader: Reader, vocab: int, distances: Sequence[int], count: int, told: Told) -> list[Copied]:
    """Random tokens, other tokens, then the first again: how sure the model is of what it has seen.

    `count` tokens are repeated after `distance` tokens from where they stood.
    """
    found = []
    for distance in distances:
        told(f"copying over {distance:,} tokens")
        rng = np.random.default_rng(distance)
        low = min(vocab - 1, 1000)  # control tokens stand first in most vocabularies
        tokens = rng.integers(low, vocab, max(distance, count)).tolist()
        losses = reader.losses([*tokens, *tokens[:count]])
        # the first repeated token cannot be foreseen
        found.append(Copied(distance, float(losses[-count + 8 :].mean()), float(losses[:count].mean())))
    return found
