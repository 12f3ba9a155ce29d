"""What is solved from times: costs that were put into them come out again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from qkv.benching import profile as module
from qkv.benching.profile import LONG, MANY, NARROW, ROWS, SOME, WIDE, Shape, Solved, Steps, measured, solve
from qkv.cli import app
from qkv.errors import CheckpointError
from qkv.planning import Profile, plan
from qkv.planning.cache import layers
from qkv.planning.timing import overlapped
from qkv.planning.weights import read_in_a_step, stored
from qkv.runtime.built import missing

COSTS = Solved(weights=20e9, few=3e11, compute=5e11, cache=15e9, attention=2e11, layer=3e-5, row=2e-6)


def taken(shape: Shape, format: str, costs: Solved) -> Steps:
    """The times that a machine of these costs would have, written out."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    beside = shape.layers * costs.layer
    row = beside + read / costs.weights
    (kept,) = layers(shape.model, "bf16")
    far = row + LONG * kept.count * kept.per_token / costs.cache
    meanwhile = overlapped(read / costs.weights, SOME * flops / costs.few)
    some = beside + shape.layers * costs.row * SOME + meanwhile
    per_pair = 4 * shape.heads * 64 * shape.layers

    def among(rows: int, start: int) -> float:
        products = rows * (shape.layers * costs.row + flops / costs.compute)
        return beside + products + rows * (start + (rows + 1) / 2) * per_pair / costs.attention

    return Steps(row, far, some, among(MANY, 0), among(ROWS, 0), among(ROWS, LONG - ROWS))


@pytest.mark.parametrize("format", ["BF16", "Q4_K"])
def test_costs_come_out_of_the_times_they_make(format: str) -> None:
    times = {shape: taken(shape, format, COSTS) for shape in (NARROW, WIDE)}
    found = solve(format, "bf16", 1e12, times)
    # a row's own cost is left out of the products' reading, so that little is off
    assert list(found) == pytest.approx(list(COSTS), rel=0.02)


def test_weights_are_read_no_faster_than_memory_is() -> None:
    times = {shape: taken(shape, "BF16", COSTS._replace(weights=80e9)) for shape in (NARROW, WIDE)}
    assert solve("BF16", "bf16", 30e9, times).weights == 30e9


@pytest.mark.skipif(missing() is not None, reason="the native runtime was not built")
def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, layers_ in (("NARROW", 4), ("WIDE", 2)):
        width = 128 if name == "WIDE" else 64
        monkeypatch.setattr(module, name, Shape(layers_, width, width // 64, width // 64, 2 * width))
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "EACH", 1)
    seen: list[tuple[int, int]] = []
    found = measured(1, formats=("Q8_0",), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1)] and found.details["threads"] == 1
    assert set(found.weights) == {"Q8_0", ""} and min(found.weights.values()) > 0
    assert 0 < found.weights["Q8_0"] <= found.details["read_bandwidth"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Llama-3.1-8B's own, without what does not matter here."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
                "rope_theta": 500000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            }
        )
    )
    return path


def test_the_command(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    page = tmp_path / "plan.html"
    asked = ["plan", str(config), "-c", "8k", "-n", "16", "--device", "h100", "--memory", "80GiB", "--json"]
    done = CliRunner().invoke(app, [*asked, "--html", str(page)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["context"], said["concurrency"], said["weights"]) == (
        8192,
        16,
        "bfloat16".replace("loat", ""),
    )
    cache = next(part["bytes"] for part in said["parts"] if part["name"] == "cache, full")
    assert cache == 16 * 2**30 and said["fits"] is True
    text = page.read_text()
    assert text.count("<svg") == 4 and "http" not in re.sub(r"http://www.w3.org/2000/svg", "", text)
    plain = CliRunner().invoke(app, ["plan", str(config)])
    assert "No times: measure this machine once (qkv plan --measure)" in plain.output


def test_damaged_weights_are_not_taken_for_none(config: Path) -> None:
    assert plan(config.parent).how.name == "bf16"
    (config.parent / "model.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="is damaged"):
        plan(config.parent)


def test_times_come_from_the_kept_profile(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Profile("mine", None, {"": 1e10}, {"": 1e12}, {"": 1e12}, 1e10, 1e12).save(tmp_path / "qkv/machine.json")
    done = CliRunner().invoke(app, ["plan", str(config)])
    assert "On mine (measured here):" in done.output
    assert plan(config).decode is None  # the library takes what it is given


def test_a_broken_profile_is_one_sentence(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "qkv").mkdir()
    (tmp_path / "qkv/machine.json").write_text("{}")
    done = CliRunner().invoke(app, ["plan", str(config)])
    assert done.exit_code and "holds no profile of a machine: measure it again" in str(done.exception)
