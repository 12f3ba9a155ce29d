"""A tokenizer in one line: its kind and what it puts around a text, without reading its vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qkv.inspection.tokenizer import read_head, tokenizer_words


def saved(path: Path, tokenizer: Tokenizer) -> dict[str, object]:
    tokenizer.save(str(path / "tokenizer.json"))
    return read_head(path / "tokenizer.json")


def test_byte_level_bpe_that_begins_with_a_token_as_llama_3_is_saved(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    head = saved(tmp_path, tokenizer)
    assert "vocab" in head["model"] and head["model"]["vocab"] is None  # type: ignore[operator, index]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert tokenizer_words(config, head, None) == "tokenizer: byte-level BPE, begins with <s>"


def test_unigram_that_ends_with_a_token_as_t5_is_saved(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0)], unk_id=0))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert tokenizer_words({}, saved(tmp_path, tokenizer), None) == "tokenizer: Unigram, ends with </s>"


def test_bpe_with_byte_fallback_as_gemma_is_saved(tmp_path: Path) -> None:
    head = saved(tmp_path, Tokenizer(models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True)))
    config = {"add_bos_token": True, "bos_token": {"content": "<bos>"}}
    assert tokenizer_words(config, head, None) == (
        "tokenizer: BPE with bytes to fall back on, begins with <bos>"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"vocab": 5', '"vocab"', '{"model": {"type": 5, "vocab": {}}}']
)
def test_a_file_that_is_no_tokenizer_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizer_words({}, read_head(tmp_path / "tokenizer.json"), None) is None
    assert read_head(tmp_path / "none.json") == {}


def test_without_a_tokenizer_json_the_class_is_named() -> None:
    config = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<bos>"}
    assert tokenizer_words(config, {}, None) == "tokenizer class GemmaTokenizer, begins with <bos>"
    assert (
        tokenizer_words({}, {}, {"tokenizer.ggml.model": "gpt2"}) == "tokenizer in the file: byte-level BPE"
    )
