"""What is read: the tokens of a text, or of none; which of the answers tell something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.engine.requests import start_token
from qkv.errors import RequestError
from qkv.loading import Loaded
from qkv.spec import Language, MultiToken, Replace

OWN = Path(__file__).with_name("attention.txt")


@dataclass(frozen=True)
class Text:
    """What everything reads: `source` an encoder, `tokens` the stack that answers.

    `targets` are the tokens that the answers should tell, -1 where there is none; None without a text,
    or a model that tells nothing. `causal` texts can be read in pieces. `probable`: the answers are logits.
    """

    about: str
    tokens: list[int]
    source: list[int] | None
    targets: NDArray[np.int64] | None
    causal: bool
    probable: bool


def text_for(loaded: Loaded, given: str | Path | None, count: int) -> Text:
    """The first `count` tokens of a text for this model, as far as its context allows.

    An encoder-decoder reads them and is asked for the same again. Raises RequestError for fewer than two
    tokens, and for a text where there is no tokenizer.
    """
    spec = loaded.spec
    count = min(count, loaded.context or count)
    ids = random_ids(loaded, count)
    about = f"fixed random ids from {loaded.vocab:,}, as there is no tokenizer"
    if loaded.tokenizer is not None:
        ids = loaded.tokenizer.encode(_read(OWN if given is None else given))[:count]
        about = given.name if isinstance(given, Path) else "the text given"
        about = "a text on attention that comes with qkv" if given is None else about
    elif given is not None:
        raise RequestError(f"{loaded.files.name} has no tokenizer to read a text with: leave the text out.")
    if len(ids) < 2:
        raise RequestError(f"The text makes {len(ids)} tokens; give at least two.")
    head = spec.head
    probable = isinstance(head, Language | MultiToken)
    start = start_token(loaded) if spec.encoder is not None and spec.decoder is not None else None
    targets = np.array(ids if start is not None else [*ids[1:], -1])
    tells = probable and spec.decoder is not None and loaded.tokenizer is not None
    return Text(
        about,
        ids if start is None else [start, *ids[:-1]],
        None if start is None else ids,
        targets if tells else None,
        spec.decoder is not None and (head is None or head.every_token),
        probable,
    )


def _read(text: str | Path) -> str:
    if not isinstance(text, Path):
        return text
    try:
        return text.read_text(encoding="utf-8")
    except OSError as problem:
        raise RequestError(f"{text} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise RequestError(f"{text} is not UTF-8 text.") from None


def random_ids(loaded: Loaded, count: int) -> list[int]:
    """None of those that stand for padding, or for what a tower makes: they would be read otherwise."""
    towers = [tower.join.token for tower in loaded.spec.towers if isinstance(tower.join, Replace)]
    others = np.setdiff1d(np.arange(loaded.vocab), [loaded.config.get("pad_token_id") or 0, *towers])
    found: list[int] = np.random.default_rng(0).choice(others, count).tolist()
    return found
