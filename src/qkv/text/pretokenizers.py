"""The pre-tokenizers that `tokenizer.ggml.pre` names: how text is split before byte-level BPE.

Each is the regular expressions that its models publish, applied one after the other: every match
is a piece of its own, and so is what lies between two matches.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from qkv.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class Splitting:
    """Regular expressions in the order they apply, and what else belongs to the name.

    `composes` says that text is brought to Unicode NFC first. `whole` says that a piece which is
    a token as it stands is not merged from its bytes. `adds_bos` is the default of the name.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None


_SUFFIX = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_GPT2 = rf"{_SUFFIX}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _gpt4(digits: str) -> str:
    """GPT-4's expression, with the numbers cut as `digits` says."""
    return (
        rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
    )


def _cased(suffix: str, digits: str) -> str:
    """GPT-4o's expression: a word also ends where lower case turns to upper."""
    lead, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"
    )


_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}"
)
_QWEN35 = (
    rf"(?i:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
)

_BY_GPT2 = Splitting((_GPT2,))
_BY_DIGIT = Splitting((r"\p{N}", _GPT2))
_BY_LLAMA3 = Splitting((_gpt4(r"\p{N}{1,3}"),), whole=True, adds_bos=True)
_BY_GPT4 = Splitting((_gpt4(r"\p{N}{1,3}"),))
_BY_QWEN2 = Splitting((_gpt4(r"\p{N}"),))
_BY_GPT4O = Splitting((_cased(rf"(?i:{_SUFFIX})?", r"\p{N}{1,3}"),))

SPLITTINGS = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _BY_GPT2,
    "phi-2": _BY_GPT2,
    "jais": _BY_GPT2,
    "trillion": _BY_GPT2,
    "exaone4": _BY_GPT2,
    "mpt": Splitting((_GPT2,), composes=True),
    "olmo": Splitting((_GPT2,), composes=True),
    "starcoder": _BY_DIGIT,
    "refact": _BY_DIGIT,
    "command-r": _BY_DIGIT,
    "smollm": _BY_DIGIT,
    "codeshell": _BY_DIGIT,
    "exaone": _BY_DIGIT,
    "minerva-7b": _BY_DIGIT,
    "llama3": _BY_LLAMA3,
    "llama-v3": _BY_LLAMA3,
    "llama-bpe": _BY_LLAMA3,
    "dbrx": _BY_GPT4,
    "smaug-bpe": _BY_GPT4,
    "chatglm-bpe": _BY_GPT4,
    "glm4": _BY_GPT4,
    "qwen2": Splitting((_gpt4(r"\p{N}"),), composes=True),
    "qwen35": Splitting((_QWEN35,), composes=True),
    "stablelm2": _BY_QWEN2,
    "hunyuan": _BY_QWEN2,
    "megrez": _BY_QWEN2,
    "grok-2": _BY_QWEN2,
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3": Splitting((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "tekken": Splitting((_cased("", r"\p{N}"),), whole=True, adds_bos=True),
    "gpt-4o": _BY_GPT4O,
    "llama4": _BY_GPT4O,
    "bloom": Splitting((_BLOOM,)),
    "poro-chat": Splitting((_BLOOM,)),
    "viking": Splitting((_BLOOM, r"\p{N}")),
}


def splitting(name: str) -> Splitting:
    """The pre-tokenizer of that name. Raises TokenizerError, with the known ones, for any other."""
    if name not in SPLITTINGS:
        raise TokenizerError(f'tokenizer.ggml.pre: "{name}" is not known ({", ".join(SPLITTINGS)}).')
    return SPLITTINGS[name]
