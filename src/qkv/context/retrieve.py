"""The parts of a document that have to do with a question: cut, ranked, and joined within a budget."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Protocol

import numpy as np

from qkv.errors import RequestError
from qkv.model import Model, load
from qkv.spec import PooledEmbedding
from qkv.text import Tokenizer


class Ranker(Protocol):
    """How much each of some texts has to do with a question: more is better."""

    name: str

    def scores(self, question: str, texts: Sequence[str]) -> Sequence[float]: ...


@dataclass(frozen=True)
class Lexical:
    """Rare words in common count most. Robertson and Zaragoza 2009 (BM25), equation 3.15."""

    saturation: float = 1.2
    by_length: float = 0.75
    name = "BM25"

    def scores(self, question: str, texts: Sequence[str]) -> Sequence[float]:
        words = [Counter(_words(text)) for text in texts]
        mean = sum(sum(each.values()) for each in words) / max(1, len(words)) or 1.0
        asked = set(_words(question))
        known = {word: sum(word in each for each in words) for word in asked}
        rarity = {word: log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in known.items()}

        def score(each: Counter[str]) -> float:
            size = 1 - self.by_length + self.by_length * sum(each.values()) / mean
            return sum(
                rarity[word] * each[word] * (self.saturation + 1) / (each[word] + self.saturation * size)
                for word in asked
                if each[word]
            )

        return [score(each) for each in words]


def _words(text: str) -> list[str]:
    """Words of letters or digits; signs of Chinese and its kin, which have no spaces, one by one."""
    return re.findall(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+", text.lower())


class Semantic:
    """The cosine of embeddings: as the encoder's files say they are made, else the mean of its states."""

    def __init__(self, source: str | Path | Model):
        self.model = source if isinstance(source, Model) else load(source)
        if self.model.tokenizer is None or self.model.spec.decoder is not None:
            raise RequestError("What ranks texts is an encoder with a tokenizer.")
        self.name = self.model.loaded.files.name

    def scores(self, question: str, texts: Sequence[str]) -> Sequence[float]:
        vectors = np.stack([self._vector(text) for text in (question, *texts)])
        vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
        found: list[float] = (vectors[1:] @ vectors[0]).tolist()
        return found

    def _vector(self, text: str) -> np.ndarray:
        import torch

        with torch.no_grad():
            if isinstance(self.model.spec.head, PooledEmbedding):
                return self.model.embed(text)[0].float().cpu().numpy()
            tokens = self.model.encode(text)[: self.model.context]
            states = self.model(torch.tensor([tokens], device=self.model.device))
            return states[0].float().mean(0).cpu().numpy()


def chunks(length: int, size: int) -> list[range]:
    """Parts of `size` of a document of `length` tokens; each has half in common with the one before."""
    last = max(0, length - size)
    starts = sorted({*range(0, last + 1, max(1, size // 2)), last})
    return [range(start, min(start + size, length)) for start in starts]


def retrieved(
    tokenizer: Tokenizer, document: Sequence[int], question: str, budget: int, ranker: Ranker, size: int = 128
) -> list[int]:
    """The best parts that fit into the budget together, in the order of the document, each token once."""
    parts = chunks(len(document), min(size, budget))
    texts = [tokenizer.decode(list(document[part.start : part.stop])) for part in parts]
    scores = ranker.scores(question, texts)
    chosen = set[int]()
    for place in sorted(range(len(parts)), key=lambda i: -scores[i]):
        both = chosen | set(parts[place])
        if len(both) <= budget:
            chosen = both
    return [document[place] for place in sorted(chosen)]
