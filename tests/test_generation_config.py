"""generation_config.json: each key is honoured, known not to matter, neutral, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from qkv.errors import ConfigError
from qkv.generation_config import (
    HONOURED,
    IRRELEVANT,
    NEUTRAL,
    TOKEN_LISTS,
    TOKENS,
    WORDS,
    check,
    ends,
    token_ids,
)

# as published
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {"_from_model_config": True, "bos_token_id": 1, "do_sample": True, "eos_token_id": 2,
                "pad_token_id": 0, "temperature": 0.6, "max_length": 4096, "top_p": 0.9,
                "transformers_version": "4.31.0.dev0"},
    "Llama 3.1": {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009],
                  "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"},
    "Qwen 2.5": {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True,
                 "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "temperature": 0.7,
                 "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"},
    "Qwen 2.5 base": {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643,
                      "max_new_tokens": 2048, "transformers_version": "4.37.0"},
    "SmolLM": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
               "transformers_version": "4.42.3"},
    "Phi 3": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [32000, 32001, 32007],
              "pad_token_id": 32000, "transformers_version": "4.39.3"},
    "Gemma 3": {"bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True,
                "eos_token_id": [1, 106], "pad_token_id": 0, "top_k": 64, "top_p": 0.95,
                "transformers_version": "4.50.0.dev0"},
    "BART CNN": {"bos_token_id": 0, "decoder_start_token_id": 2, "early_stopping": True, "eos_token_id": 2,
                 "forced_bos_token_id": 0, "forced_eos_token_id": 2, "length_penalty": 2.0,
                 "max_length": 142, "min_length": 56, "no_repeat_ngram_size": 3, "num_beams": 4,
                 "pad_token_id": 1, "transformers_version": "4.27.0.dev0"},
    "T5": {"_from_model_config": True, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
           "transformers_version": "4.27.0.dev0"},
    "Whisper": {"alignment_heads": [[2, 2], [3, 0]], "begin_suppress_tokens": [220, 50257],
                "decoder_start_token_id": 50258, "eos_token_id": 50257, "max_length": 448,
                "forced_decoder_ids": [[1, None], [2, 50359]], "is_multilingual": True,
                "lang_to_id": {"<|en|>": 50259}, "max_initial_timestamp_index": 50,
                "no_timestamps_token_id": 50363, "prev_sot_token_id": 50361, "return_timestamps": False,
                "suppress_tokens": [1, 2, 7], "task_to_id": {"transcribe": 50359, "translate": 50358}},
    "nothing said": {"temperature": None, "suppress_tokens": None, "no_such_key": None, "num_beams": 1,
                     "typical_p": 1.0, "guidance_scale": 1, "bad_words_ids": [], "sequence_bias": {},
                     "min_length": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_taken(name: str) -> None:
    check(PUBLISHED[name])


LOST: dict[str, Any] = {
    "bad_words_ids": [[7]], "sequence_bias": [[[7], -9]], "encoder_no_repeat_ngram_size": 3,
    "typical_p": 0.9, "num_beam_groups": 2, "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.2, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "penalty_alpha": 0.6,
    "top_h": 0.4, "dola_layers": "low", "constraints": [1], "force_words_ids": [[1]], "token_healing": True,
    "exponential_decay_length_penalty": [5, 1.5],
    "watermarking_config": {"bias": 2.5}, "max_time": 3, "stop_strings": ["x"], "remove_invalid_values": True,
}  # fmt: skip


@pytest.mark.parametrize("key", [*LOST, "seed", "no_such_key"])
def test_what_would_be_lost_is_refused_naming_file_key_and_the_way_on(key: str) -> None:
    with pytest.raises(ConfigError) as problem:
        check({"top_p": 0.9, key: LOST.get(key, 5)})
    message = str(problem.value)
    assert message.startswith(f"generation_config.json: {key} is {LOST.get(key, 5)!r}, which ")
    assert message.endswith(f'Pass ignore=("{key}",) to load without it.')


def test_tokens_that_are_forced_are_lost_but_where_they_only_write_the_prompt() -> None:
    with pytest.raises(ConfigError, match=r"forced_decoder_ids is .*, which is not known"):
        check({"forced_decoder_ids": [[1, 5]]})
    with pytest.raises(ConfigError, match="return_timestamps is True, which cannot be honoured yet"):
        check({**PUBLISHED["Whisper"], "return_timestamps": True})


def test_every_key_that_transformers_knows_has_its_place() -> None:
    known = {*HONOURED, *IRRELEVANT, *NEUTRAL, *LOST, *WORDS, *TOKENS, *TOKEN_LISTS}
    assert set(vars(GenerationConfig())) - known == set()


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("do_sample", "false", "true or false"),
        ("do_sample", 1, "true or false"),
        ("top_k", -1, "a whole number of at least 0"),
        ("top_k", 2.0, "a whole number of at least 0"),
        ("temperature", "0.7", "a number of at least 0"),
        ("temperature", float("nan"), "a number of at least 0"),
        ("temperature", True, "a number of at least 0"),
        ("top_p", 1.5, "a number from 0 to 1"),
        ("min_p", [0.1], "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number from 0.01 to 100"),
        ("max_new_tokens", 0, "a whole number of at least 1"),
        ("max_length", 20.5, "a whole number of at least 1"),
        ("early_stopping", "soon", 'true, false or "never"'),
        ("early_stopping", 1, 'true, false or "never"'),
        ("num_beams", 0, "a whole number from 1 to 128"),
        ("num_beams", True, "a whole number from 1 to 128"),
        ("num_return_sequences", 129, "a whole number from 1 to 128"),
        ("length_penalty", "2", "a number from -10 to 10"),
        ("no_repeat_ngram_size", -1, "a whole number of at least 0"),
        ("min_length", False, "a whole number of at least 0"),
        ("forced_bos_token_id", [0], "a whole number of at least 0"),
        ("forced_eos_token_id", [0, -1], "a token id or a list of them"),
        ("suppress_tokens", 5, "a list of token ids"),
        ("begin_suppress_tokens", [0.5], "a list of token ids"),
        ("eos_token_id", "5", "a token id or a list of them"),
        ("eos_token_id", [1.0], "a token id or a list of them"),
        ("eos_token_id", [1, [2]], "a token id or a list of them"),
        ("eos_token_id", True, "a token id or a list of them"),
        ("eos_token_id", -1, "a token id or a list of them"),
    ],
)
def test_a_value_that_cannot_be_is_refused(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as problem:
        check({key: value})
    assert str(problem.value) == (
        f"generation_config.json: {key} is {value!r}; it must be {wanted}. "
        f'Pass ignore=("{key}",) to load without it.'
    )


@pytest.mark.parametrize(("key", "value"), [("num_beam_groups", True), ("token_healing", 0)])
def test_true_and_false_are_no_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be honoured yet"):
        check({key: value})


@pytest.mark.parametrize(("value", "expected"), [(None, set()), (5, {5}), ([], set()), ([5, 7, 5], {5, 7})])
def test_ends_are_one_or_several_or_none(value: Any, expected: set[int]) -> None:
    assert ends({"eos_token_id": value}, "config.json") == expected
    assert ends({}, "config.json") == set()


def test_lists_of_tokens_are_read_from_one_or_several() -> None:
    assert token_ids({"forced_eos_token_id": 2}, "forced_eos_token_id") == (2,)
    assert token_ids({"forced_eos_token_id": [2, 3]}, "forced_eos_token_id") == (2, 3)
    assert token_ids({"suppress_tokens": None}, "suppress_tokens") == ()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"num_beams": 4, "do_sample": True},
            "num_beams is 4 with do_sample: beams that are drawn cannot be honoured yet",
        ),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences is 3; it must be at most num_beams, 2",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as problem:
        check(data)
    assert str(problem.value).startswith(f"generation_config.json: {sentence}. Pass ignore=")
    check({"num_beams": 1, "do_sample": True, "num_return_sequences": 3})
