import pytest
from hypothesis import given, settings, strategies as st

from qkv.errors import TokenizerError
from qkv.text import from_gguf
from qkv.text.decoding import IncrementalDecoder, decode
from qkv.text.pieces import Pieces, byte_level, sentencepiece, wordpiece

BYTES = Pieces([f"<0x{byte:02X}>" for byte in range(256)], sentencepiece)
SPACED = Pieces(["▁hello", "▁world", "▁", "ing", "<0x20>", "<0xF0>", "<s>"], sentencepiece, {6}, True)
WORDS = Pieces(["hello", "world", "##ing", "[SEP]"], wordpiece, drops_space=True)
GPT2 = Pieces(["hello", "Ġworld", "ð", "Ł", "Ļ", "Ĥ", "<|end|>"], byte_level, {6})


def increments(pieces, ids, skip=frozenset()):
    decoder = IncrementalDecoder(pieces, skip)
    return [decoder.push(id) for id in ids] + [decoder.flush()]


@pytest.mark.parametrize(
    ("data", "pushed"),
    [
        (b"\xf0\x9f\x99\x82", ["", "", "", "\U0001f642", ""]),
        (b"\xc4\x8f", ["", "\u010f", ""]),
        (b"\xf0\x9f", ["", "", "\ufffd"]),
        (b"a\xc4", ["a", "", "\ufffd"]),
        (b"\xc4a", ["", "\ufffda", ""]),
    ],
)
def test_an_unfinished_character_is_held_and_bad_bytes_flush_as_one_replacement(data, pushed):
    """Case G3."""
    assert increments(BYTES, data) == pushed


def test_a_token_may_end_in_the_middle_of_a_character():
    """Case G3, with two bytes in each token: F0 9F | 99 82."""
    halves = Pieces(["ðŁ", "ĻĤ"], byte_level)
    assert increments(halves, [0, 1]) == ["", "\U0001f642", ""]


def test_the_space_of_the_first_word_is_the_vocabularys_own():
    """Case T4: "hello world" gives that text, no leading space, whole and in increments."""
    assert increments(SPACED, [0, 1]) == ["hello", " world", ""]
    assert decode(SPACED, [0, 1], frozenset()) == "hello world"
    assert increments(WORDS, [0, 2, 1]) == ["hello", "ing", " world", ""]


def test_only_one_leading_space_is_dropped():
    assert decode(SPACED, [2, 0], frozenset()) == " hello"


def test_a_skipped_token_does_not_count_as_the_first():
    assert increments(SPACED, [6, 0], {6}) == ["", "hello", ""]
    assert decode(SPACED, [6, 0], {6}) == "hello"


def test_a_text_that_goes_on_keeps_its_space():
    decoder = IncrementalDecoder(SPACED, frozenset(), after=[0])
    assert decoder.push(1) == " world"


@pytest.mark.parametrize("id", [-1, 256, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(id):
    with pytest.raises(TokenizerError, match=f"Token id {id} is not in the vocabulary of 256 ids"):
        decode(BYTES, [id], frozenset())


@settings(deadline=None)
@given(st.data(), st.sampled_from([BYTES, SPACED, WORDS, GPT2]))
def test_joined_increments_are_the_full_decode(data, pieces):
    """Case T4."""
    ids = data.draw(st.lists(st.integers(0, len(pieces.tokens) - 1)))
    skip = data.draw(st.sets(st.integers(0, 6)))
    assert "".join(increments(pieces, ids, skip)) == decode(pieces, ids, skip)


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    assert decode(BYTES, list(text.encode()), frozenset()) == text


def test_decoding_tidies_no_space(tiny):
    tokenizer = from_gguf(tiny())
    for text in ["hello , world .", "  hello  ", "do n't", " hello"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_unless_asked_for(tiny):
    tokenizer = from_gguf(tiny())
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"
