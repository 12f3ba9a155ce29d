"""Masks: what each shows, by hand and against loops, on numpy and torch arrays alike."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from qkv.spec import (
    Blocks,
    Causal,
    Chunk,
    Dilated,
    Documents,
    Everything,
    Global,
    Mask,
    Padding,
    Prefix,
    Strided,
    Window,
)

See = Callable[[int, int], bool]

# what a query at q sees of a key at k, said without arrays
MASKS: dict[str, tuple[Mask, See]] = {
    "everything": (Everything(), lambda q, k: True),
    "causal": (Causal(), lambda q, k: k <= q),
    "window of 1": (Window(1), lambda q, k: k == q),
    "window of 3": (Window(3), lambda q, k: q - k in (0, 1, 2)),
    "window to both sides": (Window(3, 2), lambda q, k: -2 <= q - k <= 2),
    "chunks of 4": (Chunk(4), lambda q, k: k in range(q // 4 * 4, q // 4 * 4 + 4)),
    "strided": (Strided(3), lambda q, k: abs(q - k) in range(0, 100, 3)),
    "dilated": (Dilated(3, 4), lambda q, k: k in (q, q - 4, q - 8)),
    "global": (Global((0, 5)), lambda q, k: 0 in (q, k) or 5 in (q, k)),
    "global nowhere": (Global(()), lambda q, k: False),
    "blocks": (
        Blocks(4, ((0,), (0, 1), (2,))),
        lambda q, k: (q // 4, k // 4) in {(0, 0), (1, 0), (1, 1), (2, 2)},
    ),
    "padding": (Padding(), lambda q, k: True),
    "no prefix": (Prefix(), lambda q, k: False),
    "one document": (Documents(), lambda q, k: True),
    "sliding": (Causal() & Window(4), lambda q, k: 0 <= q - k < 4),
    "sliding, causal last": (Window(4, 4) & Causal(), lambda q, k: 0 <= q - k < 4),
    "llama 4": (Causal() & Chunk(4), lambda q, k: q // 4 == k // 4 and k <= q),
    "sparse transformer": (
        Causal() & (Window(3) | Strided(3)),
        lambda q, k: q - k >= 0 and (q - k < 3 or (q - k) % 3 == 0),
    ),
    "longformer": (Window(2, 1) | Global((0,)), lambda q, k: -1 <= q - k < 2 or 0 in (q, k)),
    "sinks": (Causal() & (Window(3) | Global((0,))), lambda q, k: k <= q and (q - k < 3 or 0 in (q, k))),
    "prefix lm without a prefix": (Causal() | Prefix(), lambda q, k: k <= q),
    "packed": (Causal() & Documents() & Padding(), lambda q, k: k <= q),
}
LENGTH = 14


def square(mask: Mask, length: int = LENGTH, layout: Any = None) -> np.ndarray[Any, Any]:
    position = np.arange(length)
    return np.broadcast_to(mask.visible(position[:, None], position[None, :], layout), (length, length))


def brute(see: See, length: int = LENGTH) -> np.ndarray[Any, Any]:
    return np.array([[see(q, k) for k in range(length)] for q in range(length)])


@pytest.mark.parametrize("name", MASKS)
def test_visible_equals_loops(name: str) -> None:
    mask, see = MASKS[name]
    assert (square(mask) == brute(see)).all()


@pytest.mark.parametrize("name", MASKS)
def test_torch_and_numpy_agree_on_any_positions(name: str) -> None:
    """Batches of positions, fewer queries than keys: the mask only looks at absolute positions."""
    mask, see = MASKS[name]
    query, key = torch.tensor([[[9], [2]], [[5], [0]]]), torch.tensor([[[0, 1, 2, 3, 9]], [[0, 5, 4, 3, 8]]])
    seen = mask.visible(query, key)
    assert seen.dtype == torch.bool
    expected = [[[see(int(q), int(k)) for k in key[b, 0]] for q in query[b, :, 0]] for b in range(2)]
    assert seen.expand(2, 2, 5).tolist() == expected
    arrays = mask.visible(query.numpy(), key.numpy())
    assert arrays.dtype == bool and np.broadcast_to(arrays, (2, 2, 5)).tolist() == expected


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, LENGTH, 23])
def test_pairs_equal_loops(name: str, length: int) -> None:
    mask, see = MASKS[name]
    assert mask.pairs(length) == brute(see, length).sum()


@pytest.mark.parametrize("name", MASKS)
def test_interval_is_the_visible_run(name: str) -> None:
    mask, see = MASKS[name]
    run = mask.interval(np.arange(LENGTH))
    if run is None:
        return
    first, last = (np.broadcast_to(end, LENGTH) for end in run)
    for q in range(LENGTH):
        shown = range(max(first[q], 0), min(last[q], LENGTH - 1) + 1)
        assert [k for k in range(LENGTH) if see(q, k)] == list(shown)


@pytest.mark.parametrize("name", MASKS)
def test_no_query_looks_back_further_than_the_reach(name: str) -> None:
    """And the reach is not wider than it needs to be, for masks made of one."""
    mask, see = MASKS[name]
    if mask.reach is None:
        return
    back = [q - k for q in range(60) for k in range(q + 1) if see(q, k)]
    assert max(back) < mask.reach
    if "&" not in str(mask):
        assert max(back) == mask.reach - 1


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (Everything(), None),
        (Causal(), None),
        (Window(7), 7),
        (Window(7, 3), 7),
        (Chunk(8), 8),
        (Dilated(3, 4), 9),
        (Strided(2), None),
        (Global((0,)), None),
        (Causal() & Window(5), 5),
        (Window(9) & Chunk(4), 4),
        (Window(9) | Chunk(4), 9),
        (Window(9) | Global((0,)), None),
        (Causal() | Prefix(), None),
        (Causal() & (Window(9) | Dilated(2, 20)), 21),
        (Causal() & Documents() & Padding(), None),
    ],
)
def test_reach(mask: Mask, reach: int | None) -> None:
    assert mask.reach == reach


# --- what depends on the batch ----------------------------------------------------------------


def layout(**parts: Any) -> Any:
    return SimpleNamespace(**{"prefix": None, "documents": None, "key_documents": None, **parts})


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_prefix_is_seen_by_all(array: Callable[..., Any]) -> None:
    position = array([[0, 1, 2, 3, 4]])
    seen = (Causal() | Prefix()).visible(
        position[..., :, None], position[..., None, :], layout(prefix=array([3, 0]))
    )
    assert seen.shape == (2, 5, 5)
    assert seen[0].tolist() == [[k < 3 or k <= q for k in range(5)] for q in range(5)]
    assert seen[1].tolist() == [[k <= q for k in range(5)] for q in range(5)]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_packed_documents_do_not_see_each_other(array: Callable[..., Any]) -> None:
    """Case M8: lengths 3 and 2, positions that start again; and a later call with fewer queries."""
    positions, documents = array([[0, 1, 2, 0, 1]]), array([[0, 0, 0, 1, 1]])
    mask = Causal() & Documents()
    whole = layout(documents=documents, key_documents=documents)
    seen = mask.visible(positions[..., :, None], positions[..., None, :], whole)
    assert seen[0].tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [False, False, False, True, False],
        [False, False, False, True, True],
    ]
    last = layout(documents=documents[:, 4:], key_documents=documents)
    later = mask.visible(positions[:, 4:, None], positions[..., None, :], last)
    assert later[0].tolist() == [[False, False, False, True, True]]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_padding_hides_and_is_hidden(array: Callable[..., Any]) -> None:
    position = array([-1, -1, 0, 1])
    seen = (Causal() & Padding()).visible(position[:, None], position[None, :])
    assert seen.tolist() == [
        [False, False, False, False],
        [False, False, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


# --- alignment, counts, pictures --------------------------------------------------------------


def test_fewer_queries_than_keys_align_at_the_end() -> None:
    """Case M5: positions 3 and 4 over five keys."""
    seen = Causal().visible(np.array([[3], [4]]), np.arange(5)[None, :])
    assert seen.sum(1).tolist() == [4, 5]


def test_a_window_counts_the_query_itself() -> None:
    """Case M7: three keys, u and v = 1..6."""
    seen = square(Causal() & Window(3), 6)
    assert seen.sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert (seen @ np.arange(1, 7) / seen.sum(1)).tolist() == [1, 1.5, 2, 3, 4, 5]


def test_pairs_in_closed_form() -> None:
    n, w = 100_000, 4096
    assert Causal().pairs(n) == n * (n + 1) // 2
    assert Everything().pairs(n) == n * n
    assert (Causal() & Window(w)).pairs(n) == w * (w + 1) // 2 + (n - w) * w
    assert (Causal() & Chunk(1000)).pairs(n) == 100 * 1000 * 1001 // 2
    assert Causal().pairs(0) == 0


def test_pairs_are_counted_in_slabs() -> None:
    """Longer than one slab of 512 queries."""
    assert Strided(7).pairs(1030) == sum((q - k) % 7 == 0 for q in range(1030) for k in range(1030))


def test_a_mask_draws_itself() -> None:
    assert (Causal() & (Window(2) | Global((0,)))).draw(6) == "\n".join(
        ("#.....", "##....", "###...", "#.##..", "#..##.", "#...##")
    )
    assert Window(2, 1).draw(4) == "##..\n###.\n.###\n..##"
    assert Chunk(2).draw(4) == "##..\n##..\n..##\n..##"
    assert Causal().draw(1) == "#"


simple = st.one_of(
    st.just(Everything()),
    st.just(Causal()),
    st.builds(Window, st.integers(1, 6), st.integers(0, 4)),
    st.builds(Chunk, st.integers(1, 6)),
    st.builds(Strided, st.integers(1, 5)),
    st.builds(Dilated, st.integers(1, 4), st.integers(1, 4)),
    st.builds(Global, st.lists(st.integers(0, 15), max_size=3).map(tuple)),
)


def joined(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.builds(lambda a, b: a & b, inner, inner) | st.builds(lambda a, b: a | b, inner, inner)


combined = st.recursive(simple, joined, max_leaves=5)


@given(combined, combined, st.integers(1, 17))
def test_combinations(a: Mask, b: Mask, length: int) -> None:
    assert (square(a & b, length) == (square(a, length) & square(b, length))).all()
    assert (square(a | b, length) == (square(a, length) | square(b, length))).all()
    for mask in (a & b, a | b):
        seen = square(mask, length)
        assert mask.pairs(length) == seen.sum()
        query, key = np.nonzero(seen)
        back = (query - key).max(initial=0)
        assert mask.reach is None or back < mask.reach
        run = mask.interval(np.arange(length))
        if run is not None:
            first, last = (np.broadcast_to(end, length)[:, None] for end in run)
            assert (seen == ((np.arange(length) >= first) & (np.arange(length) <= last))).all()
