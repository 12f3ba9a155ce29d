"""A tokenizer from a folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from qkv.errors import TokenizerError
from qkv.text.pieces import Pieces, byte_level, is_byte, sentencepiece, word, wordpiece
from qkv.text.shapes import a_list, a_string, an_integer, an_object, check_ids, check_known, entry
from qkv.text.tokenizer import Tokenizer
from qkv.text.vocabulary import AddedToken, Vocabulary, control_ids, hidden_name

_MERGE = "tokenizer.json: an entry of model.merges"
_STEP = "tokenizer.json: a step of decoder"
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder: tokenizer.json, with what the other files say of it.

    Reads tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
    additional_chat_templates/*.jinja where they are. Raises TokenizerError naming the file that is
    missing or malformed, and the part of tokenizer.json that is not known.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(f"tokenizer.json is not in {folder}.")
    data = _json(folder / "tokenizer.json")
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    templates = _templates(folder, config)
    try:
        return Tokenizer(_vocabulary(data, config, templates))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} is malformed: a part of it or of tokenizer_config.json "
            "is not of the type that the format gives it."
        ) from error


def _vocabulary(data: dict[str, Any], config: Mapping[str, Any], templates: Mapping[str, str]) -> Vocabulary:
    model = an_object(entry(data, "model", "tokenizer.json"), "tokenizer.json: model")
    ids = _model_ids(model)
    added = _listed(data, config)
    entries = len(ids) + len(added)
    check_ids(ids, entries)
    check_ids({token.text: token.id for token in added.values()}, entries)
    known_ids = ids | {token.text: token.id for token in added.values()}
    named = {}
    for text, name in _special_texts(config):
        id = known_ids.get(text)
        if id is None:
            continue
        if name is not None:
            named[name] = id
        if id not in added or not added[id].special:
            added[id] = _added(id, {"content": text, "special": True})
    if model.get("byte_fallback"):
        # They stand for bytes of ordinary text, whatever a trainer flagged them as.
        added |= {id: replace(token, special=False) for id, token in added.items() if is_byte(token.text)}
    listed = [added[id] for id in sorted(added)]
    controls = control_ids(
        [token for token in listed if not (model.get("byte_fallback") and is_byte(token.text))],
        templates.values(),
    )
    tokens: list[str | None] = [None] * (max(known_ids.values(), default=-1) + 1)
    for text, id in known_ids.items():
        tokens[id] = text
    before, after = _edges(data.get("post_processor"))
    check_known((*before, *after), tokens, "tokenizer.json: post_processor")
    unknown = model["unk_id"] if "unk_id" in model else ids.get(model.get("unk_token") or "")
    if unknown is not None:
        check_known((unknown,), tokens, "tokenizer.json: model.unk_id")
    return Vocabulary(
        pipeline=_pipeline(data, tokens, controls),
        tokens=tokens,
        pieces=_pieces(data, tokens, listed),
        added=listed,
        controls=controls,
        named=named,
        unknown=unknown,
        ends=frozenset({named["eos"]} if "eos" in named else ()),
        before=_asked(config.get("add_bos_token"), before, named.get("bos")),
        after=_asked(config.get("add_eos_token"), after, named.get("eos")),
        templates=templates,
    )


def _listed(data: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens of tokenizer.json and tokenizer_config.json by id."""
    added = {}
    for index, token in enumerate(a_list(data.get("added_tokens") or [], "tokenizer.json: added_tokens")):
        where = f"tokenizer.json: added_tokens[{index}]"
        id = an_integer(entry(an_object(token, where), "id", where), f"{where}.id")
        added[id] = _added(id, token, where)
    where = "tokenizer_config.json: added_tokens_decoder"
    for name, token in an_object(config.get("added_tokens_decoder") or {}, where).items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise TokenizerError(f"{where} must have ids for keys, not {name[:60]!r}.")
        known, id = added.get(int(name)), int(name)
        token = _added(id, an_object(token, f"{where}.{name}"), f"{where}.{name}")
        if known is None or (token.special and not known.special):
            added[id] = token
    return added


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is no JSON: {error}.") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold an object.")
    return data


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A file of its own goes before the entry in tokenizer_config.json."""
    entry = config.get("chat_template") or {}
    if isinstance(entry, str):
        entry = {"default": entry}
    if isinstance(entry, list):
        entry = {named["name"]: named["template"] for named in entry}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return entry | {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}


def _added(id: int, token: Mapping[str, Any], where: str = "tokenizer_config.json") -> AddedToken:
    return AddedToken(
        id=id,
        text=a_string(entry(token, "content", where), f"{where}.content"),
        special=bool(token.get("special", False)),
        lstrip=bool(token.get("lstrip", False)),
        rstrip=bool(token.get("rstrip", False)),
        single_word=bool(token.get("single_word", False)),
        normalized=bool(token.get("normalized", False)),
    )


def _special_texts(config: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The texts of the special tokens that the configuration names, with their roles."""
    found: list[tuple[Any, str | None]] = [(config.get(f"{name}_token"), name) for name in _NAMED]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        found += [(token, None) for token in (more.values() if isinstance(more, dict) else more)]
    texts = [(token["content"] if isinstance(token, dict) else token, name) for token, name in found]
    return [(text, name) for text, name in texts if isinstance(text, str)]


def _model_ids(model: Mapping[str, Any]) -> dict[str, int]:
    where = "tokenizer.json: model.vocab"
    vocab = entry(model, "vocab", "tokenizer.json: model")
    if not isinstance(vocab, list):
        return {a_string(text, where): id for text, id in an_object(vocab, where).items()}
    if bad := next((item for item in vocab if not (isinstance(item, list) and len(item) == 2)), None):
        raise TokenizerError(f"{where} must hold pairs of a token and its score, not {bad!r}."[:200])
    return {a_string(item[0], where): id for id, item in enumerate(vocab)}


def _pipeline(
    data: Mapping[str, Any], tokens: list[str | None], controls: frozenset[int]
) -> tokenizers.Tokenizer:
    """tokenizer.json without its added tokens, and with control tokens hidden in its model."""
    model = dict(data["model"])
    names = {tokens[id]: hidden_name(id) for id in controls}
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    else:
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
        # The library counts keys to number what is added, so an id that is left out is filled.
        unused = set(range(max(vocab.values(), default=-1) + 1)) - set(vocab.values())
        model["vocab"] |= {hidden_name(id): id for id in unused}
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        merges = a_list(model["merges"] or [], "tokenizer.json: model.merges")
        pairs = [tuple(m.split(" ") if isinstance(m, str) else a_list(m, _MERGE)) for m in merges]
        if any(len(pair) != 2 or not all(isinstance(p, str) for p in pair) for pair in pairs):
            raise TokenizerError(f"{_MERGE} must be two tokens.")
        model["merges"] = [p for p in pairs if names.keys().isdisjoint((p[0], p[1], p[0] + p[1]))]
    plain = dict(data) | {
        "model": model,
        "added_tokens": [],
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"tokenizer.json cannot be read: {error}.") from error


def _edges(processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a post-processor puts before and after a text."""
    if processor is None:
        return (), ()
    where = "tokenizer.json: post_processor"
    kind = entry(an_object(processor, where), "type", where)
    if kind == "ByteLevel":
        return (), ()
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if kind == "Sequence":
        both = [_edges(part) for part in processor["processors"]]
        return sum((before for before, _ in reversed(both)), ()), sum((after for _, after in both), ())
    if kind == "TemplateProcessing":
        sides: tuple[list[int], list[int]] = ([], [])
        side = 0
        for item in processor["single"]:
            if "Sequence" in item:
                side = 1
            else:
                sides[side].extend(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        return tuple(sides[0]), tuple(sides[1])
    raise TokenizerError(
        f"tokenizer.json: post_processor {kind} is not known "
        "(ByteLevel, BertProcessing, RobertaProcessing, Sequence, TemplateProcessing)."
    )


def _asked(wanted: bool | None, edge: tuple[int, ...], id: int | None) -> tuple[int, ...]:
    """tokenizer_config.json may ask for a BOS or EOS, or for none, whatever tokenizer.json does."""
    if wanted is None:
        return edge
    if not wanted:
        return tuple(other for other in edge if other != id)
    return edge or (() if id is None else (id,))


def _pieces(data: Mapping[str, Any], tokens: list[str | None], added: list[AddedToken]) -> Pieces:
    """How tokens become text, from the `decoder` of tokenizer.json."""
    decoder = an_object(data.get("decoder") or {"type": None}, "tokenizer.json: decoder")
    name = entry(decoder, "type", "tokenizer.json: decoder")
    if not isinstance(name, str | None) or name not in DECODERS:
        known = ", ".join(str(name) for name in DECODERS if name)
        raise TokenizerError(f"tokenizer.json: decoder {name} is not known ({known}).")
    return DECODERS[name](decoder, data, tokens, added)


def _words(
    decoder: Mapping[str, Any], data: Any, tokens: list[str | None], added: list[AddedToken]
) -> Pieces:
    return Pieces(tokens, word, drops_space=True)


def _wordpiece(
    decoder: Mapping[str, Any], data: Any, tokens: list[str | None], added: list[AddedToken]
) -> Pieces:
    prefix = decoder.get("prefix", "##")
    return Pieces(tokens, lambda token: wordpiece(token, prefix), drops_space=True)


def _byte_level(decoder: Any, data: Any, tokens: list[str | None], added: list[AddedToken]) -> Pieces:
    splitter = data.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    prefix = any(step.get("type") == "ByteLevel" and step.get("add_prefix_space") for step in steps)
    return Pieces(tokens, byte_level, frozenset(token.id for token in added), drops_space=prefix)


def _metaspace(
    decoder: Mapping[str, Any], data: Any, tokens: list[str | None], added: list[AddedToken]
) -> Pieces:
    mark = decoder.get("replacement", "\u2581")
    prefix = decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
    specials = frozenset(token.id for token in added if token.special)
    return Pieces(tokens, lambda token: token.replace(mark, " ").encode(), specials, drops_space=prefix)


def _sequence(
    decoder: Mapping[str, Any], data: Any, tokens: list[str | None], added: list[AddedToken]
) -> Pieces:
    """SentencePiece as steps, each where it is there: U+2581 to a space, bytes, one space less in front."""
    steps = a_list(entry(decoder, "decoders", "tokenizer.json: decoder"), "tokenizer.json: decoder.decoders")
    spaces = bytes_ = fused = drops = False
    for step in steps:
        kind = entry(
            an_object(step, "tokenizer.json: a decoder step"), "type", "tokenizer.json: decoder step"
        )
        if step == {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
            spaces = True
        elif kind == "ByteFallback" and not fused:
            bytes_ = True
        elif kind == "Fuse":
            fused = True
        elif fused and step == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            drops = True
        elif len(steps) == 1:
            return _pieces({**data, "decoder": step}, tokens, added)
        else:
            raise TokenizerError(f"tokenizer.json: decoder step {step} is not known in this place.")
    specials = frozenset(token.id for token in added if token.special)

    def spell(token: str) -> bytes:
        if bytes_ and is_byte(token):
            return sentencepiece(token)
        return (token.replace("\u2581", " ") if spaces else token).encode()

    return Pieces(tokens, spell, specials, drops_space=drops)


_Decoder = Callable[[Mapping[str, Any], Any, list[str | None], list[AddedToken]], Pieces]
DECODERS: dict[str | None, _Decoder] = {
    None: _words,
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
    "Sequence": _sequence,
    "WordPiece": _wordpiece,
}
