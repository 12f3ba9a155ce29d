import io

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings, strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from qkv.errors import TokenizerError
from qkv.text import from_gguf
from qkv.text.pretokenizers import SPLITTINGS

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "she sells sea shells by the sea shore",
    "aaa aaaa aa banana bandana abab ababab",
    "numbers 1 22 333 4444, and (brackets) too!",
] * 20


def metadata_of(model_type, **options):
    """A small SentencePiece model and the GGUF metadata that says the same."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type=model_type,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(model.vocab_size())

    def kind(id):
        flags = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte}
        normal = 4 if model.id_to_piece(id) in options.get("user_defined_symbols", ()) else 1
        return next((number for number, is_it in flags.items() if is_it(id)), normal)

    proto = ModelProto.FromString(written.getvalue())
    charsmap = np.frombuffer(proto.normalizer_spec.precompiled_charsmap, np.uint8)
    normal = {"tokenizer.ggml.precompiled_charsmap": charsmap} if len(charsmap) else {}
    return model, normal | {
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": np.array([model.get_score(id) for id in ids], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(id) for id in ids], np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def sentencepiece_bpe():
    return metadata_of(
        "bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tag>", "<tag><tag>"],
    )


@pytest.fixture(scope="module")
def sentencepiece_unigram():
    return metadata_of("unigram", vocab_size=120)  # with its usual normalisation, NFKC and more


@settings(max_examples=300, deadline=None)
@given(text=st.text("abdehlnost 1,é🦙", max_size=40))
def test_llama_is_sentencepieces_bpe(sentencepiece_bpe, text):
    model, metadata = sentencepiece_bpe
    tokenizer = from_gguf(metadata | {"tokenizer.ggml.model": "llama"})
    ids = model.encode(text)
    assert tokenizer.encode(text, bos=False) == ids
    assert tokenizer.decode(ids) == model.decode(ids) == text


def test_a_user_defined_token_is_found_before_anything_else(sentencepiece_bpe):
    _, metadata = sentencepiece_bpe
    tokenizer = from_gguf(metadata | {"tokenizer.ggml.model": "llama"})
    one, two = tokenizer.id_of("<tag>"), tokenizer.id_of("<tag><tag>")
    assert tokenizer.encode("<tag><tag><tag>", bos=False, specials=False) == [two, one]
    assert tokenizer.decode([two, one]) == "<tag><tag><tag>"


def test_llama_without_a_space_prefix(sentencepiece_bpe):
    _, metadata = sentencepiece_bpe
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}
    tokenizer = from_gguf(metadata | keys)
    assert tokenizer.token(tokenizer.encode("the cat", bos=False)[0]).startswith("t")
    assert tokenizer.decode(tokenizer.encode(" the cat")) == " the cat"


@settings(max_examples=300, deadline=None)
@given(text=st.text("abdehlnost 1,éﬁ②Ａ\t\u3000", max_size=40))
def test_t5_is_sentencepieces_unigram(sentencepiece_unigram, text):
    model, metadata = sentencepiece_unigram
    keys = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.remove_extra_whitespaces": True}
    tokenizer = from_gguf(metadata | keys)
    assert tokenizer.encode(text, eos=False) == model.encode(text)
    assert tokenizer.encode(text) == [*model.encode(text), 2]


def test_smollm2(smollm2_metadata):
    tokenizer = from_gguf(smollm2_metadata)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.pad_id) == (49152, 1, 2)
    assert tokenizer.eos_ids == {2}
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (False, False)
    assert tokenizer.token(2) == "<|im_end|>"
    assert tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.id_of("no such token") is None
    ids = tokenizer.encode("The capital of France is")
    assert [tokenizer.token(id) for id in ids] == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert tokenizer.decode(ids) == "The capital of France is"


def test_a_number_is_split_as_the_pre_tokenizer_says(tiny):
    """ "1234" where every digit is a merge away: single digits, threes, or whole."""
    merges = ["1 2", "12 3", "123 4"]
    extra = [(merge.replace(" ", ""), 1) for merge in merges]
    expected = {
        "qwen2": ["1", "2", "3", "4"],
        "dbrx": ["123", "4"],
        "gpt-2": ["1234"],
        "smollm": ["1", "2", "3", "4"],
    }
    for pre, tokens in expected.items():
        tokenizer = from_gguf(tiny(extra=extra, pre=pre, merges=merges))
        assert [tokenizer.token(id) for id in tokenizer.encode("1234")] == tokens


def test_ignore_merges_takes_a_whole_piece_that_is_a_token(tiny):
    extra = [("Ġzz", 1)]
    whole = from_gguf(tiny(extra=extra, pre="llama-bpe"))
    merged = from_gguf(tiny(extra=extra, pre="dbrx"))
    assert [whole.token(id) for id in whole.encode(" zz", bos=False)] == ["Ġzz"]
    assert [merged.token(id) for id in merged.encode(" zz")] == ["Ġ", "z", "z"]


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_pre_tokenizer_keeps_the_whole_text(tiny, pre):
    text = "Hello, wörld's 12345\r\n\n  \tδοκιμή 漢字 أهلا 🦙 I'LL done.  "
    tokenizer = from_gguf(tiny(pre=pre))
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_eot_and_eom_end_a_turn_too(tiny):
    """Case G8: every id the file names as an end is one."""
    tokenizer = from_gguf(tiny(eot_token_id=265, eom_token_id=268, template="no turns"))
    assert tokenizer.eos_ids == {265, 267, 268}


def test_a_comma_named_as_bos_stays_a_comma(tiny):
    comma = tiny()["tokenizer.ggml.tokens"].index(",")
    tokenizer = from_gguf(tiny(bos_token_id=comma))
    assert comma not in tokenizer.control_ids
    assert tokenizer.encode("a,", specials=False)[-1] == comma


def test_a_marker_the_converter_typed_as_text_is_a_control_token(tiny):
    metadata = tiny()
    types = list(metadata["tokenizer.ggml.token_type"])
    end = metadata["tokenizer.ggml.eos_token_id"]
    types[end] = 1
    tokenizer = from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    assert tokenizer.encode("<|im_end|>") == [end]
    assert end not in tokenizer.encode("<|im_end|>", specials=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "rwkv"}, r'tokenizer\.ggml\.model: "rwkv" is not known \(gpt2, llama, bert, t5\)'),
        ({"model": 3}, r"tokenizer\.ggml\.model must be a string, not int"),
        ({"pre": "gpt-9"}, r'tokenizer\.ggml\.pre: "gpt-9" is not known \(default, gpt-2, .*viking\)'),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens must be an array, not str"),
        ({"tokens": ["a", 3], "token_type": None}, r"tokenizer\.ggml\.tokens must hold strings only"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, r"tokens: ids 0 and 2 are both 'a'"),
        (
            {"token_type": [1, 1]},
            r"tokenizer\.ggml\.token_type has 2 entries and tokenizer\.ggml\.tokens has 270",
        ),
        ({"token_type": [9] * 270}, r"token_type must hold numbers from 0 to 6 only"),
        ({"token_type": ["x"] * 270}, r"token_type must hold numbers only"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        (
            {"merges": ["h e", "q zz"]},
            r"tokenizer\.ggml\.merges does not fit tokenizer\.ggml\.tokens: .*`zz`",
        ),
        ({"merges": ["hello"]}, r"tokenizer\.ggml\.merges: 'hello' is not two tokens"),
        ({"bos_token_id": 270}, r"tokenizer\.ggml\.bos_token_id is 270, outside the vocabulary of 270 ids"),
        ({"eos_token_id": -1}, r"tokenizer\.ggml\.eos_token_id is -1, outside"),
        ({"eot_token_id": "x"}, r"tokenizer\.ggml\.eot_token_id must be a token id, not 'x'"),
        (
            {"add_bos_token": True, "bos_token_id": None},
            r"add_bos_token is true and the file names no such token",
        ),
        ({"add_bos_token": "yes"}, r"add_bos_token must be true or false, not 'yes'"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, r"tokenizer\.ggml\.scores has 1 entries"),
        ({"model": "llama", "scores": [float("nan")] * 270}, r"scores must hold finite numbers only"),
        ({"model": "bert"}, r"tokenizer\.ggml\.unknown_token_id is missing"),
    ],
)
def test_a_contradiction_is_an_error_that_names_its_key(tiny, changes, message):
    assert len(tiny()["tokenizer.ggml.tokens"]) == 270
    with pytest.raises(TokenizerError, match=message):
        from_gguf(tiny(**changes))


def test_a_byte_token_that_is_no_byte_is_refused(tiny):
    """Case K8: "<0x-1>"."""
    metadata = tiny(model="llama", extra=[("<0x-1>", 6)], scores=[0.0] * 271)
    with pytest.raises(TokenizerError, match="'<0x-1>' is typed as a byte"):
        from_gguf(metadata)


def test_very_long_tokens_are_refused_before_they_cost_anything(tiny):
    with pytest.raises(TokenizerError, match="Added token 270 has 5,000 characters"):
        from_gguf(tiny(extra=[("x" * 5000, 3)]))
    with pytest.raises(TokenizerError, match="id 270 has 5,000 characters; a piece has at most 256"):
        from_gguf(tiny(extra=[("x" * 5000, 1)], model="llama", scores=[0.0] * 271))
