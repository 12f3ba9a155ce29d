"""Masks through attention: with all scores equal, each output is the mean of the visible values."""

from __future__ import annotations

import pytest
import torch

from qkv.nn import Layout
from qkv.nn.backends import Reference
from qkv.spec import Causal, Everything, Mask, Prefix, Score, Window


def attend_equally(values: list[float], visible: torch.Tensor) -> torch.Tensor:
    """Outputs (query,) of one head whose queries are zero. `visible` is (query, key)."""
    value = torch.tensor(values, dtype=torch.float32)[None, None, :, None]
    query, key = torch.zeros(1, 1, visible.shape[0], 4), torch.randn(1, 1, len(values), 4)
    return Reference().attend(query, key, value, visible[None], Score())[0, 0, :, 0]


def under(values: list[float], mask: Mask, queries: int | None = None) -> list[float]:
    """With the last `queries` positions asking; all of them by default."""
    keys = torch.arange(len(values))[None]
    asking = torch.arange(len(values) - (queries or len(values)), len(values))[None]
    return attend_equally(values, Layout(asking, keys).visible(mask)[0]).tolist()


def test_a_row_that_may_see_nothing_gives_zero_and_finite_gradients() -> None:
    """Case M1."""
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    query = torch.zeros(1, 1, 3, 4, requires_grad=True)
    key = torch.randn(1, 1, 3, 4, requires_grad=True)
    value = torch.tensor([1.0, 2, 3])[None, None, :, None].requires_grad_()
    out = Reference().attend(query, key, value, visible[None], Score())
    assert out[0, 0, :, 0].tolist() == [1, 1.5, 0]
    out.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def test_causal_shows_the_past_and_itself() -> None:
    """Case M3: true means visible; read the other way round the first row would be 2.5."""
    assert under([1, 2, 3], Causal()) == [1, 1.5, 2]


def test_a_mask_of_numbers_is_refused() -> None:
    """Case M3: 0 and 1 as numbers are ambiguous; only booleans are taken."""
    with pytest.raises((RuntimeError, TypeError)):
        attend_equally([1, 2], torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def test_fewer_queries_than_keys_align_at_the_end() -> None:
    """Case M5: two queries over five keys are the last two."""
    assert under([1, 2, 3, 4, 5], Causal(), queries=2) == [2.5, 3]


def test_more_queries_than_keys_leave_the_first_rows_empty() -> None:
    """Case M5: five queries over two keys; position -1 marks a query before the first key."""
    layout = Layout(torch.tensor([[-3, -2, -1, 0, 1]]).clamp(min=-1), torch.tensor([[0, 1]]))
    assert attend_equally([1, 2], layout.visible(Causal())[0]).tolist() == [0, 0, 0, 1, 1.5]


def test_a_window_of_three_counts_the_query_itself() -> None:
    """Case M7: W keys, the query's own included."""
    assert under([1, 2, 3, 4, 5, 6], Causal() & Window(3)) == [1, 1.5, 2, 3, 4, 5]


def test_packed_documents_neither_see_each_other_nor_share_positions() -> None:
    """Case M8."""
    layout = Layout.packed([3, 2])
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert attend_equally([1, 2, 3, 4, 5], layout.visible(Causal())[0]).tolist() == [1, 1.5, 2, 4, 4.5]


def test_a_prefix_sees_itself_whole() -> None:
    positions = torch.arange(4)[None]
    layout = Layout(positions, positions, prefix=torch.tensor([2]))
    assert attend_equally([1, 2, 3, 4], layout.visible(Causal() | Prefix())[0]).tolist() == [1.5, 1.5, 2, 2.5]


def test_empty_cache_slots_are_invisible() -> None:
    """Case C7: capacity 4, two of them filled: 2.0, not 1.0."""
    layout = Layout(torch.tensor([[1]]), torch.tensor([[0, 1, -1, -1]]))
    assert attend_equally([1, 3, 0, 0], layout.visible(Everything())[0]).tolist() == [2.0]


@pytest.mark.parametrize(
    ("present", "positions"),
    [
        ([0, 0, 1, 1, 1], [-1, -1, 0, 1, 2]),
        ([1, 1, 1, 0, 0], [0, 1, 2, -1, -1]),
        ([0, 1, 1, 0], [-1, 0, 1, -1]),
    ],
)
def test_positions_count_what_is_there(present: list[int], positions: list[int]) -> None:
    """Case P3: the real tokens are 0, 1, 2, whichever side the padding is on."""
    assert Layout.padded(torch.tensor([present])).positions.tolist() == [positions]


def test_weights_of_a_causal_row_are_equal_shares() -> None:
    """Case I1: equal scores, three tokens."""
    seen = {}

    class Reader:
        def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
            seen[name] = value
            return value

    positions = torch.arange(3)[None]
    visible = Layout(positions, positions).visible(Causal())
    zeros = torch.zeros(1, 1, 3, 2)
    Reference().attend(zeros, zeros, zeros, visible, Score(), tap=Reader())  # type: ignore[arg-type]
    expected = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.allclose(seen["weights"][0, 0], expected)
