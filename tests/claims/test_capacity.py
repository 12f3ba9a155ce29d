"""H26: the judge both ways, and sums against bytes that are known by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.capacity import LARGE, PARTS, after_a_step, apart, in_blocks, judge, llama, summed
from qkv.nn import Transformer
from qkv.spec import Causal, Window


def figures(**changed: Any) -> Figures:
    """All exact; `part=sum` changes one sum of a small model, `large_part` one of Llama-3-8B."""
    small = {part: [100, 100] for part in PARTS}
    large = {
        name: {"weights": [100, 100], "cache": [100, 100], "token": float(said)}
        for name, (_, _, said) in LARGE.items()
    }
    for part, total in changed.items():
        if part == "token":
            large["Llama-3-8B"]["token"] = total
        elif part.startswith("large "):
            large["Llama-3-8B"][part.removeprefix("large ")] = [100, total]
        else:
            small[part] = [100, total]
    return {"small": {"one": small, "other": {"weights": [100, 100]}}, "large": large}


def test_all_holds_of_figures_as_expected() -> None:
    near = figures(**{"cache": 100.9, "large weights": 99.1, "token": 128.5})
    checks = judge([figures(), near, figures()])
    assert len(checks) == 7 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("part", "total", "failed"),
    [
        ("weights", 98, "small models: weights"),
        ("cache", 102, "small models: cache by"),
        ("cache in one piece", 98, "small models: cache in one piece"),
        ("training", 102, "small models: training"),
        ("large weights", 102, "7 to 70 billion parameters: weights"),
        ("large cache", 98, "7 to 70 billion parameters: cache"),
        ("token", 256.0, "the cache of a token"),
    ],
)
def test_what_is_apart_in_one_seed_does_not_hold(part: str, total: float, failed: str) -> None:
    (check,) = [check for check in judge([figures(), figures(**{part: total})]) if not check.holds]
    assert check.what.startswith(failed)


def test_apart_is_a_share_of_what_is_there() -> None:
    assert apart([99, 100]) == pytest.approx(1) and apart([102, 100]) == pytest.approx(2)


def test_a_storage_counts_once() -> None:
    one = torch.zeros(3, 5)
    assert summed([one, one, torch.zeros(2, dtype=torch.bfloat16)]) == 60 + 4


def test_blocks_that_are_held_are_whole_and_windows_hand_back() -> None:
    model = llama(2, 32, 4, 2, 16, 8)
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dimensions, bytes
    assert in_blocks(model.trunk, 33, 3) == 3 * 48 * token
    assert in_blocks(model.trunk, 33, 1, "meta", chunk=33) == 48 * token // 2  # 16 bits
    (layer, _), mask = model.trunk.layers, Causal() & Window(20)
    first, *rest = layer.sublayers
    (branch,) = first.branches
    near = replace(branch, mixer=replace(branch.mixer, mask=mask))
    short = replace(layer, sublayers=(replace(first, branches=(near,)), *rest))
    stack = replace(model.trunk, layers=(short, short))
    # 20 keys reach into three blocks at most, whatever the length
    assert in_blocks(stack, 200, 1) == 3 * 16 * token


def test_training_takes_sixteen_bytes_a_parameter_and_a_count_of_steps() -> None:
    network = Transformer(llama(1, 16, 2, 1, 8, 8))
    count = sum(p.numel() for p in network.parameters())
    tensors = len(list(network.parameters()))
    assert after_a_step(network) == 16 * count + 4 * tensors
