"""The original Transformer (D7, D8): sizes, one whole model against torch's layers, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError, RequestError
from qkv.lineage.transformer import (
    BASE,
    BIG,
    BIG_ENGLISH_FRENCH,
    Dropout,
    Hyperparameters,
    Search,
    Training,
    Transformer,
    averaged,
    describe,
    learning_rate,
    smoothed_cross_entropy,
    smoothing_floor,
)
from qkv.nn import Layout, Taps, tap_names
from qkv.nn.attention import Attention
from qkv.nn.positions import Sinusoidal
from tests.nn.test_layers import of_attention, pair
from tests.support import assert_close

SMALL = Hyperparameters(layers=2, width=12, hidden=20, heads=3)
VOCAB, PAD = 11, 0
SOURCE = torch.tensor([[3, 4, 5, 2, 7], [8, 9, 2, 0, 0]])
PRESENT = SOURCE != PAD
TARGET = torch.tensor([[1, 6, 3, 8], [1, 4, 10, 2]])
EVERY = torch.ones_like(TARGET, dtype=torch.bool)


def random(node: spec.Model | None = None, **dropout: float) -> Any:
    model = Transformer(node or describe(SMALL, VOCAB), **dropout).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=2.0 if name.endswith("post.weight") else 0.4)
    return model


# --- the model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hyper", "millions"), [(BASE, 63.05), (BIG, 214.17), (BIG_ENGLISH_FRENCH, 214.17)], ids=str
)
def test_parameters_of_the_papers_sizes(hyper: Hyperparameters, millions: float) -> None:
    """D8: 63.05M and 214.2M at 37,000 shared entries, of the model as built and of its description."""
    with torch.device("meta"):
        model = Transformer(describe(hyper))
    count = sum(p.numel() for p in model.parameters())
    assert count == describe(hyper).parameters() and round(count / 1e6, 2) == millions


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_more_heads_are_narrower_and_cost_the_same(heads: int) -> None:
    """D7: d_k = d / h; the rows of table 3 (A) have equal parameters and equal operations."""
    other = describe(replace(BASE, heads=heads))
    assert other.parameters() == describe().parameters()
    assert other.flops(40, 50) == describe().flops(40, 50)


def test_one_table_reads_both_sides_and_tells_the_next_token() -> None:
    network: Any = Transformer(describe(SMALL, VOCAB)).network
    assert network.encoder.embedding.weight is network.decoder.embedding.weight is network.head.weight


@pytest.mark.parametrize("position", [spec.Sinusoidal(), spec.Learned(9), None], ids=str)
@torch.no_grad()
def test_equals_torch_layers_on_scaled_embeddings_with_positions(position: spec.Position | None) -> None:
    """The whole: sqrt(d) E + PE, post-norm, no final norm, the encoder's padding in cross-attention, E^T."""
    model = random(describe(SMALL, VOCAB, position))
    network, width = model.network, 12
    table = network.head.weight
    places = torch.zeros(9, width)
    if isinstance(position, spec.Sinusoidal):
        places = Sinusoidal(spec.Sinusoidal(), width)(torch.arange(9)[None])[0]

    def embedded(tokens: Tensor, side: Any) -> Tensor:
        if isinstance(position, spec.Learned):
            return table[tokens] * math.sqrt(width) + side.embedding.position.weight[: tokens.shape[1]]
        return table[tokens] * math.sqrt(width) + places[: tokens.shape[1]]

    states = embedded(SOURCE, network.encoder)
    for ours in network.encoder.layers:
        theirs = nn.TransformerEncoderLayer(width, 3, 20, 0.0, batch_first=True)
        filled(theirs, ours, {"attention": theirs.self_attn})
        states = theirs(states, src_key_padding_mask=~PRESENT)
    x = embedded(TARGET, network.decoder)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for ours in network.decoder.layers:
        theirs = nn.TransformerDecoderLayer(width, 3, 20, 0.0, batch_first=True)
        filled(theirs, ours, {"attention": theirs.self_attn, "cross": theirs.multihead_attn})
        x = theirs(x, states, tgt_mask=future, memory_key_padding_mask=~PRESENT)
    assert_close(model(SOURCE, PRESENT, TARGET), x @ table.T)


def filled(theirs: Any, ours: Any, attentions: dict[str, Any]) -> None:
    """Our weights in torch's layer, whose attention's biases, which the paper's count lacks, are 0."""
    slots: dict[str, Tensor] = pair("feed_forward.up", theirs.linear1)
    slots |= pair("feed_forward.down", theirs.linear2)
    for number, name in enumerate((*attentions, "feed_forward"), 1):
        slots |= pair(f"{name}_post", getattr(theirs, f"norm{number}"))
    for name, attention in attentions.items():
        slots |= of_attention(attention, name)
    for name, value in ours.state_dict().items():
        slots.pop(name).copy_(value)
    assert all(name.endswith("bias") for name in slots)
    for bias in slots.values():
        bias.zero_()


@torch.no_grad()
def test_an_alignment_is_the_last_layers_mean_over_heads() -> None:
    model = random()
    taps = Taps("decoder.layers.1.cross.weights", tap_names(model.network.spec))
    model.network(TARGET[:1], SOURCE[:1], tap=taps)
    weights = taps["decoder.layers.1.cross.weights"]
    expected = (weights[:, 0] + weights[:, 1] + weights[:, 2]) / 3
    assert_close(model.alignment(SOURCE[:1], PRESENT[:1], TARGET[:1]), expected)


def test_parameters_start_with_embeddings_of_variance_one() -> None:
    """Times sqrt(d); matrices within Glorot's bound sqrt(6 / (in + out)), norms the identity."""
    model: Any = Transformer(describe(Hyperparameters(1, 256, 512, 4), 500, spec.Learned(300)))
    layer = model.network.decoder.layers[0]
    assert float((16 * model.network.head.weight.detach()).var()) == pytest.approx(1, rel=0.05)
    assert float((16 * model.network.encoder.embedding.position.weight.detach()).var()) == pytest.approx(
        1, rel=0.05
    )
    for matrix, bound in (
        (layer.cross.key.weight, (6 / 512) ** 0.5),
        (layer.feed_forward.down.weight, (6 / 768) ** 0.5),
    ):
        assert 0.98 * bound < float(matrix.detach().abs().max()) <= bound
    assert (layer.cross_post.weight == 1).all() and not layer.cross_post.bias.any()
    assert not layer.feed_forward.up.bias.any()


def test_what_is_no_translator_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 heads cannot share a width of 12"):
        describe(replace(SMALL, heads=5))
    node = describe(SMALL, VOCAB)
    for lacking in (replace(node, encoder=None), replace(node, head=None)):
        with pytest.raises(ConfigError, match="one is missing"):
            Transformer(lacking)


# --- dropout ----------------------------------------------------------------------------------


def test_dropout_is_on_sublayers_before_they_are_added_and_on_embeddings() -> None:
    """D8, section 5.4: these points of both stacks and no others; the stream itself loses nothing."""
    names = tap_names(describe(replace(SMALL, layers=1), VOCAB))
    tap = Dropout(0.1)
    dropped = {name for name in names if tap.at(*name.split(".")[:-1]).wants(name.split(".")[-1])}
    assert dropped == {
        "encoder.embedding", "decoder.embedding",
        "encoder.layers.0.attention.output", "encoder.layers.0.feed_forward.output",
        "decoder.layers.0.attention.output", "decoder.layers.0.cross.output",
        "decoder.layers.0.feed_forward.output",
    }  # fmt: skip


@torch.no_grad()
def test_dropout_acts_in_training_only_and_where_it_says() -> None:
    """All dropped, norm(0) is what every layer starts from; values kept are divided by their share."""
    model = random(dropout=1.0)
    assert torch.equal(model(SOURCE, PRESENT, TARGET), model(SOURCE, PRESENT, TARGET))
    model.train()
    out = model(SOURCE, PRESENT, TARGET)
    assert_close(out, out[:1, :1].expand_as(out))
    x = torch.zeros(12)
    for layer in model.network.decoder.layers:
        x = layer.feed_forward_post(layer.cross_post(layer.attention_post(x)))
    assert_close(out[0, 0], model.network.head.weight @ x)
    kept = Dropout(0.25).at("encoder")("embedding", torch.ones(20_000))
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(kept.mean()) == pytest.approx(1, rel=0.02)


@torch.no_grad()
def test_dropout_of_weights_comes_after_the_softmax() -> None:
    """D7: four keys of weight 1/4 become 0 or 1/2; were scores dropped, a row would still sum to 1."""
    module = Attention(spec.Attention(1, 1, 4, mask=spec.Everything()), 4)
    for part in (module.query, module.key):
        nn.init.zeros_(part.weight)
    for part in (module.value, module.output):  # type: ignore[assignment]
        nn.init.eye_(part.weight)
    rows, layout = torch.eye(4).expand(50, 4, 4), Layout.unpadded(50, 4)
    weights = module(rows, layout, tap=Dropout(0.0, 0.5).at("encoder", "layers", 0, "attention"))
    assert weights.unique().tolist() == [0, 0.5] and weights.sum(-1).unique().tolist() == [0, 0.5, 1, 1.5, 2]
    assert float(weights.mean()) == pytest.approx(0.25, rel=0.1)
    assert not module(rows, layout, tap=Dropout(0.0, 1.0).at("attention")).any()


# --- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("hyper", "peak"), [(BASE, 6.9877e-4), (BIG, 4.941e-4)], ids=["base", "big"])
def test_the_rate_rises_to_its_peak_at_the_end_of_the_warm_up(hyper: Hyperparameters, peak: float) -> None:
    """D8: linear from the first step, then by the root; steps count from 1."""
    assert learning_rate(4000, hyper.width) == pytest.approx(peak, rel=5e-5)
    assert (
        learning_rate(3999, hyper.width) < learning_rate(4000, hyper.width) > learning_rate(4001, hyper.width)
    )
    assert learning_rate(1, hyper.width) == pytest.approx(peak / 4000, rel=5e-5)
    assert learning_rate(16_000, hyper.width) == pytest.approx(peak / 2, rel=5e-5)
    with pytest.raises(RequestError, match="The step is 0; the first is 1"):
        learning_rate(0)


def test_an_optimiser_goes_through_the_rates_from_the_first() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimiser = Training(warmup=4).optimiser([weight], width=16)
    schedule, rates = Training(warmup=4).schedule(optimiser), []
    for _ in range(9):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates == pytest.approx([learning_rate(step, 16, 4) for step in range(1, 10)])
    group = optimiser.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_settings_of_the_paper() -> None:
    """D8, table 3 and sections 5 and 6."""
    assert Hyperparameters(6, 512, 2048, 8, 0.1, 0.1, 100_000, 5) == BASE
    assert Hyperparameters(6, 1024, 4096, 16, 0.3, 0.1, 300_000, 20) == BIG
    assert BIG_ENGLISH_FRENCH.dropout == 0.1
    assert Training() == Training((0.9, 0.98), 1e-9, 4000, 25_000)
    assert Search() == Search(4, 0.6, 50)


@pytest.mark.parametrize(("classes", "floor"), [(100, 0.7778), (1000, 1.0148), (37_000, 1.3769)])
def test_the_loss_ends_at_the_entropy_of_its_targets(classes: int, floor: float) -> None:
    """D8: reached by exactly the smoothed distribution, over the classes that count; pad gets nothing."""
    assert smoothing_floor(classes) == pytest.approx(floor, abs=5e-5)
    target = torch.tensor([[1, 5, 6, 7]])
    q = F.one_hot(target[:, 1:], classes + 1) * 0.9 + 0.1 / classes
    q[..., PAD] = 0
    assert_close(q.sum(-1), torch.ones(1, 3))
    logits = F.pad(q.log(), (0, 0, 0, 1)).requires_grad_()
    loss = smoothed_cross_entropy(logits, target, torch.ones(1, 4, dtype=torch.bool), pad=PAD)
    assert float(loss.detach()) == pytest.approx(floor, abs=5e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


def test_without_a_padding_class_the_loss_is_torchs() -> None:
    logits = torch.randn(2, 4, VOCAB)
    for smoothing in (0.0, 0.1, 0.4):
        expected = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten(), label_smoothing=smoothing
        )
        assert_close(smoothed_cross_entropy(logits, TARGET, EVERY, smoothing), expected)
    assert smoothing_floor(5, 0.0) == 0
    logits[..., 0] = float("-inf")
    assert smoothed_cross_entropy(logits, TARGET, EVERY, 0.0).isfinite()


def test_padding_counts_neither_as_a_token_nor_as_a_class() -> None:
    """D8: by hand, over three tokens and one; logits where nothing is to be said may be anything."""
    logits, target = torch.randn(2, 4, 5), torch.tensor([[1, 2, 3, 4], [1, 4, 0, 0]])
    logs = logits.log_softmax(-1)
    told = [(logs[0, 0], 2), (logs[0, 1], 3), (logs[0, 2], 4), (logs[1, 0], 4)]
    expected = -sum(0.9 * row[token] + 0.1 / 4 * row[1:].sum() for row, token in told) / 4
    logits[1, 1:] = float("nan")
    logits[0, 3] = float("nan")
    assert_close(smoothed_cross_entropy(logits, target, target != PAD, pad=PAD), expected)
    nothing = smoothed_cross_entropy(logits, target, torch.zeros(2, 4, dtype=torch.bool))
    assert float(nothing) == 0


def test_it_learns_a_sentence_by_heart_and_smoothing_keeps_it_from_certainty() -> None:
    """With the paper's Adam: the loss comes to its floor, where the right token has .9 + .1 / 10."""
    torch.set_num_threads(1)  # matrices so small that two threads would wait for one another
    model, settings = Transformer(describe(SMALL, VOCAB), dropout=0.0), Training()
    optimiser = settings.optimiser(model.parameters())
    optimiser.param_groups[0]["lr"] = 5e-3  # a sentence needs no warm-up
    for _ in range(150):
        optimiser.zero_grad()
        loss = smoothed_cross_entropy(model(SOURCE, PRESENT, TARGET), TARGET, EVERY, pad=PAD)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert smoothing_floor(10) < float(loss.detach()) < smoothing_floor(10) + 0.05
    told = model(SOURCE, PRESENT, TARGET).softmax(-1)[:, :-1].gather(-1, TARGET[:, 1:, None])
    assert told.detach().flatten().tolist() == pytest.approx([0.91] * 6, abs=0.05)


def test_the_mean_of_checkpoints() -> None:
    """Tensor by tensor, in the tensors' own type; what is tied stays one."""
    models = [random() for _ in range(3)]
    mean = averaged([model.state_dict() for model in models])
    name = "network.decoder.layers.1.cross.key.weight"
    first, second, third = (model.state_dict()[name] for model in models)
    assert_close(mean[name], (first + second + third) / 3)
    merged = random()
    merged.load_state_dict(mean)
    head = sum(model.network.head.weight for model in models) / 3
    assert_close(merged.network.head.weight, head)
    assert merged.network.head.weight is merged.network.encoder.embedding.weight
    halves = averaged([{"x": torch.tensor([1.0, 6e4]).half()}, {"x": torch.tensor([2.0, 6e4]).half()}])
    assert halves["x"].dtype == torch.float16 and halves["x"].tolist() == [1.5, 6e4]  # their sum has no half
    assert_close(averaged([models[0].state_dict()])[name], first)


def test_checkpoints_that_have_no_mean_are_refused() -> None:
    with pytest.raises(RequestError, match="no checkpoint"):
        averaged([])
    for other in ({"y": torch.ones(2)}, {"x": torch.ones(3)}, {}):
        with pytest.raises(RequestError, match="different tensors"):
            averaged([{"x": torch.ones(2)}, other])
