"""The comparison of explanations: its files, its lines, and its page, with figures made up for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from benchmarks import explain, explain_report, gpt2
from benchmarks.environments import ENGINES, EXPLAINERS
from benchmarks.explainers.protocol import METHODS, Question, Swept, answer
from benchmarks.workers import commands
from tests.support import assert_close

TINY = gpt2.Shape(layers=2, width=12, heads=3, vocab=30, context=16)
ASKED = {"tokens": [1, 2], "other": [3, 4], "reference": [[5, 6]], "token": 7, "against": 8}


def test_the_folder_is_read_alike_here_and_by_transformers(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folder = gpt2.write(tmp_path / "tiny", TINY, spread=0.3)
    tokens = torch.arange(9)[None]
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        assert_close(qkv.load(folder, dtype="float32")(tokens), theirs(tokens).logits)
    biases = [p for name, p in theirs.named_parameters() if name.endswith("bias")]
    assert all(bias.abs().min() > 0 for bias in biases)  # a bias of zeros would not show that it is used
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert gpt2.write(folder, TINY) == folder and (folder / "model.safetensors").stat().st_mtime_ns == written


class Fake:
    name = "fake 1"

    def load(self, folder: Path, threads: int) -> None:
        self.folder = folder

    def answers(self, question: Question) -> dict[str, np.ndarray]:
        return {name: np.array([question.token, question.against]) for name in METHODS}

    def sweep(self, question: Question) -> Swept:
        if question.against == 9:
            raise ZeroDivisionError("over\nand out")
        return Swept(np.array([question.tokens]), 40)


def test_what_a_worker_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, out = Fake(), tmp_path / "a.npz"
    assert answer(fake, {"do": "load", "folder": "/m/a", "threads": 1}) == {"explainer": "fake 1"}
    assert answer(fake, {"do": "answers", "question": ASKED, "out": str(out)}) == {}
    assert np.load(out)["lens"].tolist() == [7, 8]
    swept = answer(fake, {"do": "sweep", "question": ASKED})
    assert swept["values"] == [[1.0, 2.0]] and swept["bound"] == 40 and swept["seconds"] >= 0
    failing = {**ASKED, "against": 9}
    assert answer(fake, {"do": "memory", "question": failing}) == {"error": "ZeroDivisionError: over"}
    assert answer(fake, {"do": "sweep"}) == {"error": "'sweep' is not known, or lacks its question."}


def test_an_explainer_is_no_engine_that_generates() -> None:
    assert "transformer_lens" in EXPLAINERS and "transformer_lens" not in ENGINES
    assert "transformer_lens" not in commands()


def test_our_side_answers_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against itself, in two processes: nothing differs, and each method has its numbers."""
    monkeypatch.setattr(explain, "WORK", tmp_path)
    monkeypatch.setattr(explain, "THEIRS", explain.OURS)
    folder = gpt2.write(tmp_path / "tiny", TINY, spread=0.3)
    found = explain.compared(folder, explain.question(TINY, 6), threads=1)
    assert list(found) == list(METHODS)
    assert all(each["difference"] == 0 < each["largest"] for each in found.values())
    if sys.platform == "linux":
        weighed = explain.weighed(folder, explain.question(TINY, 6), threads=1)
        assert weighed["qkv"]["bound"] > 0


def test_the_page_has_ratios_round_by_round() -> None:
    def sample(seconds: float, others: float = 0.0) -> dict[str, float]:
        return {"seconds": seconds, "processor_seconds": seconds / 2, "others": others}

    samples = {"qkv": [sample(2), sample(4, 0.5)], "transformer_lens": [sample(8), sample(20)]}
    assert explain_report.ratios(samples, "seconds") == [4, 5]
    parity = {name: {"difference": 1e-6, "largest": 2.0} for name in METHODS}
    parity["lens"]["difference"] = 3e-5
    assert explain_report.worst(parity) == "at most 3.0e-05 (lens)"
    shape = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "context": 128}
    names = {"qkv": "qkv 0.1.0", "transformer_lens": "TransformerLens 4.3.0"}
    facts = {
        "dates": {"parity": "2026-01-02 10:00 UTC", "speed": "2026-01-02 11:00 UTC"},
        "machine": {"processor": "Zen 4", "cores": 2, "instructions": ["avx2"], "system": "Linux 6"},
        "threads": 1,
        "tokens": 64,
        "shapes": {"parity": shape, "speed": shape},
        "parity": parity,
        "speed": {"explainers": names, "samples": samples, "difference": 2e-6},
        "memory": {
            name: {"explainer": names[name], "usual": usual, "returned": 3e7, "bound": bound}
            for name, usual, bound in (
                ("qkv", 50_000_000, 40_000_000),
                ("transformer_lens", 20_000_000, None),
            )
        },
    }
    page = explain_report.document(facts, METHODS)
    assert "with 1 thread each, in float32: qkv 0.1.0; TransformerLens 4.3.0. Done: parity on 2026" in page
    assert "| qkv 0.1.0 | **3.00** (2.00-4.00) | **1.50** (1.00-2.00) | 1 of 2 |" in page
    assert "| times as fast, round by round | **4.50** (4.00-5.00) | **4.50** (4.00-5.00) |  |" in page
    assert "| qkv 0.1.0 | 50.0 | 30.0 | 40.0 |" in page
    assert "| TransformerLens 4.3.0 | 20.0 | 30.0 |  |" in page
    assert f"| {METHODS['lens']} | 3.0e-05 | 2.00 |" in page
