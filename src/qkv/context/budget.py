"""Longer context, compression or retrieval: the same questions, each way, with the same room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from qkv.context.measure import long_text
from qkv.context.reading import Reader, machine_of
from qkv.context.retrieve import Ranker, retrieved
from qkv.engine import Completion
from qkv.errors import RequestError
from qkv.model import Model, load
from qkv.text import Tokenizer

CITIES = ("Lima", "Oslo", "Cairo", "Hanoi", "Quito", "Tunis", "Kyoto", "Porto", "Accra", "Delhi")


@dataclass(frozen=True)
class Question:
    """A document with facts in it, and what is asked for."""

    document: list[int]
    asked: str
    answer: str


@dataclass(frozen=True)
class Way:
    """How many questions came out right, and what an answer cost: tokens read, cache bytes, seconds."""

    name: str
    right: int
    asked: int
    read: int
    cache_bytes: int
    seconds: float


@dataclass(frozen=True)
class Compared:
    """All ways, on documents of `length` tokens with room for `budget`."""

    name: str
    length: int
    budget: int
    ways: tuple[Way, ...]

    def data(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def about(self) -> str:
        return f"{self.name}: facts in {self.length:,} tokens, room for {self.budget:,}"

    def __str__(self) -> str:
        lines = [self.about, ""]
        lines.append(f"{'way':<24}{'right':>8}{'read':>9}{'cache':>12}{'seconds':>10}")
        for way in self.ways:
            right = f"{way.right}/{way.asked}"
            cache = f"{way.cache_bytes / 1e6:,.1f} MB"
            lines.append(f"{way.name:<24}{right:>8}{way.read:>9,}{cache:>12}{way.seconds:>10.2f}")
        return "\n".join(lines)


def questions(tokenizer: Tokenizer, filler: Sequence[int], length: int, count: int) -> list[Question]:
    """Documents of a text in which every city has a pass key, one of which is asked for."""
    found = []
    for number in range(count):
        random = Random(f"{length}/{number}")
        keys = {city: str(random.randrange(10_000, 100_000)) for city in CITIES}
        facts = [tokenizer.encode(f"\n\nThe pass key of {city} is {key}.\n\n") for city, key in keys.items()]
        room = length - sum(map(len, facts))
        if room < len(facts) + 1 or len(filler) < room:
            raise RequestError(f"Documents of {length:,} tokens have no room for their facts, or no text.")
        start = random.randrange(len(filler) - room + 1)
        around, document = list(filler[start : start + room]), list[int]()
        places = sorted(random.sample(range(room), len(facts)))
        for fact, (begin, end) in zip(facts, zip([0, *places], places, strict=False), strict=True):
            document += [*around[begin:end], *fact]
        city = random.choice(CITIES)
        document += around[places[-1] :]
        found.append(Question(document, f"\n\nThe pass key of {city} is", keys[city]))
    return found


def pruned(reader: Reader, document: Sequence[int], budget: int) -> list[int]:
    """The tokens that could be foreseen least, in order. After Jiang et al. 2023 (LLMLingua), whole texts."""
    losses = np.concatenate([[np.inf], reader.losses(document)])
    kept = np.sort(np.argsort(-losses, kind="stable")[:budget])
    return [document[place] for place in kept]


def compare(
    source: str | Path = "smollm2",
    *,
    budget: int = 1024,
    length: int = 4096,
    times: int = 5,
    ranker: Ranker,
    text: Path | None = None,
    weighing: bool = False,
    threads: int | None = None,
    told: Callable[[str], None] = lambda what: None,
) -> Compared:
    """Asks for facts in documents longer than the budget, in every way there is.

    All of the context; its end; the first keys and the latest; with `weighing`, on torch, what attention
    chose (SnapKV, H2O); the least foreseen tokens; the best parts by `ranker`. All but the first have
    room for `budget` tokens, the question among them.
    """
    whole = load(source, threads=threads)
    if whole.tokenizer is None:
        raise RequestError("Facts are asked for in words: this model has no tokenizer.")
    asked = questions(whole.tokenizer, whole.tokenizer.encode(long_text(text)), length, times)
    short = max(len(whole.tokenizer.encode(q.asked)) for q in asked) + 8  # of the question and its answer
    if budget <= 2 * short:
        raise RequestError(f"A budget of {budget} tokens holds little but the question.")
    room, reader = budget - short, Reader(machine_of(whole.loaded))
    tokenizer = whole.tokenizer
    ways: Iterator[tuple[str, Model, Callable[[Question], list[int]]]] = iter(
        [
            ("all of the context", whole, lambda q: q.document),
            ("its end", whole, lambda q: q.document[-room:]),
            (
                f"sinks:{budget}",
                load(source, threads=threads, compress=f"sinks:{budget}"),
                lambda q: q.document,
            ),
            *(
                (
                    f"{kind}:{budget}",
                    load(source, threads=threads, compress=f"{kind}:{budget}"),
                    lambda q: q.document,
                )
                for kind in (("snapkv", "h2o") if weighing else ())
            ),
            ("least foreseen tokens", whole, lambda q: pruned(reader, q.document, room)),
            (
                f"retrieval, {ranker.name}",
                whole,
                lambda q: retrieved(tokenizer, q.document, q.asked.strip(), room, ranker),
            ),
        ]
    )
    return Compared(
        whole.loaded.files.name,
        length,
        budget,
        tuple(_way(name, model, read, asked, budget, told) for name, model, read in ways),
    )


def _way(
    name: str,
    model: Model,
    read: Callable[[Question], list[int]],
    asked: Sequence[Question],
    budget: int,
    told: Callable[[str], None],
) -> Way:
    right, tokens, started = 0, 0, time.perf_counter()
    for number, question in enumerate(asked, 1):
        told(f"{name}, question {number} of {len(asked)}")
        prompt = [*read(question), *cast(Tokenizer, model.tokenizer).encode(question.asked)]
        answer = model.generate(prompt, max_new_tokens=8, temperature=0)
        if isinstance(answer, Completion):
            right += answer.text.strip().startswith(question.answer)
        tokens = max(tokens, len(prompt))
    held = min(tokens, budget) if ":" in name else tokens
    seconds = (time.perf_counter() - started) / len(asked)
    return Way(name, right, len(asked), tokens, model.spec.cache_bytes(held), seconds)
