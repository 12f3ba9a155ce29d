"""What tests of documents share: their code, what it prints, and their links."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from tests.support import ROOT


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fenced(name: str) -> list[tuple[str, str]]:
    """Every fenced block of a document: its language, "" where it names none, and its text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", read(name), re.M | re.S)


def blocks(name: str, language: str = "") -> list[str]:
    return [text for given, text in fenced(name) if given == language]


def without_comments(code: str) -> list[str]:
    """Lines without what may be in another language. No text in the documents' code has a #."""
    return [line.split("#")[0].rstrip() for line in code.splitlines()]


def printed(code: str, scope: dict[str, Any]) -> str:
    """What a block prints when it runs after those that left `scope`."""
    out = StringIO()
    with redirect_stdout(out):
        exec(code, scope)
    return out.getvalue()


def links(text: str) -> list[tuple[str, str]]:
    """The words and the target of every link."""
    return re.findall(r"\[([^\]]*)\]\(([^)]+)\)", text)
