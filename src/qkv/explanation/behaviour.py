"""What a model does over many prompts, as it is and with parts taken out: accuracy and log-probability.

Cases are lines of JSON. Either a prompt and what should follow it, word for word:

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt": "The capital of France is", "answer": " Paris", "against": " Rome"}
    {"prompt": "2 + 2 =", "answer": " 4", "choices": [" 3", " 4", " 5"]}

or a question as tasks of lm-evaluation-harness have them, with the place, letter or text of the answer:

    {"question": "What is 2 + 2?", "choices": ["3", "4"], "answer": 1}
    {"question": "What is 2 + 2?", "choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answerKey": "B"}

A question is asked as "Question: ...\\nAnswer:", and its choices follow after a space. Other keys are not
read. A case with choices is right where its answer has the highest log-probability of them; one without,
where each token of the answer is the likeliest after those before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkv.errors import RequestError, SourceError
from qkv.explanation.scoring import INSTEAD, Candidate, Scored, Told, candidate, named, score
from qkv.model import Model


@dataclass(frozen=True)
class Case:
    """A prompt and its answer: a text, or the number of a class; `choices` has it among others."""

    prompt: str
    answer: str | int
    choices: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[str | int, ...]:
        return self.choices or (self.answer,)


@dataclass(frozen=True)
class Outcome:
    """What a model does with a case: whether it is right, the answer's log-probability, and what it chose.

    Log-probabilities are natural and of the whole answer: the sum of its tokens'. `chosen` is None
    where there is nothing to choose from.
    """

    right: bool
    logprob: float
    chosen: str | None


@dataclass(frozen=True)
class Answered:
    """A case with what the model does as it is, and with parts taken out."""

    case: Case
    own: Outcome
    changed: Outcome | None


@dataclass(frozen=True)
class Paired:
    """A mean over the cases, with parts taken out too, and the mean change: of each case, so paired.

    `spread` is the standard error of that mean: the standard deviation of the cases' changes over the
    square root of their number. None for what was not asked, or of fewer than two cases.
    """

    own: float
    changed: float | None = None
    change: float | None = None
    spread: float | None = None


def paired(own: Sequence[float], changed: Sequence[float] | None = None) -> Paired:
    """Means of the cases of two runs, and of their differences."""
    mean = float(np.mean(own))
    if changed is None:
        return Paired(mean)
    differences = np.asarray(changed, dtype=np.float64) - np.asarray(own, dtype=np.float64)
    count = len(differences)
    spread = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return Paired(mean, float(np.mean(changed)), float(differences.mean()), spread)


@dataclass(frozen=True)
class Behaviour:
    """What a model does with cases, and without parts of it.

    `without` names what was taken out, and `by` what stood in its place; () and None where nothing was.
    """

    model: str
    answered: tuple[Answered, ...]
    without: tuple[str, ...] = ()
    by: str | None = None

    @property
    def accuracy(self) -> Paired:
        """The share of the cases that are right."""
        return self._paired(lambda outcome: float(outcome.right))

    @property
    def logprob(self) -> Paired:
        """The answers' log-probability, in nats, mean over the cases."""
        return self._paired(lambda outcome: outcome.logprob)

    @property
    def turned(self) -> tuple[int, int]:
        """How many cases became right, and how many wrong."""
        each = [(one.own.right, one.changed.right) for one in self.answered if one.changed is not None]
        return each.count((False, True)), each.count((True, False))

    def _paired(self, read: Callable[[Outcome], float]) -> Paired:
        own = [read(one.own) for one in self.answered]
        changed = [read(one.changed) for one in self.answered if one.changed is not None]
        return paired(own, changed if self.without else None)

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        gained, lost = self.turned
        return {
            "model": self.model,
            "cases": len(self.answered),
            "without": list(self.without),
            "by": self.by,
            "accuracy": vars(self.accuracy),
            "logprob": vars(self.logprob),
            "turned_right": gained,
            "turned_wrong": lost,
            "answers": [
                {
                    "prompt": one.case.prompt,
                    "answer": one.case.answer,
                    "choices": list(one.case.choices),
                    "own": vars(one.own),
                    "changed": None if one.changed is None else vars(one.changed),
                }
                for one in self.answered
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, most: int = 5) -> list[str]:
        """A table, and the `most` cases that change most."""
        count, accuracy, logprob = len(self.answered), self.accuracy, self.logprob
        out = [f"{self.model}: {count:,} case{'' if count == 1 else 's'}", ""]
        if not self.without:
            out += [f"{'accuracy':<34}{accuracy.own:>9.1%}", f"{_LOGPROB:<34}{logprob.own:>9.3f}"]
            return out
        gained, lost = self.turned
        out += [
            f"{'':<34}{'as it is':>9}{'without':>10}{'change':>10}",
            f"{'accuracy':<34}{accuracy.own:>9.1%}{accuracy.changed:>10.1%}"
            f"{100 * (accuracy.change or 0):>+10.1f} points{_about(accuracy.spread, 100, 1)}; "
            f"{gained} became right, {lost} wrong",
            f"{_LOGPROB:<34}{logprob.own:>9.3f}{logprob.changed:>10.3f}{logprob.change:>+10.3f} nats"
            f"{_about(logprob.spread, 1, 3)}",
            f"without: {', '.join(self.without)}; in its place: {self.by}",
            "±: the standard error of the cases' changes",
            "",
            "Cases that change most:",
        ]
        changes = [(one.changed.logprob - one.own.logprob, one) for one in self.answered if one.changed]
        for change, one in sorted(changes, key=lambda pair: -abs(pair[0]))[:most]:
            out.append(f"  {change:>+9.3f}  {one.case.answer!r:<20.20}  {_short(one.case.prompt)}")
        return out


_LOGPROB = "log-probability of the answer"


def _about(spread: float | None, times: float, digits: int) -> str:
    return "" if spread is None else f" ± {times * spread:.{digits}f}"


def _short(prompt: str, most: int = 60) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= most else "..." + line[-most + 3 :]


def measure_behaviour(
    model: Model,
    cases: str | Path | Iterable[Case | Mapping[str, Any]],
    without: Sequence[str] = (),
    by: str = "zero",
    told: Told = lambda done, total, what: None,
) -> Behaviour:
    """What a model does with cases, and, where parts are named, without them.

    `cases` is a file, or cases as the lines of one. A decoder continues the prompt, an encoder-decoder
    answers it, a masked language model fills its one mask, and a classifier says the number of a class.
    `without` names parts, which are taken out together: "layer 3 head 2", "layer 3 attention", "layer 3
    feed-forward", "layer 3", "decoder layer 0 cross head 1". `by` is "zero", or "mean": what stands there
    in the mean over all tokens of all cases. `told` hears how many passes are done, of how many, and
    which.

    Raises SourceError for a file that cannot be read, RequestError for a case or part that is none, and
    UnsupportedError for a model that answers none of these.
    """
    if by not in INSTEAD:
        raise RequestError(f"What is taken out is replaced by {' or '.join(INSTEAD)}, not by {by!r}.")
    if isinstance(cases, str | Path):
        wanted = read_cases(cases)
    else:
        wanted = [_case(f"Case {number}", case) for number, case in enumerate(cases, 1)]
    if not wanted:
        raise RequestError("There is no case to measure.")
    asked = [[_candidate(model, i, case, one) for one in case.candidates] for i, case in enumerate(wanted, 1)]
    flat = [one for each in asked for one in each]
    parts = [part for name in without for part in named(model, name)]
    own = score(model, flat, told=told)
    changed = score(model, flat, parts, INSTEAD[by], told) if parts else None
    both = zip(_outcomes(wanted, own), _outcomes(wanted, changed), strict=True)
    answered = [Answered(case, *pair) for case, pair in zip(wanted, both, strict=True)]
    words = INSTEAD[by].name if parts else None
    return Behaviour(model.loaded.files.name, tuple(answered), tuple(without), words)


def _outcomes(cases: Sequence[Case], scored: Sequence[Scored] | None) -> list[Any]:
    """Of each case; candidates of equal log-probability: the first of them is chosen."""
    if scored is None:
        return [None] * len(cases)
    rest, out = iter(scored), []
    for case in cases:
        each = [next(rest) for _ in case.candidates]
        place = case.candidates.index(case.answer)
        best = max(range(len(each)), key=lambda i: each[i].logprob)
        right = best == place if case.choices else each[0].likeliest
        out.append(Outcome(right, each[place].logprob, case.choices[best] if case.choices else None))
    return out


def _candidate(model: Model, number: int, case: Case, answer: str | int) -> Candidate:
    try:
        return candidate(model, case.prompt, answer)
    except RequestError as problem:
        raise RequestError(f"Case {number}: {problem}") from None


# cases


def read_cases(path: str | Path) -> list[Case]:
    """The cases of a file, a line of JSON each; empty lines are skipped.

    Raises SourceError where it cannot be read, and RequestError, naming the line, for what is no case.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SourceError(f"{path} cannot be read: {reason}.") from None
    lines = [(f"Line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_case(where, _json(where, line)) for where, line in lines]


def _json(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{where} is not JSON: {getattr(problem, 'msg', problem)}.") from None


def _case(where: str, given: Any) -> Case:
    try:
        if isinstance(given, Case):
            return Case(given.prompt, _chosen(given.answer, given.choices), given.choices)
        if not isinstance(given, Mapping):
            raise RequestError("a case is an object")
        for key, read in (("prompt", _plain), ("question", _question)):
            if key in given:
                return read(given)
        raise RequestError('a case has a "prompt" or a "question"')
    except RequestError as problem:
        raise RequestError(f"{where}: {problem}.") from None


def _plain(given: Mapping[str, Any]) -> Case:
    prompt, answer, choices = given["prompt"], _answer(given, "answer"), given.get("choices", [])
    if not isinstance(prompt, str):
        raise RequestError('"prompt" is a text')
    if "against" in given:
        if choices:
            raise RequestError('"against" is the one other choice: leave it or "choices" out')
        choices = [answer, given["against"]]
    choices = _texts(choices)
    return Case(prompt, _chosen(answer, choices), choices)


def _question(given: Mapping[str, Any]) -> Case:
    question, answer = given["question"], _answer(given, "answer", "answerKey")
    if not isinstance(question, str):
        raise RequestError('"question" is a text')
    prompt = f"Question: {question}\nAnswer:"
    choices: Any = given.get("choices", [])
    labels: Any = []
    if isinstance(choices, Mapping):
        choices, labels = choices.get("text"), choices.get("label")
    texts, labels = _texts(choices), _texts(labels)
    if labels and len(labels) != len(texts):
        raise RequestError(f"there are {len(texts)} choices and {len(labels)} labels")
    if not texts:
        return Case(prompt, f" {answer}")
    if answer in labels:  # labels may be numbers, and so may texts
        answer = labels.index(answer)
    elif answer not in texts and answer in _LETTERS[: len(texts)]:
        answer = _LETTERS.index(answer)
    return Case(prompt, f" {_chosen(answer, texts)}", tuple(f" {text}" for text in texts))


_LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _answer(given: Mapping[str, Any], *keys: str) -> str | int:
    answer = next((given[key] for key in keys if key in given), None)
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise RequestError('"answer" is a text, or the number of a choice or class')
    return answer


def _texts(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise RequestError("choices are a list of texts")
    return tuple(given)


def _chosen(answer: str | int, choices: Sequence[str]) -> str | int:
    """The text of a choice, by that or by its place; the answer itself where there are no choices."""
    if len(set(choices)) != len(choices):
        raise RequestError("the same choice is there twice")
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    if choices and answer not in choices:
        raise RequestError(f"the answer {answer!r} is none of the {len(choices)} choices")
    return answer
