"""Answers scored in batches: their log-probability after a prompt, with parts of the model taken out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qkv.engine.requests import start_token
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.asking import encoded, masked_place, one_class
from qkv.explanation.parts import Part, every_mixer, heads
from qkv.explanation.reading import Reading
from qkv.model import Model
from qkv.nn.taps import Replace
from qkv.spec import Language, MaskedLanguage, MultiToken, SequenceClass
from qkv.text import Tokenizer

NUMBERS = 2**25  # of logits in one pass, at most
Told = Callable[[int, int, str], None]  # passes done, of how many, and which
Row = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and those of a source
Batch = tuple[list[Row], list[int]]  # rows that run together, and the candidates that are read off them


class Candidate(NamedTuple):
    """What a model reads, and what it should answer: `targets` at the places from `first` on.

    `first` is None for a head that answers once. `source` is what an encoder beside a decoder reads.
    """

    tokens: tuple[int, ...]
    source: tuple[int, ...]
    first: int | None
    targets: tuple[int, ...]


class Scored(NamedTuple):
    """The natural log-probability of a candidate's targets, and whether each is its place's likeliest."""

    logprob: float
    likeliest: bool


@dataclass(frozen=True)
class Instead:
    """What stands in the place of what is taken out: one value for all tokens, of each point."""

    name: str
    values: Callable[[Iterable[Reading], Sequence[str]], Mapping[str, Tensor]]


def candidate(model: Model, prompt: str, answer: str | int) -> Candidate:
    """An answer to a prompt, as this kind of model is asked.

    A text follows the prompt word for word, so that its tokens are those of both together. Raises
    RequestError for an answer that there is not, UnsupportedError for models that answer no prompt.
    """
    if model.tokenizer is None:
        raise RequestError("Prompts are read by their tokens, and this model has no tokenizer.")
    head = model.spec.head
    if isinstance(head, SequenceClass):
        found = Candidate(tuple(model.encode(prompt)), (), None, (one_class(answer, head.classes),))
    elif not isinstance(head, Language | MultiToken):
        raise UnsupportedError("This model gives a prompt no answer that has a probability.")
    else:
        text = str(answer)
        if isinstance(head, MaskedLanguage):
            found = _filled(model, prompt, text)
        elif model.spec.encoder is not None:
            found = _answered(model, prompt, text)
        else:
            found = _continued(model, prompt, text)
    longest = max(len(found.tokens), len(found.source))
    if model.context is not None and longest > model.context:
        raise RequestError(f"It has {longest:,} tokens, and this model reads {model.context:,}.")
    return found


def _continued(model: Model, prompt: str, answer: str) -> Candidate:
    """Tokens of both together; those of the answer begin where the prompt's own end or differ."""
    tokenizer = cast(Tokenizer, model.tokenizer)
    before, whole = (tokenizer.encode(text, eos=False) for text in (prompt, prompt + answer))
    alike = [a == b for a, b in zip(before, whole, strict=False)]
    first = alike.index(False) if False in alike else len(alike)
    targets = whole[first:]
    if not targets:
        raise RequestError(f"The answer {answer!r} makes no token.")
    if first == 0:
        raise RequestError("The prompt makes no token that an answer could follow.")
    return Candidate(tuple(whole[:-1]), (), first - 1, tuple(targets))


def _answered(model: Model, prompt: str, answer: str) -> Candidate:
    start, targets = start_token(model.loaded), encoded(model, answer)
    if not targets:
        raise RequestError(f"The answer {answer!r} makes no token.")
    if start is None:
        raise UnsupportedError("This model reads images or audio, and no prompt.")
    return Candidate((start, *targets[:-1]), tuple(model.encode(prompt)), 0, tuple(targets))


def _filled(model: Model, prompt: str, answer: str) -> Candidate:
    tokens, targets = model.encode(prompt), encoded(model, answer)
    if len(targets) != 1:
        raise RequestError(f"A mask stands for one token, and {answer!r} makes {len(targets)}.")
    return Candidate(tuple(tokens), (), masked_place(Reading(model, tokens)), tuple(targets))


# what stands in the place of parts


def _zeros(readings: Iterable[Reading], points: Sequence[str]) -> dict[str, Tensor]:
    found = next(iter(readings)).read(points)
    return {point: torch.zeros(value.shape[2:]) for point, value in found.items()}


def _means(readings: Iterable[Reading], points: Sequence[str]) -> dict[str, Tensor]:
    """Over all tokens of all rows, each row counted once."""
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(points, 0)
    for reading in readings:
        for point, value in reading.read(points).items():
            total = value.double().sum((0, 1))
            sums[point] = total + sums[point] if point in sums else total
            counts[point] += value.shape[0] * value.shape[1]
    return {point: sums[point] / counts[point] for point in points}


ZERO = Instead("zero", _zeros)
MEAN = Instead("its mean over all tokens of the cases", _means)
INSTEAD = {"zero": ZERO, "mean": MEAN}


# passes


def score(
    model: Model,
    candidates: Sequence[Candidate],
    without: Sequence[Part] = (),
    by: Instead = ZERO,
    told: Told = lambda done, total, what: None,
) -> list[Scored]:
    """Every candidate, with these parts taken out. Candidates that are read alike share a pass.

    Rows of equal length run as one batch, so nothing is padded.
    """
    batches, found = list(_batches(model, candidates)), {}
    changes: dict[str, Replace] = {}
    if without:
        changes = _changes(without, by.values(_readings(model, batches, told), _points(without)))
    for done, (rows, members) in enumerate(batches, 1):
        reading, places = _reading(model, rows), _places([candidates[i] for i in members])
        with torch.no_grad():
            logits = reading.run(reading.taps(changes), places=places).float().log_softmax(-1)
        for i in members:
            one = candidates[i]
            row = logits[rows.index((one.tokens, one.source))]
            at = 0 if one.first is None or places is None else one.first - places[0]
            found[i] = _scored(row[at : at + len(one.targets)], one.targets)
        told(done, len(batches), "without parts" if without else "as it is")
    return [found[i] for i in range(len(candidates))]


def _readings(model: Model, batches: Sequence[Batch], told: Told) -> Iterator[Reading]:
    for done, (rows, _) in enumerate(batches, 1):
        yield _reading(model, rows)
        told(done, len(batches), "what stands in the place of parts")


def _points(parts: Iterable[Part]) -> list[str]:
    return list(dict.fromkeys(part.point for part in parts))


def _scored(told: Tensor, targets: Sequence[int]) -> Scored:
    wanted = torch.tensor(targets, device=told.device)
    logprob = told.gather(-1, wanted[:, None]).double().sum()
    return Scored(float(logprob), bool((told.argmax(-1) == wanted).all()))


def _batches(model: Model, candidates: Sequence[Candidate]) -> Iterator[Batch]:
    """Rows that can run together, and the candidates that are read off them."""
    members: dict[Row, list[int]] = {}
    for i, one in enumerate(candidates):
        members.setdefault((one.tokens, one.source), []).append(i)
    alike: dict[tuple[int, int], list[Row]] = {}
    for row in members:
        alike.setdefault((len(row[0]), len(row[1])), []).append(row)
    answers = model.spec.head.vocab if isinstance(model.spec.head, Language) else 1
    for (length, _), rows in alike.items():
        reading = _reading(model, rows[:1])
        size = max(1, min(reading.most_rows, NUMBERS // (length * answers)))
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            yield some, [i for row in some for i in members[row]]


def _reading(model: Model, rows: Sequence[Row]) -> Reading:
    tokens, sources = zip(*rows, strict=True)
    return Reading(model, list(tokens), list(sources) if sources[0] else None)


def _places(candidates: Sequence[Candidate]) -> range | None:
    """All that these candidates are read at."""
    firsts = [one.first for one in candidates if one.first is not None]
    if not firsts:
        return None
    return range(
        min(firsts), max(one.first + len(one.targets) for one in candidates if one.first is not None)
    )


# parts by name


def named(model: Model, name: str) -> list[Part]:
    """The parts that a name means: "layer 3 head 2", "layer 3 feed-forward", "layer 3".

    Where a model has an encoder and a decoder, which of them comes first: "decoder layer 0 cross head 1".
    Raises RequestError for what is no such name, or is not there.
    """
    matched = _NAME.fullmatch(" ".join(name.lower().split()))
    if matched is None:
        raise RequestError(
            f'{name!r} is no part: say "layer 3", or "layer 3 head 2", "layer 3 attention", '
            '"layer 3 feed-forward".'
        )
    side, layer, what, head = matched.group("side"), int(matched["layer"]), matched["what"], matched["head"]
    paired = model.spec.encoder is not None and model.spec.decoder is not None
    if paired != (side is not None):
        must = "say which: encoder layer 3, or decoder layer 3" if paired else "leave encoder and decoder out"
        raise RequestError(f"{name!r}: {must}.")
    reading = Reading(model, [0], [0] if paired else None)
    number = 0 if side in (None, "encoder") else 1
    role = _ROLES.get(what or ("attention" if head is not None else ""))
    found = [
        site
        for site in every_mixer(reading)
        if (site.side, site.layer) == (number, layer) and role in (None, site.mixer.role)
    ]
    if not found:
        raise RequestError(f"This model has no {name}.")
    if head is None:
        return [Part(site.point(reading, "output")) for site in found]
    return [_head(reading, name, site.point(reading, "heads"), int(head), str(role)) for site in found]


_NAME = re.compile(
    r"(?:(?P<side>encoder|decoder) )?layer (?P<layer>\d+)(?: (?P<what>attention|cross|feed-forward|mixer))?"
    r"(?: head (?P<head>\d+))?"
)
_ROLES = {"attention": "attention", "cross": "cross", "feed-forward": "feed_forward", "mixer": "mixer"}


def _head(reading: Reading, name: str, point: str, head: int, role: str) -> Part:
    if role == "feed_forward":
        raise RequestError(f"{name!r}: a feed-forward has no heads.")
    there = [group[0] for group in heads(reading, role).parts.values() if group[0].point == point]
    if head >= len(there):
        raise RequestError(f"This model has no {name}: its layer has {len(there)} heads.")
    return there[head]


def _changes(parts: Sequence[Part], values: Mapping[str, Tensor]) -> dict[str, Replace]:
    """For a tap: each point with its parts replaced, in every row."""
    by_point: dict[str, list[Part]] = {}
    for part in parts:
        by_point.setdefault(part.point, []).append(part)

    def put(point: str, value: Tensor) -> Tensor:
        value = value.clone()
        for part in by_point[point]:
            # a value has no axis of tokens, which comes first in what a row holds
            value[(slice(None), *part.where)] = values[point][part.where[1:]].to(value)
        return value

    return {point: partial(put, point) for point in by_point}
