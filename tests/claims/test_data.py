"""Where data is found, what is said where it is not, and what is read."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import pytest
import torch

import qkv
from qkv.claims import data
from qkv.errors import SourceError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    return tmp_path


def test_a_named_folder_is_the_only_one(own: Path, shared_folder: Path) -> None:
    assert not data.there_is("shakespeare")
    (own / "tinyshakespeare.txt").write_text("To be")
    assert data.text("shakespeare") == "To be" and data.find("shakespeare").parent == own


def test_without_one_it_is_shared_data_beside_or_above_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QKV_DATA", raising=False)
    monkeypatch.setattr(qkv, "__file__", str(tmp_path / "checkout" / "src" / "qkv" / "__init__.py"))
    for place in (tmp_path, tmp_path / "checkout"):
        file = place / "shared" / "data" / "moby-dick.txt"
        file.parent.mkdir(parents=True)
        file.write_text("Call me")
        assert data.find("moby-dick") == file  # the nearer one
    assert data.text("moby-dick") == "Call me"


def test_then_it_is_the_package_that_brings_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "sklearn" / "datasets" / "data"
    package.mkdir(parents=True)
    (tmp_path / "site" / "sklearn" / "__init__.py").write_text("raise ImportError('it is not imported')")
    rows = [[*range(16), *[0] * 48, 7], [0] * 64 + [3]]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (package / "digits.csv.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    images, labels = data.digits()
    assert labels.tolist() == [7, 3] and images.shape == (2, 8, 8)
    assert images[0, 1].tolist() == [i / 16 for i in range(8, 16)] and float(images[1].max()) == 0


@pytest.mark.parametrize("name", data.FILES)
def test_what_is_absent_is_named_with_the_folder_and_the_package(
    own: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(data, "find_spec", lambda package: None)
    monkeypatch.setattr(data, "_inside", lambda path: own / "absent")
    wanted = data.FILES[name]
    with pytest.raises(SourceError) as problem:
        data.find(name)
    assert str(problem.value) == (
        f"{wanted.file} is not here: put it into the folder that QKV_DATA names, or install what "
        f"brings it ({wanted.package})."
    )


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(SourceError, match="There is no data called mnist; there are shakespeare, "):
        data.find("mnist")


def test_every_python_has_a_text(own: Path) -> None:
    name, words = data.any_text()
    assert name == "docstrings" and words.isascii() and len(words) > 500_000
    assert "Return a shallow copy" in words or "Return" in words
    common = re.findall(r"\bthe\b", words)
    assert len(common) > 5_000  # it is English


def test_the_real_text_is_taken_where_it_is(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(shared_folder / "data"))
    name, words = data.any_text(100)
    assert name == "shakespeare" and words.startswith("First Citizen:") and len(words) == 100
    pairs = data.pairs()
    assert len(pairs) == 21_116 and pairs[0] == ("Hi.", "嗨。")


def test_characters_come_back() -> None:
    corpus = data.characters(5_000, "docstrings")
    assert corpus.decode(corpus.tokens) == data.text("docstrings")[:5_000]
    assert corpus.vocab == len(set(data.text("docstrings")[:5_000])) == int(corpus.tokens.max()) + 1
    assert list(corpus.entries) == sorted(corpus.entries)


def test_pieces_come_back_and_are_fewer() -> None:
    corpus = data.pieces(300, 20_000, "docstrings")
    assert corpus.decode(corpus.tokens) == data.text("docstrings")[:20_000]
    assert corpus.vocab == 300 and len(corpus.tokens) < 12_000 and int(corpus.tokens.max()) < 300


def test_images_of_clothes(own: Path) -> None:
    pixels = bytes(range(256)) * 6 + bytes(2 * 784 - 6 * 256)
    header = struct.pack(">4i", 2051, 2, 28, 28)
    (own / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels))
    (own / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">2i", 2049, 2) + b"\x09\x04"))
    images, labels = data.fashion()
    assert images.shape == (2, 28, 28) and labels.tolist() == [9, 4]
    assert torch.allclose(images[0, 0, :3], torch.tensor([0, 1 / 255, 2 / 255]))
