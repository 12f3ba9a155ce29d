"""The documents on the two notes: nothing left out, no link that leads nowhere, no output that is not so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qkv.claims.registry import CLAIMS, chosen
from tests.documents import blocks, fenced, links, printed, read, without_comments
from tests.support import ROOT

NOTES = ["docs/notes.md", "docs/notes.zh.md"]
CHECKLISTS = ["docs/checklist.md", "docs/checklist.zh.md"]
ERRATA = {f"E{number}" for number in range(1, 36)}


class Row(NamedTuple):
    number: int
    says: str
    code: str
    shown: str

    @property
    def errata(self) -> list[str]:
        return re.findall(r"\*\*(E\d+)\*\*", self.says)

    @property
    def claims(self) -> list[str]:
        return re.findall(r"\bH\d+\b", self.shown)


def rows(name: str) -> list[Row]:
    found = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", read(name), re.M)
    return [Row(int(number), *cells) for number, *cells in found]


@cache
def defined(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


# --- the notes, row by row --------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTES)
def test_all_143_items_have_a_row_in_order(name: str) -> None:
    assert [row.number for row in rows(name)] == list(range(1, 144))


@pytest.mark.parametrize("name", NOTES)
def test_every_row_but_the_closing_note_has_code_and_what_shows_it(name: str) -> None:
    for row in rows(name)[:-1]:
        assert links(row.code), row.number
        assert links(row.shown), row.number
        assert {target.split("/")[1] for _, target in links(row.code)} == {"src"}, row.number


@pytest.mark.parametrize("name", NOTES)
def test_every_error_of_the_notes_is_corrected(name: str) -> None:
    assert {error for row in rows(name) for error in row.errata} == ERRATA


def test_both_languages_have_the_same_links_errors_and_claims() -> None:
    for english, chinese in zip(*map(rows, NOTES), strict=True):
        assert links(english.code) == links(chinese.code), english.number
        tests = [[link for link in links(row.shown) if link[1].endswith(".py")] for row in (english, chinese)]
        assert tests[0] == tests[1], english.number
        assert (english.errata, english.claims) == (chinese.errata, chinese.claims), english.number
        assert ("not yet" in english.code) == ("尚未实现" in chinese.code), english.number


@pytest.mark.parametrize("name", NOTES)
def test_the_headings_are_those_of_the_notes_in_their_order(name: str, shared_folder: Path) -> None:
    theirs = []
    for file in sorted((shared_folder / "notes").glob("*.txt")):
        theirs += re.findall(r"^(\S.*)#$", file.read_text(encoding="utf-8"), re.M)
    ours = re.findall(r"^#{3,4} (.+?)(?: – .+)?$", read(name), re.M)
    assert len(theirs) > 30 and ours == theirs


# --- links and claims -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTES + CHECKLISTS)
def test_links_lead_to_files_and_code_links_to_what_they_name(name: str) -> None:
    found = links(read(name))
    assert found
    for words, target in found:
        file = (ROOT / name).parent / target
        assert file.is_file(), target
        if file.suffix == ".py":
            assert words.strip("`") in defined(file), f"{words} is not in {target}"


@pytest.mark.parametrize("name", NOTES + CHECKLISTS)
def test_claims_that_are_named_exist_and_have_their_number(name: str) -> None:
    named = re.findall(r"`qkv reproduce ([a-zA-Z][\w-]*)`(?: \((H\d+)\))?", read(name))
    assert named
    for claim, number in named:
        (found,) = chosen([claim])
        assert not number or (found.name, found.number) == (claim, number)
    assert {claim for claim, _ in named} & set(CLAIMS)


# --- the checklist ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKLISTS)
def test_the_checklist_answers_each_of_its_items_once_with_code_and_output(name: str) -> None:
    sections = re.findall(r"^### (\d+) .+?\n(.*?)(?=^##|\Z)", _without_code(name), re.M | re.S)
    assert [int(number) for number, _ in sections] == [*range(136, 143), *range(131, 136), *range(122, 131)]
    for number, text in sections:
        assert re.findall(r"<(python|text)>", text) == ["python", "text"], number


def _without_code(name: str) -> str:
    """The document with each block as <language>: a # in code is no heading."""
    return re.sub(r"^```(\w*)\n.*?^```$", r"<\1>", read(name), flags=re.M | re.S)


def test_the_checklist_prints_what_it_shows(smollm2_file: Path) -> None:
    scope: dict[str, Any] = {}
    said = ""
    for language, text in fenced("docs/checklist.md"):
        if language == "python":
            said = printed(text, scope)
        elif language == "text":
            assert text == said
            said = ""
    assert said == "", "the last block prints what is not shown"


def test_both_checklists_hold_the_same_code_and_output() -> None:
    english, chinese = CHECKLISTS
    assert [without_comments(code) for code in blocks(english, "python")] == [
        without_comments(code) for code in blocks(chinese, "python")
    ]
    assert blocks(english, "text") == blocks(chinese, "text")
