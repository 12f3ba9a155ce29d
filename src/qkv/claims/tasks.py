"""Made-up tasks: functions of a generator, the same on every machine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import RequestError

PAD = 0


class Ragged(NamedTuple):
    """Rows of several lengths, padded with 0 at the end."""

    tokens: Int[Tensor, "rows longest"]
    lengths: Int[Tensor, " rows"]

    @property
    def there(self) -> Bool[Tensor, "rows longest"]:
        """Where a token is."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


def ragged(
    generator: torch.Generator, rows: int, shortest: int, longest: int, symbols: int, first: int = 1
) -> Ragged:
    """Random symbols from `first` on, every length from `shortest` to `longest` as likely as another."""
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    tokens = torch.randint(first, first + symbols, (rows, longest), generator=generator)
    made = Ragged(tokens, lengths)
    return Ragged(tokens.masked_fill(~made.there, PAD), lengths)


def reversed_(given: Ragged) -> Ragged:
    """Each row backwards, padding still at the end."""
    place = torch.arange(given.tokens.shape[1])
    back = torch.where(given.there, given.lengths[:, None] - 1 - place, place)
    return Ragged(given.tokens.gather(1, back), given.lengths)


class Recall(NamedTuple):
    """Rows of pairs (key, value), fillers, and a key again: the answer is its value."""

    tokens: Int[Tensor, "rows length"]
    answers: Int[Tensor, " rows"]
    places: Int[Tensor, " rows"]  # of the value, in the row


def recall(
    generator: torch.Generator, rows: int, pairs: int, gap: int, keys: int, values: int, fillers: int = 1
) -> Recall:
    """`pairs` different keys of `keys`, each with one of `values`, then `gap` fillers, then one of the keys.

    Keys are tokens from 0 on, values follow them, then fillers. The length is 2 * pairs + gap + 1.
    """
    if pairs > keys:
        raise RequestError(f"There are {keys} keys, too few for {pairs} different ones in a row.")
    chosen = torch.rand(rows, keys, generator=generator).argsort(1)[:, :pairs]
    given = keys + torch.randint(values, (rows, pairs), generator=generator)
    filling = keys + values + torch.randint(fillers, (rows, gap), generator=generator)
    asked = torch.randint(pairs, (rows, 1), generator=generator)
    tokens = torch.cat([torch.stack([chosen, given], -1).flatten(1), filling, chosen.gather(1, asked)], 1)
    return Recall(tokens, given.gather(1, asked)[:, 0], 2 * asked[:, 0] + 1)


def a_or_b_first(
    generator: torch.Generator, rows: int, length: int, fillers: int
) -> tuple[Int[Tensor, "rows length"], Int[Tensor, " rows"]]:
    """Fillers with one token a (0) and one b (1) at random places; the label is 1 where b comes first.

    Swapping a and b changes the label and not which tokens there are.
    """
    tokens = 2 + torch.randint(fillers, (rows, length), generator=generator)
    places = torch.rand(rows, length, generator=generator).argsort(1)[:, :2]
    tokens.scatter_(1, places[:, :1], 0).scatter_(1, places[:, 1:], 1)
    return tokens, (places[:, 1] < places[:, 0]).long()


class Repeated(NamedTuple):
    """Rows that begin again after a period of their own."""

    tokens: Int[Tensor, "rows length"]
    periods: Int[Tensor, " rows"]


def repeated(
    generator: torch.Generator, rows: int, length: int, symbols: int, shortest: int, longest: int
) -> Repeated:
    """Random different symbols, from `shortest` to `longest` of them, again and again up to the length.

    No symbol comes twice within a period, so that what follows it the second time is certain.
    Raises RequestError where there are fewer symbols than the longest period has.
    """
    if longest > symbols:
        raise RequestError(f"There are {symbols} symbols, too few for {longest} different ones in a row.")
    periods = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    order = torch.rand(rows, symbols, generator=generator).argsort(1)
    return Repeated(order.gather(1, torch.arange(length) % periods[:, None]), periods)
