"""Families that see and hear: loaded from files, equal to transformers, and saved again bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import qkv
from qkv.errors import CheckpointError, RequestError, UnsupportedError
from qkv.nn import Layout
from tests.families import parity
from tests.families.parity import present, tokens
from tests.loading.support import edit_weights, refused
from tests.nn.transplant import randomised
from tests.support import assert_close

IMAGE = 60  # the token that an image's rows replace
WHISPER: dict[str, Any] = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "num_mel_bins": 6,
    "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 3, "decoder_start_token_id": 2,
}  # fmt: skip
HEARS_ODDLY = {**WHISPER, "d_model": 30, "encoder_attention_heads": 5, "num_mel_bins": 7, "encoder_layers": 3,
               "max_source_positions": 9, "activation_function": "relu",
               "tie_word_embeddings": False}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 28,
    "image_size": 12, "patch_size": 3, "num_channels": 2,
}  # fmt: skip
SEES_ODDLY = {**VISION, "hidden_size": 21, "num_attention_heads": 3, "num_channels": 3, "image_size": 13}
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 59,
}  # fmt: skip
CLIP = {"text_config": TEXT, "vision_config": SEES_ODDLY, "projection_dim": 14}
SIGLIP = {"text_config": TEXT, "vision_config": {**VISION, "hidden_size": 24}}
LLAMA = {**TEXT, "model_type": "llama", "max_position_embeddings": 64, "num_key_value_heads": 2}
SEES = {"text_config": LLAMA, "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE}  # fmt: skip
SEES_THROUGH_SIGLIP = {
    "text_config": {**LLAMA, "model_type": "qwen2", "num_attention_heads": 6, "tie_word_embeddings": True},
    "vision_config": {**SEES_ODDLY, "model_type": "siglip_vision_model"},
    "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    "multimodal_projector_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {
    "text_config": {**LLAMA, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 3,
                    "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4, "image_token_index": IMAGE,
}  # fmt: skip
CARRIED = {"pooler", "vision_tower", "text_model", "vision_model", "text_projection", "visual_projection",
           "logit_scale", "logit_bias"}  # fmt: skip
Call = Callable[["Pair"], tuple[Tensor, Tensor]]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def hears(pair: Pair) -> tuple[Tensor, Tensor]:
    """The longest audio, and tokens of which some are padding."""
    config = pair.theirs.config
    audio, there = noise(3, config.num_mel_bins, 2 * config.max_source_positions), present(3, 9, "right")
    other = {"decoder_input_ids": tokens(3, 9), "decoder_attention_mask": there}
    found = pair.theirs(input_features=audio, **other)
    ours = pair.model(tokens(3, 9), features=audio, layout=Layout.padded(there))
    return ours[there.bool()], (found.logits if "logits" in found else found.last_hidden_state)[there.bool()]


def images(pair: Pair) -> Tensor:
    config = pair.theirs.config
    config = getattr(config, "vision_config", config)
    size = config.image_size
    return noise(3, config.num_channels, *([size, size] if isinstance(size, int) else size))


def classifies(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.model(features=images(pair)), pair.theirs(images(pair)).logits


def last_states(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.model(features=images(pair)), pair.theirs(images(pair)).last_hidden_state


def normed_states(pair: Pair) -> tuple[Tensor, Tensor]:
    """Theirs normalises only the class token, and gives that beside."""
    found = pair.theirs(images(pair))
    ours = pair.model(features=images(pair))
    return ours, torch.cat([found.pooler_output[:, None], pair.theirs.post_layernorm(
        found.last_hidden_state[:, 1:])], 1)  # fmt: skip


def embeds_images(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.model(features=images(pair)), pair.theirs(images(pair)).image_embeds


def reads_a_query(pair: Pair) -> tuple[Tensor, Tensor]:
    query = torch.zeros(3, 1, dtype=torch.long)
    return pair.model(query, features=images(pair)), pair.theirs(images(pair)).pooler_output


def reads(pair: Pair) -> tuple[Tensor, Tensor]:
    there = present(3, 12, "right")
    found = pair.theirs(tokens(3, 12), attention_mask=there).last_hidden_state
    return pair.model(tokens(3, 12), layout=Layout.padded(there))[there.bool()], found[there.bool()]


def embeds_text(pair: Pair) -> tuple[Tensor, Tensor]:
    """Theirs takes the first end of the text, which is put where ours takes the last token."""
    there, ids = present(3, 12, "right"), tokens(3, 12).clamp(max=58)
    ids[torch.arange(3), there.sum(1) - 1] = pair.theirs.config.eos_token_id
    found = pair.theirs(ids, attention_mask=there)
    return pair.model(ids, layout=Layout.padded(there)), found.text_embeds


def pools_text(pair: Pair) -> tuple[Tensor, Tensor]:
    """Theirs takes the last place, padding or not."""
    return pair.model(tokens(3, 12)), pair.theirs(tokens(3, 12)).pooler_output


def half_of_images(pair: Pair) -> tuple[Tensor, Tensor]:
    found = pair.theirs.get_image_features(images(pair)).pooler_output
    spec = pair.model.spec
    query = {"tokens": torch.zeros(3, 1, dtype=torch.long)} if spec.decoder else {}
    return pair.model(**query, features=images(pair)), found / found.norm(dim=-1, keepdim=True)


def half_of_text(pair: Pair) -> tuple[Tensor, Tensor]:
    ids = tokens(3, 12).clamp(max=58)
    ids[:, -1] = pair.theirs.config.text_config.eos_token_id
    found = pair.theirs.get_text_features(ids).pooler_output
    return pair.model(ids), found / found.norm(dim=-1, keepdim=True)


def sees(pair: Pair) -> tuple[Tensor, Tensor]:
    """Two rows: one with two images, one with one; the rest is text, or padding at its end."""
    rows = pair.model.spec.towers[0].stack.input.rows(0) - pair.model.spec.towers[0].first_row
    ids, there = tokens(2, 2 * rows + 5), present(2, 2 * rows + 5, "right")
    ids[ids == IMAGE] = 4
    ids[0, 1 : 1 + rows] = ids[0, 3 + rows : 3 + 2 * rows] = ids[1, 1 : 1 + rows] = IMAGE
    found = pair.theirs(input_ids=ids, pixel_values=images(pair), attention_mask=there)
    ours = pair.model(ids, features=images(pair), layout=Layout.padded(there))
    theirs = found.logits if "logits" in found else found.last_hidden_state
    return ours[there.bool()], theirs[there.bool()]


def reads_between(pair: Pair) -> tuple[Tensor, Tensor]:
    """Text alone."""
    ids, there = tokens(3, 12).clamp(max=58), present(3, 12, "right")
    found = pair.theirs(input_ids=ids, attention_mask=there).logits
    return pair.model(ids, layout=Layout.padded(there))[there.bool()], found[there.bool()]


class Case(NamedTuple):
    """A class of transformers, what it is made from, how both are called, and what is not loaded."""

    auto: str
    config: Any
    call: Call
    ignore: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "whisper": Case("WhisperForConditionalGeneration", hf.WhisperConfig(**WHISPER), hears),
    "whisper-odd": Case("WhisperForConditionalGeneration", hf.WhisperConfig(**HEARS_ODDLY), hears),
    "whisper-bare": Case("WhisperModel", hf.WhisperConfig(**WHISPER), hears),
    "vit": Case("ViTForImageClassification", hf.ViTConfig(**VISION, num_labels=5), classifies),
    "vit-odd": Case(
        "ViTForImageClassification",
        hf.ViTConfig(**{**SEES_ODDLY, "image_size": (13, 8)}, num_labels=3, qkv_bias=False),
        classifies,
    ),
    "vit-bare": Case("ViTModel", hf.ViTConfig(**VISION), last_states),
    "llava": Case("LlavaForConditionalGeneration", hf.LlavaConfig(**SEES), sees),
    "llava-odd": Case("LlavaForConditionalGeneration", hf.LlavaConfig(**SEES_THROUGH_SIGLIP), sees),
    "llava-bare": Case("LlavaModel", hf.LlavaConfig(**{**SEES, "vision_feature_layer": 1}), sees),
    "gemma3": Case("Gemma3ForConditionalGeneration", hf.Gemma3Config(**GEMMA), reads_between),
    "clip-text": Case("CLIPTextModel", hf.CLIPTextConfig(**TEXT), reads),
    "clip-text-projected": Case(
        "CLIPTextModelWithProjection", hf.CLIPTextConfig(**TEXT, projection_dim=10), embeds_text
    ),
    "clip-vision": Case("CLIPVisionModel", hf.CLIPVisionConfig(**VISION), normed_states),
    "clip-vision-projected": Case(
        "CLIPVisionModelWithProjection", hf.CLIPVisionConfig(**SEES_ODDLY, projection_dim=10), embeds_images
    ),
    "clip-images": Case("CLIPModel", hf.CLIPConfig(**CLIP), half_of_images, ("text_config",)),
    "clip-texts": Case("CLIPModel", hf.CLIPConfig(**CLIP), half_of_text, ("vision_config",)),
    "siglip-text": Case("SiglipTextModel", hf.SiglipTextConfig(**TEXT), pools_text),
    "siglip-vision": Case("SiglipVisionModel", hf.SiglipVisionConfig(**VISION), reads_a_query),
    "siglip-vision-odd": Case(
        "SiglipVisionModel", hf.SiglipVisionConfig(**SEES_ODDLY, vision_use_head=False), last_states
    ),
    "siglip-images": Case("SiglipModel", hf.SiglipConfig(**SIGLIP), half_of_images, ("text_config",)),
    "siglip-texts": Case("SiglipModel", hf.SiglipConfig(**SIGLIP), half_of_text, ("vision_config",)),
}


class Pair:
    """The oracle, the files it saved, and our reading of them."""

    def __init__(self, name: str):
        self.case = CASES[name]
        self.theirs = randomised(getattr(hf, self.case.auto)(self.case.config))
        self.kept = TemporaryDirectory(prefix="qkv-features-")  # gone with the process
        self.folder = Path(self.kept.name)
        self.theirs.save_pretrained(self.folder)
        self.model = qkv.load(self.folder, ignore=self.case.ignore)


@cache
def pair_of(name: str) -> Pair:
    return Pair(name)


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return pair_of(request.param)


def test_equals_transformers(pair: Pair) -> None:
    with torch.no_grad():
        ours, theirs = pair.case.call(pair)
    assert ours.shape == theirs.shape and len(ours)
    assert_close(ours, theirs)


def test_saved_again(pair: Pair, tmp_path: Path) -> None:
    """transformers and we read back what was saved, bit for bit."""
    pair.model.save(tmp_path)
    stored, first = (load_file(folder / "model.safetensors") for folder in (tmp_path, pair.folder))
    assert stored.keys() == first.keys()
    for name, values in stored.items():
        assert torch.equal(values, first[name]), name
    for name, values in qkv.load(tmp_path).network.named_parameters():
        assert torch.equal(values, pair.model.network.get_parameter(name)), name


def test_parameters_are_counted_as_transformers_counts_them(pair: Pair) -> None:
    """All but those carried along; a table of sinusoids is stored, and counted."""
    held = load_file(pair.folder / "model.safetensors")
    carried = pair.model.loaded.carried
    assert pair.model.spec.parameters() == sum(v.numel() for name, v in held.items() if name not in carried)
    assert {name.split(".")[0] for name in carried} <= CARRIED


# --- strictness ---------------------------------------------------------------------------------


def copied(name: str, folder: Path) -> Path:
    """The files of a pair, to change."""
    folder.mkdir()
    for path in pair_of(name).folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def rename(folder: Path, *changes: tuple[str, str]) -> None:
    """Beginnings of tensors' names, the first that fits."""
    file = folder / "model.safetensors"
    found = {}
    for name, values in load_file(file).items():
        old, new = next((pair for pair in changes if name.startswith(pair[0])), ("", ""))
        found[new + name.removeprefix(old)] = values
    save_file(found, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "changes",
    [
        [("vision_tower.", "vision_tower.vision_model.")],
        [
            ("vision_tower.", "model.vision_tower.vision_model."),
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head.", "lm_head."),
            ("multi_", "model.multi_"),
        ],
    ],
    ids=["released", "as the class calls them"],
)
def test_llava_under_its_other_names(tmp_path: Path, changes: list[tuple[str, str]]) -> None:
    folder = copied("llava", tmp_path / "model")
    rename(folder, *changes)
    ours = dict(qkv.load(folder).network.named_parameters())
    for name, values in pair_of("llava").model.network.named_parameters():
        assert torch.equal(ours[name], values), name


@pytest.mark.parametrize(
    ("name", "start"),
    [("clip-text", "text_model."), ("clip-vision", "vision_model."), ("siglip-vision", "vision_model.")],
)
def test_a_half_alone_may_be_named_as_in_its_pair(tmp_path: Path, name: str, start: str) -> None:
    folder = copied(name, tmp_path / "model")
    rename(folder, ("", start))
    ours = dict(qkv.load(folder).network.named_parameters())
    for part, values in pair_of(name).model.network.named_parameters():
        assert torch.equal(ours[part], values), part


def test_nomic_s_masked_model_may_be_named_as_it_was_released(tmp_path: Path) -> None:
    pair = parity.pair_of("nomic-bert")
    (tmp_path / "config.json").write_bytes((pair.folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((pair.folder / "model.safetensors").read_bytes())
    rename(tmp_path, ("nomic_bert.", "bert."))
    ours = dict(qkv.load(tmp_path).network.named_parameters())
    for name, values in pair.ours.named_parameters():
        assert torch.equal(ours[name], values), name


def test_a_tensor_under_two_of_its_names_is_refused(tmp_path: Path) -> None:
    folder = copied("llava", tmp_path / "model")
    name = "vision_tower.post_layernorm.bias"
    other = name.replace("tower.", "tower.vision_model.")
    edit_weights(folder, lambda tensors: tensors.update({other: tensors[name].clone()}))
    refused(folder, CheckpointError, f"holds {name} twice, under another name as well")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("whisper", "model.encoder.conv2.weight"),
        ("vit", "vit.embeddings.cls_token"),
        ("llava", "multi_modal_projector.linear_1.bias"),
        ("siglip-vision", "head.attention.in_proj_bias"),
    ],
)
def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path, name: str, missing: str) -> None:
    folder = copied(name, tmp_path / "model")
    edit_weights(folder, lambda tensors: tensors.update({missing: tensors[missing].flatten()[:-1]}))
    refused(folder, CheckpointError, f"{missing} has shape")
    edit_weights(folder, lambda tensors: tensors.pop(missing))
    refused(folder, CheckpointError, f"lacks {missing}")
    folder = copied(name, tmp_path / "more")
    edit_weights(folder, lambda tensors: tensors.update({f"{missing}.more": torch.ones(2)}))
    refused(folder, CheckpointError, f"holds {missing}.more, which its configuration has no place for")


def test_a_half_that_was_loaded_is_saved_with_its_pair(tmp_path: Path) -> None:
    """The other half's tensors stay beside it, and its configuration does not."""
    pair_of("clip-images").model.save(tmp_path)
    again = qkv.load(tmp_path)
    assert again.spec == pair_of("clip-images").model.spec and "text_config" not in again.loaded.config
    assert "text_projection.weight" in again.loaded.carried


def test_images_in_another_type_are_read_in_the_model_s(tmp_path: Path) -> None:
    pair = pair_of("vit")
    model = qkv.load(pair.folder, dtype="bfloat16")
    found = model(features=images(pair))
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), pair.model(features=images(pair)), 0.1)


# --- generation ---------------------------------------------------------------------------------


def audio(pair: Pair, count: int = 3) -> list[Tensor]:
    config = pair.theirs.config
    return list(noise(count, config.num_mel_bins, 2 * config.max_source_positions).split(1))


def test_whisper_writes_what_it_hears() -> None:
    """The likeliest token of theirs, over and over, from a prompt of two: each row of a batch by its own."""
    pair = pair_of("whisper-odd")
    prompts = [[2, 7], [2, 9, 11], [2]]
    found = pair.model.generate(prompts, features=audio(pair), max_new_tokens=8, ignore_eos=True)
    for prompt, heard, done in zip(prompts, audio(pair), found, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(8):
            with torch.no_grad():
                logits = pair.theirs(input_features=heard, decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        assert done.tokens == ids[0, len(prompt) :].tolist()
        alone = pair.model.generate(prompt, features=heard, max_new_tokens=8, ignore_eos=True)
        assert alone.tokens == done.tokens
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(done.tokens) for done in found}) > 1


def test_beams_and_samples_hear_the_same_audio() -> None:
    """One beam of several is no worse than greedy; a stream says what generate does."""
    pair, (heard, *_) = pair_of("whisper"), audio(pair_of("whisper"))
    options: dict[str, Any] = {"features": heard, "max_new_tokens": 6, "ignore_eos": True}
    greedy = pair.model.generate([2, 5], **options)
    best = pair.model.generate([2, 5], beams=4, length_penalty=0.0, **options)
    assert best.score >= sum(greedy.logprobs) - 1e-5
    first, second = pair.model.generate([2, 5], n=2, temperature=1.0, seed=3, **options)
    assert first.tokens != second.tokens
    stream = pair.model.stream([2, 5], **options)
    assert list(stream) == [] and stream.completion.tokens == greedy.tokens


def test_llava_goes_on_from_what_it_sees() -> None:
    """Two prompts in a batch, one with two images: theirs, one at a time."""
    pair = pair_of("llava")
    rows, given = 16, noise(3, 2, 12, 12)
    prompts = [[5, *[IMAGE] * rows, 6, *[IMAGE] * rows, 7], [8, 9, *[IMAGE] * rows, 10], [11, 12]]
    beside = [given[:2], given[2:], None]
    found = pair.model.generate(prompts, features=beside, max_new_tokens=6, ignore_eos=True)
    for prompt, seen, done in zip(prompts, beside, found, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(6):
            with torch.no_grad():
                logits = pair.theirs(input_ids=ids, pixel_values=seen).logits
            logits[..., IMAGE] = -torch.inf  # theirs would look for an image there
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        assert done.tokens == ids[0, len(prompt) :].tolist()


def test_a_token_that_stands_for_an_image_is_never_generated() -> None:
    model = pair_of("llava").model
    for options in ({}, {"beams": 2}):
        done = model.generate([5, 6], max_new_tokens=5, logit_bias={IMAGE: 90.0}, ignore_eos=True, **options)
        assert len(done.tokens) == 5 and IMAGE not in done.tokens and done.error is None


def test_what_is_beside_a_prompt_must_fit_it() -> None:
    hearing, seeing = pair_of("whisper").model, pair_of("llava").model
    heard, seen = audio(pair_of("whisper")), noise(2, 2, 12, 12)
    for model, prompt, features, problem in (
        (
            hearing,
            [2],
            None,
            "This model reads audio, as features beside its prompt: one for each prompt, not 0",
        ),
        (hearing, [2], torch.cat(heard), "one for each prompt, not 3"),
        (hearing, [2], heard[0][:, 1:], r"Audio must be \(batch, 6, frames\); got \(1, 5, 20\)"),
        (hearing, [2], [1.0], "Features must be a tensor of images or audio, not list"),
        (hearing, [[2], [2]], torch.cat(heard[:2]), "For a list of prompts features must be a list: 2, one"),
        (seeing, [IMAGE] * 16, seen, "The features make 32 rows, and 16 places of the prompt hold token 60"),
        (seeing, [IMAGE] * 16, None, "The features make 0 rows, and 16 places of the prompt hold token 60"),
        (seeing, [[IMAGE] * 16, [IMAGE] * 32], [seen, seen[:1]], "The features make 32 rows, and 16 places"),
        (hearing, [2] * 16, heard[0], "The prompt has 16 tokens and the context holds 16"),
    ):
        with pytest.raises(RequestError, match=problem):
            model.generate(prompt, features=features)
    with pytest.raises(UnsupportedError, match="no language head"):
        pair_of("vit").model.generate([1], features=seen)


def test_audio_of_several_lengths_is_read_as_each_alone() -> None:
    model, heard = pair_of("whisper").model, audio(pair_of("whisper"))
    given = [heard[0], heard[1][..., :12]]
    together = model.generate([[2], [2]], features=given, max_new_tokens=5, ignore_eos=True)
    for one, done in zip(given, together, strict=True):
        alone = model.generate([2], features=one, max_new_tokens=5, ignore_eos=True)
        assert done.tokens == alone.tokens
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_model_of_tokens_has_no_use_for_features() -> None:
    with pytest.raises(RequestError, match="This model has no use for features"):
        parity.pair_of("gpt2").model.generate([5], features=noise(1, 2, 3))


def test_images_of_which_rows_see_both_ways_are_refused() -> None:
    """Gemma 3's: its text can be read and gone on from all the same."""
    model, seen = pair_of("gemma3").model, noise(1, 2, 12, 12)
    assert len(model.generate([5, 6], max_new_tokens=3, ignore_eos=True).tokens) == 3
    with pytest.raises(UnsupportedError, match="see one another both ways"):
        model.generate([5, *[IMAGE] * 4, 6], features=seen)
    with pytest.raises(UnsupportedError, match="see one another both ways"):
        model(torch.tensor([[IMAGE] * 4]), features=seen)
