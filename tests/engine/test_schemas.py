"""What cannot be held to is refused, at once: schemas, regular expressions and choices."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.engine import schemas
from qkv.errors import RequestError
from qkv.model import Model
from tests.engine.tiny import tiny, word

PROMPT = [word("hello"), word("AB")]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(runtime="numpy")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def circle() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name enclosed in double quotes"),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema is not JSON: NaN is no number there."),
    ({"json_schema": "[" * 90_000}, "json_schema is nested more than 64 deep."),
    ({"json_schema": "x" * 100_001}, "json_schema has 100,001 characters; 100,000 are the most."),
    ({"json_schema": {"enum": ["x" * 100_000]}}, "json_schema has 100,014 characters; 100,000 are the most."),
    ({"json_schema": nested(65)}, "json_schema is nested more than 64 deep."),
    ({"json_schema": circle()}, "json_schema is nested more than 64 deep."),
    ({"json_schema": {"const": {1, 2}}}, "json_schema cannot be written as JSON: Object of type set"),
    ({"json_schema": False}, "json_schema must be an object, its JSON text, or true for any object."),
    ({"json_schema": [1]}, "json_schema must be an object, its JSON text, or true for any object."),
    ({"json_schema": {"minLenght": 3}}, "json_schema: the keyword 'minLenght' is not known"),
    ({"json_schema": {"items": {"x-guidance": {"lenient": True}}}}, "json_schema: the keyword 'x-guidance'"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema: the keyword 'uniqueItems'"),
    ({"json_schema": {"type": "string", "format": "odd"}}, "json_schema cannot be used: Unknown format: odd"),
    (
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        "json_schema cannot be used: Unsatisfiable schema: minimum (5) is greater than maximum (3).",
    ),
    ({"json_schema": {"type": "odd"}}, "json_schema cannot be used: Invalid type: odd."),
    ({"json_schema": {"enum": []}}, "json_schema cannot be used: Unsatisfiable schema: "),
    ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema cannot be used: Pointer '/$defs/x' does"),
    ({"json_schema": {"$ref": "http://a.b/c"}}, "json_schema cannot be used: Resource 'http://a.b/c'"),
    ({"json_schema": ENDLESS}, "json_schema: # holds itself whatever is chosen, so no text that"),
    ({"json_schema": {"type": "string", "pattern": "a{1,100000}"}}, "json_schema: pattern repeats a part"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "json_schema cannot be used: look-around, "),
    ({"regex": ""}, "regex must be a text that is not empty."),
    ({"regex": 5}, "regex must be a text that is not empty."),
    ({"regex": "("}, "regex cannot be used: unclosed group."),
    ({"regex": "a\\"}, "regex ends in a lone backslash."),
    ({"regex": "(?<=a)b"}, "regex cannot be used: look-around, including look-ahead and look-behind, is not"),
    ({"regex": r"(a)\1"}, "regex cannot be used: backreferences are not supported."),
    ({"regex": "a{1,100000}"}, "regex repeats a part more than 10,000 times."),
    ({"regex": "a{99999999999999999999}"}, "regex repeats a part more than 10,000 times."),
    ({"regex": "a" * 10_001}, "regex has 10,001 characters; 10,000 are the most."),
    ({"regex": "(" * 4000 + ")" * 4000}, "regex cannot be used: "),
    ({"regex": r"[^\s\S]"}, "regex: no token can follow, so no text of the model satisfies it."),
    ({"regex": "\ud800"}, "regex holds half a character (a lone surrogate)."),
    ({"choice": "yes"}, "choice must be a list of texts, none of them empty."),
    ({"choice": []}, "choice must be a list of texts, none of them empty."),
    ({"choice": ["a", ""]}, "choice must be a list of texts, none of them empty."),
    ({"choice": ["a" * 50_001] * 2}, "choice has 100,002 characters; 100,000 are the most."),
    ({"choice": ["\ud800"]}, "choice holds half a character (a lone surrogate)."),
    ({"choice": ["a"], "regex": "a"}, "regex and choice are given, and an answer follows one of them: "),
    ({"choice": ["a"], "ignore_eos": True}, "ignore_eos has an answer go on where its constraint ends it"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_held_to_is_refused(model: Model, options: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model.generate(PROMPT, **options)
    assert str(problem.value).startswith(sentence)
    assert str(problem.value).endswith((".", "?)")) and len(str(problem.value)) < 300


LISTS = {"type": "array", "minItems": 1}


def catastrophes() -> list[dict[str, Any]]:
    """What takes other engines for ever: each is refused, or served."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(40)]} for i in range(40)}
    pairs = [
        {"anyOf": [{"properties": {c: {"type": t}}} for t in ("null", "string")]} for c in "abcdefghijklmnop"
    ]
    return [
        {"regex": "(a+)+b"}, {"regex": "(a|a)*b"}, {"regex": "(.*)*(.*)*x"}, {"regex": "(x{1,1000}){1,1000}"},
        {"regex": "[ab]*a[ab]{300}"}, {"json_schema": {"allOf": pairs}}, {"json_schema": {"$defs": chain}},
        {"json_schema": {"type": "string", "minLength": 10**9}}, {"json_schema": nested(60)},
        {"json_schema": {"type": "array", "minItems": 10**9}}, {"choice": [f"v{i}" for i in range(9_000)]},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(3_000)}}},
    ]  # fmt: skip


@pytest.mark.timeout(60)  # each takes a second at most
@pytest.mark.parametrize("asked", catastrophes(), ids=lambda asked: str(asked)[:40])
def test_no_constraint_takes_long(model: Model, asked: Any) -> None:
    try:
        done: Any = model.generate([PROMPT], max_new_tokens=5, **asked)
    except RequestError:
        return
    assert done[0].finish_reason in ("stop", "length", "error")


@pytest.mark.parametrize("endless", [
    {"$ref": "#"},
    {"anyOf": [False, {"$ref": "#"}]},
    {"items": {"$ref": "#"}, **LISTS},
    {"allOf": [{"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}]},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"prefixItems": [{"$ref": "#"}], **LISTS}}},
], ids=str)  # fmt: skip
def test_schemas_without_end_are_found(endless: Any) -> None:
    with pytest.raises(RequestError, match="holds itself whatever is chosen"):
        schemas.parsed(endless)


@pytest.mark.parametrize("ending", [
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "null"}}},
], ids=str)  # fmt: skip
def test_schemas_with_an_end_are_taken(ending: Any) -> None:
    assert schemas.parsed(ending) == ending
