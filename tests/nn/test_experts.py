"""Experts: who goes where and with what weight, against naive loops and transformers' own blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.errors import ConfigError, UnsupportedError
from qkv.nn import ContiguousCache, Layout, Taps, tap_names
from qkv.nn.build import build
from qkv.nn.experts import (
    Experts,
    best,
    importance,
    load_balancing,
    rebalanced,
    router_z,
    sequence_balance,
)
from qkv.spec import (
    Attention,
    Causal,
    Dense,
    Experts as Node,
    Gated,
    Language,
    Model,
    RMSNorm,
    Router,
    Stack,
    Tokens,
    pre_norm,
)
from tests.support import assert_close, random_model

WIDTH, HIDDEN = 16, 12
EXPERT = Gated("silu", HIDDEN)


def experts(node: Node, width: int = WIDTH, seed: int = 0, std: float = 0.4) -> Experts:
    torch.manual_seed(seed)
    module = build(node, width)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module  # type: ignore[return-value]


def whole(x: torch.Tensor) -> Layout:
    return Layout.unpadded(x.shape[0], x.shape[1])


def route(node: Node, logits: Any, balance: Any = None) -> Any:
    """The routing of tokens with these logits, (length, experts)."""
    module, logits = experts(node), torch.as_tensor(logits, dtype=torch.float32)[None]
    if balance is not None:
        module.router.balance.data = torch.as_tensor(balance, dtype=torch.float32)  # type: ignore[union-attr]
    return module.router(logits, whole(logits))


def places(chosen: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in chosen]


# the choice


def test_a_softmax_over_the_chosen_is_a_softmax_over_all_normalised() -> None:
    """D24, Mixtral: probabilities .1 .2 .3 .4, the best two are .3 / .7 and .4 / .7."""
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    routing = route(Node(4, 2, EXPERT), logits)
    assert routing.weights[0].tolist() == [pytest.approx([0, 0, 3 / 7, 4 / 7])]
    assert_close(routing.weights[0, :, 2:], logits[:, 2:].softmax(-1))
    plain = route(Node(4, 2, EXPERT, Router(normalise=False, scale=2.0)), logits)
    assert plain.weights[0].tolist() == [pytest.approx([0, 0, 0.6, 0.8])]


def test_a_balancing_bias_chooses_and_does_not_weigh() -> None:
    """D24, DeepSeek-V3: the two best by s + b are 0 and 1; their weights are s / sum of s, times 2.5."""
    scores = torch.tensor([[0.2, 0.3, 0.6, 0.8]])
    router = Router("sigmoid", scale=2.5, balance=True)
    routing = route(Node(4, 2, EXPERT, router), torch.logit(scores), [0.7, 0.7, 0.0, 0.0])
    assert places(routing.chosen[0]) == [[0, 1]]
    assert routing.weights[0].tolist() == [pytest.approx([2.5 * 0.4, 2.5 * 0.6, 0, 0])]


def test_the_best_group_is_the_one_with_the_best_two_or_the_best_one() -> None:
    """Groups (.9 .1) and (.6 .7): by the sum of two the second (V3), by the best one the first (V2)."""
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.7]]))
    for group_best, chosen in ((2, [2, 3]), (1, [0, 1])):
        router = Router("sigmoid", groups=2, top_groups=1, group_best=group_best)
        assert places(route(Node(4, 2, EXPERT, router), logits).chosen[0]) == [chosen]


def test_a_negative_score_in_a_serving_group_beats_a_group_that_does_not_serve() -> None:
    """D24: shut out with -inf; with 0 the biased scores of the best group, all negative, would lose."""
    router = Router("sigmoid", balance=True, groups=2, top_groups=1)
    logits = torch.logit(torch.tensor([[0.4, 0.5, 0.1, 0.2]]))
    routing = route(Node(4, 2, EXPERT, router), logits, [-2.0] * 4)
    assert places(routing.chosen[0]) == [[0, 1]]


@pytest.mark.parametrize("rows", [1, 2, 64, 1000])
@pytest.mark.parametrize("count", [8, 64, 256])
def test_ties_go_to_the_first_whoever_else_is_in_the_batch(rows: int, count: int) -> None:
    ranking = torch.zeros(rows, count)
    ranking[:, 5] = 1.0
    assert places(best(ranking, 4)) == [[0, 1, 2, 5]] * rows


def test_scores_that_round_to_one_are_still_told_apart() -> None:
    """In fp32 the sigmoids of 30 and 40 are both 1."""
    router = Router("sigmoid", normalise=False, scales="input")
    assert places(route(Node(3, 1, EXPERT, router), [[30.0, 40.0, 35.0]]).chosen[0]) == [[1]]


def test_scores_that_all_vanish_give_zero_and_finite_gradients() -> None:
    module = experts(Node(4, 2, EXPERT, Router("sigmoid")))
    logits = torch.full((1, 3, 4), -1000.0, requires_grad=True)
    routing = module.router(logits, whole(logits))
    routing.weights.sum().backward()
    assert (routing.weights == 0).all() and logits.grad is not None and logits.grad.isfinite().all()


def test_padding_goes_to_no_expert() -> None:
    """D24: so that it neither costs nor counts, and gets only what the shared expert gives."""
    module, x = experts(Node(4, 2, EXPERT)), torch.randn(2, 5, WIDTH)
    present = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    layout = Layout.padded(present)
    routing = module.router(module.router.logits(x), layout)
    assert routing.chosen.sum(-1).tolist() == (2 * present.long()).tolist()
    assert (module(x, layout)[~present] == 0).all() and (module(x, layout)[present] != 0).all()


# what they compute


@pytest.mark.parametrize(
    ("expert", "activate"),
    [(Gated("silu", HIDDEN), F.silu), (Dense("relu", HIDDEN), F.relu)],
    ids=["gated", "dense"],
)
def test_equals_a_loop_over_tokens(expert: Gated | Dense, activate: Any) -> None:
    """Token by token, choice by choice; biases included."""
    node = Node(5, 2, type(expert)(expert.activation, HIDDEN, bias=True), Router(bias=True))
    module, x = experts(node), torch.randn(2, 4, WIDTH)
    bank, expected = module.expert, torch.zeros(2, 4, WIDTH)
    for row in range(2):
        for place in range(4):
            token = x[row, place]
            logits = module.router.weight @ token + module.router.bias
            top, indices = logits.topk(2)
            for weight, e in zip(top.softmax(-1), indices, strict=True):
                up = bank.up.weight[e] @ token + bank.up.bias[e]
                if bank.gate is not None:
                    up = activate(bank.gate.weight[e] @ token + bank.gate.bias[e]) * up
                else:
                    up = activate(up)
                expected[row, place] += weight * (bank.down.weight[e] @ up + bank.down.bias[e])
    assert_close(module(x, whole(x)), expected, 1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_experts_are_one_dense_feed_forward(score: Any) -> None:
    """D24: where the weights sum to 1."""
    module, dense = experts(Node(6, 3, EXPERT, Router(score))), build(EXPERT, WIDTH)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            nn.init.normal_(parameter, std=0.4)
            module.expert.get_parameter(name).copy_(parameter.expand(6, *parameter.shape))
    x = torch.randn(2, 5, WIDTH)
    assert_close(module(x, whole(x)), dense(x), 1e-5)


def test_a_shared_expert_is_added_and_its_gate_opens_half_at_zero() -> None:
    x, alone = torch.randn(2, 5, WIDTH), experts(Node(4, 2, EXPERT))
    both = experts(Node(4, 2, EXPERT, shared_expert=Gated("silu", 20), shared_gate=True))
    both.load_state_dict(alone.state_dict(), strict=False)
    assert both.shared_gate is not None and both.shared_expert is not None
    nn.init.zeros_(both.shared_gate.weight)
    assert_close(both(x, whole(x)), alone(x, whole(x)) + both.shared_expert(x) / 2, 1e-5)


def test_scaling_the_input_is_not_scaling_the_output() -> None:
    """Llama 4: E(s x), which for a gated expert is not s E(x)."""
    router = Router("sigmoid", normalise=False, scales="input")
    module, x = experts(Node(3, 1, EXPERT, router)), torch.randn(1, 4, WIDTH)
    out = module(x, whole(x))[0]
    scores, indices = torch.sigmoid(x[0] @ module.router.weight.T).max(-1)
    expected = torch.cat([module.expert(s * t[None], int(e)) for s, t, e in zip(scores, x[0], indices)])  # noqa: B905
    assert_close(out, expected, 1e-5)
    assert (out - scores[:, None] * torch.cat([module.expert(t[None], int(e))
                                               for t, e in zip(x[0], indices)])).abs().max() > 1e-2  # noqa: B905  # fmt: skip


def test_the_router_works_in_fp32_inside_a_half_model() -> None:
    module = experts(Node(8, 2, EXPERT)).bfloat16()
    x = torch.randn(2, 5, WIDTH).bfloat16()
    logits = module.router.logits(x)
    assert logits.dtype == torch.float32
    assert_close(logits, x.float() @ module.router.weight.float().T)
    assert module(x, whole(x)).dtype == torch.bfloat16


def test_every_parameter_that_weighs_learns_and_the_balancing_bias_does_not() -> None:
    router = Router("sigmoid", bias=True, balance=True)
    module = experts(Node(4, 2, EXPERT, router, shared_expert=EXPERT, shared_gate=True))
    x = torch.randn(3, 20, WIDTH)
    module(x, whole(x)).square().sum().backward()
    without = [name for name, p in module.named_parameters() if p.grad is None or (p.grad == 0).all()]
    assert without == ["router.balance"]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node(4, 5, EXPERT), "A token cannot use 5 of 4 experts"),
        (Node(6, 2, EXPERT, Router(groups=4)), "6 experts cannot be in 4 equal groups"),
        (Node(6, 2, EXPERT, Router(groups=3, top_groups=4)), "of which 4 serve"),
        (Node(6, 3, EXPERT, Router(groups=3)), "A token cannot use 3 of 2 experts"),
        (Node(6, 2, EXPERT, Router(groups=3, group_best=3)), "of 2 experts cannot be ranked by its best 3"),
        (Node(4, 2, EXPERT, shared_gate=True), "there is no shared expert"),
        (Node(4, 2, EXPERT, Router(chosen_by="experts", capacity=1.0)), "neither groups nor a capacity"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_made_are_refused(node: Node, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(node, WIDTH)


# capacity, and experts that choose


def test_a_token_beyond_the_capacity_leaves_the_layer_as_it_came() -> None:
    """D24, Switch: 6 tokens, 3 experts, factor 1: room for two each. All want the first expert."""
    node = Node(3, 1, EXPERT, Router(normalise=False, capacity=1.0))
    layer = build(pre_norm(node, norm=RMSNorm(scale=False)), WIDTH)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    nn.init.zeros_(layer.feed_forward.router.weight)  # of equals the first is taken
    x = torch.randn(1, 6, WIDTH)
    changed = (layer(x, whole(x)) != x).any(-1)
    assert changed[0].tolist() == [True, True, False, False, False, False]


def test_capacity_counts_within_each_sequence_and_not_its_padding() -> None:
    module = experts(Node(3, 1, EXPERT, Router(capacity=1.0)))
    logits = torch.zeros(2, 6, 3)
    present = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
    chosen = module.router(logits, Layout.padded(present)).chosen[..., 0]
    assert chosen.tolist() == [[True] * 2 + [False] * 4, [False] * 3 + [True, False, False]]
    packed = module.router(logits[:1], Layout.packed([3, 3])).chosen[0, :, 0]
    assert packed.tolist() == [True, False, False] * 2


def test_experts_that_choose_are_evenly_loaded_and_take_their_best_tokens() -> None:
    """Zhou et al. 2022, section 3.2: each of n takes length * top_k / n tokens; weights are the softmax."""
    module = experts(Node(4, 2, EXPERT, Router(normalise=False, chosen_by="experts")))
    x = torch.randn(2, 6, WIDTH)
    scores = (x @ module.router.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for expert in range(4):
            for place in scores[row, :, expert].topk(3).indices.tolist():
                output = module.expert(x[row, place][None], expert)[0]
                expected[row, place] += scores[row, place, expert] * output
    assert_close(module(x, whole(x)), expected, 1e-5)
    assert (module.router(module.router.logits(x), whole(x)).chosen.sum(1) == 3).all()


def chosen_by_experts(**router: Any) -> Model:
    node = Node(4, 1, EXPERT, Router(normalise=False, **router))
    layer = pre_norm(Attention(2, 2, 4, mask=Causal()), node, norm=RMSNorm())
    return Model(decoder=Stack(Tokens(20, 8), (layer, layer), RMSNorm()), head=Language(20))


def test_experts_that_choose_look_at_the_future() -> None:
    """So no causal mask makes the model causal: a later token takes an earlier one's place."""
    tokens = torch.arange(8)[None]
    changed = torch.cat([tokens[:, :4], tokens[:, 4:] + 8], 1)
    leaks = random_model(chosen_by_experts(chosen_by="experts"))
    causal = random_model(chosen_by_experts())
    assert (leaks(tokens) - leaks(changed))[:, :4].abs().max() > 1e-2
    assert_close(causal(tokens)[:, :4], causal(changed)[:, :4])


@pytest.mark.parametrize("router", [{"chosen_by": "experts"}, {"capacity": 1.0}], ids=["choice", "capacity"])
def test_what_needs_the_whole_sequence_is_refused_in_parts(router: dict[str, Any]) -> None:
    model = random_model(chosen_by_experts(**router))
    cache, tokens = ContiguousCache(model.spec.trunk, 1, 8), torch.arange(8)[None]
    assert_close(model(tokens[:, :6], cache=cache), model(tokens[:, :6]))
    with pytest.raises(UnsupportedError, match="need the whole sequence in one call"):
        model(tokens[:, 6:], cache=cache)
    assert cache.length == 6


# taps


def test_the_router_can_be_read_and_an_expert_shut_out() -> None:
    model = random_model(chosen_by_experts())
    known, tokens = tap_names(model.spec), torch.arange(8)[None]
    name = "layers.0.feed_forward.router"
    taps = Taps([name, "layers.0.feed_forward.output"], known)
    plain = model(tokens, tap=taps)
    logits = taps[name]
    assert logits.shape == (1, 8, 4) and taps["layers.0.feed_forward.output"].shape == (1, 8, 8)
    busiest = int(logits.argmax(-1).flatten().mode().values)

    def without(value: torch.Tensor) -> torch.Tensor:
        return value.masked_fill(torch.arange(4) == busiest, float("-inf"))

    shut = model(tokens, tap=Taps({name: without}, known))
    went = logits.argmax(-1)[0] == busiest
    assert went.any() and not torch.allclose(shut, plain)
    weights = model.decoder.layers[0].feed_forward.router(without(logits), Layout.unpadded(1, 8))
    assert not weights.chosen[..., busiest].any() and weights.weights.isfinite().all()


# the losses


def even(count: int, top_k: int, rows: int = 2, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal scores, and choices that come round to each expert equally often."""
    first = torch.arange(rows * length).view(rows, length)
    chosen = sum(F.one_hot((first * top_k + i) % count, count) for i in range(top_k))
    return torch.full((rows, length, count), 1 / count), chosen.bool()  # type: ignore[union-attr]


def collapsed(count: int, top_k: int, rows: int = 2, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything to the first `top_k` experts."""
    chosen = (torch.arange(count) < top_k).expand(rows, length, count)
    return chosen / top_k, chosen


LAYOUT = Layout.unpadded(2, 8)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_even_routing_costs_top_k_and_a_collapse_the_number_of_experts(top_k: int) -> None:
    """D24: times Switch's alpha that is alpha and alpha * N; summed over k, so that top 2 gives 2."""
    assert float(load_balancing(*even(8, top_k), LAYOUT)) == pytest.approx(top_k)
    assert float(load_balancing(*collapsed(8, top_k), LAYOUT)) == pytest.approx(8)


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_equals_transformers(padded: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits, present = torch.randn(2, 8, 6), torch.ones(2, 8, dtype=torch.long)
    if padded:
        present[0, 5:] = 0
    layout = Layout.padded(present)
    routing = experts(Node(6, 2, EXPERT)).router(logits, layout)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), 6, 2, present if padded else None)
    assert_close(load_balancing(routing.scores, routing.chosen, layout), theirs)


def test_the_shares_have_no_gradient_and_the_scores_do() -> None:
    """D24: d loss / d score of an expert is N * its share / tokens."""
    scores = torch.rand(2, 8, 4).softmax(-1).requires_grad_()
    chosen = best(scores.detach(), 1)
    load_balancing(scores, chosen, LAYOUT).backward()
    share = chosen.float().mean((0, 1))
    assert scores.grad is not None and torch.allclose(scores.grad, (4 * share / 16).expand(2, 8, 4))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_loss_of_each_sequence_on_its_own(top_k: int) -> None:
    """DeepSeek-V3: even routing costs 1 for any k, a collapse N / k; sigmoids are first made to sum to 1."""
    scores, chosen = even(8, top_k)
    assert float(sequence_balance(3 * scores, chosen, LAYOUT)) == pytest.approx(1)
    assert float(sequence_balance(*collapsed(8, top_k), LAYOUT)) == pytest.approx(8 / top_k)


def test_sequences_that_balance_one_another_are_not_balanced() -> None:
    """One collapses to the first of two experts, the other to the second: even as a batch only."""
    chosen = F.one_hot(torch.tensor([[0] * 8, [1] * 8]), 2)
    assert float(load_balancing(chosen.float(), chosen.bool(), LAYOUT)) == pytest.approx(1)
    assert float(sequence_balance(chosen.float(), chosen.bool(), LAYOUT)) == pytest.approx(2)
    packed = Layout.packed([8, 8])
    in_a_row = chosen.view(1, 16, 2)
    assert float(sequence_balance(in_a_row.float(), in_a_row.bool(), packed)) == pytest.approx(2)


def test_the_router_z_loss() -> None:
    """D24: mean of logsumexp^2: at 8 equal logits of 0, ln(8)^2 = 4.324077."""
    assert float(router_z(torch.zeros(2, 8, 8), LAYOUT)) == pytest.approx(math.log(8) ** 2)
    assert math.log(8) ** 2 == pytest.approx(4.324077, abs=1e-6)
    logits = torch.randn(2, 8, 5)
    expected = logits.exp().sum(-1).log().square().mean()
    assert_close(router_z(logits, LAYOUT), expected)


def test_importance() -> None:
    """Shazeer et al. 2017: squared coefficient of variation, 0 when even and N - 1 when one has all."""
    assert float(importance(even(8, 1)[0], LAYOUT)) == pytest.approx(0, abs=1e-6)
    assert float(importance(collapsed(8, 1)[0], LAYOUT)) == pytest.approx(7)
    assert float(importance(torch.tensor([[[1.0, 3.0]]]), Layout.unpadded(1, 1))) == pytest.approx(0.25)


def test_only_tokens_that_are_there_count() -> None:
    """D24. Not in a loss, and not in the update of the balancing bias."""
    logits, present = torch.randn(2, 8, 4), torch.ones(2, 8, dtype=torch.bool)
    present[1, 3:] = False
    module, layout, balance = experts(Node(4, 2, EXPERT)), Layout.padded(present), torch.zeros(4)

    def values() -> list[float]:
        routing = module.router(logits, layout)
        losses = [load_balancing(routing.scores, routing.chosen, layout), router_z(logits, layout),
                  sequence_balance(routing.scores, routing.chosen, layout),
                  importance(routing.scores, layout)]  # fmt: skip
        return [*map(float, losses), *rebalanced(balance, best(logits, 2), layout).tolist()]

    before = values()
    logits[1, 3:] = torch.tensor([9.0, 5.0, 1.0, 1.0])
    assert values() == before
    nobody = Layout.padded(torch.zeros(2, 8, dtype=torch.bool))
    routing = module.router(logits.requires_grad_(), nobody)
    total = load_balancing(routing.scores, routing.chosen, nobody) + router_z(logits, nobody)
    total = (
        total + sequence_balance(routing.scores, routing.chosen, nobody) + importance(routing.weights, nobody)
    )
    total.backward()
    assert total.item() == 0 and logits.grad is not None and logits.grad.isfinite().all()


def test_the_balancing_bias_moves_by_its_rate_against_the_load() -> None:
    """D24, DeepSeek-V3: gamma .001. Loads 10, 4, 2, 0 around a mean of 4."""
    chosen = F.one_hot(torch.tensor([0] * 10 + [1] * 4 + [2] * 2), 4).bool()[None]
    moved = rebalanced(torch.tensor([0.5, 0.5, 0.5, 0.5]), chosen, Layout.unpadded(1, 16))
    assert moved.tolist() == pytest.approx([0.499, 0.5, 0.501, 0.501])


def test_the_balancing_bias_evens_a_lopsided_router() -> None:
    """200 updates of .01 bring the largest load from all tokens to less than twice the mean."""
    module, x = experts(Node(4, 1, EXPERT, Router("sigmoid", balance=True))), torch.randn(1, 200, WIDTH)
    nn.init.zeros_(module.router.balance)
    logits, loads = module.router.logits(x) + torch.tensor([4.0, 0.0, 0.0, 0.0]), []
    for _ in range(200):
        chosen = module.router(logits, whole(x)).chosen
        loads.append(int(chosen.sum((0, 1)).max()))
        module.router.balance.data = rebalanced(module.router.balance, chosen, whole(x), 0.01)
    assert loads[0] > 150 and loads[-1] < 100, (loads[0], loads[-1])


def test_small_scores_are_normalised_like_large_ones() -> None:
    """Two sigmoids near exp(-9) and exp(-10) weigh as e to 1."""
    weights = route(Node(3, 2, EXPERT, Router("sigmoid")), [[-9.0, -10.0, -30.0]]).weights.flatten()
    assert weights.tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e), 0], abs=1e-4)
