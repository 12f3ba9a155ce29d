"""Everything there is to say of one answer: what each part of the prompt and of the model does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import roles
from qkv.explanation.ablation import ablate, occlusion
from qkv.explanation.asking import Answer, Asked, asked, token
from qkv.explanation.attention import attention_maps, rollout
from qkv.explanation.explained import Explained, Head, Pairs
from qkv.explanation.faithfulness import agreement, comprehensiveness, spearman
from qkv.explanation.gradients import integrated_gradients
from qkv.explanation.intervention import Blank
from qkv.explanation.metric import Similarity
from qkv.explanation.pairs import (
    agreement_by_head,
    aligned_attention,
    alignment,
    interactions,
    text_vector,
)
from qkv.explanation.parts import Parts, every_head, feed_forwards, tokens as every_token
from qkv.explanation.reading import Reading
from qkv.explanation.repair import direct_effects
from qkv.explanation.result import Evidence, Ranked
from qkv.explanation.words import word_effects
from qkv.model import Model
from qkv.text import Tokenizer

STOPS = (".", ",", ";", ":", "!", "?")
Told = Callable[[str], None]
Role = Callable[[Tensor, Tensor, Tensor], Tensor]  # of weights, tokens, and those that separate
ROLES: dict[str, Role] = {
    "looks at the token before": lambda weights, tokens, stops: roles.previous_token(weights),
    "looks at the token after": lambda weights, tokens, stops: roles.next_token(weights),
    "rests on the first token": lambda weights, tokens, stops: roles.first_token(weights),
    "rests on separators": roles.on_tokens,
    "looks at the same token earlier": lambda weights, tokens, stops: roles.duplicate(weights, tokens),
    "looks at what followed the same token": lambda weights, tokens, stops: roles.prefix_matching(
        weights, tokens
    ),
}


def explain(
    model: Model,
    prompt: str,
    *,
    target: Answer | None = None,
    against: Answer | None = None,
    blank: Answer | None = None,
    words: Sequence[str] = (),
    most: int = 6,
    told: Told = lambda what: None,
) -> Explained:
    """Why a model answers a prompt as it does.

    A decoder is asked for the next token, a masked language model for its mask ("[MASK]" in the prompt),
    a classifier for the class, an encoder-decoder for the first token of its answer, a model that embeds
    texts for how like the text `target` the prompt is. `target` is the answer to explain (a text that
    begins with the token, a token id, or the number of a class; None: the likeliest); `against` another
    one: why this rather than that. Of an encoder-decoder all of `target`, or of what it answers, is also
    held against the prompt, token by token. Tokens are taken out by putting `blank` in their place (None:
    a full stop). `words` of the prompt are also taken out whole. `most` heads are told of. `told` hears
    what is measured next.

    Raises RequestError for answers that there are not, UnsupportedError for what the methods cannot do.
    """
    question = asked(model, prompt, target, against)
    reading, metric = question.reading, question.metric
    by = Blank(token(model, "." if blank is None else blank))
    told("what each token does")
    effects = occlusion(reading, metric, by)
    told("attention")
    seen = _seen(question)
    side = 0 if question.role == "cross" else -1
    tokenizer = cast(Tokenizer, model.tokenizer)
    whole = word_effects(reading, metric, words, tokenizer, seen, by, side) if words else ()
    told("gradients")
    gradient = integrated_gradients(reading, metric, by, tolerance=1e-2, most=128)
    told("what each head does")
    parts = every_head(reading)
    heads = ablate(reading, metric, parts)
    told("what each feed-forward does")
    forwards = ablate(reading, metric, feed_forwards(reading))
    told("what later layers make up for")
    best = _heads(model, question, parts, heads, most)
    told("whether rankings are faithful")
    return Explained(
        **_answer(model, question),
        blank=reading.label(by.token),
        effects=effects,
        gradient=gradient,
        attention=seen,
        heads=heads,
        forwards=forwards,
        best=best,
        lens=question.lens(),
        **_faithful(question, effects, gradient, seen, by),
        words=whole,
        pairs=_pairs(question, by, told),
    )


def _answer(model: Model, question: Asked) -> dict[str, Any]:
    """What is explained, in words and numbers."""
    choices = question.choices
    return {
        "model": model.loaded.files.name,
        "tokens": tuple(str(label) for label in every_token(question.reading).axes[0].labels),
        "place": question.place,
        "target": question.target,
        "against": question.against,
        "probability": None if choices is None else choices.probability,
        "answers": () if choices is None else choices.likeliest(5),
        "metric": question.metric.name,
        "value": float(question.reading.value(question.metric)[0]),
    }


def _faithful(
    question: Asked, effects: Evidence, gradient: Evidence, seen: Evidence, by: Blank
) -> dict[str, Any]:
    """How far attention, rollout and gradients agree with the effects, and what goes with their best tokens.

    Of the tokens that attention is over: of an encoder-decoder those of the source.
    """
    reading, side = question.reading, 0 if question.role == "cross" else -1
    beside, slopes = (_part(evidence, side, reading) for evidence in (effects, gradient))
    mean = np.asarray(np.nanmean(seen.values, axis=(0, 1)))
    rankings = {"attention": mean, "rollout": _rolled(question), "gradient": slopes.values}
    removed = {}
    for name, scores in (("attention", mean), ("gradient", slopes.values), ("effects", beside.values)):
        curve = comprehensiveness(reading, question.metric, scores, by, (0.2,), side=side).values[:, 0]
        removed[name] = (float(curve[0]), float(curve[1]))
    return {
        "agreement": agreement(seen, beside),
        "agrees": {name: spearman(one, beside.values) for name, one in rankings.items() if one is not None},
        "removed": removed,
    }


def _seen(question: Asked) -> Evidence:
    """Attention of the tokens that answer, in the mean over these: (layer, head, token)."""
    maps = attention_maps(question.reading, question.role)
    values = maps.values[:, :, list(question.queries)].mean(2)
    axes = (*maps.axes[:2], replace(maps.axes[3], name="token"))
    many = f", mean over {len(question.queries):,} tokens" if len(question.queries) > 1 else ""
    return Evidence(maps.method, values, axes, maps.score + many)


def _rolled(question: Asked) -> np.ndarray | None:
    """Rollout's shares of the tokens that answer; None where more than self-attention mixes tokens."""
    try:
        rolled = rollout(question.reading)
    except UnsupportedError:
        return None
    return np.asarray(rolled.values[-1][list(question.queries)].mean(0))


def _part(evidence: Evidence, side: int, reading: Reading) -> Evidence:
    """Of scores of the tokens of all sides, those of one."""
    length, before = reading.length(side), 0 if side == 0 else len(evidence.values) - reading.length(side)
    axis = evidence.axes[0]
    kept = replace(axis, labels=axis.labels[before : before + length])
    return replace(evidence, values=evidence.values[before : before + length], axes=(kept,))


def _heads(model: Model, question: Asked, parts: Parts, heads: Evidence, most: int) -> tuple[Head, ...]:
    """Those that matter most: what goes with each, what of that directly, and what it looks at."""
    reading = question.reading
    best = heads.top(most)
    trunk = set(every_head(reading, -1).axes[0].labels)
    chosen = {ranked.index: parts.parts[ranked.index] for ranked in best if ranked.labels["layer"] in trunk}
    direct = direct_effects(reading, question.metric, replace(parts, parts=chosen)) if chosen else None
    found = []
    for ranked in best:
        role, share = _role(model, question, parts, ranked)
        one = None if direct is None else float(direct.values[ranked.index])
        one = one if ranked.index in chosen else None
        repair = None if one is None else one - ranked.value
        labels = ranked.labels
        found.append(Head(labels["layer"], int(labels["head"]), ranked.value, one, repair, role, share))
    return tuple(found)


def _role(model: Model, question: Asked, parts: Parts, ranked: Ranked) -> tuple[str, float]:
    """What a head does most, of what heads are known to do; how sure that is stands beside it."""
    reading = question.reading
    (part,) = parts.parts[ranked.index]
    point, head = part.point.removesuffix("heads") + "weights", ranked.index[-1]
    weights = reading.read([point])[point][:, head : head + 1]
    if ".cross." in point:
        shares = weights[0, 0, list(question.queries)].mean(0)
        place = int(shares.argmax())
        return f"looks at {reading.tokens_axis(0).labels[place]!r} in the source", float(shares[place])
    tokens = reading.sides[reading.place(part.point).side].given[:1]
    stops = _separators(model).to(tokens.device)
    best, share = "no role that is looked for", 0.0
    for name, score in ROLES.items():
        try:
            found = float(score(weights, tokens, stops)[0])
        except RequestError:  # nothing comes twice, nothing separates, or there is one token alone
            continue
        if found > max(share, 0.4):
            best, share = name, found
    return best, share


def _separators(model: Model) -> Tensor:
    """Control tokens, and what ends a sentence or a part of one."""
    tokenizer = cast(Tokenizer, model.tokenizer)
    stops = [tokenizer.encode(stop, bos=False, eos=False) for stop in STOPS]
    return torch.tensor(sorted(tokenizer.special_ids | {ids[0] for ids in stops if len(ids) == 1}))


def _pairs(question: Asked, by: Blank, told: Told) -> Pairs | None:
    """An answer against its source, or a text against the one it is like; None where there is no second."""
    reading = question.reading
    if question.answer:
        told("what each token of the source does to the answer")
        return _aligned(reading, question.answer, by)
    if question.other is not None:
        told("what two tokens do together")
        back = occlusion(question.other, Similarity(text_vector(reading), "the prompt"), by)
        both = interactions(reading, question.other, by)
        return Pairs("the prompt's tokens and the other text's", both, others=back)
    return None


def _aligned(reading: Reading, answer: Sequence[int], by: Blank) -> Pairs:
    source, start = reading.sides[0].given, reading.sides[-1].given[0].tolist()
    told = Reading(reading.model, [*start, *answer[:-1]], source=source)
    effects, weights = alignment(told, answer, by), aligned_attention(told, answer)
    mean = np.asarray(np.nanmean(weights.values, axis=(0, 1)))
    seen = Evidence(weights.method, mean, effects.axes, f"{weights.score}, mean over all heads")
    return Pairs("the answer's tokens and the source's", effects, seen, agreement_by_head(weights, effects))
