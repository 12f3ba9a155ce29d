"""Bibles as SWORD packs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.claims.sword import verses
from qkv.errors import SourceError
from tests.claims.bibles import write


def test_verses_come_in_their_order_whatever_block_they_are_in(tmp_path: Path) -> None:
    write(tmp_path / "b", [[["one", "", "two"], ["trés"]], [["four"]]])
    assert verses(tmp_path / "b") == ["one", "", "two", "trés", "four"]


def test_markup_goes_and_with_it_notes_and_titles(tmp_path: Path) -> None:
    marked = '<title type="main">A psalm</title><note osisID="x"/><w lemma="G1">In  the</w> '
    marked += '<note n="1">or: at</note>beginning'
    write(tmp_path / "b", [[[marked + "<milestone/>\n God."]], [["<q who='x'>Go</q>"]]])
    assert verses(tmp_path / "b") == ["In the beginning God.", "Go"]


@pytest.mark.parametrize("end", [".bzs", ".bzz", ".bzv"])
def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path, end: str) -> None:
    write(tmp_path / "b", [[["one"]], [["two"]]])
    file = (tmp_path / "b" / "nt").with_suffix(end)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(SourceError, match=r"nt\.bzv, \.bzs and \.bzz are no zText module"):
        verses(tmp_path / "b")
    file.unlink()
    with pytest.raises(SourceError, match="are no zText module"):
        verses(tmp_path / "b")
