"""Head scores on weights whose scores are known by hand, and against loops over every pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.explanation import roles

LENGTH = 7


def looking(back: int, length: int = LENGTH) -> Tensor:
    """One head that gives all its weight to the key so far back, or to the first one."""
    weights = torch.zeros(1, 1, length, length)
    for query in range(length):
        weights[..., query, max(query - back, 0)] = 1
    return weights


def rows(batch: int = 3, heads: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Random causal weights, over tokens of which some come again."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(batch, heads, length, length, generator=draw)
    hidden = torch.ones(length, length).triu(1).bool()
    tokens = torch.randint(4, (batch, length), generator=draw)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1), tokens


def by_loop(weights: Tensor, tokens: Tensor, wanted) -> list[float]:  # type: ignore[no-untyped-def]
    """The mean share on wanted(row, query, key) keys, of the queries that have one, pair by pair."""
    scores = []
    for head in range(weights.shape[1]):
        shares = []
        for b, row in enumerate(tokens.tolist()):
            for q in range(len(row)):
                keys = [k for k in range(q + 1) if wanted(row, q, k)]
                if keys:
                    shares.append(sum(float(weights[b, head, q, k]) for k in keys))
        scores.append(sum(shares) / len(shares))
    return scores


def test_a_head_that_looks_one_back_is_a_previous_token_head_and_one_that_looks_two_back_is_not() -> None:
    both = torch.cat([looking(1), looking(2)], 1)
    # two back, the second token's query falls on the first, which is just before it
    assert roles.previous_token(both).tolist() == pytest.approx([1, 1 / (LENGTH - 1)])


def test_the_first_token_counts_for_all_queries_but_its_own() -> None:
    heads = torch.cat([looking(0), looking(LENGTH), looking(1)], 1)
    assert roles.first_token(heads).tolist() == pytest.approx([0, 1, 1 / (LENGTH - 1)])


def test_separators_count_wherever_they_are_and_whichever_they_are() -> None:
    tokens = torch.tensor([[5, 1, 9, 5, 5, 2, 5]])  # 1 and 2 are separators
    heads = torch.cat([looking(0), looking(1), roles.equal(LENGTH)], 1)
    found = roles.on_tokens(heads, tokens, torch.tensor([1, 2])).tolist()
    seen = [0, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 2 / 6, 2 / 7]
    assert found == pytest.approx([2 / 7, 2 / 7, sum(seen) / 7])


def test_duplicates_are_earlier_places_of_the_same_token_and_never_the_query_itself() -> None:
    tokens = torch.tensor([[3, 4, 5, 3, 4, 5, 3]])
    heads = torch.cat([looking(3), looking(0), roles.equal(LENGTH)], 1)
    shares = [1 / 4, 1 / 5, 1 / 6, 2 / 7]  # of the last four queries, which alone have one
    assert roles.duplicate(heads, tokens).tolist() == pytest.approx([1, 0, sum(shares) / 4])


def test_an_induction_head_looks_at_what_followed_the_token_the_last_time() -> None:
    tokens = torch.tensor([[3, 4, 5, 3, 4, 5, 3]])
    heads = torch.cat([looking(2), looking(3), looking(5), roles.equal(LENGTH)], 1)
    # five back is after the token's first time for the last query alone; before, it falls on the first key
    assert roles.prefix_matching(heads, tokens).tolist() == pytest.approx(
        [1, 0, 1 / 4, (1 / 4 + 1 / 5 + 1 / 6 + 2 / 7) / 4]
    )


def test_a_token_that_follows_itself_does_not_make_looking_at_oneself_an_induction() -> None:
    tokens = torch.tensor([[3, 3, 4, 3]])
    # the second 3 has no key but itself; the last 3 has the second 3 and the 4
    assert roles.prefix_matching(roles.equal(4), tokens).tolist() == pytest.approx([2 / 4])
    assert roles.prefix_matching(looking(0, 4), tokens).tolist() == [0]


def test_scores_are_those_of_a_loop_over_every_pair_of_random_rows() -> None:
    weights, tokens = rows()
    assert roles.duplicate(weights, tokens).tolist() == pytest.approx(
        by_loop(weights, tokens, lambda row, q, k: k < q and row[k] == row[q])
    )
    assert roles.prefix_matching(weights, tokens).tolist() == pytest.approx(
        by_loop(weights, tokens, lambda row, q, k: 0 < k < q and row[k - 1] == row[q])
    )
    assert roles.previous_token(weights).tolist() == pytest.approx(
        by_loop(weights, tokens, lambda row, q, k: k == q - 1)
    )


def test_distance_is_in_tokens_weighted_by_attention() -> None:
    # two back: 0, 1, 2, 2, 2, 2, 2; equal attention: half the query's place on average
    heads = torch.cat([looking(0), looking(2), roles.equal(LENGTH)], 1)
    assert roles.distance(heads).tolist() == pytest.approx([0, 11 / 7, sum(q / 2 for q in range(7)) / 7])


def test_distance_without_the_first_token_is_that_of_what_is_left() -> None:
    sink = 0.9 * looking(LENGTH) + 0.1 * looking(1)
    # of query 2 on, a tenth of the weight is on the key before; query 1 has no other key than the first
    assert roles.distance(sink[..., 1:, 1:]).tolist() == pytest.approx([1])
    assert float(roles.distance(sink)) > 2


def test_distance_counts_keys_after_the_query_too() -> None:
    assert roles.distance(looking(1).transpose(-1, -2)[..., 1:, 1:]).tolist() == pytest.approx([1])


def test_equal_attention_sums_to_one_over_what_is_before() -> None:
    assert torch.allclose(roles.equal(5).sum(-1), torch.ones(5)) and roles.equal(5)[0, 0, 2, 3] == 0


def test_what_no_row_has_is_refused_and_not_a_zero() -> None:
    once = torch.arange(LENGTH)[None]
    for score in (roles.duplicate, roles.prefix_matching):
        with pytest.raises(RequestError, match="No token"):
            score(roles.equal(LENGTH), once)
    with pytest.raises(RequestError, match="no head can look at one"):
        roles.on_tokens(roles.equal(LENGTH), once, torch.tensor([99]))


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    weights, tokens = rows()
    with pytest.raises(RequestError, match=r"\(3, 2, 7, 6\); they must be \(batch, heads, query, key\)"):
        roles.previous_token(weights[..., :-1])
    with pytest.raises(RequestError, match=r"Tokens have shape \(2, 7\); .* must be \(3, 7\)"):
        roles.duplicate(weights, tokens[:2])


def test_bfloat16_weights_are_added_up_in_float32() -> None:
    weights = roles.equal(256).bfloat16().expand(64, 1, -1, -1)
    assert roles.first_token(weights).dtype == torch.float32
    exact = sum(1 / q for q in range(2, 257)) / 255
    assert float(roles.first_token(weights)) == pytest.approx(exact, rel=2e-3)


def test_a_head_of_an_encoder_may_look_one_ahead() -> None:
    """The transpose of one that looks one back; causal weights cannot."""
    ahead = looking(1).transpose(-1, -2)
    assert roles.next_token(ahead).tolist() == pytest.approx([1])
    assert roles.next_token(looking(1)).tolist() == [0]
    weights, _ = rows()
    flipped = weights.flip(-1, -2)  # read from the end, one ahead is one back
    assert roles.next_token(flipped).tolist() == pytest.approx(roles.previous_token(weights).tolist())
