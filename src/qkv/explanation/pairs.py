"""Two texts against each other, token by token: an answer with its source, a text with one like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.attention import attention_maps
from qkv.explanation.faithfulness import spearman
from qkv.explanation.intervention import Blank, Change, Replacement, replacements, substituted
from qkv.explanation.parts import tokens
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Evidence
from qkv.spec import PooledEmbedding

Read = Callable[[Tensor], Tensor]
ANSWERS = 512  # over so many places, at most, are answers held at once


def alignment(reading: Reading, answer: Sequence[int], by: Replacement) -> Evidence:
    """What each token of an answer loses with each token of its source replaced. Axes (target, source).

    The log-probability of `answer[i]` at place i of the decoder, so of tokens that the decoder reads up
    to the one before: `reading` has a source, and `answer` one token for each it reads. Occlusion (Zeiler
    and Fergus 2014), measured for every token of the answer at once.

    Raises UnsupportedError for a model without an encoder beside its decoder.
    """
    if len(reading.one().sides) < 2:
        raise UnsupportedError("Only an encoder-decoder has a source that its answer is aligned with.")
    if len(answer) != reading.length():
        raise RequestError(f"The decoder reads {reading.length():,} tokens and {len(answer):,} are answered.")
    wanted = torch.as_tensor(list(answer), device=reading.device)[:, None]

    def told(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, wanted.expand(len(logits), -1, -1))[..., 0]

    own, changed = _replaced(reading, by, 0, range(len(answer)), told)
    targets = tuple(map(reading.label, answer))
    axes = (Axis("target", targets), reading.tokens_axis(0, "source"))
    score = "log-probability of the target as it is, less with the source's token replaced"
    return Evidence("alignment", (own - changed).T, axes, score, by.name, "log-probability")


def aligned_attention(reading: Reading, answer: Sequence[int]) -> Evidence:
    """Where the decoder looks in the source as it answers each token. Axes (layer, head, target, source).

    Weights of cross-attention: a picture to set beside `alignment`, which is measured. Bahdanau et al.
    2015, figure 3.
    """
    maps = attention_maps(reading, "cross")
    targets = tuple(map(reading.label, answer))
    axes = (*maps.axes[:2], Axis("target", targets), Axis("source", maps.axes[3].labels))
    return Evidence("cross-attention", maps.values, axes, maps.score)


def agreement_by_head(attention: Evidence, effects: Evidence) -> Evidence:
    """How far each head looks where the effects are: Spearman, mean over the targets. Axes (layer, head)."""
    layers, heads, targets, _ = attention.values.shape
    found = np.full((layers, heads), np.nan)
    for layer in range(layers):
        for head in range(heads):
            rows = [spearman(attention.values[layer, head, i], effects.values[i]) for i in range(targets)]
            there = [row for row in rows if not np.isnan(row)]
            found[layer, head] = np.mean(there) if there else np.nan
    score = f"Spearman correlation with {effects.method}, mean over the targets, -1 to 1"
    return Evidence("agreement of cross-attention", found, attention.axes[:2], score, effects.baseline)


def interactions(left: Reading, right: Reading, by: Blank) -> Evidence:
    """Which tokens make two texts alike together: of cosines, by pairs. Axes (token, other).

    cos(a, b) - cos(a without i, b) - cos(a, b without j) + cos(a without i, b without j): above 0 where
    the two tokens count for more together than each for itself, as words of one meaning do. The
    interaction of two players (Grabisch and Roubens 1999), with all others there.
    """
    a, b = _vectors(left, by), _vectors(right, by)
    cosines = a @ b.T
    values = cosines[0, 0] - cosines[1:, :1] - cosines[:1, 1:] + cosines[1:, 1:]
    axes = (left.tokens_axis(name="token"), right.tokens_axis(name="other"))
    score = "cosine that two tokens bring together, beyond what each brings"
    return Evidence("interactions", values, axes, score, by.name, "cosine")


def text_vector(reading: Reading) -> Float[Tensor, " width"]:
    """What a model that embeds texts makes of this one. Raises UnsupportedError for other models."""
    if not isinstance(reading.one().spec.head, PooledEmbedding):
        raise UnsupportedError("Only a model that answers a text with a vector says how alike two are.")
    with torch.no_grad():
        return reading.run()[0, 0]


def _vectors(reading: Reading, by: Blank) -> np.ndarray:
    """Of unit length: of the text, and of the text without each token, (1 + tokens, width)."""
    own = text_vector(reading).double().cpu().numpy()
    _, changed = _replaced(reading, by, -1, None, lambda logits: logits[:, 0])
    both = np.concatenate([own[None], changed])
    return both / np.linalg.norm(both, axis=-1, keepdims=True)


def _replaced(
    reading: Reading, by: Replacement, side: int, places: Sequence[int] | None, read: Read
) -> tuple[np.ndarray, np.ndarray]:
    """What `read` makes of the answer, and of each answer with a token of a side replaced."""
    parts = [part for group in tokens(reading, side).parts.values() for part in group]
    own = next(_passes(reading, [[]], places, read))[0]
    each = []
    alternatives = substituted(reading, parts, by)
    for changes in alternatives:
        rows = [[change] for change in changes]
        each.append(np.concatenate(list(_passes(reading, rows, places, read))))
    return own, np.mean(each, 0)


def _passes(
    reading: Reading, rows: Sequence[Sequence[Change]], places: Sequence[int] | None, read: Read
) -> Iterator[np.ndarray]:
    size = min(reading.most_rows, max(1, ANSWERS // len(places or (0,))))
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        with torch.no_grad():
            answer = reading.run(reading.taps(replacements(some)), rows=len(some), places=places)
            yield read(answer).double().cpu().numpy()
