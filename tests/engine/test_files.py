"""Lines of a file: each answered as if it were alone, in order, and gone on with after any break."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkv.engine import files, limits
from qkv.engine.files import Line, Output, Run
from qkv.engine.scheduler import Scheduler
from qkv.errors import CapacityError, QkvError, RequestError, SourceError, UnsupportedError
from qkv.model import Model
from qkv.runtime.built import missing
from qkv.spec import PooledEmbedding
from tests.engine.test_scheduler_programs import machine_of
from tests.engine.tiny import spec, tiny, word

SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model() -> Iterator[Model]:
    """A model that numpy runs; whatever happened, no sequence may be left of it."""
    made = tiny(runtime="numpy")
    yield made
    assert not machine_of(made).kept.slots
    assert "program" not in made.loaded.serving or made.loaded.serving["program"].idle


def raw(*values: Any) -> list[bytes]:
    """Lines of a file: bytes as they are, other values as JSON."""
    return [value if isinstance(value, bytes) else _written(value) for value in values]


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def answered(model: Model, *values: Any, **asked: Any) -> list[dict[str, Any]]:
    return list(Run(model, files.lines(raw(*values)), asked).answers())


def assert_answers(found: dict[str, Any], expected: Any) -> None:
    """That a line holds what the model gives alone."""
    each = found.get("answers", [found])
    one_by_one = expected if isinstance(expected, list) else [expected]
    assert len(each) == len(one_by_one)
    for data, done in zip(each, one_by_one, strict=True):
        assert (data["text"], data["tokens"], data["finish_reason"]) == (
            done.text,
            done.tokens,
            done.finish_reason,
        )
        assert data["logprobs"] == pytest.approx(done.logprobs, abs=1e-5)
        assert data.get("score") == pytest.approx(done.score, abs=1e-5)
        assert [[token for token, _ in top] for top in data.get("top_logprobs", [])] == [
            [token for token, _ in top] for top in done.top_logprobs
        ]


# What a line asks for


def test_every_line_is_answered_in_order_as_if_it_were_alone(model: Model) -> None:
    """The first is the longest, so that all others are done before it."""
    own: list[dict[str, Any]] = [
        {"prompt": "ABC", "max_new_tokens": 40},
        {"prompt": "hello", "temperature": 1.0, "seed": 3},
        {"prompt": [3, 4, 5], "n": 2, "seed": 5, "top_p": 0.9},
        {"prompt": "x" * 40, "beams": 3, "n": 2, "length_penalty": 0.5},
        {"prompt": "GHI", "max_new_tokens": 1, "top_logprobs": 2, "logprobs": "processed"},
        {"prompt": "ABAB", "stop": ["a", "\n"], "repetition_penalty": 1.2},
        *({"prompt": f"number {i}", "max_new_tokens": 12 - i} for i in range(9)),
    ]
    asked: Any = {"max_new_tokens": 9, "ignore_eos": True}
    found = answered(model, *own, **asked)
    assert [data["line"] for data in found] == list(range(1, len(own) + 1))
    assert ["answers" in data for data in found[:5]] == [False, False, True, True, False]
    for line, data in zip(own, found, strict=True):
        options = {**asked, **line}
        assert_answers(data, model.generate(options.pop("prompt"), **options))


def test_a_line_may_be_a_text_a_conversation_or_an_object_with_a_name(model: Model) -> None:
    text, talk, named, ids = answered(
        model, "ABC", {"messages": SAID, "id": 7}, {"prompt": "é", "id": "a\n"}, {"prompt": [1], "id": None}
    )
    for data, prompt in ((text, "ABC"), (talk, model.chat(SAID)), (named, "é"), (ids, [1])):
        assert_answers(data, model.generate(prompt))
    assert (talk["id"], named["id"]) == (7, "a\n") and "id" not in text | ids


def test_a_lines_own_options_are_over_those_of_all(model: Model) -> None:
    """Null is the model's own default; a bias names a token by its id or its text."""
    asked: Any = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 5.0, "seed": 1}
    same, greedy, biased = answered(
        model,
        "ABC",
        {"prompt": "ABC", "temperature": None, "seed": None, "max_new_tokens": 4},
        {"prompt": "ABC", "logit_bias": {"DE": 300, str(word("GH")): 299}, "top_logprobs": 2},
        **asked,
    )
    assert_answers(same, model.generate("ABC", **asked))
    assert_answers(greedy, model.generate("ABC", max_new_tokens=4, ignore_eos=True))
    pair = {word("DE"), word("GH")}
    assert set(biased["tokens"]) <= pair and len(biased["tokens"]) == 3
    alone = model.generate("ABC", logit_bias={"DE": 300.0, word("GH"): 299.0}, top_logprobs=2, **asked)
    assert_answers(biased, alone)


def test_marks_and_line_ends_of_other_systems_are_no_part_of_a_line(model: Model) -> None:
    first, second, last = answered(model, b'\xef\xbb\xbf"ABC"\r\n', b'"ABC"\r\n', b'"ABC"', max_new_tokens=2)
    assert first["tokens"] == second["tokens"] == last["tokens"]
    assert second["input"] == last["input"] == "0fd3038f8a66ebe5"  # echo -n '"ABC"' | sha256sum


WRONG: list[tuple[Any, str]] = [
    (b"\n", "The line is not JSON (Expecting value): it must be a text in quotes, or an object with"),
    (b"ABC\n", "not JSON (Expecting value)"),
    (b'{"prompt": "a"\n', "not JSON (Expecting ',' delimiter)"),
    (b'"\xff"\n', "The line is not UTF-8 text."),
    (b"[" * 100_000 + b"\n", "not JSON (maximum recursion depth"),
    (b'{"prompt": "a", "seed": ' + b"1" * 40 + b"}\n", "not JSON (a number of more than 30 digits)"),
    ([1, 2], "The line is neither a text nor an object"),
    (None, "neither a text nor an object"),
    ({"prompt": "a", "promt": "b"}, "There is no key 'promt' (beams, "),
    ({"prompt": "a", "features": [1]}, "There is no key 'features'"),
    ({"id": 1}, 'must have "prompt" or "messages", and has neither.'),
    ({"prompt": "a", "messages": SAID}, 'must have "prompt" or "messages", and has both.'),
    ({"prompt": "a", "id": 1.5}, "id is 1.5; it must be a text or a whole number."),
    ({"prompt": "a", "id": True}, "id is True"),
    ("", "The prompt is empty"),
    ({"prompt": []}, "The prompt is empty"),
    ({"prompt": [1, 2.5]}, "A prompt must be text or token ids"),
    ({"prompt": [9999]}, "Token 9999, at place 0"),
    ({"prompt": {"text": "a"}}, "A prompt must be text or token ids"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"messages": "hi"}, "A conversation is a list of messages"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1"),
    ({"prompt": "a", "max_new_tokens": 10**29}, "needs"),
    ({"prompt": "a", "logit_bias": {"7": 1, "07": 2}}, "logit_bias names a token twice."),
]


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[part for _, part in WRONG])
def test_a_wrong_line_has_its_sentence_and_is_not_the_end(model: Model, line: Any, part: str) -> None:
    before, wrong, after = answered(model, "ABC", line, "ABC", max_new_tokens=2)
    assert part in wrong.pop("error") and wrong.keys() <= {"line", "input", "id"} and wrong["line"] == 2
    assert before["tokens"] == after["tokens"] == model.generate("ABC", max_new_tokens=2).tokens  # type: ignore[union-attr]


def test_a_wrong_line_keeps_its_name(model: Model) -> None:
    (data,) = answered(model, {"prompt": "a", "colour": 1, "id": "x"})
    assert data["id"] == "x" and "error" in data


ODD = [None, True, False, 0, -1, 1.5, 1e300, 10**29, "", "x", [], [[]], [None], {}, {"a": []}]


@pytest.mark.parametrize("key", sorted({"prompt", "messages", "id", *files.Options.__annotations__}))
def test_no_value_of_any_key_ends_the_run(model: Model, key: str) -> None:
    """Each line has an answer, or a sentence that is no Python error's."""
    found = answered(model, *({"prompt": "a", key: value} for value in ODD), max_new_tokens=1)
    assert len(found) == len(ODD)
    for data in found:
        assert len({"error", "text", "answers"} & data.keys()) == 1
        json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("asked", [{"temperature": -1}, {"length_penalty": 2.0}, {"colour": 1}], ids=str)
def test_what_is_wrong_for_all_lines_is_said_at_once(model: Model, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        Run(model, files.lines(raw("ABC")), asked)


def test_a_model_that_cannot_generate_is_refused_at_once() -> None:
    described = spec()
    network = tiny(runtime="numpy")
    network.spec = type(described)(decoder=described.decoder, head=PooledEmbedding())
    with pytest.raises(UnsupportedError, match="no language head"):
        Run(network, files.lines(raw("ABC")), {})


def test_an_answer_that_breaks_off_is_a_failed_line(model: Model) -> None:
    """Every token forbidden: nothing to choose from. A search then has one answer of two."""
    line = {"prompt": "a", "logit_bias": {str(token): -1e400 for token in range(model.loaded.vocab)}}
    alone, several, search = answered(model, line, line | {"n": 2}, line | {"n": 2, "beams": 2})
    assert alone["finish_reason"] == "error" and files.error(alone) == alone["error"]
    assert files.error(several) == several["answers"][1]["error"] == alone["error"]
    assert [data["error"] for data in search["answers"]] == [alone["error"]]
    assert files.error({"text": "", "answers": [{"text": ""}]}) is None


# How many at once


def test_lines_are_read_as_they_are_needed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests with the scheduler, eight lines in memory, though the first of forty is long."""
    monkeypatch.setattr(files, "AHEAD", 3)
    monkeypatch.setattr(files, "HELD", 8)
    step, most, taken, given = Scheduler.step, 0, 0, 0
    counts = [30, *(1 + i % 5 for i in range(39))]

    def counted(serving: Scheduler) -> bool:
        nonlocal most
        most = max(most, len(serving.waiting) + len(serving.running))
        return step(serving)

    def reading() -> Iterator[bytes]:
        nonlocal taken
        for line in raw(*({"prompt": "ABC", "max_new_tokens": count} for count in counts)):
            taken += 1
            yield line

    monkeypatch.setattr(Scheduler, "step", counted)
    ahead = 0
    for data in Run(model, files.lines(reading()), {"ignore_eos": True}).answers():
        assert len(data["tokens"]) == counts[given]
        ahead, given = max(ahead, taken - given), given + 1
    assert (most, ahead, given) == (3, 8, 40)
    assert [data["line"] for data in answered(model, *[b"not JSON\n"] * 30)] == list(range(1, 31))


def test_a_long_line_does_not_keep_others_waiting(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: beside fifty tokens of the first, nine lines of five, one after the other."""
    monkeypatch.setattr(files, "AHEAD", 2)
    long = {"prompt": "ABC", "max_new_tokens": 50}
    found = answered(model, long, *["ABC"] * 9, max_new_tokens=5, ignore_eos=True)
    assert [len(data["tokens"]) for data in found] == [50, *[5] * 9]
    assert model.loaded.serving["program"].steps == 50


def test_a_line_waits_for_memory_that_others_hold(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not fit even alone is refused; the others are as if there were no limit."""
    submit, waited = Scheduler.submit, []

    def crowded(serving: Scheduler, request: Any, **named: Any) -> Any:
        busy = bool(serving.waiting or serving.running)
        if busy or request.max_new_tokens > 100:
            waited.append(busy)
            raise CapacityError("There is no room.")
        return submit(serving, request, **named)

    monkeypatch.setattr(Scheduler, "submit", crowded)
    found = answered(model, "ABC", {"prompt": "a", "max_new_tokens": 200}, "GHI", max_new_tokens=3)
    assert (found[1]["error"], waited.count(False)) == ("There is no room.", 1) and True in waited
    monkeypatch.undo()
    assert [found[0]["tokens"], found[2]["tokens"]] == [
        done.tokens
        for done in model.generate(["ABC", "GHI"], max_new_tokens=3)  # type: ignore[union-attr]
    ]


def test_memory_that_is_short_for_all_is_said_on_each_line(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda device: 2 * 9 * 192)
    fits, not_so = answered(model, {"prompt": [3], "max_new_tokens": 2}, "ABC", max_new_tokens=99)
    assert len(fits["tokens"]) == 2 and "A cache of 99 tokens needs 0 MB" in not_so["error"]


def test_a_run_that_is_closed_or_fails_holds_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ({"prompt": "ABC", "max_new_tokens": 1 + i} for i in range(9))
    run = Run(model, files.lines(raw(*values)), {"ignore_eos": True})
    several = run.answers()
    next(several)
    assert not model.loaded.serving["program"].idle
    several.close()
    assert model.loaded.serving["program"].idle

    def full(rows: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(machine_of(model), "run", full)
    with pytest.raises(MemoryError):
        answered(model, "ABC", "ABC")


def test_tokens_are_counted_as_they_are_made(model: Model) -> None:
    told: list[int] = []
    values = ({"prompt": "ABC", "n": n, "seed": 1} for n in (1, 2, 3))
    run = Run(model, files.lines(raw(*values, "AB")), {"max_new_tokens": 4, "ignore_eos": True})
    list(run.answers(told.append))
    assert told == [7, 14, 21, 28] and (run.tokens, run.read) == (28, 4)


# The output


MANY = [
    {"prompt": "ABC", "max_new_tokens": 5},
    {"prompt": "hello", "temperature": 1.0, "seed": 4, "id": "é\ud800"},
    b"no JSON\n",
    {"prompt": "x", "n": 2, "seed": 1, "max_new_tokens": 1},
    "GHI",
]
ASKED: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True}


class Files:
    """An input, and an output that a run writes."""

    def __init__(self, folder: Path, model: Model, *values: Any):
        self.input, self.output, self.model = folder / "in.jsonl", folder / "out.jsonl", model
        self.input.write_bytes(b"".join(raw(*values)))

    def run(self, overwrite: bool = False) -> Output:
        with files.opened(self.input, self.output, overwrite) as (lines, output):
            run = Run(self.model, lines, ASKED)
            output.begin()
            for data in run.answers():
                output.write(data)
                assert self.held().count(b"\n") == output.lines  # at once, for those who read along
        return output

    def held(self) -> bytes:
        return self.output.read_bytes()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose numbers are the same whatever else runs; numpy's are where nothing does."""
    if missing() is not None:
        monkeypatch.setattr(files, "AHEAD", 1)
    return tiny(runtime="native" if missing() is None else "numpy")


def test_what_is_written_is_a_line_each(tmp_path: Path, model: Model) -> None:
    there = Files(tmp_path, model, *MANY)
    done = there.run()
    each = [json.loads(line) for line in there.held().decode().removesuffix("\n").split("\n")]
    assert [data["line"] for data in each] == [1, 2, 3, 4, 5]
    assert each[1]["id"] == "é\ud800" and "é\\ud800".encode() in there.held()
    assert (done.lines, done.kept, done.failed) == (5, 0, 1)
    assert done.problem.startswith("line 3: The line is not JSON")


def test_a_run_goes_on_wherever_it_was_broken_off(tmp_path: Path, exact: Model) -> None:
    """The output cut at every byte of its last two lines, and at every line before."""
    there = Files(tmp_path, exact, *MANY)
    there.run()
    whole = there.held()
    ends = [at + 1 for at in range(len(whole)) if whole[at : at + 1] == b"\n"]
    for cut in (0, *ends[:2], *range(ends[-3], len(whole) + 1)):
        there.output.write_bytes(whole[:cut])
        done = there.run()
        assert there.held() == whole, cut
        assert done.kept == sum(end <= cut for end in ends)
        assert (done.lines, done.failed) == (5, 1) and done.problem.startswith("line 3: ")


@pytest.mark.parametrize("tail", [b"\n", b"\0" * 9, b'"', b'", "text": \n', b"\0\n"])
def test_a_torn_end_is_cut_off(tmp_path: Path, exact: Model, tail: bytes) -> None:
    """Such as a machine leaves that stopped: the beginning of a line, then zeros, or a line break."""
    there = Files(tmp_path, exact, *MANY)
    there.run()
    whole = there.held()
    digest = whole.rindex(b'"input": "') + len(b'"input": "')
    there.output.write_bytes(whole[: digest + 16] + tail)
    assert there.run().kept == 4
    assert there.held() == whole


def test_after_an_interrupt_at_any_step_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: Model
) -> None:
    there = Files(tmp_path, exact, *MANY)
    there.run()
    whole, step, after = there.held(), Scheduler.step, -1

    def interrupted(serving: Scheduler) -> bool:
        nonlocal after
        after -= 1
        if after == 0:
            raise KeyboardInterrupt
        return step(serving)

    monkeypatch.setattr(Scheduler, "step", interrupted)
    monkeypatch.setattr(files, "AHEAD", 1)
    kept = []
    for steps in range(1, 11):  # 5 + 2 + 1 + 2 tokens
        after = steps
        with pytest.raises(KeyboardInterrupt):
            there.run(overwrite=True)
        assert whole.startswith(there.held()) and there.held()[-1:] in (b"", b"\n")
        kept.append(there.run().kept)
        assert there.held() == whole
    assert kept == [0] * 5 + [1] * 2 + [3] + [4] * 2


def test_what_answers_another_input_is_refused_and_left_as_it_is(tmp_path: Path, model: Model) -> None:
    there = Files(tmp_path, model, *MANY)
    there.run()
    whole = there.held()
    changed = [*MANY[:1], "another", *MANY[2:]]
    there.input.write_bytes(b"".join(raw(*changed)))
    for held in (whole, whole[: whole.index(b'"text"', 300) - 1]):  # also where that line is torn
        there.output.write_bytes(held)
        with pytest.raises(RequestError, match=r"Line 2 of .*out.jsonl is no answer to that line of the"):
            there.run()
        assert there.held() == held
    there.input.write_bytes(b"".join(raw(*MANY[:3])))
    there.output.write_bytes(whole)
    with pytest.raises(RequestError, match=r"out.jsonl holds more lines than the input, which has 3: write"):
        there.run()
    assert there.held() == whole
    done = there.run(overwrite=True)
    assert (done.kept, done.lines) == (0, 3) and len(there.held()) < len(whole)


@pytest.mark.parametrize("text", [b"My notes.", b"My notes.\n", b"{}\n", b'{"line": 1', b'{"line": 2}\n'])
def test_a_file_that_is_something_else_is_not_cut(tmp_path: Path, model: Model, text: bytes) -> None:
    there = Files(tmp_path, model, *MANY)
    there.output.write_bytes(text)
    if text == b'{"line": 1':  # as an answer begins
        assert there.run().lines == 5
        return
    with pytest.raises(RequestError, match="Line 1 of"):
        there.run()
    assert there.held() == text


def test_a_line_in_the_middle_that_is_damaged_is_not_passed_over(tmp_path: Path, model: Model) -> None:
    there = Files(tmp_path, model, *MANY)
    there.run()
    damaged = there.held().replace(b'"finish_reason"', b'"finish_reason', 1)
    there.output.write_bytes(damaged)
    with pytest.raises(RequestError, match="Line 1 of"):
        there.run()
    assert there.held() == damaged


def test_the_input_is_never_the_output(tmp_path: Path, model: Model) -> None:
    there = Files(tmp_path, model, *MANY)
    whole = there.input.read_bytes()
    (tmp_path / "link").symlink_to(there.input)
    for output in (there.input, tmp_path / "link"):
        there.output = output
        with pytest.raises(RequestError, match="is the input as well: write to another file"):
            there.run(overwrite=True)
    assert there.input.read_bytes() == whole


def test_files_that_cannot_be_opened(tmp_path: Path, model: Model) -> None:
    there = Files(tmp_path, model, *MANY)
    for name, path in (("input", tmp_path / "missing"), ("output", tmp_path / "missing" / "out")):
        before = getattr(there, name)
        setattr(there, name, path)
        with pytest.raises(SourceError, match=r"cannot be (read|written): No such file or directory\."):
            there.run()
        setattr(there, name, before)
    there.output = tmp_path
    with pytest.raises(QkvError, match=r"cannot be written: Is a directory\."):
        there.run()


def test_what_is_no_file_is_written_from_the_start() -> None:
    written = io.BytesIO()
    with files.opened(io.BytesIO(b'"a"\n"b"'), written) as (lines, output):
        assert list(lines) == [Line(1, b'"a"'), Line(2, b'"b"')]
        output.begin()
        output.write({"line": 1, "error": "a"})
        output.write({"line": 2, "error": "b"})
    assert written.getvalue() == b'{"line": 1, "error": "a"}\n{"line": 2, "error": "b"}\n'
    assert (output.lines, output.kept, output.failed, output.problem) == (2, 0, 2, "line 1: a")
    with files.opened(io.BytesIO(b""), Path("/dev/null")) as (lines, output):
        output.begin()
        assert list(lines) == []


def test_lines_are_counted_where_they_can_be_read_twice(tmp_path: Path) -> None:
    (tmp_path / "three").write_bytes(b"a\n\nb")
    assert files.count(tmp_path / "three") == 3
    assert files.count(io.BytesIO(b"a\n")) is None and files.count(Path("/dev/null")) is None
