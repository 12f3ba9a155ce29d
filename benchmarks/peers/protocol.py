"""What a worker and the harness say to each other: a line of JSON in, a line of JSON out.

Each engine runs in a process of its own, in its own environment, loaded once and asked in turn with the
others. This file needs nothing but Python, so that every environment can import it.

    {"do": "prepare", "gguf": ..., "folder": ..., "type": "Q8_0", "threads": 2}      -> {}
    {"do": "load", the same}                       -> {"engine": "llama.cpp 0.3.36", "format": "Q8_0"}
    {"do": "prefill_decode", "prompts": [[ids], ...], "new": 128}
        -> {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 92.0, "tokens": [[ids], ...]}
    {"do": "quit"}                                                    -> the process ends

Any answer may be {"error": sentence} instead.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Refused(Exception):
    """What an engine has no way to do; the sentence goes into the report."""


@dataclass(frozen=True)
class Request:
    """A model to load, in the two forms there are: a .gguf of this type, and a bf16 folder.

    `type` is the GGUF type that the bits of the weights shall be like. An engine that reads neither
    form converts the folder, in `prepare`, to a folder beside it. Some models are a .gguf alone.
    """

    gguf: Path
    folder: Path | None
    type: str
    threads: int

    @staticmethod
    def read(message: Mapping[str, Any]) -> Request:
        given = {each.name: message[each.name] for each in fields(Request)}
        folder = Path(given["folder"]) if given["folder"] else None
        return Request(**{**given, "gguf": Path(given["gguf"]), "folder": folder})

    def needed_folder(self) -> Path:
        """The folder; Refused where there is none."""
        if self.folder is None:
            raise Refused("this model is a .gguf alone, which it does not read")
        return self.folder


class Timing(NamedTuple):
    """Seconds from the prompts to every stream's first token, then to its last; the tokens of each.

    `early` are tokens after a stream's first that did not come within `decode`: while other prompts were
    still being read, or when other streams had ended.
    """

    prefill: float
    decode: float
    tokens: Sequence[Sequence[int]]
    early: int = 0


class Engine(Protocol):
    name: str

    def prepare(self, request: Request) -> None:
        """Makes the files that `load` needs, where they are not there yet."""

    def load(self, request: Request) -> str:
        """Loads the model, and says which format the weights are in."""

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        """Reads prompts of one length together, and continues each greedily by `new` tokens.

        No stream stops early. What one run has read must not help the next.
        """


def rates(prompts: Sequence[Sequence[int]], timing: Timing) -> dict[str, Any]:
    """Tokens a second of all streams together. The first new token of each is prefill's work."""
    given = sum(map(len, prompts))
    made = sum(len(tokens) - 1 for tokens in timing.tokens) - timing.early
    return {
        "prefill_tokens_per_s": given / timing.prefill,
        "decode_tokens_per_s": made / timing.decode if made else None,
        "tokens": [list(map(int, tokens)) for tokens in timing.tokens],
    }


def answer(engine: Engine, message: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker says to one message. An engine that fails says so, and goes on."""
    try:
        match message["do"]:
            case "prepare":
                engine.prepare(Request.read(message))
                return {}
            case "load":
                return {"format": engine.load(Request.read(message)), "engine": engine.name}
            case "prefill_decode":
                return rates(message["prompts"], engine.run(message["prompts"], message["new"]))
            case other:
                return {"error": f"{other!r} is not known (prepare, load, prefill_decode, quit)."}
    except Refused as refusal:
        return {"error": str(refusal)}
    except Exception as problem:  # whatever a peer raises is one figure missing, not the end of the run
        traceback.print_exc()
        return {"error": f"{type(problem).__name__}: {problem}".splitlines()[0]}


def serve(engine: Engine) -> None:
    """Answers lines on stdin until they end. What libraries print on stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "quit":
            break
        answers.write(json.dumps(answer(engine, message)) + "\n")
        answers.flush()
