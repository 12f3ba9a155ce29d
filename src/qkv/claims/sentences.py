"""Sentence pairs for translation: cleaned, split, made tokens, and cut into batches of like length.

A corpus is English into another language. English is pieces of a BPE over words; the other side says how
it is cut (`Characters`, `Pieces`) and joined again. What scores count are symbols: characters
of Chinese, words of what has words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.claims import data, sword
from qkv.claims.tasks import PAD
from qkv.claims.translating import END, START, Pairs
from qkv.errors import RequestError

UNKNOWN = 3
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
HELD_OUT = 10  # one target sentence in so many is for the test


class Pair(NamedTuple):
    """Cleaned sentences, their symbols separated by single spaces."""

    source: str
    target: str

    @property
    def length(self) -> int:
        """Of the source, in words and punctuation marks."""
        return len(self.source.split())


def words(text: str) -> str:
    """Words and punctuation marks, lower case, compatibility forms as plain ones, with spaces between."""
    plain = unicodedata.normalize("NFKC", text).replace("’", "'").lower()
    return " ".join(re.findall(r"\w+(?:'\w+)*|[^\w\s]", plain))


def characters(text: str) -> str:
    """All characters that can be seen, compatibility forms as plain ones, lower case, with spaces between."""
    plain = unicodedata.normalize("NFKC", text).lower()
    return " ".join(one for one in plain if not one.isspace() and unicodedata.category(one)[0] != "C")


def chinese(longest: int = 30) -> list[Pair]:
    """Tatoeba's English and Chinese (simplified and traditional, as people wrote it)."""
    return clean(((words(one), characters(other)) for one, other in data.pairs("tatoeba")), longest)


def spanish(longest: int = 30) -> list[Pair]:
    """Verses of the King James Version and of the Reina-Valera of 1909, which number them alike.

    The World English Bible numbers some differently, and its footnotes glue words together.
    """
    english, other = (
        sword.verses(data.find(f"bible-{language}").parent) for language in ("english", "spanish")
    )
    if len(english) != len(other):
        raise RequestError(
            f"The Bibles have {len(english):,} and {len(other):,} verses: they do not pair up."
        )
    marks = str.maketrans("", "", "¶[]()")
    both = zip(english, other, strict=True)
    return clean(((words(one.translate(marks)), words(two.translate(marks))) for one, two in both), longest)


def clean(pairs: Iterator[tuple[str, str]], longest: int) -> list[Pair]:
    """Each pair once, with something on both sides, and at most `longest` symbols in the source.

    A target may have twice as many, so that a translation that is a story of its own is left out.
    """
    kept = dict.fromkeys(Pair(*pair) for pair in pairs)
    return [
        pair for pair in kept if 0 < pair.length <= longest and 0 < len(pair.target.split()) <= 2 * longest
    ]


class Split(NamedTuple):
    train: list[Pair]
    test: list[Pair]


def split(pairs: Sequence[Pair]) -> Split:
    """One target sentence in ten, by its hash, is for the test with all its sources.

    No sentence of the test is in training, on either side: pairs that would bring one are left out.
    """
    test = [pair for pair in pairs if _hash(pair.target) % HELD_OUT == 0]
    known = {pair.source for pair in test}
    train = [pair for pair in pairs if _hash(pair.target) % HELD_OUT and pair.source not in known]
    return Split(train, test)


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


class Cut(Protocol):
    """Between symbols and tokens; the first tokens are `SPECIAL`."""

    @property
    def vocab(self) -> int: ...

    def encode(self, sentence: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Characters:
    """Each symbol a token, those that are seen less than `least` times unknown."""

    def __init__(self, sentences: Sequence[str], least: int = 3):
        counts = Counter(symbol for sentence in sentences for symbol in sentence.split())
        known = sorted(symbol for symbol, count in counts.items() if count >= least)
        self.entries = (*SPECIAL, *known)
        self.places = {entry: place for place, entry in enumerate(self.entries)}

    @property
    def vocab(self) -> int:
        return len(self.entries)

    def encode(self, sentence: str) -> list[int]:
        return [self.places.get(symbol, UNKNOWN) for symbol in sentence.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.entries[token] for token in tokens)


class Pieces:
    """Parts of words, by a BPE of `size` entries learned from these sentences (Sennrich et al. 2016)."""

    def __init__(self, sentences: Sequence[str], size: int):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN], end_of_word_suffix="</w>"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer.decoder = decoders.BPEDecoder()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            special_tokens=list(SPECIAL),
            end_of_word_suffix="</w>",
            show_progress=False,
        )
        self.tokenizer.train_from_iterator(sentences, trainer)

    @property
    def vocab(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, sentence: str) -> list[int]:
        return list(self.tokenizer.encode(sentence, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "rows longest"], Bool[Tensor, "rows longest"]]:
    """Rows of several lengths in one tensor, and where a token is."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    return tokens, torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Pairs to learn from and to test with, and both languages' tokens."""

    train: list[Pair]
    test: list[Pair]
    source: Cut
    target: Cut

    @staticmethod
    def of(pairs: Sequence[Pair], pieces: int, target: Callable[[list[str]], Cut]) -> Corpus:
        """Of a split; vocabularies are learned from the training part alone."""
        train, test = split(pairs)
        sides = [pair.source for pair in train], [pair.target for pair in train]
        return Corpus(train, test, Pieces(sides[0], pieces), target(sides[1]))

    def sources(self, pairs: Sequence[Pair]) -> list[list[int]]:
        return [[*self.source.encode(pair.source), END] for pair in pairs]

    def batches(self, size: int, generator: torch.Generator, pool: int = 50) -> Iterator[Pairs]:
        """Endless, every sentence once an epoch, in a new order each time.

        A pool of batches is sorted by length before it is cut, so that little is padding; its batches
        come in random order.
        """
        sources = self.sources(self.train)
        targets = [[START, *self.target.encode(pair.target), END] for pair in self.train]
        while True:
            order = torch.randperm(len(sources), generator=generator).tolist()
            for start in range(0, len(order), pool * size):
                part = sorted(
                    order[start : start + pool * size], key=lambda i: (len(targets[i]), len(sources[i]))
                )
                cuts = [part[i : i + size] for i in range(0, len(part), size)]
                for at in torch.randperm(len(cuts), generator=generator).tolist():
                    both = ([side[i] for i in cuts[at]] for side in (sources, targets))
                    yield Pairs(*(part for rows in both for part in padded(rows)))

    def longest(self) -> int:
        """Of all sources with their ends, in tokens."""
        return max(len(row) for part in (self.train, self.test) for row in self.sources(part))
