"""Parameters as programs read them: the files' own blocks wherever they can be handed on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qkv.checkpoints import StoredTensor, quantise, read_gguf
from qkv.families import Description
from qkv.families.weights import Place, Table
from qkv.loading import Files, Parameters, checked, load, weight_map
from qkv.loading.files import opened
from qkv.spec import Gated, Language, Model, RMSNorm, Stack, Tokens, pre_norm
from tests.families.parity import pair_of
from tests.matrix.variants import VARIANTS, attention


def floats(stored: StoredTensor) -> np.ndarray:
    return stored.decode().astype(np.float32)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "bloom", "gpt-neox", "phi3", "bert-masked", "t5", "bart", "mixtral-experts"),
        *("deepseek-v2-experts", "gpt-oss-experts", "llama4-experts", "gemma4-experts"),
    ],
)
def test_every_parameter_equals_that_of_torch(name: str) -> None:
    """Whole tensors, fused and turned ones, heads in turn, stacks of experts, shared ones once."""
    pair = pair_of(name)
    files = opened(pair.folder)
    found = Parameters(files, checked(files))
    network = dict(pair.ours.named_parameters())
    assert found.keys() == files.description.model.weights().keys() and len(found) == len(list(found))
    for key in found:
        assert found[key].name == key and found[key].format == "F32"
        assert np.array_equal(found[key].decode(), network[key].detach().numpy()), key


def files_of(model: Model, table: Table, tensors: dict[str, StoredTensor]) -> Files:
    return Files(Path("made"), Description(model, table), tensors)


def described(table: Table, **changed: StoredTensor) -> tuple[Files, Parameters]:
    """A model of one layer of width 64, its values counted up, with some of its tensors stored otherwise."""
    layer = pre_norm(attention(8, 8, head_dim=8, position=None), Gated("silu", 96), norm=RMSNorm())
    model = Model(decoder=Stack(Tokens(40, 64), (layer,), RMSNorm()), head=Language(40))
    tensors = {
        name: StoredTensor.from_array(name, np.arange(tensor.size, dtype=np.float32).reshape(tensor.shape))
        for name, tensor in model.weights().items()
    }
    files = files_of(model, {**{name: name for name in tensors}, **table}, {**tensors, **changed})
    return files, Parameters(files, weight_map(files.description))


ATTENTION = "decoder.layers.0.attention"
QKV = [f"{ATTENTION}.{part}.weight" for part in ("query", "key", "value")]
VALUES = np.random.default_rng(0).standard_normal((192, 64)).astype(np.float32)


def fused(**how: int) -> Table:
    return {name: Place("qkv", part, **how) for part, name in enumerate(QKV)}


def test_whole_rows_of_blocks_are_windows_on_the_file() -> None:
    stored = quantise("qkv", VALUES, "Q4_1")
    _, found = described(fused(), qkv=stored)
    for part, name in enumerate(QKV):
        own = found[name]
        assert (own.format, own.shape) == ("Q4_1", (64, 64))
        assert np.shares_memory(own.data, stored.data)
        assert np.array_equal(own.decode(), stored.decode()[64 * part : 64 * part + 64])


def test_rows_of_heads_in_turn_are_gathered_as_blocks() -> None:
    stored = quantise("qkv", VALUES, "Q8_0")
    _, found = described(fused(groups=8), qkv=stored)
    expected = stored.decode().reshape(8, 3, 8, 64)
    for part, name in enumerate(QKV):
        assert found[name].format == "Q8_0"
        assert np.array_equal(found[name].decode(), expected[:, part].reshape(64, 64))


@pytest.mark.parametrize("format", ["F16", "BF16"])
@pytest.mark.parametrize("turned", [False, True])
def test_halves_stay_halves_also_where_they_are_turned(format: str, turned: bool) -> None:
    halves = torch.tensor(VALUES).to(torch.float16 if format == "F16" else torch.bfloat16)
    whole = (halves.T if turned else halves).contiguous()
    data = whole.view(torch.int16).numpy().view(np.uint8).reshape(-1)
    _, found = described(fused(transposed=turned), qkv=StoredTensor("qkv", tuple(whole.shape), format, data))
    for part, name in enumerate(QKV):
        assert found[name].format == format
        assert np.shares_memory(found[name].data, data) is not turned
        assert np.array_equal(floats(found[name]), halves[64 * part : 64 * part + 64].float().numpy())


def test_what_would_cut_blocks_is_decoded() -> None:
    """Turned matrices, and blocks of 256 in rows of 64."""
    stored = quantise("qkv", np.ascontiguousarray(VALUES.T), "Q4_0")
    _, found = described(fused(transposed=True), qkv=stored)
    for part, name in enumerate(QKV):
        assert found[name].format == "F32"
        assert np.array_equal(found[name].decode(), stored.decode().T[64 * part : 64 * part + 64])
    rows = StoredTensor("q", (64, 64), "Q4_K", quantise("q", VALUES[:64].reshape(16, 256), "Q4_K").data)
    _, found = described({QKV[0]: "q"}, q=rows)
    assert found[QKV[0]].format == "F32" and np.array_equal(found[QKV[0]].decode(), rows.decode())


@pytest.mark.parametrize(("groups", "format"), [(1, "Q8_0"), (8, "F32")])
def test_parts_of_rows_stay_blocks_unless_they_take_turns(groups: int, format: str) -> None:
    """Of rows of 192, a part has 64 in a run, or eight times 8, which no block of 32 divides into."""
    stored = quantise("qkv", VALUES.reshape(64, 192), "Q8_0")
    _, found = described(fused(groups=groups, axis=1), qkv=stored)
    expected = stored.decode().reshape(64, groups, 3, 64 // groups)
    for part, name in enumerate(QKV):
        assert found[name].format == format
        assert np.array_equal(found[name].decode(), expected[:, :, part].reshape(64, 64))


def test_other_formats_are_decoded_to_float32() -> None:
    wide = StoredTensor.from_array("q", VALUES[:64].astype(np.float64))
    small = StoredTensor("k", (64, 64), "F8_E4M3", np.arange(4096, dtype=np.uint16).astype(np.uint8) & 0x77)
    _, found = described({QKV[0]: "q", QKV[1]: "k"}, q=wide, k=small)
    assert found[QKV[0]].format == found[QKV[1]].format == "F32"
    assert np.array_equal(found[QKV[0]].decode(), VALUES[:64])
    assert np.array_equal(found[QKV[1]].decode(), small.decode())


def experts(formats: tuple[str, str]) -> tuple[dict[str, StoredTensor], Parameters, str]:
    """A layer of experts, each stored by itself."""
    model = VARIANTS["experts-softmax"]
    sizes = model.weights()
    name = next(key for key in sizes if key.endswith("expert.up.weight"))
    tensors = {
        key: StoredTensor.from_array(key, np.zeros(tensor.shape, np.float32)) for key, tensor in sizes.items()
    }
    shape = sizes[name].shape
    random, each = np.random.default_rng(1), dict[str, StoredTensor]()
    for number in range(shape[0]):
        values = random.standard_normal(shape[1:]).astype(np.float16).astype(np.float32)
        narrow = values.astype(np.float16) if formats[number % 2] == "F16" else values
        each[f"expert{number}"] = StoredTensor.from_array(f"expert{number}", narrow)
    files = files_of(model, {**{key: key for key in sizes}, name: "expert{expert}"}, {**tensors, **each})
    return each, Parameters(files, weight_map(files.description)), name


@pytest.mark.parametrize(("formats", "wanted"), [(("F16", "F16"), "F16"), (("F16", "F32"), "F32")])
def test_experts_are_stacked_in_their_format_where_they_have_one(
    formats: tuple[str, str], wanted: str
) -> None:
    each, found, name = experts(formats)
    assert found[name].format == wanted
    assert np.array_equal(floats(found[name]), np.stack([floats(one) for one in each.values()]))


def test_the_packaged_model_is_handed_on_as_it_is(smollm2_file: Path) -> None:
    """No block is copied: every parameter is a window on the mapped file."""
    files = opened(smollm2_file)
    found = Parameters(files, checked(files))
    tensors = read_gguf(smollm2_file).tensors
    assert sum(stored.nbytes for stored in found.values()) == sum(t.nbytes for t in tensors.values())
    assert {stored.format for stored in found.values()} == {tensor.format for tensor in tensors.values()}
    theirs = files.tensors["blk.3.ffn_up.weight"]
    ours = found["decoder.layers.3.feed_forward.up.weight"]
    assert ours.format == "Q4_1" and np.shares_memory(ours.data, theirs.data)


def test_progress_counts_each_parameter_once(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load(folder, runtime="numpy", progress=lambda done, of: seen.append((done, of)))
    assert seen == [(i, 21) for i in range(1, 22)] and "model" not in vars(loaded)
