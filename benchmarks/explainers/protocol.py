"""What a worker that explains and the harness say to each other: a line of JSON in, a line of JSON out.

Each library runs in a process of its own, in its own environment. This file needs Python and numpy alone,
so that every environment can import it.

    {"do": "load", "folder": ..., "threads": 1}                -> {"explainer": "qkv 0.1.0, torch 2.13.0"}
    {"do": "answers", "question": {...}, "out": "a.npz"}       -> {}, and arrays by method in the file
    {"do": "sweep", "question": {...}}
        -> {"seconds": 1.2, "processor_seconds": 1.2, "values": [[...], ...], "bound": 50000000}
    {"do": "memory", "question": {...}}
        -> {"growth": 30000000, "bound": 40000000}
    {"do": "quit"}                                             -> the process ends

`growth` is how many bytes more are resident at most during a sweep than just before it, in a process that
has done one on two tokens. `bound` is what the library said beforehand that a sweep takes, None for one
that says nothing. Any answer may be {"error": sentence} instead.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class Question:
    """Why `token` rather than `against` comes next after a prompt.

    `other` is a prompt of the same length to patch from, `reference` rows of the same length whose mean
    stands in for a head. All are token ids.
    """

    tokens: Sequence[int]
    other: Sequence[int]
    reference: Sequence[Sequence[int]]
    token: int
    against: int


class Swept(NamedTuple):
    """The effect of taking out each head, (layers, heads), and the bytes that were stated for it."""

    values: np.ndarray
    bound: int | None = None


class Explainer(Protocol):
    name: str

    def load(self, folder: Path, threads: int) -> None:
        """A folder in Hugging Face layout of model type gpt2, in float32."""

    def answers(self, question: Question) -> dict[str, np.ndarray]:
        """The arrays that METHODS names."""

    def sweep(self, question: Question) -> Swept:
        """The difference of the two logits as it is, less with each head zeroed. Nothing is kept between."""


# the name of each array, its axes, and what it holds
METHODS = {
    "lens": "logits at every place behind the embedding and each layer (layer + 1, place, answer)",
    "attribution_embedding": "what the embedding adds to the difference",
    "attribution_heads": "what each head adds (layer, head)",
    "attribution_feed_forwards": "what each feed-forward adds (layer)",
    "attribution_bias": "what all other biases add",
    "ablation_zero": "the difference as it is, less with a head zeroed (layer, head)",
    "ablation_mean": "the same with a head's mean over the reference in its place (layer, head)",
    "patching_stream": "the difference with the other prompt's stream, less without (layer, place)",
    "patching_heads": "the difference with the other prompt's head, less without (layer, head)",
}


def timed(explainer: Explainer, question: Question) -> dict[str, Any]:
    """A sweep, with the seconds it took by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    found = explainer.sweep(question)
    seconds, used = time.perf_counter() - clock, time.process_time() - processor
    values = np.asarray(found.values, np.float64).tolist()
    return {"seconds": seconds, "processor_seconds": used, "values": values, "bound": found.bound}


def weighed(explainer: Explainer, question: Question) -> dict[str, Any]:
    """By how much a sweep raises what is resident, once one on two tokens has loaded all there is to load."""
    explainer.sweep(replace(question, tokens=question.tokens[:2]))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was given back before would hide what the sweep takes
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    found = explainer.sweep(question)
    return {"growth": max(_resident("VmHWM") - before, 0), "bound": found.bound}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def answer(explainer: Explainer, message: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker says to one message. One that fails says so."""
    question = Question(**message["question"]) if "question" in message else None
    try:
        match message["do"]:
            case "load":
                explainer.load(Path(message["folder"]), message["threads"])
                return {"explainer": explainer.name}
            case "answers" if question:
                np.savez(message["out"], **explainer.answers(question))
                return {}
            case "sweep" if question:
                return timed(explainer, question)
            case "memory" if question:
                return weighed(explainer, question)
            case other:
                return {"error": f"{other!r} is not known, or lacks its question."}
    except Exception as problem:  # the harness says it and ends
        traceback.print_exc()
        return {"error": f"{type(problem).__name__}: {problem}".splitlines()[0]}


def serve(explainer: Explainer) -> None:
    """Answers lines on stdin until they end. What libraries print on stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "quit":
            break
        answers.write(json.dumps(answer(explainer, message)) + "\n")
        answers.flush()
