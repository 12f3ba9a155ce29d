"""Floating-point operations: the notes' claims worked out, and torch's own counter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qkv.spec import (
    Attention,
    Causal,
    Dense,
    Disentangled,
    Everything,
    Experts,
    Frames,
    Gated,
    GatedDelta,
    HeadBiases,
    Language,
    Layer,
    Model,
    MultiToken,
    Patches,
    Position,
    RelativeSinusoidal,
    RelativeTable,
    Router,
    Shaw,
    Span,
    Stack,
    StateSpace,
    TokenClass,
    Tokens,
    Window,
    pre_norm,
)
from tests.spec import descriptions as of


def block(d: int, *, causal: bool = False) -> tuple[Layer, Layer, Layer]:
    """The layer both notes describe, its attention alone, its feed-forward alone."""
    attention = Attention(d // 64, d // 64, 64, mask=Causal() if causal else Everything())
    feed_forward = Dense("relu", 4 * d)
    return pre_norm(attention, feed_forward), pre_norm(attention), pre_norm(feed_forward)


# --- E28: feed-forward against attention ------------------------------------------------------


@pytest.mark.parametrize("d", [512, 4096])
def test_feed_forward_costs_as_much_as_attention_only_at_long_lengths(d: int) -> None:
    _, attention, feed_forward = block(d)
    (branch,) = attention.sublayers[0].branches
    n = 4 * d
    assert branch.mixer.mixing_flops(n, 0) == feed_forward.flops(d, n) == 16 * n * d * d
    n = 2 * d
    assert attention.flops(d, n) == feed_forward.flops(d, n)
    assert {512: 1024, 4096: 8192}[d] == n


@pytest.mark.parametrize("d", [512, 1024])
def test_skipping_blocks_doubles_those_lengths(d: int) -> None:
    """8d and 4d, but for the diagonal: n (n + 1) / 2 pairs are visible and not n^2 / 2."""
    _, attention, feed_forward = block(d, causal=True)
    (branch,) = attention.sublayers[0].branches
    n = 8 * d
    assert branch.mixer.mixing_flops(n - 1, 0) == 2 * n * (n - 1) * d == feed_forward.flops(d, n - 1)
    n = 4 * d
    assert attention.flops(d, n - 1) == feed_forward.flops(d, n - 1)


def test_projections_scores_and_feed_forward_by_formula() -> None:
    d, n = 256, 100
    whole, attention, feed_forward = block(d)
    assert attention.flops(d, n) == 8 * n * d**2 + 4 * n**2 * d
    assert feed_forward.flops(d, n) == 16 * n * d**2
    assert whole.flops(d, n) == attention.flops(d, n) + feed_forward.flops(d, n)


def test_share_of_the_parameters() -> None:
    """8 d^2 of 12 d^2; Llama-3-8B 80.8 % of a layer's matrices, 70.2 % of the model."""
    d = 512
    whole, _, feed_forward = block(d)

    def matrices(layer: Layer) -> int:
        return sum(tensor.size for tensor in layer.tensors(d) if tensor.multiplies)

    assert 3 * matrices(feed_forward) == 2 * matrices(whole) == 24 * d * d
    model = of.llama()
    gated = 32 * 3 * 4096 * 14336
    layers = sum(
        t.size for t in model.weights().values() if t.name.startswith("decoder.layers") and t.multiplies
    )
    assert round(100 * gated / layers, 1) == 80.8
    assert round(100 * gated / model.parameters(), 1) == 70.2


# --- E32: what doubling the length costs ------------------------------------------------------

LENGTHS = (1 / 8, 1 / 2, 1, 2, 8)


@pytest.mark.parametrize(
    ("causal", "ratios"), [(False, (2.04, 2.15, 2.29, 2.5, 3.14)), (True, (2.02, 2.08, 2.15, 2.29, 2.80))]
)
@pytest.mark.parametrize("gated", [False, True])
def test_twice_the_length_costs_little_more_than_twice(
    causal: bool, ratios: tuple[float, ...], gated: bool
) -> None:
    """Ungated at 4d and gated at 8d/3 alike."""
    d = 3 * 512
    attention = Attention(d // 64, d // 64, 64, mask=Causal() if causal else Everything())
    layer = pre_norm(attention, Gated("silu", 8 * d // 3) if gated else Dense("relu", 4 * d))
    model = Model(decoder=Stack(Tokens(11, d), (layer,) * 3))
    found = [model.flops(int(2 * d * part)) / model.flops(int(d * part)) for part in LENGTHS]
    assert [round(ratio, 2) for ratio in found] == list(ratios)


def test_scores_alone_cost_four_times() -> None:
    (branch,) = block(512)[1].sublayers[0].branches
    assert branch.mixer.mixing_flops(2000, 0) == 4 * branch.mixer.mixing_flops(1000, 0)


# --- against torch's counter ------------------------------------------------------------------


def counted(model: nn.Module, **inputs: torch.Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


SMALL: dict[str, Any] = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 52,
    "vocab_size": 97,
    "attn_implementation": "eager",
}
SIZES = {"layers": 3, "width": 36, "heads": 6, "hidden": 52, "vocab": 97}


@pytest.mark.parametrize("length", [1, 7, 33])
def test_bert_equals_torchs_counter(length: int) -> None:
    tokens = torch.ones(1, length, dtype=torch.long)
    theirs = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    assert of.bert(**SIZES).flops(length) == counted(theirs, input_ids=tokens)
    masked = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).eval()
    assert of.bert_mlm(**SIZES).flops(length) == counted(masked, input_ids=tokens)


def test_grouped_heads_equal_torchs_counter() -> None:
    """Eager attention computes the hidden half too, so the description is asked without the mask."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=10)
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = of.llama(3, 36, 6, 2, 10, 52, 97, mask=Everything())
    assert ours.flops(9) == counted(theirs, input_ids=torch.ones(1, 9, dtype=torch.long))


def test_encoder_and_decoder_equal_torchs_counter() -> None:
    config = transformers.T5Config(
        d_model=36,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=6,
        d_kv=10,
        d_ff=52,
        vocab_size=97,
        attn_implementation="eager",
    )
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    source, target = torch.ones(1, 11, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
    ours = of.t5(3, 2, 36, 6, 10, 52, 97)
    assert ours.decoder is not None
    first, *rest = ours.decoder.layers[0].sublayers
    (branch,) = first.branches
    seeing = replace(branch, mixer=replace(branch.mixer, mask=Everything()))
    layer = Layer((replace(first, branches=(seeing,)), *rest))
    ours = replace(ours, decoder=replace(ours.decoder, layers=(layer,) * 2))
    found = counted(theirs, input_ids=source, decoder_input_ids=target)
    assert ours.flops(5, source=11) == found


def test_images_equal_torchs_counter() -> None:
    config = transformers.CLIPVisionConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=44,
        image_size=35,
        patch_size=7,
        projection_dim=14,
        attn_implementation="eager",
    )
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    ours = of.clip_vision(2, 24, 3, 44, 7, 35, projection=14)
    assert ours.flops(1) == counted(theirs, pixel_values=torch.zeros(1, 3, 35, 35))


def test_convolutions_equal_torchs_counter() -> None:
    frames = Frames(11, 36, strides=(1, 2, 2))
    convolutions = nn.Sequential(
        nn.Conv1d(11, 36, 3, padding=1),
        nn.Conv1d(36, 36, 3, stride=2, padding=1),
        nn.Conv1d(36, 36, 3, stride=2, padding=1),
    )
    for length in (8, 9, 30):
        x = torch.zeros(1, 11, length)
        assert frames.flops(length) == counted(convolutions, input=x)
        assert frames.rows(length) == convolutions(x).shape[-1]


# --- by hand ----------------------------------------------------------------------------------


def test_a_matrix_costs_two_a_parameter_and_token() -> None:
    """So a dense model costs 2 N D but for scores; experts cost what is used (E28)."""
    d, n = 8, 5
    dense, shared = Gated("silu", 6), Dense("relu", 4, bias=False)
    routed = Experts(10, 3, dense, shared_expert=shared)
    assert pre_norm(dense).flops(d, n) == 2 * n * 3 * d * 6
    assert pre_norm(routed).flops(d, n) == 2 * n * (3 * 3 * d * 6 + 10 * d + 2 * d * 4)
    biased = Experts(10, 3, replace(dense, bias=True), Router(bias=True), shared_expert=shared)
    assert pre_norm(biased).flops(d, n) == pre_norm(routed).flops(d, n)


def test_windows_and_latents() -> None:
    d, n = 16, 50
    attention = Attention(2, 1, 4, mask=Causal() & Window(8))
    pairs = 8 * 9 // 2 + (n - 8) * 8
    projections = 2 * n * (2 * d * 8 + 2 * d * 4)
    assert pre_norm(attention).flops(d, n) == projections + 2 * 2 * (4 + 4) * pairs
    small = of.deepseek_v3(1, 16, 2, 4, 2, 3, 5, None, 7, 3, 4, 1, 2, 2, 1, dense_layers=1, vocab=11)
    matrices = 16 * 2 * 6 + 16 * 7 + 5 * 2 * 4 + 5 * 2 * 3 + 2 * 3 * 16 + 3 * 16 * 7 + 16 * 11
    assert small.flops(n) == 2 * n * matrices + 2 * 2 * (4 + 2 + 3) * n * (n + 1) // 2


@pytest.mark.parametrize(
    ("position", "more"),
    [
        (Shaw(4), 2 * 2 * 4 * 2),  # a vector on the keys, one on the values
        (Shaw(4, values=False), 2 * 2 * 4),
        (RelativeSinusoidal(biases=HeadBiases()), 2 * 2 * 4),
        (Disentangled(RelativeTable(6)), 2 * 2 * 4 * 2),
        (Disentangled(RelativeTable(6), terms=("content_to_position",)), 2 * 2 * 4),
    ],
)
def test_distances_as_vectors_cost_another_score(position: Position, more: int) -> None:
    d, n = 16, 9
    plain = Attention(2, 2, 4, mask=Everything())
    extra = pre_norm(replace(plain, position=position)).flops(d, n) - pre_norm(plain).flops(d, n)
    made = 0
    if isinstance(position, RelativeSinusoidal):
        made = 2 * n * d * 2 * 4
    if isinstance(position, Disentangled):
        made = 2 * 6 * d * 2 * 4 * len(position.terms)
    assert extra == more * n * n + made


def test_a_state_costs_the_same_at_every_token() -> None:
    layer = pre_norm(GatedDelta(2, 4, 5, 7))
    assert layer.flops(16, 60) == 60 * layer.flops(16, 1)
    convolution, state = 2 * (2 * 2 * 5 + 4 * 7) * 4, 6 * 4 * 5 * 7
    projections = 2 * 16 * (2 * 10 + 28 + 28 + 4 + 4 + 28)
    assert layer.flops(16, 1) == convolution + state + projections


def test_a_state_space_costs_the_same_at_every_token() -> None:
    layer = pre_norm(StateSpace(4, 5, 7, groups=2, convolution=3))
    assert layer.flops(16, 60) == 60 * layer.flops(16, 1)
    convolution, state = 2 * (20 + 2 * 2 * 7) * 3, 4 * 4 * 5 * 7
    projections = 2 * 16 * (20 + 20 + 14 + 14 + 4 + 20)
    assert layer.flops(16, 1) == convolution + state + projections


def test_heads_answer_once_or_for_every_token() -> None:
    stack = Stack(Tokens(11, 8), (pre_norm(Dense("relu", 4)),))
    bare = Model(encoder=stack).flops(5)
    for head, more in (
        (Language(11), 5 * 2 * 8 * 11),
        (TokenClass(3), 5 * 2 * 8 * 3),
        (Span(), 5 * 2 * 8 * 2),
        (of.bert(1, 8, 2, 4, 11).head, 2 * 8 * 8),
    ):
        assert Model(encoder=stack, head=head).flops(5) - bare == more


def test_a_second_token_costs_a_layer_a_join_and_the_logits_again() -> None:
    layer = pre_norm(Attention(2, 2, 4), Dense("relu", 4))
    stack = Stack(Tokens(11, 8), (layer,))
    one = Model(decoder=stack, head=Language(11)).flops(5)
    two = Model(decoder=stack, head=MultiToken(Language(11), (layer,))).flops(5)
    assert two - one == layer.flops(8, 5) + 5 * 2 * 8 * 16 + 5 * 2 * 8 * 11


def test_patches_do_not_multiply_the_class_token() -> None:
    patches = Patches(7, 24, (35, 28), class_token=True)
    assert (patches.rows(1), patches.flops(1)) == (21, 2 * 20 * 24 * 3 * 49)


def test_whisper_reads_half_as_many_rows_as_frames() -> None:
    model = of.whisper(1, 1, 8, 2, 4, 11, 5)
    assert model.encoder is not None and model.decoder is not None
    head = 2 * 3 * 8 * 11
    assert model.flops(3, source=30) == model.encoder.flops(30) + model.decoder.flops(3, 15) + head
    # three tokens' own projections, the source's keys and values, the scores over 3 x 15 pairs
    cross = model.decoder.layers[0].sublayers[1]
    assert Layer((cross,)).flops(8, 3, 15) == 2 * 3 * 2 * 64 + 2 * 15 * 2 * 64 + 4 * 8 * 3 * 15
