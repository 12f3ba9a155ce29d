"""Pairs of sentences: cleaned, split without leaks, made tokens and back, and batched."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from qkv.claims.sentences import (
    SPECIAL,
    UNKNOWN,
    Characters,
    Corpus,
    Pair,
    Pieces,
    characters,
    chinese,
    clean,
    padded,
    spanish,
    split,
    words,
)
from qkv.claims.tasks import PAD
from qkv.claims.translating import END, START
from qkv.errors import RequestError
from tests.claims.bibles import write, write_pair

MADE = [Pair(f"a {i % 40} b", f"c {i}") for i in range(400)]


def test_words_and_marks_stand_apart() -> None:
    assert words("Don’t  say “No!”, Ｔom.") == "don't say “ no ! ” , tom ."


def test_characters_that_can_be_seen_stand_apart() -> None:
    assert characters("我爱 T\u200bom？") == "我 爱 t o m ?"


def test_cleaning_drops_what_comes_twice_is_empty_or_too_long() -> None:
    given = [("a", "x"), ("a", "x"), ("a", "y"), ("", "x"), ("a", ""), ("a b c", "x"), ("a", "x y z z z")]
    assert clean(iter(given), 2) == [("a", "x"), ("a", "y")]
    assert clean(iter([("a b", "x y z z")]), 2)[0].length == 2


def test_no_sentence_of_the_test_is_in_training() -> None:
    train, test = split(MADE)
    for side in ("source", "target"):
        assert not {getattr(pair, side) for pair in train} & {getattr(pair, side) for pair in test}
    assert len(test) > 20
    assert {pair.target for pair in test} == {pair.target for pair in split(MADE[::-1]).test}  # by hash alone


def test_one_target_in_ten_is_for_the_test_and_nothing_else_is_lost() -> None:
    pairs = [Pair(f"a {i}", f"c {i}") for i in range(3000)]
    train, test = split(pairs)
    assert len(train) + len(test) == 3000 and 240 < len(test) < 360


def test_rare_characters_are_unknown() -> None:
    cut = Characters(["我 爱 你", "我 爱", "我"], least=2)
    assert cut.entries == (*SPECIAL, "我", "爱") and cut.vocab == 6
    assert cut.encode("你 爱 我") == [UNKNOWN, 5, 4] and cut.decode([5, 4, UNKNOWN]) == "爱 我 <unk>"


def test_pieces_come_back_as_words() -> None:
    cut = Pieces(["low lower lowest new newer newest"] * 3, 25)
    assert cut.vocab == 25
    said = "newest low lowernew ."
    assert cut.decode(cut.encode("newest lower")) == "newest lower"
    assert len(cut.encode("lowest")) < 6 and UNKNOWN in cut.encode(said)
    assert [cut.tokenizer.id_to_token(i) for i in range(4)] == list(SPECIAL)


def test_special_tokens_are_where_the_searches_look() -> None:
    assert [SPECIAL[i] for i in (PAD, START, END, UNKNOWN)] == ["<pad>", "<s>", "</s>", "<unk>"]


def test_padding_is_marked() -> None:
    tokens, there = padded([[5, 6], [7]])
    assert tokens.tolist() == [[5, 6], [7, PAD]] and there.tolist() == [[True, True], [True, False]]


def test_an_epoch_has_every_pair_once_in_batches_of_like_length() -> None:
    pairs = [Pair(" ".join("ab"[:1] * (1 + i % 9)), f"x{i} " * (1 + i % 9)) for i in range(300)]
    corpus = Corpus(
        pairs, [], Pieces([pair.source for pair in pairs], 20), Characters([p.target for p in pairs], 1)
    )
    batches = corpus.batches(10, torch.Generator().manual_seed(1), pool=10)
    for _ in range(2):  # epochs
        epoch = list(islice(batches, 30))
        assert sorted(row[1] for batch in epoch for row in batch.target.tolist()) == list(range(4, 304))
        assert sum(int((~batch.there).sum()) for batch in epoch) < 0.15 * sum(b.there.numel() for b in epoch)
    batch = epoch[0]
    for source, present, target, there in zip(*batch, strict=True):
        assert target[0] == START and target[there][-1] == END and (target[there] == END).sum() == 1
        assert (
            source[present][-1] == END and (source[~present] == PAD).all() and (target[~there] == PAD).all()
        )
        assert len(source[present]) == len(target[there]) - 1  # they are of one pair
    widths = [batch.target.shape[1] for batch in epoch[:10]]
    assert len(set(widths)) > 3 and widths != sorted(widths)  # not from short to long
    again = corpus.batches(10, torch.Generator().manual_seed(1), pool=10)
    assert torch.equal(
        next(again).target, next(corpus.batches(10, torch.Generator().manual_seed(1), 10)).target
    )


def test_vocabularies_know_the_training_part_alone() -> None:
    corpus = Corpus.of(MADE, 60, lambda said: Characters(said, 1))
    numbers = {pair.target.split()[1] for pair in corpus.test}
    assert not numbers & set(corpus.target.entries)  # type: ignore[attr-defined]
    assert corpus.longest() == max(len(corpus.source.encode(p.source)) for p in MADE) + 1


def test_verses_pair_up_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    write(tmp_path / "engKJV2006eb", [[["", "¶ And God [was] said:", "Lost"]], [["Amen."]]])
    write(tmp_path / "spaRV1909eb", [[["", "Y dijo Dios:", ""]], [["Amén."]]])
    assert spanish() == [("and god was said :", "y dijo dios :"), ("amen .", "amén .")]


def test_bibles_of_different_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    write_pair(tmp_path)
    for file in (tmp_path / "spaRV1909eb").iterdir():
        file.unlink()
    (tmp_path / "spaRV1909eb").rmdir()
    write(tmp_path / "spaRV1909eb", [[["uno"]], [["dos"]]])
    with pytest.raises(RequestError, match="The Bibles have 201 and 2 verses: they do not pair up"):
        spanish()


def test_tatoeba_is_almost_all_kept(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(shared_folder / "data"))
    pairs = chinese()
    train, test = split(pairs)
    assert (len(pairs), len(train), len(test)) == (21_111, 18_856, 2_120)
    assert pairs[0] == ("hi .", "嗨 。")
