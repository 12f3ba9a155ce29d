"""Real vocabularies: the ids that their own models were trained with."""

import pytest
from hypothesis import given, settings, strategies as st

from qkv.text import from_gguf

NAMES = ["bert-bge", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2"]
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module", params=NAMES)
def case(request, shared, vocabulary_metadata):
    """A tokenizer, its texts, and the ids they must give."""
    path = shared / "tokenizers" / f"ggml-vocab-{request.param}.gguf"
    texts = path.with_name(path.name + ".inp").read_text("utf-8").split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    expected = [[int(id) for id in line.split()] for line in lines]
    return request.param, from_gguf(vocabulary_metadata(request.param)), texts, expected


def test_every_text_gives_exactly_its_ids(case):
    _, tokenizer, texts, expected = case
    assert len(texts) == len(expected) == 47
    assert [tokenizer.encode(text, bos=False, eos=False) for text in texts] == expected


def test_every_text_comes_back(case):
    name, tokenizer, texts, expected = case
    if name != "bert-bge":  # WordPiece keeps neither case nor spaces
        assert [tokenizer.decode(ids) for ids in expected] == texts


def test_plain_encoding_puts_around_a_text_what_the_file_says(case):
    name, tokenizer, _, _ = case
    around = {
        "bert-bge": ([101], [102]),
        "llama-bpe": ([128000], []),
        "llama-spm": ([1], []),
        "phi-3": ([1], []),
    }
    before, after = around.get(name, ([], []))
    assert (
        tokenizer.encode("hello world")
        == before + tokenizer.encode("hello world", bos=False, eos=False) + after
    )
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (bool(before), bool(after))


def test_joined_increments_are_the_full_decode_on_any_ids(case):
    """Case T4, on random ids: byte-level BPE, byte fallback and WordPiece alike."""
    _, tokenizer, _, _ = case
    # The first ids hold the bytes, where characters can be split.
    ids = st.lists(st.integers(0, 400) | st.integers(0, tokenizer.vocab_size - 1), max_size=30)

    @settings(max_examples=150, deadline=None)
    @given(ids, st.booleans())
    def check(ids, skip_special):
        stream = tokenizer.stream(skip_special=skip_special)
        text = "".join([stream.push(id) for id in ids] + [stream.flush()])
        assert text == tokenizer.decode(ids, skip_special=skip_special)

    check()


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_byte_level_bpe(vocabulary_metadata, text):
    tokenizer = gpt2(vocabulary_metadata)
    assert tokenizer.decode(tokenizer.encode(text, specials=False)) == text


def gpt2(vocabulary_metadata, known={}):  # noqa: B006 - built once for all examples
    if not known:
        known["gpt-2"] = from_gguf(vocabulary_metadata("gpt-2"))
    return known["gpt-2"]


def test_the_eos_of_a_chat_is_the_one_its_template_closes_a_turn_with(case):
    """Case G8: what ends a turn is a set; Phi-3 names <|endoftext|> and its turns end with <|end|>."""
    name, tokenizer, _, _ = case
    ends = {"phi-3": {32000, 32007}, "qwen2": {151643, 151645}, "llama-bpe": {128001}, "bert-bge": set()}
    if name in ends:
        assert tokenizer.eos_ids == ends[name]
