"""Pages: their parts, what is escaped, and styles that keep to their own elements."""

from __future__ import annotations

import re
from pathlib import Path

import qkv
from qkv.inspection import Inspection, page
from qkv.inspection.drawing import STYLE, breadth, wrap
from qkv.inspection.verdict import Verdict


def config(shared_folder: Path, name: str) -> Path:
    return shared_folder / "configs" / f"{name}_config.json"


def test_a_page_of_two_models_shows_what_differs_and_both_structures(shared_folder: Path) -> None:
    names = ("meta-llama--Meta-Llama-3.1-8B", "openai--gpt-oss-20b")
    text = page(qkv.compare(*(config(shared_folder, name) for name in names)))
    assert text.startswith("<!doctype html>") and text.count("<svg") == 2
    assert "32 layers, width 4,096" in text and "24 layers, width 2,880" in text
    assert "<span>x2.6</span>" in text
    for reference in ("src=", "href=", "@import", "url("):
        assert reference not in text


def test_a_page_of_a_model_and_itself_says_so(shared_folder: Path) -> None:
    path = config(shared_folder, "openai--gpt-oss-20b")
    text = page(qkv.compare(path, path))
    assert "The two are described alike." in text and "It follows" not in text


def test_names_are_escaped() -> None:
    found = Inspection("<b>&", None, (), Verdict(), None, unknown=("<i>",))
    text = page(found)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text and "&lt;i&gt;" in text


def test_values_are_spelt_as_in_the_file(shared_folder: Path) -> None:
    text = page(qkv.inspect(config(shared_folder, "meta-llama--Meta-Llama-3.1-8B")))
    assert "attention_bias = false" in text and "attention_bias = False" not in text


def test_the_style_of_a_picture_reaches_nothing_else() -> None:
    """A <style> inside an SVG holds for the whole page it stands in."""
    rules = [rule for rule in re.findall(r"[^{}]+(?=\{)", STYLE.replace("\n", "")) if "@" not in rule]
    assert all(rule.strip().startswith("svg") for rule in rules)


def test_lines_break_where_a_wide_font_would_leave_the_box() -> None:
    assert wrap("a word", 10) == ["a", "word"]
    assert wrap("one two", 1000) == ["one two"]
    assert breadth("WWWW") > 2 * breadth("iiii")
