"""qkv: the methods of `qkv.explanation`, as they are called by anyone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from protocol import Question, Swept, serve

import qkv
from qkv import explanation as explain


class Qkv:
    name = f"qkv {qkv.__version__}, torch {torch.__version__}"

    def load(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = qkv.load(folder, dtype="float32", runtime="torch").network

    def answers(self, question: Question) -> dict[str, np.ndarray]:
        reading = explain.Reading(self.model, question.tokens)
        other = explain.Reading(self.model, question.other)
        reference = explain.Reading(self.model, question.reference)
        metric = explain.Difference(question.token, question.against)
        heads, stream = explain.parts.heads(reading), explain.parts.stream(reading)
        places = range(len(question.tokens))
        return {
            "lens": explain.logit_lens_answers(reading, places).values,
            **_shares(explain.direct_attribution(reading, metric), heads),
            "ablation_zero": explain.ablate(reading, metric, heads).values,
            "ablation_mean": explain.ablate(reading, metric, heads, explain.Mean(reference)).values,
            "patching_stream": explain.patch(reading, other, metric, stream).values,
            "patching_heads": explain.patch(reading, other, metric, heads).values,
        }

    def sweep(self, question: Question) -> Swept:
        reading = explain.Reading(self.model, question.tokens)
        metric = explain.Difference(question.token, question.against)
        found = explain.ablate(reading, metric, explain.parts.heads(reading))
        return Swept(found.values, int(found.facts["bytes"]))


def _shares(found: explain.Evidence, heads: explain.Parts) -> dict[str, np.ndarray]:
    layers, width = (len(axis.labels) for axis in heads.axes)
    by_head = [
        [float(found.at(component=f"{layer}.attention.{head}")) for head in range(width)]
        for layer in range(layers)
    ]
    forwards = [float(found.at(component=f"{layer}.feed_forward")) for layer in range(layers)]
    return {
        "attribution_embedding": found.at(component="embedding").values,
        "attribution_heads": np.array(by_head),
        "attribution_feed_forwards": np.array(forwards),
        "attribution_bias": found.at(component="bias").values,
    }


if __name__ == "__main__":
    serve(Qkv())
