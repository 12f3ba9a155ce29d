"""What is solved from times: costs that were put into them come out again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from qkv.benching import profile, steps
from qkv.benching.profile import measured
from qkv.benching.shapes import NARROW, SMALL, WIDE, Shape
from qkv.benching.solving import FASTEST, Solved, solve
from qkv.benching.steps import LONG, SHORT, SIZES, Steps
from qkv.cli import app
from qkv.errors import CheckpointError
from qkv.planning import Profile, plan
from qkv.planning.cache import layers
from qkv.planning.profile import Speeds, overlapped, read_at
from qkv.planning.timing import MANY, SOME
from qkv.planning.weights import read_in_a_step, stored
from qkv.planning.workspace import ROWS, widths
from qkv.runtime.built import missing

COSTS = Solved(
    weights=20e9,
    few=3e11,
    compute=5e11,
    cache=15e9,
    attention=2e11,
    pair=2e-9,
    layer=3e-5,
    number=3e-10,
    logit=3e-10,
)
EVEN: Speeds = ((32 << 20, 30e9), (512 << 20, 30e9))
STEEP: Speeds = ((128 << 20, 60e9), (512 << 20, 15e9))  # two octaves of size, two of speed


def taken(shape: Shape, format: str, costs: Solved, speed: Callable[[float], float]) -> Steps:
    """The times that a machine of these costs would have, written out."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    beside = shape.layers * costs.layer
    of_a_row = shape.layers * costs.number * widths(shape.model).all
    weights = overlapped(read / costs.weights, read / speed(read))
    row = beside + of_a_row + weights
    (kept,) = layers(shape.model, "bf16")
    computing = SOME * flops / costs.few
    some = beside + SOME * of_a_row + overlapped(weights, computing)

    def far(tokens: int, of_rows: float, products: float) -> float:
        held = tokens * kept.count * kept.per_token
        among = speed(read + held)
        reading = overlapped(products, read / costs.weights, read / among)
        return beside + of_rows + reading + overlapped(held / costs.cache, held / among)

    texts = far(SOME * SHORT, SOME * of_a_row, computing)
    per_pair = shape.layers * shape.heads * (costs.pair + 4 * shape.head_dim / costs.attention)

    def among(rows: int, start: int) -> float:
        products = rows * (of_a_row + flops / costs.compute)
        return beside + products + rows * (start + (rows + 1) / 2) * per_pair

    alone, own = among(ROWS, 0), among(ROWS, LONG - ROWS)
    return Steps(row, far(LONG, of_a_row, 0), some, texts, among(MANY, 0), alone, own, costs.logit)


def small(costs: Solved, reading: Speeds) -> float:
    read, _ = read_in_a_step(SMALL.model, stored("q8_0"), 1)
    return SMALL.layers * costs.layer + read / max(speed for _, speed in reading)


@pytest.mark.parametrize("format", ["BF16", "Q4_K"])
def test_costs_come_out_of_the_times_they_make(format: str) -> None:
    for reading in (EVEN, STEEP):
        times = {s: taken(s, format, COSTS, partial(read_at, reading)) for s in (NARROW, WIDE)}
        found = solve(format, "bf16", reading, times, small(COSTS, reading))
        assert list(found) == pytest.approx(list(COSTS), rel=0.02)


def test_memory_is_as_fast_as_for_the_nearest_sizes_that_were_read() -> None:
    sizes = (1 << 20, 128 << 20, 181 << 20, 256 << 20, 512 << 20, 1 << 40)
    found = [read_at(STEEP, size) for size in sizes]
    assert found == pytest.approx([60e9, 60e9, 60e9 / 2**0.5, 30e9, 15e9, 15e9], rel=2e-3)


def test_what_is_read_no_slower_than_memory_is_takes_memory_alone() -> None:
    """Where steps are quicker than memory was just before, nothing is left to go through."""
    quick = COSTS._replace(weights=1e15, cache=1e15)
    times = {shape: taken(shape, "BF16", quick, lambda bytes: 40e9) for shape in (NARROW, WIDE)}
    found = solve("BF16", "bf16", EVEN, times, small(quick, EVEN))
    assert found.weights == pytest.approx(FASTEST * 30e9) and found.cache == pytest.approx(
        FASTEST * 30e9, rel=0.01
    )


def test_a_step_reads_its_weights_and_cache_from_where_all_of_it_lies() -> None:
    """96 MiB of weights alone come from the processor's cache; with 416 MiB of keys and values not."""
    at = Profile("small", None, {"": 1e15}, {"": 1e15}, {"": 1e15}, 1e15, 1e15, reading=STEEP)
    assert at.seconds(96 << 20, 1e15, 96 << 20) == pytest.approx((96 << 20) / 60e9)
    assert at.seconds(96 << 20, 1e15, 512 << 20) == pytest.approx((96 << 20) / 15e9)
    alike = at.seconds(96 << 20, 60e9, 96 << 20)  # going through it takes as long as reading it
    assert alike == pytest.approx(2**0.5 * (96 << 20) / 60e9)


@pytest.mark.skipif(missing() is not None, reason="the native runtime was not built")
def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small_ones = (Shape(4, 64, 1, 1, 128, 64), Shape(2, 128, 1, 1, 256, 128))
    monkeypatch.setattr(profile, "SHAPES", small_ones)
    for name, value in (("ROUNDS", 1), ("EACH", 1), ("WARM", 0)):
        monkeypatch.setattr(steps, name, value)
    seen: list[tuple[int, int]] = []
    found = measured(1, formats=("Q8_0",), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1)] and found.details["threads"] == 1
    assert set(found.weights) == {"Q8_0", ""} and min(found.weights.values()) > 0
    assert [size for size, _ in found.reading] == list(SIZES)
    fastest = FASTEST * max(speed for _, speed in found.reading)
    assert 0 < found.weights["Q8_0"] <= fastest and 0 < found.cache <= fastest


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
