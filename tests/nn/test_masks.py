"""Masks through attention: with all scores equal, each output is the mean of the visible values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import RequestError
from qkv.nn import Layout
from qkv.nn.attention import Attention
from qkv.nn.backends import Backend, Reference
from qkv.nn.flex import Flex
from qkv.nn.sdpa import SDPA
from qkv.spec import (
    Attention as Node,
    Causal,
    Documents,
    Everything,
    Mask,
    Padding,
    Prefix,
    Rotary,
    Score,
    Window,
)
from tests.matrix.variants import attention, model, pre_norm
from tests.spec.test_masks import MASKS
from tests.support import random_model


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", [Reference(), SDPA(), Flex(compiled=False)], ids=lambda b: b.name)
def test_half_precision_hides_as_well(backend: Backend, dtype: torch.dtype) -> None:
    """Case M1 where -1e9 would overflow (D19): huge scores that are hidden, and a row that sees nothing."""
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    key = torch.tensor([0.0, 0.0, 200.0], dtype=dtype)[None, None, :, None].expand(1, 1, 3, 16)
    query, value = torch.full((1, 1, 3, 16), 20.0, dtype=dtype), torch.zeros(1, 1, 3, 16, dtype=dtype)
    value[0, 0, :, 0] = torch.tensor([1.0, 2, 3])
    out = backend.attend(query, key, value, visible[None], Score())
    assert out.dtype == dtype and out[0, 0, :, 0].tolist() == [1, 1.5, 0]


def jacobian(mask: Mask, layout: Layout) -> torch.Tensor:
    """How strongly each output of one attention hangs on each input, (query, key)."""
    module = Attention(Node(2, 1, 4, position=Rotary(100.0), mask=mask), 8)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(1, layout.shape[1], 8, requires_grad=True)
    out = (module(x, layout) * torch.linspace(0.5, 1.5, 8)).sum(-1)[0]
    (rows,) = torch.autograd.grad(out, x, torch.eye(len(out)), is_grads_batched=True)
    return rows[:, 0].abs().amax(-1)


@pytest.mark.parametrize("name", MASKS)
def test_an_output_hangs_on_what_its_query_sees_and_on_nothing_else(name: str) -> None:
    """D19: the derivative is zero where the mask hides, and only there; a query is its own input too."""
    mask, see = MASKS[name]
    found = jacobian(mask, Layout.unpadded(1, 14))
    seen = torch.tensor([[see(q, k) for k in range(14)] for q in range(14)])
    other = ~torch.eye(14, dtype=torch.bool)
    assert ((found > 0) == seen)[other].all()
    assert (found.diagonal() > 0).tolist() == seen.any(-1).tolist()


def test_an_output_hangs_on_its_document_and_prefix_and_on_no_padding() -> None:
    """D19, for the masks that depend on the batch: the same, by hand."""
    other = ~torch.eye(6, dtype=torch.bool)
    positions = torch.tensor([[-1, 0, 1, 2, 3, -1]])
    prefix = Layout(positions, positions, prefix=torch.tensor([3]))
    packed = Layout.packed([2, 3, 1])
    cases: list[tuple[Mask, Layout, list[str]]] = [
        (Causal() & Padding(), Layout(positions, positions),
         ["......", ".#....", ".##...", ".###..", ".####.", "......"]),
        (Causal() | Prefix(), prefix, ["......", ".###..", ".###..", ".###..", ".####.", "......"]),
        (Causal() & Documents(), packed, ["#.....", "##....", "..#...", "..##..", "..###.", ".....#"]),
        (Everything(), packed, ["##....", "##....", "..###.", "..###.", "..###.", ".....#"]),
    ]  # fmt: skip
    for mask, layout, drawn in cases:
        seen = torch.tensor([[sign == "#" for sign in row] for row in drawn])
        assert ((jacobian(mask, layout) > 0) == seen)[other].all(), mask


@pytest.mark.parametrize(("layers", "window"), [(1, 3), (3, 3), (4, 2), (2, 5)])
def test_a_stack_of_windows_reaches_further_than_one(layers: int, window: int) -> None:
    """D30: layers * (window - 1) + 1 places, 131,041 for 32 layers of 4096."""
    reach, length = layers * (window - 1) + 1, 14
    node = model(*(pre_norm(attention(mask=Causal() & Window(window))),) * layers)
    network, tokens = random_model(node), torch.arange(length)[None]
    others = tokens.repeat(length + 1, 1)
    others[range(length), range(length)] = 49  # each token changed in a row of its own, none in the last
    with torch.no_grad():
        last = network(others)[:, -1]
    changed = (last[:length] != last[length]).any(-1).tolist()
    assert changed == [False] * (length - reach) + [True] * reach


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


@pytest.mark.parametrize("lengths", [[], [3, -1], [2.0], "ab"])
def test_what_are_no_lengths_of_documents_is_refused(lengths: Any) -> None:
    with pytest.raises(RequestError, match="must be whole numbers of at least 0"):
        Layout.packed(lengths)


@pytest.mark.parametrize("present", [[[1, 1]], torch.tensor([[0.0, 1.0]]), torch.tensor([[0, 2]])])
def test_what_is_no_padding_mask_is_refused(present: Any) -> None:
    with pytest.raises(RequestError, match="A padding mask is true or 1 where a token is"):
        Layout.padded(present)
