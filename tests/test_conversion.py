"""Models written as GGUF: the same logits, nothing lost in plain types, the same for transformers.

The models are small random ones of transformers, saved as folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from qkv import cli, conversion, loading
from qkv.checkpoints import StoredTensor, quantise, read_gguf, squared_error
from qkv.conversion import convert
from qkv.errors import CheckpointError, QkvError, RequestError, TokenizerError, UnsupportedError
from qkv.families.gguf_metadata import interleaved
from qkv.loading.network import SAVED
from qkv.spec import Divided, LongRope, Rotary, Window
from qkv.text.gguf_metadata import FIRST_SPACE
from tests.families.models import SMALL, saved, tokens
from tests.support import assert_close
from tests.text.test_folder import change, save as save_tokenizer

GEMMA: dict[str, Any] = {"num_hidden_layers": 7, "head_dim": 12, "query_pre_attn_scalar": 12}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 16,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
# name: model type, what differs from the small model, the architecture of the file
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "llama"),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, "llama"),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "llama"),
    "llama, wide heads": ("llama", {"head_dim": 12}, "llama"),
    "llama 3": ("llama", {"rope_parameters": SCALED}, "llama"),
    "mistral": ("mistral", {"sliding_window": None}, "llama"),
    "mistral, window": ("mistral", {"sliding_window": 5}, "llama"),
    "granite": ("granite", GRANITE, "granite"),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}, "smollm3"),
    "gemma": ("gemma", {"head_dim": 12}, "gemma"),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 5, "final_logit_softcapping": 2.0}, "gemma2"),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window": 5}, "gemma3"),
    "gpt2": ("gpt2", {"intermediate_size": None, "n_inner": 48}, "gpt2"),
    "olmo2": ("olmo2", {}, "olmo2"),
    "phi3": ("phi3", {}, "phi3"),
    "phi3, long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}, "phi3"),
    "qwen2": ("qwen2", {}, "qwen2"),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}, "qwen2"),
    "qwen2moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40}, "qwen2moe"),
    "qwen3": ("qwen3", {"head_dim": 12}, "qwen3"),
    "qwen3moe": ("qwen3_moe", {**MOE, "head_dim": 12, "norm_topk_prob": True}, "qwen3moe"),
}


def folder_of(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> Path:
    kind, changes, _ = CASES[case]
    saved(folder / "model", kind, dtype=dtype, **changes)
    config = json.loads((folder / "model" / "config.json").read_text())
    if kind == "gpt2":  # the small model's keys are other kinds'
        for key in ("intermediate_size", "num_key_value_heads"):
            config.pop(key, None)
        (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return loading.load(path, dtype="float32").model(tokens())


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits(tmp_path: Path, case: str) -> None:
    source = folder_of(tmp_path, case)
    done = convert(source, tmp_path / "m.gguf")
    assert [each.error for each in done.types] == [0.0]
    assert read_gguf(done.path).metadata["general.architecture"] == CASES[case][2]
    assert_close(logits(done.path), logits(source), 1e-4 if "moe" in case else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3", "gpt2", "qwen3moe"])
def test_plain_types_lose_nothing(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Bit for bit the parameters of the source, queries and keys of Llama's kind in another order."""
    source = folder_of(tmp_path, case, dtype)
    convert(source, tmp_path / "m.gguf")
    theirs = read_gguf(tmp_path / "m.gguf").tensors
    assert {
        each.format for each in theirs.values() if len(each.shape) > 1 and "gate_inp" not in each.name
    } == {SAVED[dtype]} | ({"F32"} if case == "gpt2" else set())  # learned positions
    before, after = loading.load(source), loading.load(tmp_path / "m.gguf")
    assert before.model.spec.trunk.width == after.model.spec.trunk.width
    found = dict(after.model.named_parameters())
    for name, wanted in before.model.named_parameters():
        values = wanted.float().numpy()
        for part, heads in (("attention.query", 4), ("attention.key", 2)):
            if case == "llama" and f"{part}." in name:
                values = interleaved(values, heads)
        assert np.array_equal(found[name].float().numpy(), values), name


def test_norms_of_gemma_are_stored_whole(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "gemma")
    convert(source, tmp_path / "m.gguf", "F16")
    ours = loading.load(source).model.state_dict()["decoder.norm.weight"].numpy()
    stored = read_gguf(tmp_path / "m.gguf").tensors["output_norm.weight"]
    assert stored.format == "F32"
    assert np.array_equal(stored.decode(), ours + np.float32(1))


def test_scalings_become_divisors(tmp_path: Path) -> None:
    convert(folder_of(tmp_path / "a", "llama 3"), tmp_path / "a.gguf", "Q8_0")
    divisors = read_gguf(tmp_path / "a.gguf").tensors["rope_freqs.weight"]
    # theta 1e4, 8 dimensions, trained on 8: waves of 6, 63, 628 and 6283; above 8 all are divided by 8,
    # and 6.28 lies a share (8 / 6.28 - 1) / 3 of the way from there to 2
    kept = (8 / (2 * np.pi) - 1) / 3
    assert divisors.format == "F32"
    assert divisors.decode() == pytest.approx([1 / (kept + (1 - kept) / 8), 8, 8, 8], rel=1e-6)
    position = (
        loading.load(tmp_path / "a.gguf").model.spec.trunk.layers[0].sublayers[0].branches[0].mixer.position
    )  # type: ignore[union-attr]
    assert isinstance(position, Rotary) and isinstance(position.scaling, Divided)
    convert(folder_of(tmp_path / "b", "phi3, long"), tmp_path / "b.gguf")
    found = (
        loading.load(tmp_path / "b.gguf").model.spec.trunk.layers[0].sublayers[0].branches[0].mixer.position
    )  # type: ignore[union-attr]
    assert isinstance(found.scaling, LongRope) and found.scaling.long == (1.0, 2.0, 3.0, 4.5)


def test_a_window_is_said(tmp_path: Path) -> None:
    convert(folder_of(tmp_path, "mistral, window"), tmp_path / "m.gguf")
    assert read_gguf(tmp_path / "m.gguf").metadata["llama.attention.sliding_window"] == 5
    layers = loading.load(tmp_path / "m.gguf").model.spec.trunk.layers
    assert Window(5) in layers[0].sublayers[0].branches[0].mixer.mask.children().values()  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["llama", "llama, tied", "mistral", "qwen2"])
def test_transformers_reads_the_same_model(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration and weights, all from the file."""
    source = folder_of(tmp_path, case)
    convert(source, tmp_path / "m.gguf")
    # needed for placing parts of a model on several devices only, and this is one
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert_close(theirs(tokens()).logits, logits(source))


# types


def wide(folder: Path, **changes: Any) -> Path:
    """Rows of 256 but for those of 288."""
    saved(folder / "model", hidden_size=256, intermediate_size=288, **changes)
    return folder / "model"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_types_and_the_error_they_make(tmp_path: Path, kind: str) -> None:
    source = wide(tmp_path)
    done = convert(source, tmp_path / "m.gguf", kind)
    stored = read_gguf(tmp_path / "m.gguf").tensors
    exact = {}
    convert(source, tmp_path / "exact.gguf", "F32")
    for name, tensor in read_gguf(tmp_path / "exact.gguf").tensors.items():
        exact[name] = tensor.decode()
        assert stored[name].format == (kind if len(tensor.shape) > 1 else "F32")
    matrices = [name for name in exact if exact[name].ndim > 1]
    sums = np.array([squared_error(exact[name], stored[name]) for name in matrices]).sum(axis=0)
    row = {each.format: each for each in done.types}
    assert row[kind].error == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-9) and row[kind].error > 1e-3
    assert row[kind].bytes == sum(stored[name].nbytes for name in matrices)
    assert (row[kind].tensors, row["F32"].tensors) == (len(matrices), len(exact) - len(matrices))
    assert row["F32"].error == 0
    assert done.bytes == (tmp_path / "m.gguf").stat().st_size


@pytest.mark.parametrize(("kind", "other"), [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")])
def test_rows_that_are_no_multiple_of_256(tmp_path: Path, kind: str, other: str) -> None:
    convert(wide(tmp_path), tmp_path / "m.gguf", kind)
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["blk.0.attn_q.weight"].format == tensors["token_embd.weight"].format == kind
    assert tensors["blk.0.ffn_down.weight"].format == other
    assert (loading.load(tmp_path / "m.gguf").model(tokens()).isfinite()).all()


def test_rows_that_are_no_multiple_of_32(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", intermediate_size=40)
    assert source.config.intermediate_size == 40
    convert(tmp_path / "model", tmp_path / "m.gguf", "Q4_K")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].format == "F16"
    assert tensors["blk.0.attn_q.weight"].format == "Q5_0"


def test_what_chooses_experts_is_never_rounded(tmp_path: Path) -> None:
    convert(folder_of(tmp_path, "qwen2moe"), tmp_path / "m.gguf", "Q4_0")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["blk.0.ffn_gate_inp.weight"].format == "F32"
    assert tensors["blk.0.attn_q.weight"].format == "Q4_0"


# from one GGUF to another


def test_a_gguf_is_converted_tensor_by_tensor(tmp_path: Path) -> None:
    convert(wide(tmp_path), tmp_path / "a.gguf", "F32")
    done = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0")
    before, after = read_gguf(tmp_path / "a.gguf"), read_gguf(tmp_path / "b.gguf")
    for name, tensor in before.tensors.items():
        kind = "Q8_0" if len(tensor.shape) > 1 else "F32"
        assert np.array_equal(after.tensors[name].data, quantise(name, tensor.decode(), kind).data), name
    changed = {"general.file_type", "general.quantization_version"}
    assert (before.metadata["general.file_type"], after.metadata["general.file_type"]) == (0, 7)
    assert {k: v for k, v in before.metadata.items() if k not in changed} == {
        k: v for k, v in after.metadata.items() if k not in changed
    }
    assert done.before == sum(tensor.nbytes for tensor in before.tensors.values())
    convert(wide(tmp_path / "again"), tmp_path / "direct.gguf", "Q8_0")
    direct = read_gguf(tmp_path / "direct.gguf")
    assert all(np.array_equal(direct.tensors[name].data, after.tensors[name].data) for name in after.tensors)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", None])
def test_a_tensor_that_has_the_type_is_copied(
    tmp_path: Path, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(wide(tmp_path), tmp_path / "a.gguf", kind)

    def never(*given: Any) -> StoredTensor:
        raise AssertionError("it was to be copied")

    monkeypatch.setattr(conversion, "quantise", never)
    if kind == "Q4_K":  # its narrower rows are Q5_0
        monkeypatch.setattr(conversion, "FALLBACK", {"Q4_K": "Q5_0"})
    done = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", kind)
    assert all(each.error == 0 for each in done.types)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


# tokenizers


def with_tokenizer(folder: Path, kind: str, **changes: Any) -> tuple[Path, Any]:
    saved(folder / "model", **{**SMALL, "vocab_size": 410, **changes})
    _, theirs = save_tokenizer(folder / "model", kind)
    return folder / "model", theirs


TEXTS = ["hello world, the cat", "numbers 1 22 333\n\n  sea é🦙", "a<|user|>b</s>", "she sells", ""]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace"])
def test_the_tokenizer_comes_along(tmp_path: Path, kind: str) -> None:
    folder, _ = with_tokenizer(tmp_path, kind)
    done = convert(folder, tmp_path / "m.gguf")
    spaced = kind == "metaspace"  # SentencePiece's rule has a space after a control token, too
    assert done.notes == ((FIRST_SPACE,) if spaced else ()) and ("other tokens" in str(done)) == spaced
    before, after = loading.load(folder), loading.load(tmp_path / "m.gguf")
    assert before.tokenizer is not None and after.tokenizer is not None
    for text in TEXTS:
        if spaced and "<|user|>" in text:
            continue
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
        ids = before.tokenizer.encode(text)
        for skip in (True, False):
            wanted = before.tokenizer.decode(ids, skip_special=skip)
            assert after.tokenizer.decode(ids, skip_special=skip) == wanted
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the mat"}]
    assert (after.tokenizer.chat(chat) != before.tokenizer.chat(chat)) == spaced
    assert after.tokenizer.vocab_size == 410 and after.tokenizer.adds_bos
    assert after.eos_ids == before.eos_ids
    assert after.tokenizer.control_ids == before.tokenizer.control_ids


def test_transformers_reads_the_same_tokens(tmp_path: Path) -> None:
    folder, before = with_tokenizer(tmp_path, "byte-level")
    convert(folder, tmp_path / "m.gguf")
    after = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert (after.bos_token_id, after.eos_token_id, after.unk_token_id) == (1, 2, 0)
    for text in TEXTS:
        wanted = before.encode(text, add_special_tokens=False)
        assert after.encode(text, add_special_tokens=False) == wanted, text


def test_further_ends_of_an_answer_are_kept(tmp_path: Path) -> None:
    folder, _ = with_tokenizer(tmp_path, "byte-level")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 4]}))
    convert(folder, tmp_path / "m.gguf")
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (2, 3)
    assert loading.load(tmp_path / "m.gguf").eos_ids == {2, 3, 4}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 4, 5]}))
    refused(folder, tmp_path / "n.gguf", TokenizerError, "up to three tokens that end an answer; 5 would")


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("unigram", {}, "a model of type Unigram cannot be written as GGUF yet"),
        (
            "byte-level",
            {
                "pre_tokenizer": {
                    "type": "Split", "pattern": {"String": "q"}, "behavior": "Isolated", "invert": False
                }
            },
            "splits text in a way that GGUF has no name for",
        ),
        ("llama", {"normalizer": {"type": "Lowercase"}}, "would become other tokens"),
    ],
)  # fmt: skip
def test_tokenizers_that_cannot_be_said(
    tmp_path: Path, kind: str, entries: dict[str, Any], message: str
) -> None:
    folder, _ = with_tokenizer(tmp_path, kind)
    change(folder, "tokenizer.json", **entries)
    refused(folder, tmp_path / "m.gguf", TokenizerError, message)


def test_a_tokenizer_of_more_tokens_than_rows(tmp_path: Path) -> None:
    folder, _ = with_tokenizer(tmp_path, "byte-level", vocab_size=100)
    refused(folder, tmp_path / "m.gguf", TokenizerError, r"has \d+ tokens and the model 100")


# what is refused, and leaves nothing


def refused(source: Path, out: Path, kind: type[QkvError], message: str, **options: Any) -> None:
    beside = {path.name for path in out.parent.iterdir()}
    with pytest.raises(kind, match=message) as caught:
        convert(source, out, **options)
    assert "\n" not in str(caught.value)
    assert {path.name for path in out.parent.iterdir()} == beside


def test_a_scaling_that_files_have_no_key_for(tmp_path: Path) -> None:
    saved(
        tmp_path / "model",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    )
    refused(tmp_path / "model", tmp_path / "m.gguf", UnsupportedError, r"a GGUF of llama: .*DynamicNTK")


def test_models_without_an_architecture(tmp_path: Path) -> None:
    saved(tmp_path / "model", "stablelm")
    message = r"models of type stablelm cannot be written as GGUF yet \(mistral, .*qwen3_moe\)"
    refused(tmp_path / "model", tmp_path / "m.gguf", UnsupportedError, message)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    message = r"blk\.1\.ffn_up\.weight holds infinity or NaN"
    refused(tmp_path / "model", tmp_path / "m.gguf", CheckpointError, message, type="Q8_0")


def test_requests_that_cannot_be(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    source, out = tmp_path / "model", tmp_path / "m.gguf"
    refused(source, out, RequestError, r"type 'Q9' is not known \(F32, F16", type="Q9")
    refused(source, tmp_path / "folder", UnsupportedError, "does not end in .gguf")
    refused(source, out, RequestError, "ignore names 'nothing'", ignore="nothing")
    convert(source, out)
    refused(source, out, RequestError, "already exists: choose another name")
    refused(out, tmp_path / "n.gguf", RequestError, "ignore is for folders", ignore="a")


# the command


def test_the_command(tmp_path: Path) -> None:
    source = wide(tmp_path)
    shown = CliRunner().invoke(cli.app, ["convert", str(source), str(tmp_path / "a.gguf"), "--type", "Q8_0"])
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.output.splitlines()]
    assert lines[0] == ["type", "tensors", "bytes", "relative", "error"]
    assert [line[0] for line in lines[1:]] == ["Q8_0", "F32", "file"]
    assert 0.004 < float(lines[1][3]) < 0.007 and lines[2][3] == "none"
    command = ["convert", str(source), str(tmp_path / "b.gguf"), "--type", "Q8_0", "--json"]
    found = json.loads(CliRunner().invoke(cli.app, command).output)
    assert found["bytes"] == (tmp_path / "b.gguf").stat().st_size
    assert found["types"]["Q8_0"]["tensors"] == 16 and found["types"]["F32"]["relative_error"] == 0
