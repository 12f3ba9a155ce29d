"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from qkv.errors import TokenizerError
from qkv.text.metadata import SPACE, GgufVocabulary, Type, read
from qkv.text.pieces import BYTE_TOKEN, Pieces, byte_level, sentencepiece, wordpiece
from qkv.text.pretokenizers import splitting
from qkv.text.tokenizer import Tokenizer
from qkv.text.vocabulary import Vocabulary

_MAX_PIECE = 256  # every split of a piece is looked up, so its length costs twice


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes: key -> value, arrays as lists or numpy arrays.

    Raises TokenizerError naming the key that is missing, malformed or contradicts another. The
    definition follows the GGUF specification and, for defaults, llama.cpp.
    """
    file = read(metadata)
    name = file.text("tokenizer.ggml.model")
    if name not in KINDS:
        raise TokenizerError(f'tokenizer.ggml.model: "{name}" is not known ({", ".join(KINDS)}).')
    kind = KINDS[name](file)
    named = dict(file.named)
    if "bos" not in named and "cls" in named:
        named["bos"] = named["cls"]
    return Tokenizer(
        Vocabulary(
            pipeline=kind.pipeline,
            tokens=kind.tokens,
            pieces=kind.pieces,
            added=file.added,
            controls=file.controls,
            named=named,
            unknown=kind.unknown,
            ends=frozenset(named[end] for end in ("eos", "eot", "eom") if end in named),
            before=_edge(file, "tokenizer.ggml.add_bos_token", kind.adds_bos, named.get("bos")),
            after=(
                _edge(file, "tokenizer.ggml.add_sep_token", kind.adds_sep, named.get("sep"))
                or _edge(file, "tokenizer.ggml.add_eos_token", kind.adds_eos, named.get("eos"))
            ),
            templates=file.templates,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a kind of tokenizer makes of a file."""

    pipeline: tokenizers.Tokenizer
    tokens: Sequence[str]
    pieces: Pieces
    unknown: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    adds_sep: bool = False


def _gpt2(file: GgufVocabulary) -> _Kind:
    """Byte-level BPE. Radford et al. 2019, section 2.2."""
    rules = splitting(file.text("tokenizer.ggml.pre", "default"))
    lines = file.strings("tokenizer.ggml.merges")
    merges = cast("list[tuple[str, str]]", [tuple(line.split(" ")) for line in lines])
    if set(map(len, merges)) - {2}:
        bad = next(line for line in lines if line.count(" ") != 1)
        raise TokenizerError(f"tokenizer.ggml.merges: {bad!r} is not two tokens with a space between.")
    pipeline = _pipeline(
        _bpe(file, merges, ignore_merges=rules.whole), rules.normalizer(), rules.pre_tokenizer()
    )
    pieces = Pieces(file.tokens, byte_level, frozenset(token.id for token in file.added))
    return _Kind(pipeline=pipeline, tokens=file.tokens, pieces=pieces, adds_bos=rules.adds_bos)


def _llama(file: GgufVocabulary) -> _Kind:
    """SentencePiece's BPE: the pair whose joined piece scores best is merged first; bytes for the rest.

    Kudo and Richardson 2018.
    """
    scores = file.scores()
    pieces = {
        t: i for i, (t, kind) in enumerate(zip(file.tokens, file.types, strict=True)) if kind == Type.NORMAL
    }
    if longest := next((piece for piece in pieces if len(piece) > _MAX_PIECE), None):
        raise TokenizerError(
            f"tokenizer.ggml.tokens: id {pieces[longest]} has {len(longest):,} characters; "
            f"a piece has at most {_MAX_PIECE}."
        )
    ranked = sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece]))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    _check_bytes(file)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    steps.append(normalizers.Replace(" ", SPACE))
    pipeline = _pipeline(
        _bpe(file, merges, unk_token=file.unknown(), fuse_unk=True, byte_fallback=True),
        normalizers.Sequence(steps),
        None,
    )
    specials = frozenset(token.id for token in file.added if token.special)
    written = Pieces(file.tokens, sentencepiece, specials, drops_space=prefix)
    return _Kind(
        pipeline=pipeline, tokens=file.tokens, pieces=written, unknown=file.named.get("unk"), adds_bos=True
    )


def _bert(file: GgufVocabulary) -> _Kind:
    """WordPiece. GGUF marks the beginning of a word with U+2581 where BERT marks the inside with ##."""
    tokens = [_bert_token(file, id) for id in range(len(file.tokens))]
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens holds one WordPiece twice.")
    if "unk" not in file.named:
        raise TokenizerError("tokenizer.ggml.unknown_token_id is missing.")
    model = models.WordPiece(file.keys(tokens), unk_token=file.unknown(), max_input_chars_per_word=100)
    # The file does not say whether case matters; a vocabulary with upper case says it does.
    lowercase = not any(
        token.isascii() and token != token.lower() and not token.startswith("[") for token in tokens
    )
    pipeline = _pipeline(
        model, normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    )
    pieces = Pieces(tokens, wordpiece, drops_space=True)
    return _Kind(
        pipeline=pipeline,
        tokens=tokens,
        pieces=pieces,
        unknown=file.named["unk"],
        adds_bos=True,
        adds_sep=True,
    )


def _bert_token(file: GgufVocabulary, id: int) -> str:
    token = file.tokens[id]
    if file.types[id] != Type.NORMAL or (token.startswith("[") and token.endswith("]")):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _t5(file: GgufVocabulary) -> _Kind:
    """SentencePiece's unigram model: the most probable segmentation. Kudo 2018."""
    names = file.keys(file.tokens)
    unknown = file.named.get("unk")
    try:
        model = models.Unigram(
            list(zip(names, file.scores(), strict=True)), unk_id=unknown, byte_fallback=False
        )
        steps = [_charsmap(file)] if "tokenizer.ggml.precompiled_charsmap" in file.metadata else []
    except Exception as error:
        raise TokenizerError(f"tokenizer.ggml.tokens is no unigram vocabulary: {error}.") from error
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    metaspace = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always" if prefix else "never")
    specials = frozenset(token.id for token in file.added if token.special)
    return _Kind(
        pipeline=_pipeline(model, normalizers.Sequence(steps), metaspace),
        tokens=file.tokens,
        pieces=Pieces(file.tokens, sentencepiece, specials, drops_space=prefix),
        unknown=unknown,
        adds_eos=True,
    )


def _charsmap(file: GgufVocabulary) -> normalizers.Normalizer:
    values = file.metadata["tokenizer.ggml.precompiled_charsmap"]
    return normalizers.Precompiled(np.asarray(values).astype(np.uint8).tobytes())  # int8 in some files


KINDS: dict[str, Callable[[GgufVocabulary], _Kind]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
}


def _bpe(file: GgufVocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    controls = {file.tokens[id] for id in file.controls}
    # hardly a file has merges of control tokens, and looking at each of half a million takes long
    if controls & {*chain.from_iterable(merges), *map("".join, merges)}:
        merges = [m for m in merges if controls.isdisjoint((*m, "".join(m)))]
    try:
        return models.BPE(file.keys(file.tokens), merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}.") from error


def _check_bytes(file: GgufVocabulary) -> None:
    for token, kind in zip(file.tokens, file.types, strict=True):
        if kind == Type.BYTE and not BYTE_TOKEN.fullmatch(token):
            raise TokenizerError(
                f"tokenizer.ggml.tokens: {token!r} is typed as a byte; <0x00> to <0xFF> are bytes."
            )


def _pipeline(
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(model)
    if normalizer is not None:
        pipeline.normalizer = normalizer
    if pre_tokenizer is not None:
        pipeline.pre_tokenizer = pre_tokenizer
    return pipeline


def _edge(file: GgufVocabulary, key: str, default: bool, id: int | None) -> tuple[int, ...]:
    """The id that encoding puts at an edge of a text. A default without an id is no default."""
    if not file.flag(key, default):
        return ()
    if id is None and key in file.metadata:
        raise TokenizerError(f"{key} is true and the file names no such token.")
    return () if id is None else (id,)
