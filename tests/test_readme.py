"""The README's Python runs as printed, and both languages hold the same code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.documents import blocks, read, without_comments
from tests.support import ROOT


def test_the_python_in_the_readme_runs(smollm2_file: Path) -> None:
    scope: dict[str, Any] = {}
    for code in blocks("README.md", "python"):
        exec(code, scope)
    assert scope["model"].parameters() == 134_515_008
    assert scope["changed"].shape == scope["logits"].shape


def test_both_readmes_hold_the_same_commands_and_code() -> None:
    for language in ("python", ""):
        english, chinese = blocks("README.md", language), blocks("README.zh.md", language)
        assert len(english) == len(chinese)
        if language == "python":
            assert [without_comments(a) for a in english] == [without_comments(b) for b in chinese]


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", read("README.md"), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
