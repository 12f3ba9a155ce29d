"""Many prompts from a file, a JSON line each: answered together, written in their order.

A line of the output says which line of the input it answers, by its number and a digest. So a run that
was broken off can be gone on with: what it wrote is compared with the input, and kept.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Unpack

from qkv.engine.generation import prepared, scheduler, submit
from qkv.engine.requests import Completion, Options, Request
from qkv.engine.tasks import Task
from qkv.errors import CapacityError, RequestError, SourceError, TokenizerError
from qkv.loading import Loaded

AHEAD = 64  # requests with the scheduler at once
HELD = 1024  # lines at once, with those whose answers wait for a longer one before them

Progress = Callable[[int], None]  # is told, after each step, how many tokens were made


class Speaker(Protocol):
    """What makes requests of lines: a `qkv.Model`."""

    loaded: Loaded

    def request(self, prompt: Any, features: Any = None, **options: Unpack[Options]) -> Request: ...

    def chat(self, messages: Any) -> list[int]: ...


# lines of the input


@dataclass(frozen=True)
class Line:
    """One of the input, without its line break. Numbers count from 1."""

    number: int
    raw: bytes

    @property
    def named(self) -> dict[str, Any]:
        """What an answer to it begins with; the digest is the beginning of the line's SHA-256."""
        return {"line": self.number, "input": sha256(self.raw).hexdigest()[:16]}

    def value(self) -> Any:
        """Its JSON. Raises RequestError where it has none."""
        try:
            text = self.raw.decode("utf-8-sig")  # some editors begin a file with a mark
            return json.loads(text, parse_int=_whole_number)
        except UnicodeDecodeError:
            raise RequestError("The line is not UTF-8 text.") from None
        except (ValueError, RecursionError) as problem:
            reason = getattr(problem, "msg", None) or str(problem)
            raise RequestError(f"The line is not JSON ({reason}): {_KINDS}") from None


_KINDS = 'it must be a text in quotes, or an object with "prompt" or "messages".'


def _whole_number(digits: str) -> int:
    """Of a size that arithmetic with floats bears."""
    if len(digits) > 30:
        raise ValueError("a number of more than 30 digits")
    return int(digits)


def count(source: Path | BinaryIO) -> int | None:
    """How many lines there are; None of what can be read only once."""
    if not isinstance(source, Path) or not source.is_file():
        return None
    with source.open("rb") as file:
        return sum(1 for _ in file)


def lines(file: Iterable[bytes]) -> Iterator[Line]:
    for number, raw in enumerate(file, 1):
        yield Line(number, raw.removesuffix(b"\n").removesuffix(b"\r"))


def _asked(value: Any) -> dict[str, Any]:
    """A line's JSON as an object whose keys are known. Raises RequestError."""
    asked = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(asked, dict):
        raise RequestError(f"The line is neither a text nor an object: {_KINDS}")
    known = {"prompt", "messages", "id", *Options.__annotations__}
    for key in asked:
        if key not in known:
            raise RequestError(f"There is no key {key!r} ({', '.join(sorted(known))}).")
    if ("prompt" in asked) == ("messages" in asked):
        found = "both" if "prompt" in asked else "neither"
        raise RequestError(f'The line must have "prompt" or "messages", and has {found}.')
    return asked


def _biases(given: Any) -> Any:
    """JSON's keys are texts: one of digits alone is a token's id, as on the command line."""
    if not isinstance(given, dict):
        return given  # refused where its numbers are checked
    found = {int(key) if re.fullmatch("[0-9]{1,18}", key) else key: value for key, value in given.items()}
    if len(found) < len(given):
        raise RequestError("logit_bias names a token twice.")
    return found


# answers


def answer(done: Completion) -> dict[str, Any]:
    """An answer as JSON, without what was asked and how long it took."""
    found = {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "tokens": done.tokens,
        "logprobs": done.logprobs,
    }
    more = {"top_logprobs": done.top_logprobs, "score": done.score, "error": done.error}
    return found | {name: value for name, value in more.items() if value not in (None, [])}


def error(data: Mapping[str, Any]) -> str | None:
    """Why a line of the output, or one of its answers, failed; None where none did."""
    each = (data, *data.get("answers", ()))
    return next((one["error"] for one in each if "error" in one), None)


@dataclass(eq=False)
class _Job:
    """A line on its way to its answer, `data`."""

    line: Line
    id: str | int | None = None
    request: Request | None = None
    task: Task | None = None
    found: dict[int, Completion] = field(default_factory=dict)
    tokens: int = 0
    data: dict[str, Any] | None = None

    def end(self, said: dict[str, Any]) -> None:
        id = {} if self.id is None else {"id": self.id}
        self.data = self.line.named | id | said
        self.request = self.task = None
        self.found = {}

    def hear(self) -> int:
        """Takes what its task has said; how many tokens are new."""
        task, before = self.task, self.tokens
        if task is None:
            return 0
        while task.said:
            which, _, completion = task.said.popleft()
            self.found[which] = completion
        self.tokens = sum(len(completion.tokens) for completion in self.found.values())
        if task.problem is not None:
            raise task.problem
        if task.finished:
            each = [answer(self.found[which]) for which in sorted(self.found)]
            self.end(each[0] if task.request.n == 1 else {"answers": each})
        return self.tokens - before


class Run:
    """The answers to lines, in their order, as objects for JSON.

    `asked` are options of all lines, which a line's own override; what is wrong with them is refused
    here. A line that cannot be served has an "error". No more than `AHEAD` requests are with the
    scheduler and no more than `HELD` lines in memory, whatever the number of lines. `tokens` were
    made so far, of prompts of `read` tokens.
    """

    def __init__(self, speaker: Speaker, lines: Iterator[Line], asked: Mapping[str, Any]):
        self.speaker, self.lines, self.asked = speaker, lines, asked
        self.tokens = self.read = 0
        self._jobs: deque[_Job] = deque()  # in the order of their lines
        self._next: _Job | None = None  # one that there is no room for yet
        prepared(speaker.loaded, [self._request([0], {})])
        self._serving = scheduler(speaker.loaded)

    def answers(self, progress: Progress = lambda tokens: None) -> Generator[dict[str, Any], None, None]:
        """Gives each as soon as it and all before it are there. Closing it frees what it holds."""
        try:
            while self._fill():
                data = self._jobs[0].data
                if data is not None:
                    self._jobs.popleft()
                    yield data
                    continue
                self._serving.step()
                self._hear()
                progress(self.tokens)
        finally:
            for job in self._jobs:
                if job.task is not None:
                    self._serving.cancel(job.task)

    def _running(self) -> list[_Job]:
        return [job for job in self._jobs if job.task is not None]

    def _hear(self) -> None:
        for job in self._running():
            self.tokens += job.hear()

    def _fill(self) -> bool:
        """Takes lines and begins them, as long as there is room; whether any are in the making."""
        running = len(self._running())
        while running < AHEAD and len(self._jobs) < HELD:
            if self._next is None:
                line = next(self.lines, None)
                if line is None:
                    break
                self._next = self._job(line)
            if not self._begin(self._next, alone=not running):
                break
            running += self._next.task is not None
            self._jobs.append(self._next)
            self._next = None
        return bool(self._jobs)

    def _job(self, line: Line) -> _Job:
        """A line's request, checked. Errors that all lines would have are raised."""
        job = _Job(line)
        try:
            value = line.value()
            if isinstance(value, dict):
                job.id = _id(value.get("id"))
            asked = _asked(value)
            prompt = self.speaker.chat(asked["messages"]) if "messages" in asked else asked["prompt"]
            request = self._request(prompt, asked)
            prepared(self.speaker.loaded, [request])
            job.request = request
        except (RequestError, TokenizerError) as problem:
            job.end({"error": str(problem)})
        return job

    def _request(self, prompt: Any, own: Mapping[str, Any]) -> Request:
        own = {name: value for name, value in own.items() if name in Options.__annotations__}
        if "logit_bias" in own:
            own["logit_bias"] = _biases(own["logit_bias"])
        options: Any = {**self.asked, **own}
        return self.speaker.request(prompt, **options)

    def _begin(self, job: _Job, alone: bool) -> bool:
        """Gives its request to the scheduler; False where it has to wait for room."""
        if job.request is None:
            return True
        try:
            job.task = submit(self._serving, job.request, {}, shares=True)
            self.read += len(job.request.prompt)
        except CapacityError as problem:
            if not alone:  # the memory that is not free is that of others, which will end
                return False
            job.end({"error": str(problem)})
        return True


def _id(given: Any) -> str | int | None:
    if given is None or (isinstance(given, str | int) and not isinstance(given, bool)):
        return given
    raise RequestError(f"id is {given!r}; it must be a text or a whole number.")


# the output


class Output:
    """Where answers are written, a line each, at once.

    `lines` are in it, of which it held `kept` before; `failed` have an error, the first `problem`.
    """

    def __init__(self, file: BinaryIO, resumes: bool = False):
        self.file = file
        self.lines = self.kept = self.failed = 0
        self.problem = ""
        self._end = 0 if resumes else None  # bytes that are kept

    def resume(self, lines: Iterator[Line], name: Path) -> Iterator[Line]:
        """Compares what there is with the input; the lines that are not answered. Nothing changes yet."""
        end = 0
        for text in self.file:
            line = next(lines, None)
            if line is None:
                raise RequestError(
                    f"{name} holds more lines than the input, which has {self.lines:,}: {_ELSEWHERE}"
                )
            data = _whole(text)
            if data is None and self.file.read(1) == b"" and _torn(text, line):
                return chain([line], lines)
            if data is None or {key: data.get(key) for key in line.named} != line.named:
                raise RequestError(
                    f"Line {self.lines + 1:,} of {name} is no answer to that line of the input: {_ELSEWHERE}"
                )
            self._count(data)
            self.kept, end = self.lines, end + len(text)
            self._end = end
        return lines

    def begin(self) -> None:
        """Cuts off what is not kept."""
        if self._end is not None:
            self.file.seek(self._end)
            self.file.truncate()

    def write(self, data: Mapping[str, Any]) -> None:
        # a half character, which no UTF-8 can hold, is then written as JSON does, as \ud800
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        self.file.write(text + b"\n")
        self.file.flush()
        self._count(data)

    def _count(self, data: Mapping[str, Any]) -> None:
        self.lines += 1
        problem = error(data)
        if problem is not None:
            self.failed += 1
            self.problem = self.problem or f"line {data['line']:,}: {problem}"


_ELSEWHERE = "write to another file, or begin anew with --overwrite."


def _whole(text: bytes) -> dict[str, Any] | None:
    """The object of a line that was written to its end; None of any other."""
    try:
        data = json.loads(text) if text.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _torn(text: bytes, line: Line) -> bool:
    """Whether this may be the beginning of the line's answer: a file that is not ours is not to be cut."""
    head = json.dumps(line.named).removesuffix("}").encode()
    text = text.rstrip(b"\n\0")  # a machine that stopped may have left zeros
    return text.startswith(head) or head.startswith(text)


@contextmanager
def opened(
    source: Path | BinaryIO, output: Path | BinaryIO, overwrite: bool = False
) -> Iterator[tuple[Iterator[Line], Output]]:
    """The lines that are to be answered, and where to; of an output that is a file what it has is kept.

    Nothing is changed before `Output.begin`. Raises SourceError for what cannot be opened, and
    RequestError where the output holds something else than answers to this input.
    """
    with ExitStack() as stack:
        read = stack.enter_context(_open(source, "rb")) if isinstance(source, Path) else source
        given = lines(read)
        if not isinstance(output, Path):
            yield given, Output(output)
            return
        if isinstance(source, Path) and output.exists() and output.samefile(source):
            raise RequestError(f"{output} is the input as well: write to another file.")
        # what is no file, such as a pipe, has nothing to go on after
        resumes = output.is_file() or not output.exists()
        mode = "wb" if not resumes else "r+b" if output.exists() else "w+b"
        found = Output(stack.enter_context(_open(output, mode)), resumes)
        if resumes and not overwrite:
            given = found.resume(given, output)
        yield given, found


def _open(path: Path, mode: str) -> BinaryIO:
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as problem:
        what = "read" if mode == "rb" else "written"
        raise SourceError(f"{path} cannot be {what}: {problem.strerror}.") from None
