"""`qkv inspect` and `qkv compare` as commands: text, JSON, a page, a picture, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qkv import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["qkv", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


@pytest.fixture
def llama(shared_folder: Path) -> Path:
    return shared_folder / "configs" / "meta-llama--Meta-Llama-3.1-8B_config.json"


def test_inspect_prints_the_eight_steps(run: Run, llama: Path) -> None:
    status, out, err = run("inspect", llama)
    assert (status, err) == (0, "")
    assert re.findall(r"^(\d) [A-Z]", out, re.M) == list("12345678")
    assert "8,030,261,248 parameters" in "".join(out.splitlines()[:2])  # a narrow terminal breaks the line


def test_inspect_as_json(run: Run, llama: Path) -> None:
    status, out, _ = run("inspect", llama, "--json")
    data = json.loads(out)
    assert status == 0 and data["parameters"] == 8_030_261_248
    assert data["verdict"]["configured"]["positions"] == 131_072


def test_inspect_writes_a_page_and_a_picture(run: Run, llama: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    status, out, err = run("inspect", llama, "--html", page, "--svg", picture)
    assert (status, out) == (0, "")
    assert err.splitlines() == [f"wrote {picture}", f"wrote {page}"]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    ElementTree.fromstring(picture.read_text(encoding="utf-8"))


def test_a_page_that_cannot_be_written_is_one_sentence(run: Run, llama: Path, tmp_path: Path) -> None:
    status, _, err = run("inspect", llama, "--html", tmp_path / "no" / "page.html")
    assert status != 0 and len(err.strip().splitlines()) == 1 and "cannot be written" in err


def test_a_structure_that_is_not_known_cannot_be_drawn(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "nothing_known", "hidden_size": 8, "use_cache": 1, "odd": 2}))
    status, out, _ = run("inspect", config)
    assert status == 0 and "hidden_size = 8" in out and "not known yet" in out
    assert "odd" in out and "use_cache" not in out  # what never matters is not called unknown
    status, _, err = run("inspect", config, "--svg", tmp_path / "x.svg")
    assert status != 0 and "nothing to draw" in err


def test_compare_two_sizes_of_llama(run: Run, llama: Path, tmp_path: Path) -> None:
    other = llama.with_name("meta-llama--Meta-Llama-3.1-70B_config.json")
    status, out, _ = run("compare", llama, other)
    assert status == 0 and "+ 80 layers, width 8,192" in out and "x8.79" in out
    status, out, _ = run("compare", llama, other, "--json")
    assert json.loads(out)["changes"][0]["title"] == "Tokens"
    page = tmp_path / "both.html"
    status, out, err = run("compare", llama, other, "--html", page)
    assert (status, out, err) == (0, "", f"wrote {page}\n")
    assert "80 layers, width 8,192" in page.read_text(encoding="utf-8")


def test_a_missing_source_is_one_sentence(run: Run) -> None:
    for arguments in (("inspect", "no-such-model"), ("compare", "no-such-model", "smollm2")):
        status, out, err = run(*arguments)
        assert status != 0 and out == "" and len(err.strip().splitlines()) == 1


def test_what_is_not_known_is_not_called_alike(run: Run, llama: Path, tmp_path: Path) -> None:
    unknown, odd = tmp_path / "unknown.json", tmp_path / "odd.json"
    unknown.write_text(json.dumps({"model_type": "nothing_known", "hidden_dim": 2}))
    odd.write_text(json.dumps({**json.loads(llama.read_text()), "mystery": 2}))
    status, out, _ = run("compare", unknown, unknown)
    assert status == 0 and "alike" not in out and out.count("hidden_dim") == 2
    status, out, _ = run("compare", llama, odd)
    assert status == 0 and "alike" not in out and "+ mystery = 2" in out
    status, out, _ = run("compare", llama, llama)
    assert "The two are described alike." in out
    status, out, _ = run("compare", llama, odd, "--json")
    assert json.loads(out)["unknown"] == {"left": [], "right": ["mystery = 2"]}
