"""Plans: bytes by hand and of published models, what fits, what it costs, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from math import hypot
from pathlib import Path

import pytest
from gguf import GGUFReader

from qkv.engine import limits
from qkv.errors import RequestError
from qkv.planning import DEVICES, Plan, Profile, cache as sizes, plan, tokens, workspace
from qkv.planning.cache import cache, layers, rounding
from qkv.planning.page import page, rates
from qkv.planning.timing import Costs, crossover
from qkv.planning.weights import read_in_a_step, stored, tensor_bytes, weights
from qkv.runtime import blocks as runtime_blocks
from qkv.spec import (
    Attention,
    Causal,
    Dense,
    Everything,
    Experts,
    Gated,
    Language,
    Layer,
    LayerNorm,
    Mask,
    Model,
    RMSNorm,
    Rotary,
    Stack,
    Streaming,
    Tokens,
    Window,
    pre_norm,
)
from tests.spec import descriptions as of
from tests.spec.test_published import PUBLISHED
from tests.support import shared

LLAMA = of.llama(32, 4096, 32, 8, 128, 14336, 128_256, theta=5e5, scaling=None, mask=Causal(), tie=False)


def of_layers(*attentions: Attention, width: int = 64) -> Model:
    made = tuple(pre_norm(a, Dense("relu", 4 * width)) for a in attentions)
    return Model(decoder=Stack(Tokens(100, width), made, RMSNorm()), head=Language(100))


# --- weights ------------------------------------------------------------------------------------


def test_weights_by_format() -> None:
    """8,030,261,248 parameters, of which 65 norms of 4,096 are vectors."""
    vectors = 65 * 4096
    matrices = 8_030_261_248 - vectors
    assert weights(LLAMA, stored("bf16")).bytes == 16_060_522_496
    assert weights(LLAMA, stored("q4_k")).bytes == matrices * 144 // 256 + 4 * vectors
    assert weights(LLAMA, stored("Q8_0")).bytes == matrices * 34 // 32 + 4 * vectors
    assert weights(LLAMA, stored("fp8")).bytes == matrices + 2 * vectors


def test_rows_that_blocks_do_not_fit_have_another_format() -> None:
    model = of_layers(Attention(2, 2, 32), width=96)  # rows of 96, of 64 and of 384
    by_name = {name: stored("q4_k").of(tensor) for name, tensor in model.weights().items()}
    assert by_name["decoder.layers.0.attention.query.weight"] == "Q5_0"
    assert by_name["decoder.layers.0.feed_forward.down.weight"] == "Q5_0"  # 384 is no multiple of 256
    assert by_name["decoder.layers.0.attention_before.weight"] == "F32"
    assert stored("q4_k").of(LLAMA.weights()["head.weight"]) == "Q4_K"


def test_devices_share_matrices_and_each_has_all_vectors() -> None:
    one, eight = (weights(LLAMA, stored("bf16"), n).bytes for n in (1, 8))
    vectors = 2 * 65 * 4096
    assert eight == (one - vectors) // 8 + vectors


def test_experts_alone_are_packed_as_gpt_oss_has_them() -> None:
    expert = Gated("silu", 64)
    layer = pre_norm(Attention(2, 2, 32), Experts(4, 2, expert))
    model = Model(decoder=Stack(Tokens(10, 64), (layer,), RMSNorm()), head=Language(10))
    how = stored("mxfp4")
    found = {how.of(t) for n, t in model.weights().items() if ".expert." in n}
    assert found == {"MXFP4"} and how.of(model.weights()["head.weight"]) == "BF16"


def test_a_file_is_counted_as_it_is_stored(smollm2_file: Path) -> None:
    found = plan(smollm2_file, context=128)
    stored_there = sum(int(tensor.n_bytes) for tensor in GGUFReader(smollm2_file).tensors)
    assert found.parts[0].bytes == stored_there and found.how.name == "q4_1"


@pytest.mark.parametrize("name", ["q4_x", "", "u8", "int3"])
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"weights are .*; they can be"):
        plan(LLAMA, weights=name)


# --- cache --------------------------------------------------------------------------------------


def entries() -> Iterator[tuple[str, dict[str, object]]]:
    path = shared() / "configs" / "reference_models.json"
    yield from ((k, v) for k, v in json.loads(path.read_text()).items() if k != "_doc")


def test_the_twenty_published_models() -> None:
    """Parameters, and the cache of one token and of a whole context in blocks."""
    checked = 0
    for name, entry in entries():
        model = PUBLISHED[name](entry)
        names = ("kv_elems", "kv_elems_mla", "kv_elems_self_decoder")
        elements, length = sum(int(entry.get(n, 0)) for n in names), 4096  # type: ignore[call-overload]
        kept = layers(model)
        assert found_parameters(model, entry)
        if all(one.reach is None for one in kept):
            assert sum(part.bytes for part in cache(kept, length)) == 2 * elements * length
            checked += 1
        assert sum(one.count * one.per_token for one in kept) == 2 * elements
    assert checked >= 15


def found_parameters(model: Model, entry: dict[str, object]) -> bool:
    """Two bytes each in bf16."""
    names = ("params", "params_main", "params_text", "params_with_pooler")
    return weights(model, stored("bf16")).bytes in [2 * int(entry[n]) for n in names if n in entry]  # type: ignore[call-overload]


def test_grouped_heads_are_counted_and_not_query_heads() -> None:
    """Case L1."""
    (one,) = layers(LLAMA)
    assert one.count * one.per_token == 131_072
    assert [part.bytes for part in cache([one], 8192)] == [2**30]


def test_windows_keep_their_window_in_blocks() -> None:
    """Case L3: 52 of 62 layers keep 1,024 tokens; blocks of 16 may begin and end within it."""

    def mask(i: int) -> Mask:
        return Causal() if (i + 1) % 6 == 0 else Causal() & Window(1024)

    model = of_layers(*(Attention(16, 16, 128, mask=mask(i)) for i in range(62)))
    by_kind = {part.name: part.bytes for part in cache(layers(model), 131_072)}
    assert by_kind["cache, full"] == 10 * 8192 * 131_072
    assert by_kind["cache, window of 1,024"] == 52 * 8192 * (1024 + 16)
    assert sum(by_kind.values()) - 11_173_625_856 == 52 * 8192 * 16


def test_latents_are_kept_once_and_on_every_device() -> None:
    """Case L5."""
    model = of.deepseek_v3()
    assert sum(p.bytes for p in cache(layers(model), 163_840)) == 11_513_364_480
    assert sum(p.bytes for p in cache(layers(model, devices=8), 163_840)) == 11_513_364_480


def test_heads_are_split_over_devices_a_head_at_least() -> None:
    for devices, each in ((1, 8), (2, 4), (8, 1), (16, 1)):
        (one,) = layers(LLAMA, devices=devices)
        assert one.per_token == each * 2 * 128 * 2


def test_eight_bits_have_a_scale_for_each_head_and_token() -> None:
    (one,) = layers(LLAMA, "int8")
    assert one.per_token == 8 * 2 * (128 + 4)


def test_a_common_beginning_is_kept_once_where_all_is_seen() -> None:
    both = of_layers(Attention(2, 2, 32), Attention(2, 2, 32, mask=Causal() & Window(64)))
    full, window = layers(both)
    alone = [part.bytes for part in cache([full, window], 1024)]
    many = [part.bytes for part in cache([full, window], 1024, 10, prefix=520)]
    # 512 of 520 tokens are whole blocks
    assert many == [10 * alone[0] - 9 * 512 * 256, 10 * alone[1]]


def test_first_keys_beside_a_window() -> None:
    (one,) = layers(of_layers(Attention(2, 2, 32, mask=Causal() & Streaming(4, 60))))
    assert one.held(10_000) == 16 + 64 + 16 and one.held(40) == 48


def test_what_plans_take_for_granted_of_the_runtime_is_so() -> None:
    assert (sizes.BLOCK, workspace.ROWS) == (runtime_blocks.BLOCK, limits.CHUNK)


def test_memory_comes_in_segments() -> None:
    """SmolLM2: 23,040 bytes a token; 32 blocks of 368,640 bytes are the most below 16 MiB."""
    model = of_layers(*(Attention(9, 3, 64),) * 30)
    assert rounding(layers(model), 100).bytes == (32 - 7) * 368_640
    assert rounding(layers(model), 512).bytes == 0
    assert rounding(layers(model), 100, 5).bytes == (64 - 35) * 368_640


# --- the whole ----------------------------------------------------------------------------------


def small(**asked: object) -> Plan:
    return plan(LLAMA, **{"memory": 24 * 2**30, "context": 8192, "weights": "q4_k", **asked})  # type: ignore[arg-type]


def test_what_fits_is_the_most_that_fits() -> None:
    found = small(concurrency=4)
    assert found.fits and found.most_context and found.most_concurrency
    assert small(concurrency=4, context=found.most_context).fits
    assert not small(concurrency=4, context=found.most_context + 16).fits
    assert small(concurrency=found.most_concurrency).fits
    assert not small(concurrency=found.most_concurrency + 1).fits


def test_what_never_fits_says_so() -> None:
    found = small(memory=2**30)
    assert found.fits is False and found.most_context == found.most_concurrency == 0
    assert "does NOT fit in 1.07 GB" in str(found)


def test_parts_add_up_and_bands_are_around_them() -> None:
    found = small(concurrency=3, prefix=100)
    assert found.bytes == sum(part.bytes for part in found.parts)
    least, most = found.range
    assert least < found.bytes < most
    assert json.loads(json.dumps(found.data()))["bytes"] == found.bytes


def test_training_takes_sixteen_bytes_a_parameter_and_activations() -> None:
    """Facts, part 5 on D31; one layer's activations by hand."""
    model = of_layers(Attention(2, 2, 32))
    found = plan(model, context=10, batch=3, memory=2**30)
    by_name = {part.name: part.bytes for part in found.training}
    states = by_name["weights"] + by_name["gradients"] + by_name["optimiser"]
    assert states == 16 * model.parameters()
    attention, forward = 2 * 64 + 4 * 64, 2 * 64 + 2 * 256
    assert by_name["activations"] == 2 * 30 * (attention + forward)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"context": 0, "concurrency": 0}, "concurrency is 0"),
        ({"prefix": 9000}, "A prefix of 9,000 tokens"),
        ({"kv": "int3"}, "kv is 'int3'"),
        ({"device": "abacus"}, "device 'abacus' is not known"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
    ],
)
def test_what_cannot_be_asked_for(asked: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        small(**asked)


@pytest.mark.parametrize(
    ("text", "count"), [("8192", 8192), ("8k", 8192), ("1.5K", 1536), ("1M", 1 << 20), ("131,072", 131_072)]
)
def test_tokens_as_people_write_them(text: str, count: int) -> None:
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "8q", "1.3"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(RequestError, match="no number of tokens"):
        tokens(text)


def test_a_source_that_is_not_counted_is_told_of() -> None:
    model = PUBLISHED["T5-large"](dict(entries())["T5-large"])
    assert plan(model, memory=2**33).notes == (
        "What an encoder makes of its source is not counted: say how much it reads.",
    )
    counted = plan(model, memory=2**33, reads=512)
    # keys and values of 16 heads of 64 in 24 layers
    assert counted.notes == () and counted.part("cache, cross") == 24 * 2 * 2 * 16 * 64 * 512


# --- time ---------------------------------------------------------------------------------------

PLAIN = Profile(
    "a machine of round numbers", None, {"": 10e9}, {"": 1e12}, {"": 1e12}, cache=5e9, attention=1e12,
    layer=1e-5, step=1e-3, band=0.2,
)  # fmt: skip


def test_a_step_of_one_row_reads_all_weights_and_its_cache() -> None:
    how, kept = stored("bf16"), layers(LLAMA)
    read, flops = read_in_a_step(LLAMA, how, 1)
    embedding = 2 * 128_256 * 4096  # is looked up
    assert read == 16_060_522_496 - embedding
    assert flops == 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    found = Costs(LLAMA, how, PLAIN).decode(kept, 1000, 1)
    products = hypot(read / 10e9, flops / 1e12)  # both at once
    assert found.seconds == pytest.approx(products + 1000 * 131_072 / 5e9 + 1e-3 + 32e-5)
    assert found.range == pytest.approx((0.8 * found.seconds, 1.2 * found.seconds))


def test_many_rows_compute_and_one_of_them_answers() -> None:
    """The head comes last, for one row: its weights are read with nothing to compute meanwhile."""
    how = stored("bf16")
    found = Costs(LLAMA, how, replace(PLAIN, logit=1e-9)).prefill(512)
    inside = 2 * (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096)
    head = 2 * 128_256 * 4096  # bytes, and operations; and so many bytes of an embedding are looked up
    pairs = 512 * 513 / 2 * 32 * 4 * 32 * 128
    computing, reading = 512 * inside / 1e12, (16_060_522_496 - 2 * head) / 10e9
    products = hypot(computing, reading)  # both at once
    assert reading < 0.25 * computing
    last = hypot(head / 10e9, head / 1e12) + 128_256 * 1e-9
    assert found.seconds == pytest.approx(products + last + pairs / 1e12 + 1e-3 + 32e-5)


def test_a_few_rows_cost_what_reading_the_weights_does_until_computing_takes_longer() -> None:
    costs = Costs(LLAMA, stored("bf16"), PLAIN)
    read, flops = read_in_a_step(LLAMA, stored("bf16"), 1)
    assert costs.products(2, 2)[0] == pytest.approx(hypot(read / 10e9, 2 * flops / 1e12), rel=1e-6)
    assert costs.products(2000, 2000)[0] == pytest.approx(hypot(read / 10e9, 2000 * flops / 1e12), rel=1e-6)
    alike = round(read / 10e9 / (flops / 1e12))
    assert costs.products(alike, alike)[0] == pytest.approx(2**0.5 * read / 10e9, rel=0.01)


def test_answers_go_through_memory() -> None:
    """A number's line is read before it is written, and it is read again to be chosen from."""
    costs = Costs(
        LLAMA,
        stored("bf16"),
        replace(PLAIN, answer=4e-5, logit=2e-10, reading=((1 << 20, 5e9), (1 << 30, 5e9))),
    )
    none, some = costs.beside(24, 0), costs.beside(24, 24)
    assert some - none == pytest.approx(24 * (4e-5 + 128_256 * (2e-10 + 12 / 5e9)))


def test_of_experts_those_are_read_that_some_row_picks() -> None:
    layer = pre_norm(Attention(2, 2, 32), Experts(8, 2, Gated("silu", 64)))
    model = Model(decoder=Stack(Tokens(10, 64), (layer,), RMSNorm()), head=Language(10))
    how = stored("f32")
    expert = 4 * 3 * 64 * 64
    rest = read_in_a_step(model, how, 1)[0] - 2 * expert
    assert read_in_a_step(model, how, 2)[0] == pytest.approx(rest + 8 * (1 - 0.75**2) * expert, abs=1)
    assert read_in_a_step(model, how, 1000)[0] == pytest.approx(rest + 8 * expert, abs=1)


def test_where_attention_overtakes_the_feed_forward() -> None:
    """E28: at n = 4d scores and mixtures alone, at 2d with the projections; causal 8d and 4d."""
    d = 512
    for mask, alone, whole in ((Everything(), 4 * d, 2 * d), (Causal(), 8 * d, 4 * d)):
        layer: Layer = pre_norm(Attention(8, 8, 64, mask=mask), Dense("relu", 4 * d), norm=LayerNorm())
        model = Model(decoder=Stack(Tokens(100, d), (layer,) * 6, RMSNorm()), head=Language(100))
        found = crossover(model)
        # causal: (n + 1) / 2 pairs a token
        off = 0 if mask == Everything() else 1
        assert (found.scores, found.attention) == (alone - off, whole - off)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    for profile in (PLAIN, replace(PLAIN, reading=((1 << 25, 6e10), (1 << 29, 3e10)))):
        profile.save(tmp_path / "deep" / "machine.json")
        assert Profile.read(tmp_path / "deep" / "machine.json") == profile


def test_the_page_has_the_rates_of_the_plan_itself(smollm2_file: Path) -> None:
    """By what the file holds: SmolLM2's is larger than all its weights in the format most of them have."""
    found = plan(smollm2_file, context=512, concurrency=3, profile=PLAIN)
    assert rates(found, PLAIN, [3]) == [found.data()["tokens_per_second"]]
    assert sum((found.source.sizes or {}).values()) > weights(found.source.model, found.how).bytes


def test_the_page_says_all_that_the_text_says() -> None:
    """But for the lines of parts, which are bars there."""
    found = plan(LLAMA, context=8192, concurrency=2, device="h100", batch=2, reads=0)
    text = unescape(re.sub(r"<[^>]+>", "\n", page(found))).replace("\u00a0", " ")
    for line in str(found).split("\n"):
        for part in re.split(r"  +", line.strip()):
            assert part.rstrip(":") in text, part


def test_devices_by_name() -> None:
    found = plan(LLAMA, context=8192, device="H100")
    assert found.profile == DEVICES["h100"] and found.decode is not None
    # 15 GB of weights and 1 GB of cache at 80 % of 3,350 GB/s
    assert 5e-3 < found.decode.seconds < 8e-3


def test_tensors_are_counted_by_whole_blocks() -> None:
    tensor = LLAMA.weights()["decoder.layers.0.attention.key.weight"]
    assert tensor_bytes(tensor, "Q4_0") == 1024 * 4096 // 32 * 18
    model = of_layers(Attention(1, 1, 5, position=Rotary()), width=5)
    assert tensor_bytes(model.weights()["head.weight"], "Q8_0") == 100 * 34
