"""The example worked by hand: three tokens of four numbers, identity maps, through attention as it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qkv import spec
from qkv.nn import Layout, Taps
from qkv.nn.attention import Attention

ME, LOVE, BEIJING = [1.0, 0, 1, 0], [0.0, 1, 0, 1], [1.0, 1, 0, 0]


def run(rows: list[list[float]], score: spec.Score, position: spec.Rotary | None = None) -> Taps:
    module = Attention(spec.Attention(1, 1, 4, score, position, spec.Everything()), 4)
    for linear in (module.query, module.key, module.value, module.output):
        nn.init.eye_(linear.weight)
    taps = Taps(["scores", "weights", "output"], ["scores", "weights", "output"])
    module(torch.tensor([rows]), Layout.unpadded(1, 3), tap=taps)
    return taps


def values(taps: Taps, name: str) -> list[list[float]]:
    return taps[name].detach().view(3, -1).tolist()  # type: ignore[no-any-return]


def near(expected: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=5.1e-5) for row in expected]


def test_unscaled() -> None:
    """E9: scores, weights and outputs."""
    taps = run([ME, LOVE, BEIJING], spec.Dot())
    assert values(taps, "scores") == [[2, 0, 1], [0, 2, 1], [1, 1, 2]]
    assert values(taps, "weights") == near(
        [[0.6652, 0.0900, 0.2447], [0.0900, 0.6652, 0.2447], [0.2119, 0.2119, 0.5761]]
    )
    assert values(taps, "output") == near(
        [[0.9100, 0.3348, 0.6652, 0.0900], [0.3348, 0.9100, 0.0900, 0.6652], [0.7881, 0.7881, 0.2119, 0.2119]]
    )


def test_scaled_by_the_root_of_four() -> None:
    """E9: the default scale of a head of four dimensions."""
    taps = run([ME, LOVE, BEIJING], spec.Score())
    assert values(taps, "weights") == near(
        [[0.5065, 0.1863, 0.3072], [0.1863, 0.5065, 0.3072], [0.2741, 0.2741, 0.4519]]
    )
    assert values(taps, "output") == near(
        [[0.8137, 0.4935, 0.5065, 0.1863], [0.4935, 0.8137, 0.1863, 0.5065], [0.7259, 0.7259, 0.2741, 0.2741]]
    )


@pytest.mark.parametrize("score", [spec.Dot(), spec.Score()], ids=["unscaled", "scaled"])
def test_without_positions_a_shuffle_moves_outputs_and_changes_none(score: spec.Score) -> None:
    """E10: f(PX) = P f(X)."""
    first = torch.tensor(values(run([ME, LOVE, BEIJING], score), "output"))
    shuffled = torch.tensor(values(run([BEIJING, ME, LOVE], score), "output"))
    assert torch.allclose(shuffled, first[[2, 0, 1]], atol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "first", "shuffled"),
    [
        ("interleaved", [0.9472, 0.0857, 0.9143, 0.0528], [0.9638, 0.3737, 0.6263, 0.0362]),
        ("half", [0.9003, 0.2631, 0.7369, 0.0997], [0.8905, 0.1906, 0.8094, 0.1095]),
    ],
)
def test_with_rotary_positions_order_matters(pairs: str, first: list[float], shuffled: list[float]) -> None:
    """E9: the same token's output before and after the shuffle, unscaled."""
    rotary = spec.Rotary(pairs=pairs)  # type: ignore[arg-type]
    assert values(run([ME, LOVE, BEIJING], spec.Dot(), rotary), "output")[0] == near([first])[0]
    assert values(run([BEIJING, ME, LOVE], spec.Dot(), rotary), "output")[1] == near([shuffled])[0]
