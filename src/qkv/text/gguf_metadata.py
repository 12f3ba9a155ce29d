"""The tokenizer of a folder as GGUF metadata: what `gguf` reads, the other way.

A GGUF file names its splitting instead of holding it, and has scores where tokenizer.json has merges.
So the metadata is read again, and the two tokenizers must agree on texts of many kinds: one that
cannot be said in full is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from qkv.errors import TokenizerError
from qkv.sources import read_json
from qkv.text.gguf import from_gguf
from qkv.text.metadata import NAMED, SPACE, Type
from qkv.text.pieces import is_byte
from qkv.text.pretokenizers import SPLITTINGS
from qkv.text.tokenizer import Tokenizer
from qkv.text.vocabulary import Vocabulary

# of names that split alike, those that converters write
USUAL = ("gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o")
# words, cases, numbers, spaces, lines, marks, other scripts, characters of one to four bytes
PROBES = (
    "Hello world, it's 3 o'clock; I'LL pay $1234567.89 (or 20%)!",
    "  two  spaces\tand tabs\t\t\n\n\nlines \r\n  indented\n    deeper   ",
    "camelCase HTTPServer snake_case x=y+1; for(i=0;i<10;++i){a[i]=-i;} // done...",
    "naïve café e\u0301 straße Ελλάδα Привет שלום مرحبا नमस्ते 你好，世界。 こんにちは 안녕 สวัสดี",
    "\U0001f600\U0001f44d\U0001f3fd …—“quoted” ½² ٣٤٥ 1st 2nd 12 123 1234 12345",
    "We'Ve DON'T 'tis rock'n'roll ’s",
    "",
    " ",
    "a",
)


# SentencePiece, whose rules the file names, has a space before every text and after control tokens; newer
# tokenizer.json only before a text that begins with none. No key tells the two apart.
FIRST_SPACE = (
    "tokenizer.json puts a space in front only of a text that begins with none; by the rules of a .gguf "
    "there is always one, also after a control token, so that chats may become other tokens."
)


def metadata_of(
    folder: Path, tokenizer: Tokenizer, vocab: int, ends: frozenset[int]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The `tokenizer.` keys for the tokenizer of a folder, and what a reader of them does otherwise.

    The model has so many token ids, and its answers end at `ends`.

    Raises TokenizerError for a kind of tokenizer that GGUF has no name for, or that this would change.
    """
    data, vocabulary = read_json(folder / "tokenizer.json"), tokenizer.vocabulary
    if len(vocabulary.tokens) > vocab:
        raise TokenizerError(
            f"tokenizer.json has {len(vocabulary.tokens):,} tokens and the model {vocab:,}: "
            "a .gguf holds one row for each."
        )
    found = _model(data["model"], vocabulary, vocab) | _tokens(data["model"], vocabulary, vocab)
    found |= _special(vocabulary, ends)
    found |= {
        f"tokenizer.chat_template{'' if name == 'default' else f'.{name}'}": template
        for name, template in vocabulary.templates.items()
    }
    others = [name for name in vocabulary.templates if name != "default"]
    if others:
        found["tokenizer.chat_templates"] = others
    after = from_gguf(found)
    spaced = tokenizer.encode(" a") != after.encode(" a")
    _check(tokenizer, after, [text.lstrip(" ") for text in PROBES] if spaced else PROBES, ends)
    return found, (FIRST_SPACE,) if spaced else ()


def _check(before: Tokenizer, after: Tokenizer, probes: Iterable[str], ends: frozenset[int]) -> None:
    for text in probes:
        for specials in (True, False):
            if before.encode(text, specials=specials) != after.encode(text, specials=specials):
                raise TokenizerError(
                    f"tokenizer.json cannot be written as GGUF: {text[:40]!r} would become other tokens."
                )
    if not ends <= after.eos_ids:
        lost = ", ".join(map(str, sorted(ends - after.eos_ids)))
        raise TokenizerError(
            f"A GGUF file names up to three tokens that end an answer; {lost} would be lost."
        )


def _model(model: Mapping[str, Any], vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """The kind of tokenizer, and what it merges by."""
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise TokenizerError(
            f"tokenizer.json: a model of type {model.get('type')} cannot be written as GGUF yet (BPE can)."
        )
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    if model.get("byte_fallback"):
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.add_space_prefix": _begins_with_space(vocabulary.pipeline),
            "tokenizer.ggml.scores": _scores(vocabulary, merges, size),
        }
    if any(" " in part for pair in merges for part in pair):
        raise TokenizerError("tokenizer.json: a merge of tokens with spaces cannot be written as GGUF.")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(vocabulary.pipeline, bool(model.get("ignore_merges"))),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


def _scores(vocabulary: Vocabulary, merges: list[tuple[str, ...]], size: int) -> np.ndarray:
    """The earlier a piece is merged, the better it scores; pieces that no merge makes come last."""
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    scores = np.full(size, -float(len(merges) + 1), np.float32)
    for rank in reversed(range(len(merges))):
        made = ids.get("".join(merges[rank]))
        if made is not None:
            scores[made] = -rank
    return scores


def _begins_with_space(pipeline: tokenizers.Tokenizer) -> bool:
    return _cut(pipeline, "a")[0].startswith(SPACE)


def _cut(pipeline: tokenizers.Tokenizer, text: str) -> list[str]:
    """The pieces that the model would see."""
    if pipeline.normalizer is not None:
        text = pipeline.normalizer.normalize_str(text)
    if pipeline.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in pipeline.pre_tokenizer.pre_tokenize_str(text)]


def _splitting(pipeline: tokenizers.Tokenizer, whole: bool) -> str:
    """The name of the splitting that cuts as this one does."""
    wanted = [_cut(pipeline, text) for text in PROBES]
    for name in (*USUAL, *SPLITTINGS):
        rules, other = SPLITTINGS[name], tokenizers.Tokenizer(pipeline.model)
        if rules.whole != whole:
            continue
        other.pre_tokenizer = rules.pre_tokenizer()
        if rules.composes:
            other.normalizer = rules.normalizer()
        if [_cut(other, text) for text in PROBES] == wanted:
            return name
    raise TokenizerError(
        "tokenizer.json splits text in a way that GGUF has no name for "
        f"(of {len(SPLITTINGS)} that are known, none cuts the same)."
    )


def _tokens(model: Mapping[str, Any], vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """A text and a type for every id of the model; ids without a text are said to be unused."""
    tokens = [f"[PAD{id}]" if text is None else text for id, text in enumerate(vocabulary.tokens)]
    types = [Type.UNUSED if text is None else Type.NORMAL for text in vocabulary.tokens]
    bytewise = bool(model.get("byte_fallback"))
    for id, token in enumerate(tokens):
        if bytewise and is_byte(token):
            types[id] = Type.BYTE
    for added in vocabulary.added:
        if types[added.id] == Type.NORMAL:
            types[added.id] = Type.CONTROL if added.special else Type.USER_DEFINED
    if bytewise and vocabulary.unknown is not None:
        types[vocabulary.unknown] = Type.UNKNOWN
    more = range(len(tokens), size)
    return {
        "tokenizer.ggml.tokens": tokens + [f"[PAD{id}]" for id in more],
        "tokenizer.ggml.token_type": np.array([*types, *(Type.UNUSED for _ in more)], np.int32),
    }


def _special(vocabulary: Vocabulary, ends: frozenset[int]) -> dict[str, Any]:
    """The tokens with a role, and what stands around a text."""
    named = dict(vocabulary.named)
    others = sorted(ends - {named.get("eos")})
    if "eos" not in named and others:
        named["eos"] = others.pop(0)
    named |= dict(zip(("eot", "eom"), others, strict=False))
    keys = {ours: key for key, ours in NAMED.items()}
    return {f"tokenizer.ggml.{keys[name]}_token_id": id for name, id in named.items()} | {
        "tokenizer.ggml.add_bos_token": bool(vocabulary.before),
        "tokenizer.ggml.add_eos_token": bool(vocabulary.after),
    }
