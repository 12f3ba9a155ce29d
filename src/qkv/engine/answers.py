"""What a request makes of its rows' logits: samples, or a beam search. No model is called here."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qkv.engine.beams import Beams, BeamSearch, Hypothesis
from qkv.engine.logprobs import Logprobs, Summary
from qkv.engine.processors import NONE_LEFT, Processor, Rules
from qkv.engine.requests import Completion, Request, before, decoder, matcher, spell
from qkv.engine.sampling import Sampler
from qkv.errors import RequestError
from qkv.loading import Loaded
from qkv.spec import Model, Replace
from qkv.text import StopStrings

if TYPE_CHECKING:
    from jaxtyping import Float

Move = tuple[int, int]  # the row that this one goes on from, and the token that it does so with
Said = list[tuple[int, str, Completion]]  # which of a request's answers, its new text, all of it so far


class Answers(Protocol):
    """The answers of one request in the making."""

    @property
    def finished(self) -> bool: ...

    moves: list[Move | None]  # what each row reads next; None: it has ended, or is not used

    def accept(
        self, logits: Float[np.ndarray, "rows vocab"], summaries: Sequence[Summary] | None = None
    ) -> Said:
        """Goes on by one token in each row; `summaries` are those of the logits, where they are known."""
        ...


def answers(request: Request, loaded: Loaded) -> Answers:
    search = request.beams
    return Samples(request, loaded) if search is None else Search(request, search, loaded)


class Answer:
    """One answer: its tokens, their log-probabilities, and the text that they make so far."""

    def __init__(self, request: Request, loaded: Loaded):
        self.request, self.loaded = request, loaded
        self.completion = Completion(request.prompt)
        self.stops = StopStrings(request.stop)
        self.decoder = decoder(request, loaded)  # the text goes on after the prompt's
        self.matcher = matcher(request, loaded, self.decoder)

    def fork(self) -> Answer:
        """Another that goes on from here."""
        other, done = copy.copy(self), self.completion
        other.stops = copy.copy(self.stops)
        other.decoder = self.decoder.fork() if self.decoder else None
        other.matcher = self.matcher.fork() if self.matcher else None
        other.completion = copy.copy(done)
        for name in ("tokens", "logprobs", "top_logprobs"):
            setattr(other.completion, name, list(getattr(done, name)))
        return other

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def add(self, token: int, logprobs: Logprobs, forced: bool = False) -> str:
        """Takes the next token; returns the text that is now certain. A forced end is the limit's.

        Raises RequestError, and takes nothing, where the constraint cannot be followed.
        """
        done, request = self.completion, self.request
        if self.matcher is not None:
            self.matcher.take(token)
        done.tokens.append(token)
        if request.top_logprobs:  # first: the chosen token's number is then the one in this list
            done.top_logprobs.append(logprobs.top(request.top_logprobs))
        done.logprobs.append(logprobs.of(token))
        ended = token in self.loaded.eos_ids and not request.ignore_eos
        complete = self.matcher is not None and self.matcher.complete
        last = ended or complete or len(done.tokens) >= request.max_new_tokens
        text, stopped = self.stops.push("" if ended else spell(self.decoder, token))
        if last and stopped is None:
            tail, stopped = self.stops.push(self.decoder.flush() if self.decoder else "")
            text += tail if stopped is not None else tail + self.stops.flush()
        done.text += text
        if (ended and not forced) or complete or stopped is not None:
            done.finish_reason = "stop"
        elif last:
            done.finish_reason = "length"
        return text

    def fail(self, problem: RequestError) -> str:
        """Ends it here; what was held back of its text is given out."""
        text = self.stops.flush()
        self.completion.text += text
        self.completion.finish_reason, self.completion.error = "error", str(problem)
        return text


class _Scoring:
    """From a row's logits to what is chosen by."""

    def __init__(self, request: Request, loaded: Loaded):
        self.request = request
        past = before(request, loaded)
        rules = Rules.read(loaded.generation, len(past), loaded.eos_ids)
        rules = replace(rules, never=(*rules.never, *_stand_ins(loaded.spec)))
        self.search = request.beams is not None
        self.processor = Processor(request.sampling, past, request.max_new_tokens, rules, self.search)

    def __call__(self, logits: np.ndarray, answer: Answer, summary: Summary | None = None) -> Logprobs:
        """Raises RequestError where there is nothing to choose from."""
        if summary is not None and math.isnan(summary.top):
            summary = None  # minus infinity may stand among them, which is no fault
        top = None if summary is None else summary.top
        allowed = None if answer.matcher is None else answer.matcher.allowed
        scores = self.processor(logits, answer.completion.tokens, top, allowed)
        request = self.request
        return Logprobs(logits, scores, request.sampling, request.logprobs, self.search, summary)

    def forces_end(self, done: Completion) -> bool:
        """Whether the next token is set because the limit is reached."""
        return bool(self.processor.rules.last) and len(done.tokens) == self.request.max_new_tokens - 1


def _stand_ins(spec: Model) -> tuple[int, ...]:
    """Tokens in whose places rows of a tower stand: one that was generated would have none."""
    return tuple(tower.join.token for tower in spec.towers if isinstance(tower.join, Replace))


class Samples:
    """A request's samples, a row each. What ends one, an error too, ends no other."""

    def __init__(self, request: Request, loaded: Loaded):
        self.scoring = _Scoring(request, loaded)
        first = Answer(request, loaded)
        self.answers = [first, *(first.fork() for _ in range(request.n - 1))]
        self.samplers = [Sampler(request.sampling, sample) for sample in range(request.n)]
        self.moves: list[Move | None] = [None] * request.n

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def accept(
        self, logits: Float[np.ndarray, "rows vocab"], summaries: Sequence[Summary] | None = None
    ) -> Said:
        said: Said = []
        for row, answer in enumerate(self.answers):
            if not answer.finished:
                summary = None if summaries is None else summaries[row]
                text = self.go_on(answer, self.samplers[row], logits[row], summary)
                said.append((row, text, answer.completion))
            self.moves[row] = None if answer.finished else (row, answer.completion.tokens[-1])
        return said

    def go_on(self, answer: Answer, sampler: Sampler, logits: np.ndarray, summary: Summary | None) -> str:
        try:
            found = self.scoring(logits, answer, summary)
            forced = self.scoring.forces_end(answer.completion)
            known = found.summary if found.scores is logits else None
            return answer.add(sampler.choose(found.scores, known and known.best), found, forced)
        except RequestError as problem:
            return answer.fail(problem)


class Search:
    """A request's beam search: nothing is said before it ends, then the best `n`, best first."""

    def __init__(self, request: Request, search: BeamSearch, loaded: Loaded):
        self.request, self.scoring = request, _Scoring(request, loaded)
        self.beams = Beams(search, request.max_new_tokens, Answer(request, loaded), self.extend)
        self.moves: list[Move | None] = [None] * search.width
        self.found: list[Logprobs] = []  # of each live row
        self.finished = False

    def accept(
        self, logits: Float[np.ndarray, "rows vocab"], summaries: Sequence[Summary] | None = None
    ) -> Said:
        live = [hypothesis.kept for hypothesis in self.beams.live]
        try:
            self.found = [self.scoring(logits[row], answer) for row, answer in enumerate(live)]
            totals = np.stack([found.scores for found in self.found])
            if not self.beams.ended and not np.isfinite(totals.max()):
                raise RequestError(NONE_LEFT)
            moves = self.beams.step(totals)
        except RequestError as problem:
            return self.fail(live[0], problem)
        self.moves = [*moves, *[None] * (len(self.moves) - len(moves))]
        self.finished = not moves
        return self.best() if self.finished else []

    def extend(self, hypothesis: Hypothesis[Answer], row: int, token: int) -> tuple[Answer, bool]:
        answer = hypothesis.kept.fork()
        answer.add(token, self.found[row], self.scoring.forces_end(answer.completion))
        return answer, answer.finished

    def best(self) -> Said:
        said: Said = []
        for place, (score, hypothesis) in enumerate(self.beams.ended[: self.request.n]):
            completion = hypothesis.kept.completion
            completion.score = score
            said.append((place, completion.text, completion))
        return said

    def fail(self, answer: Answer, problem: RequestError) -> Said:
        self.finished, self.moves = True, [None] * len(self.moves)
        answer.fail(problem)
        return [(0, answer.completion.text, answer.completion)]
