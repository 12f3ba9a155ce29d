"""Which rows the next step has, and where they are kept: every text catches up with its tokens.

There is no phase of reading prompts and none of writing answers. Each text has tokens, of which some
are computed; a step computes more of them, those of texts that lack one first, within a budget of rows.
That is chunked prefill, continuing after a prefix that was found, going on after having been set aside,
and checking guesses, all in one (Yu et al. 2022, "Orca"; Kwon et al. 2023, "PagedAttention").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from threading import Lock

import numpy as np

from qkv.engine.answers import Move, answers, before
from qkv.engine.limits import CHUNK, Budget
from qkv.engine.logprobs import Summary
from qkv.engine.prefix import Prefixes
from qkv.engine.requests import Request, reads_prompt
from qkv.engine.tasks import Speculation, Task, Text
from qkv.errors import CapacityError
from qkv.loading import Loaded
from qkv.runtime import Rows
from qkv.runtime.blocks import BLOCK, blocks
from qkv.runtime.interpreter import Floats
from qkv.runtime.machine import Machine

MOST_ROWS = 256  # answers in the making at once
Chosen = tuple[Task, Text, int]  # a text and how many of its tokens, guesses included, a step has


class Scheduler:
    """Serves requests on one machine. Any thread may call it; steps are taken one at a time.

    `budget` bounds the cache. Invariants that hold between steps: see `qkv.engine.snapshot`.
    """

    def __init__(self, loaded: Loaded, machine: Machine, budget: Budget):
        self.loaded, self.machine, self.budget = loaded, machine, budget
        budget.apply(machine)
        self.prefixes = Prefixes(machine.own)
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []  # the oldest first
        self.steps = self.preempted = self.reused = 0
        self.lent: set[int] = set()  # numbers of sequences that are not a text's
        self._lock = Lock()
        self._cancelled: deque[Task] = deque()
        self._free: list[int] = []  # numbers of sequences that were given back, the lowest first
        self._count = 0

    def submit(
        self,
        request: Request,
        salt: str = "",
        shares: bool = True,
        guesser: Callable[[], Speculation] | None = None,
        heard: Callable[[Task], None] | None = None,
        **brought: object,
    ) -> Task:
        """Takes a request that was checked. What is `brought` beside its tokens is read with its prompt.

        `guesser` makes what guesses, where guesses can be checked: of one answer that is no search.
        `heard` is told of the task when there is something new of it, in the thread that steps.
        """
        self.check(request)
        start, source = self._reads(request)
        task = Task(request, answers(request, self.loaded), start, source, brought, salt)
        task.shares = shares and self.machine.shares and not brought
        checked = self.machine.goes_back and not self.machine.by_length
        if guesser is not None and checked and request.rows == 1 and request.beams is None:
            task.speculation = guesser()
        if heard is not None:  # before a step can have it
            task.heard = heard
        self.waiting.append(task)
        return task

    def check(self, request: Request) -> None:
        """Raises CapacityError for a request that could never fit, with the numbers."""
        start, source = self._reads(request)
        self.budget.check(request, len(start), len(source), self.machine)

    def _reads(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What its texts begin with, and what an encoder reads."""
        source = request.prompt if reads_prompt(self.loaded.spec) else ()
        return before(request, self.loaded), source

    def cancel(self, task: Task) -> None:
        """Ends a task whatever it is at; its blocks are free at once, or after the step that runs now."""
        self._cancelled.append(task)
        self._sweep()

    def _sweep(self) -> None:
        """Ends what was cancelled. Who has the lock does so once it has let go: nothing is left behind.

        It never waits: the garbage collector may call it in the middle of a step.
        """
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._lock.release()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self._cancelled)

    def step(self) -> bool:
        """Runs one step, if there is anything to do; whether there was."""
        try:
            with self._lock:
                self._clear()
                try:
                    return self._step()
                except BaseException as problem:
                    self._fail(problem)
                    raise
        finally:
            self._sweep()

    def _step(self) -> bool:
        started = time.perf_counter()
        self._admit_waiting()
        chosen = self._choose()
        if not chosen:
            return False
        logits = self.machine.run(self._rows(chosen))
        self.steps += 1
        self._computed(chosen, logits)
        seconds = time.perf_counter() - started
        for task in list(self.running):
            task.charge(seconds)
            if all(text.logits is not None for text in task.alive()):
                self._answer(task)
        return True

    # sequences of others, who draft

    def lend(self) -> int:
        """The number of a sequence that is not a text's."""
        with self._lock:
            number = self._number()
            self.lent.add(number)
            return number

    def run_for(self, rows: Rows) -> Floats:
        """A step of a sequence that was lent. Raises CapacityError where there is no block left for it."""
        with self._lock:
            return self.machine.step(rows)

    def take_back(self, number: int, length: int) -> None:
        with self._lock:
            self.machine.forget(number, length)

    def end_loan(self, number: int) -> None:
        with self._lock:
            if number in self.lent:
                self.lent.remove(number)
                self.machine.forget(number)
                heappush(self._free, number)

    # what a step has

    def _admit_waiting(self) -> None:
        """Lets the next ones begin, in the order they came, as far as there are blocks for their prompts."""
        rows = sum(task.rows for task in self.running)
        while self.waiting and (not self.running or rows + self.waiting[0].rows <= MOST_ROWS):
            if self.running and not self._room(self.waiting[0]):
                return
            task = self.waiting.popleft()
            self.running.append(task)
            rows += task.rows
            task.running = True
            self._begin(task)

    def _room(self, task: Task) -> bool:
        """Whether its prompt and the next step of all others fit, without setting anyone aside."""
        others = sum(1 for other in self.running for _ in other.alive())
        most = max((len(text.tokens) for text in task.alive()), default=len(task.start))
        source = blocks(len(task.source))
        if any(pool.available is not None and source > pool.available for pool in self.machine.beside):
            return False
        return all(
            pool.available is None or pool.most(most, CHUNK) + others + 1 <= pool.available
            for pool in self.machine.own
        )

    def _begin(self, task: Task) -> None:
        """Gives its texts sequences, which begin with what is in the cache already."""
        if not task.texts:
            task.texts = [Text(0, list(task.start), len(task.start)), *[None] * (task.rows - 1)]
        for text in task.alive():
            text.number, text.computed, text.published = self._number(), 0, 0
            text.parent = self.prefixes.root(task.salt)
            if task.source:
                self.machine.read(Rows.of(list(task.source), sequence=text.number, wanted=[]))
            elif task.brought:
                self.machine.bring(text.number, **task.brought)  # type: ignore[attr-defined]
            elif task.shares:
                found = self.prefixes.find(text.tokens, task.salt)
                if found:
                    self.prefixes.adopt(text.number, found)
                    text.computed, text.published = len(found) * BLOCK, len(found)
                    text.parent = found[-1].number
                    self.reused += text.computed
            task.read = min(text.computed, text.prompt)

    def _choose(self) -> list[Chosen]:
        """Texts and how many of their tokens come next, guesses included; all have room in the cache."""
        left, chosen = CHUNK, list[Chosen]()
        order = sorted(
            ((task, text) for task in self.running for text in task.alive() if text.logits is None),
            key=lambda each: each[1].left > 1,  # those that lack one token first, else as they came
        )
        for task, text in order:
            if not task.running:  # was set aside for one before it
                continue
            count = self._count_of(task, text, left)
            if count and self._make_room(task, text, count):
                count = min(count, text.left + len(text.draft))
                chosen.append((task, text, count))
                left -= count
        # setting one aside takes back what was chosen for it
        return [each for each in chosen if each[0].running]

    def _count_of(self, task: Task, text: Text, left: int) -> int:
        if task.brought and text.computed == 0:  # all at once with what is beside
            return text.left
        if self.machine.by_length:  # what was written one by one is read again one by one
            return min(left, text.prompt - text.computed) if text.computed < text.prompt else min(left, 1)
        if task.speculation is not None and text.left == 1 and left > 1:
            most = min(left - 1, task.request.max_new_tokens - (len(text.tokens) - text.prompt) - 1)
            text.draft = task.speculation.propose(text, most)
        return min(left, text.left + len(text.draft))

    def _make_room(self, task: Task, text: Text, count: int) -> bool:
        """Takes blocks for a text's next tokens; where there are none, sets the youngest task aside."""
        end = text.computed + count
        while True:
            short = any(
                pool.available is not None and pool.wanted(text.number, text.computed, end) > pool.available
                for pool in self.machine.own
            )
            if not short:
                for pool in self.machine.own:
                    pool.extend(text.number, text.computed, end)
                return True
            if text.draft:  # nobody makes room for guesses
                end -= len(text.draft)
                text.draft = []
                continue
            youngest = self.running[-1]
            if self.running == [task]:  # it would fit, but for what was lent
                task.problem = CapacityError(
                    "What drafts for others holds the cache that this request needs."
                )
                self._end(task)
            else:
                self._set_aside(youngest)
            if youngest is task:
                return False

    def _set_aside(self, task: Task) -> None:
        """Its blocks are given up; it begins again, before all who wait, when there is room."""
        self.running.remove(task)
        self._leave(task)
        self.waiting.appendleft(task)
        self.preempted += 1

    def _rows(self, chosen: list[Chosen]) -> Rows:
        tokens: list[int] = []
        sequences: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        totals: list[int] = []
        for _, text, count in chosen:
            end, length = text.computed + count, len(text.tokens)
            # the answer to the last token, and to each guess after it
            wanted += range(len(tokens) + length - 1 - text.computed, len(tokens) + count)
            tokens += text.tokens[text.computed : end]
            tokens += text.draft[: max(0, end - length)]
            sequences += [text.number] * count
            positions += range(text.computed, end)
            totals += [text.prompt if at < text.prompt else at + 1 for at in range(text.computed, end)]
        return Rows(
            np.array(tokens, np.int32),
            np.array(sequences, np.int32),
            np.array(positions, np.int32),
            np.array(wanted, np.int32),
            totals=np.array(totals) if self.machine.by_length else None,
        )

    # what came of it

    def _computed(self, chosen: list[Chosen], logits: np.ndarray) -> None:
        at, known = 0, self.machine.summaries
        every = None if known is None else list(map(Summary, *(part.tolist() for part in known)))
        for task, text, count in chosen:
            if self.machine.altered:  # what a tap has changed is nobody else's beginning
                task.shares = False
            guesses = len(text.draft)
            text.computed += count - guesses
            if text.computed == len(text.tokens):
                text.logits = logits[at : at + 1 + guesses]
                text.summaries = None if every is None else every[at : at + 1 + guesses]
                at += 1 + guesses
            self._settle(task, text)

    def _settle(self, task: Task, text: Text) -> None:
        """Full blocks are left to others, those out of sight are handed back."""
        if task.shares and text.computed // BLOCK > text.published:
            for place in range(text.published, text.computed // BLOCK):
                tokens = text.tokens[place * BLOCK : (place + 1) * BLOCK]
                text.parent = self.prefixes.publish(text.number, place, text.parent, tokens)
            text.published = text.computed // BLOCK
        for pool in self.machine.own:
            pool.hand_back(text.number, text.computed)
        task.read = max(task.read, min(text.computed, text.prompt))

    def _answer(self, task: Task) -> None:
        """The answers go on by a token, or by several where guesses were right."""
        started = time.perf_counter()
        first = next(task.alive())
        if len(task.texts) == 1:
            self._accept_guesses(task, first)
        else:
            each = [text or first for text in task.texts]
            given = np.stack([text.logits[0] for text in each])  # type: ignore[index]
            known = None if first.summaries is None else [text.summaries[0] for text in each]  # type: ignore[index]
            said = task.answers.accept(given, known)
            if not task.answers.finished:
                self._move(task, task.answers.moves)
            task.say(said)
        task.answered = True
        task.charge(time.perf_counter() - started)
        if task.answers.finished:
            self._end(task)

    def _accept_guesses(self, task: Task, text: Text) -> None:
        """A guess is right where it is what would have been chosen: the answer is the same without any."""
        logits, summaries, draft = text.logits, text.summaries, text.draft
        text.logits, text.draft = None, []
        for place in range(len(draft) + 1):
            one = slice(place, place + 1)
            said = task.answers.accept(logits[one], summaries and summaries[one])  # type: ignore[index]
            move = task.answers.moves[0]
            if not task.answers.finished and move is not None:
                text.tokens.append(move[1])
            task.say(said)
            if task.answers.finished or place == len(draft) or text.tokens[-1] != draft[place]:
                break
            text.computed += 1
        if task.speculation is not None and draft:
            task.speculation.learn(len(draft), place)
            for _, _, completion in said:
                completion.guessed, completion.right = task.speculation.guessed, task.speculation.right
        if place < len(draft) and not task.answers.finished:
            self.machine.forget(text.number, text.computed)
        if place and not task.answers.finished:
            self._settle(task, text)

    def _move(self, task: Task, moves: list[Move | None]) -> None:
        """Each row goes on from the text of a row: the first to do so takes it, others a copy."""
        old, taken = task.texts, set[int]()
        after: list[Text | None] = []
        for move in moves:
            if move is None:
                after.append(None)
                continue
            parent = old[move[0]] or next(text for text in old if text is not None)
            if id(parent) in taken:
                number = self._number()
                self.machine.fork(parent.number, number)
                child = Text(number, parent.tokens[: parent.computed], parent.prompt, parent.computed)
                child.published, child.parent = parent.published, parent.parent
            else:
                taken.add(id(parent))
                child = parent
            after.append(child)
        for text, move in zip(after, moves, strict=True):
            if text is not None and move is not None:
                text.tokens.append(move[1])
                text.logits = None
        for text in task.alive():
            if id(text) not in taken:
                self._drop(text)
        task.texts = after

    # ends

    def _end(self, task: Task) -> None:
        self._leave(task)
        if task in self.running:
            self.running.remove(task)
        task.finished = True
        if task.speculation is not None:
            task.speculation.close()
        task.heard(task)

    def _leave(self, task: Task) -> None:
        task.running = False
        for text in task.alive():
            self._drop(text)
            text.computed, text.logits, text.draft = 0, None, []

    def _drop(self, text: Text) -> None:
        if text.number >= 0:
            self.machine.forget(text.number)
            heappush(self._free, text.number)
            text.number = -1

    def _fail(self, problem: BaseException) -> None:
        """A step that failed leaves nothing half done: those who run end with what went wrong."""
        for task in list(self.running):
            task.problem = problem
            self._end(task)

    def _clear(self) -> None:
        while self._cancelled:
            task = self._cancelled.popleft()
            if task in self.waiting:
                self.waiting.remove(task)
            if not task.finished:
                self._end(task)

    def _number(self) -> int:
        if self._free:
            return heappop(self._free)
        self._count += 1
        return self._count - 1
