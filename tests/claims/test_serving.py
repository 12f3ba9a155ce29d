"""H18: the judge both ways, and that what is compared is found where it differs. No test is of times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import serving
from qkv.claims.experiments.serving import (
    KINDS,
    PASSES,
    Largest,
    apart,
    by_token,
    cache_curves,
    equal,
    exponent,
    in_turns,
    judge,
    largest,
    llama,
    served,
)
from qkv.nn import Transformer
from qkv.runtime.torch_machine import TorchMachine

LENGTHS = [8.0, 24.0, 40.0]
RUN = Run("serving", 0, "smoke")


def figures(**changed: Any) -> Figures:
    """As expected; a changed part by its path of names: `time__whole=[...]`."""
    found: Figures = {
        "equal": {way: {"torch": 1e-6, "native": 2e-6} for way in ("cache", "paged", "chunked", "flash")},
        "engine": {"tokens": 100, "wrong": 0, "reused": 32, "set_aside": 2},
        "time": {"lengths": [64, 128, 256], "cached": [2.0, 2.1, 2.4], "whole": [4.0, 8.0, 17.0]},
        "cache": {
            "lengths": LENGTHS,
            "token": {KINDS[0]: 80.0, KINDS[1]: 20.0, KINDS[2]: 10.0, KINDS[3]: 20.0},
            "held": {
                KINDS[0]: [1280, 2560, 3840],
                KINDS[1]: [320, 640, 960],
                KINDS[2]: [160, 320, 480],
                KINDS[3]: [320, 640, 6 * 320],
            },
        },
        "passes": {"lengths": [256, 512, 1024], "reference": [1, 4, 16]}
        | {way: [1, 2, 4] for way in PASSES[1:]},
    }
    for path, value in changed.items():
        *into, last = path.split("__")
        part = found
        for name in into:
            part = part[KINDS[int(name)] if name.isdigit() else name.replace("_", " ")]
        part[
            KINDS[int(last)] if last.isdigit() else last.replace("_", " ") if into == ["passes"] else last
        ] = value
    return found


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 14 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("path", "value", "failed"),
    [
        ("equal__cache", {"torch": 2e-5}, "cache: answers"),
        ("equal__paged", {"torch": 1e-6, "native": 2e-5}, "paged: answers"),
        ("equal__chunked", {"torch": 1.0}, "chunked: answers"),
        ("equal__flash", {"torch": None}, "flash: answers"),
        ("engine__wrong", 1, "the scheduler"),
        ("engine__reused", 0, "the scheduler"),
        ("engine__set_aside", 0, "the scheduler"),
        ("time__cached", [2.0, 3.0, 4.1], "time per token with a cache is flat"),
        ("time__whole", [4.0, 4.1, 4.2], "without one it is linear"),
        ("time__whole", [4.0, 16.0, 64.0], "without one it is linear"),
        ("cache__held__0", [1280, 2560, 5120], "the cache grows linearly"),
        ("cache__held__2", [160, 320, 960], "2 and 1 key/value heads"),
        ("cache__held__3", [320, 640, 7 * 320], "a window of 64"),
        ("passes__reference", [1, 2, 4], "one pass of the reference"),
        ("passes__flash", [1, 4, 16], "one pass with it"),
        ("passes__flash_kernel_alone", None, "the flash kernel alone"),
        ("passes__chunked", [1, 4, 16], "chunks of 64"),
    ],
)
def test_what_is_otherwise_in_one_seed_does_not_hold(path: str, value: Any, failed: str) -> None:
    found = [check.what for check in judge([figures(), figures(**{path: value})]) if not check.holds]
    assert found and any(what.startswith(failed) for what in found)
    assert len(found) == (2 if path == "cache__held__0" else 1)  # the shares are of what grows


def network(width: int = 32, **kind: Any) -> Transformer:
    return llama(torch.Generator().manual_seed(0), width, **kind)


def texts(length: int = 30) -> torch.Tensor:
    return torch.randint(256, (3, length), generator=torch.Generator().manual_seed(1))


def test_each_way_gives_what_one_pass_gives() -> None:
    found = equal(RUN, network())
    assert set(found) == {"cache", "paged", "chunked", "flash"}
    assert all(value < 1e-5 for each in found.values() for value in each.values() if value is not None)


@torch.no_grad()
def test_a_token_that_is_another_is_seen_from_there_on() -> None:
    """What is compared depends on all that came before it."""
    plain, given = network(), texts()
    other = given.clone()
    other[:, 11] = (other[:, 11] + 1) % 256
    turns = np.random.default_rng(0)
    for answers in (by_token(plain, other, 5), in_turns(TorchMachine(plain), other, 7, turns)):
        whole = plain(given)
        assert apart(answers[:, :11], whole[:, :11]) < 1e-5
        assert apart(answers[:, 11:12], whole[:, 11:12]) > 1e-2
        assert apart(answers[:, 29:], whole[:, 29:]) > 1e-3


def test_random_turns_take_single_tokens_or_chunks_of_several_texts() -> None:
    class Watched(TorchMachine):
        steps: list[tuple[int, int]]

        def step(self, rows):  # type: ignore[no-untyped-def]
            counts = np.unique(rows.sequences, return_counts=True)[1]
            self.steps.append((len(counts), int(counts.max())))
            return super().step(rows)

    for most in (1, 9):
        machine = Watched(network())
        machine.steps = []
        in_turns(machine, texts(), most, np.random.default_rng(2))
        together, longest = zip(*machine.steps, strict=True)
        assert max(together) == 3 and min(together) == 1
        assert max(longest) == most


def test_the_scheduler_reuses_and_sets_aside_and_is_compared_with_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = served(RUN, network())
    assert found["wrong"] == 0 and found["reused"] > 0 and found["set_aside"] > 0 and found["tokens"] == 24
    monkeypatch.setattr(serving, "greedily", lambda network, prompt, count: [-1] * count)
    assert served(RUN, network())["wrong"] == 24


def test_an_exponent_is_that_of_a_power() -> None:
    assert exponent([2, 4, 8], [3, 12, 48]) == pytest.approx(2)
    assert exponent([2, 4, 8], [5, 5, 5]) == pytest.approx(0)


def test_what_a_cache_holds_is_in_whole_blocks_of_what_a_token_takes() -> None:
    found = cache_curves(RUN)
    token = 4 * 2 * 8 * 4  # layers, keys and values, dimensions of a head, bytes; for each head
    assert [found["token"][name] for name in KINDS] == [8 * token, 2 * token, token, 2 * token]
    blocks = [length // 16 + 1 for length in found["lengths"]]
    assert found["held"][KINDS[0]] == [16 * 8 * token * count for count in blocks]
    assert max(found["held"][KINDS[3]]) <= 6 * 16 * 2 * token < found["held"][KINDS[1]][-1]


def test_the_largest_tensor_is_told() -> None:
    with Largest() as seen:
        torch.ones(3, 5) @ torch.ones(5, 7)
    assert seen.bytes == 5 * 7 * 4
    plain = network()
    assert largest(plain, "reference", 512) == 8 * 512 * 512 * 4  # the scores of 8 heads
    assert (largest(plain, "chunked", 512) or 0) < 64 * 512 * 8 + 1


def test_the_model_is_that_of_the_claim() -> None:
    (layer, *_) = network(kv_heads=1, mask=spec.Causal() & spec.Window(9)).spec.trunk.layers
    (_, attention), (_, mixer) = layer.mixers()
    assert (attention.heads, attention.kv_heads, attention.mask.reach) == (8, 1, 9)
    assert isinstance(attention.position, spec.Rotary) and isinstance(mixer, spec.Gated)
