"""Feed-forwards as memories, and one of them rewritten."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import (
    Asked,
    Difference,
    EditScores,
    Logit,
    LogProbability,
    Reading,
    direct_attribution,
    edit_scores,
    edited,
    key_at,
    key_moment,
    memories,
    neuron_readout,
    rank_one,
    target_value,
    value_at,
)
from tests.explanation.cases import METRIC, OTHER, TOKENS, asked, network, reading, tapped
from tests.matrix.variants import VARIANTS, VOCAB
from tests.support import assert_close, random_model

MANY = torch.randint(0, VOCAB, (12, 7), generator=torch.Generator().manual_seed(8))


def problem(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """W (4, 6), k (6), v (4) and C of 30 keys, float64."""
    generator = torch.Generator().manual_seed(seed)
    w, k, v, keys = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((4, 6), (6,), (4,), (30, 6))
    )
    return w, k, v, keys.T @ keys / 30


def test_a_rank_one_edit_puts_the_value_at_the_key_exactly() -> None:
    """D33: W' k = v; and x with x^T C^-1 k = 0 is mapped as before."""
    w, k, v, c = problem()
    new = rank_one(w, k, v, c)
    torch.testing.assert_close(new @ k, v, rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(new - w) == 1
    direction = torch.linalg.inv(c) @ k
    for seed in range(5):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = x - direction * (x @ direction) / (direction @ direction)
        torch.testing.assert_close(new @ x, w @ x, rtol=0, atol=1e-12)
        assert (new @ (x + k) - w @ (x + k)).abs().max() > 0.1
    expected = w + torch.outer(v - w @ k, direction) / (direction @ k)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-10)


def test_of_all_maps_that_put_it_there_it_changes_least_over_the_keys() -> None:
    """Meng et al. 2022, equation 2: sum over the keys of |(W' - W) k|^2 = tr(D C D^T) is least."""
    w, k, v, c = problem(1)

    def cost(new: torch.Tensor) -> float:
        return float(torch.trace((new - w) @ c @ (new - w).T))

    best = rank_one(w, k, v, c)
    for seed in range(10):
        other = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other = other - torch.outer(other @ k, k) / (k @ k)  # leaves k where it is
        assert cost(best + 0.1 * other) > cost(best)


def test_edits_that_have_no_answer_are_refused() -> None:
    w, k, v, c = problem()
    few = torch.randn(3, 6, dtype=torch.float64)
    with pytest.raises(RequestError, match="more tokens than the 6 hidden units"):
        rank_one(w, k, v, few.T @ few)
    with pytest.raises(RequestError, match="The key is zero"):
        rank_one(w, 0 * k, v, c)


def test_keys_values_and_moments_are_the_feed_forwards_own() -> None:
    for variant in ("grouped", "post-norm"):  # gated without biases; dense with them
        one = reading(variant)
        _, taps = tapped(variant, ["layers.1.feed_forward.*"])
        hidden, output = (taps[f"layers.1.feed_forward.{name}"][0] for name in ("hidden", "output"))
        assert_close(key_at(one, 1, 4), hidden[4])
        bias = network(variant).trunk.layers[1].get_submodule("feed_forward.down").bias
        assert (bias is None) == (variant == "grouped")
        value = output[4] if bias is None else output[4] - bias.detach()
        assert_close(value_at(one, 1, 4), value)
        moment = torch.zeros(hidden.shape[1], hidden.shape[1])
        for key in hidden:
            moment += torch.outer(key, key) / 7
        assert_close(key_moment(one, 1), moment)


def test_an_edit_in_a_model_is_found_there_and_gone_behind_the_block() -> None:
    model = random_model(VARIANTS["grouped"])
    one, before = Reading(model, TOKENS), model(TOKENS).detach()
    weight = model.trunk.layers[1].get_parameter("feed_forward.down.weight")
    key, value = key_at(one, 1), target_value(one, 1, LogProbability(9), decay=0)
    new = rank_one(weight, key, value, key_moment(Reading(model, MANY), 1))
    with edited(one, 1, new):
        inside = Reading(model, TOKENS)
        assert_close(value_at(inside, 1), value, 1e-4)
        told = float(inside.value(LogProbability(9)))
        assert told > float(one.value(LogProbability(9))) + 1
    assert model.trunk.layers[1].get_parameter("feed_forward.down.weight") is weight
    assert torch.equal(model(TOKENS), before)
    with pytest.raises(ValueError, match="stop"), edited(one, 1, new):
        raise ValueError("stop")
    assert torch.equal(model(TOKENS), before)


def test_a_value_found_for_an_answer_gives_it_when_it_is_put_there() -> None:
    """With the bias again, by a tap on the output; without steps it is the own value."""
    one = reading("post-norm")
    assert_close(target_value(one, 0, METRIC, steps=0), value_at(one, 0))
    value = target_value(one, 0, METRIC, place=5, decay=0)
    bias = network("post-norm").trunk.layers[0].get_parameter("feed_forward.down.bias").detach()

    def put(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[0, 5] = (value + bias).float()
        return x

    logits, _ = tapped("post-norm", {"layers.0.feed_forward.output": put})
    assert asked(logits) > asked(tapped("post-norm", [])[0]) + 0.05


def test_layers_that_share_their_values_are_edited_together() -> None:
    model = random_model(VARIANTS["grouped"])
    first, second = (model.trunk.layers[i].get_submodule("feed_forward.down") for i in (0, 1))
    second.weight = first.weight
    one = Reading(model, TOKENS)
    with edited(one, 0, torch.zeros(16, 24)):
        assert not first.weight.any() and second.weight is first.weight
    assert second.weight is first.weight and first.weight.any()


def test_shares_of_prompts_that_answer_as_they_should() -> None:
    one, rows = reading("grouped"), MANY.tolist()
    told = [float(reading("grouped", MANY[i : i + 1]).value(Difference(4, 8))) for i in range(12)]
    found = edit_scores(one, Asked(rows[:5], rows[5:9], rows[9:]), new=4, old=8)
    assert found.efficacy == np.mean([x > 0 for x in told[:5]])
    assert found.paraphrase == np.mean([x > 0 for x in told[5:9]])
    assert found.specificity == np.mean([x < 0 for x in told[9:]])
    only = edit_scores(one, Asked(rows[:1]), new=4, old=8)
    assert np.isnan(only.paraphrase) and np.isnan(only.specificity)
    assert isinstance(only, EditScores)


def test_what_units_write_sums_to_what_the_feed_forward_adds_to_the_logit() -> None:
    """Over the length the last norm divides by: direct attribution of the last layer, unit by unit."""
    one = reading("grouped")
    state = one.read(["layers.1.output"])["layers.1.output"][0, -1].double()
    length = float((state.square().mean() + network("grouped").trunk.norm.eps).sqrt())  # type: ignore[union-attr]
    read = neuron_readout(one, 1, range(24))
    assert read.values.shape == (24, VOCAB)
    total = float((key_at(one, 1).numpy() * read.values[:, 3]).sum()) / length
    direct = direct_attribution(one, Logit(3)).at(component="1.feed_forward")
    assert total == pytest.approx(float(direct), abs=1e-5)


def test_what_a_unit_writes_is_its_activation_times_its_values_length() -> None:
    one = reading("grouped", OTHER)
    weight = network("grouped").trunk.layers[0].get_parameter("feed_forward.down.weight").detach()
    key = key_at(one, 0, 2)
    expected = [float(key[i]) * float(weight[:, i].norm()) for i in range(24)]
    np.testing.assert_allclose(memories(one, 0, 2).values, expected, rtol=1e-5)


def test_what_is_no_memory_is_refused() -> None:
    one = reading("grouped")
    with pytest.raises(RequestError, match="Layer 5 has no feed-forward"):
        memories(one, 5)
    with pytest.raises(UnsupportedError, match="Experts have no hidden units"):
        memories(reading("experts-softmax"), 0)
    with pytest.raises(RequestError, match="no neuron 24"):
        neuron_readout(one, 0, [24])
    with pytest.raises(RequestError, match="no place 7"):
        key_at(one, 0, 7)
    with (
        pytest.raises(RequestError, match=r"have shape \(2, 2\); they must be \(16, 24\)"),
        edited(one, 0, torch.zeros(2, 2)),
    ):
        pass
