"""Everything there is to say of one answer: what each part of the prompt and of the model does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qkv.engine.requests import start_token
from qkv.errors import RequestError
from qkv.explanation import roles
from qkv.explanation.ablation import ablate, occlusion
from qkv.explanation.attention import attention_maps, rollout
from qkv.explanation.explained import Explained, Head, Said
from qkv.explanation.faithfulness import agreement, comprehensiveness, spearman
from qkv.explanation.gradients import integrated_gradients
from qkv.explanation.intervention import Blank
from qkv.explanation.lens import logit_lens, logit_lens_answers
from qkv.explanation.metric import Difference, LogProbability, Metric
from qkv.explanation.parts import feed_forwards, heads as all_heads
from qkv.explanation.reading import Reading
from qkv.explanation.result import Evidence, Ranked
from qkv.model import Model
from qkv.spec import MaskedLanguage, SequenceClass

MASKS = ("[MASK]", "<mask>")
ROLES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "looks at the token before": lambda weights, tokens: roles.previous_token(weights),
    "rests on the first token": lambda weights, tokens: roles.first_token(weights),
    "looks at the same token earlier": roles.duplicate,
    "looks at what followed the same token": roles.prefix_matching,
}


def explain(
    model: Model,
    prompt: str,
    *,
    target: str | int | None = None,
    against: str | int | None = None,
    blank: str | int | None = None,
    most: int = 6,
    told: Callable[[str], None] = lambda what: None,
) -> Explained:
    """Why a model answers a prompt as it does.

    A decoder is asked for the next token, a masked language model for its mask ("[MASK]" in the prompt),
    a classifier for the class, an encoder-decoder for the first token of its answer. `target` is the
    answer to explain (a text that begins with the token, a token id, or the number of a class; None: the
    likeliest); `against` another one: why this rather than that. Tokens are taken out by putting `blank`
    in their place (None: a full stop). `most` heads are told of. `told` hears what is measured next.

    Raises RequestError for answers that there are not, UnsupportedError for what the methods cannot do.
    """
    asked = _Asked(model, prompt, target, against, blank)
    reading, metric, by = asked.reading, asked.metric, Blank(asked.blank)
    told("what each token does")
    effects = occlusion(reading, metric, by)
    told("gradients")
    gradient = integrated_gradients(reading, metric, by, tolerance=1e-2, most=128)
    told("attention")
    query = len(asked.tokens) - 1 if asked.place is None else asked.place
    maps = attention_maps(reading)
    seen = maps.at(query=query)
    rolled = rollout(reading).at(query=query)
    told("what each head does")
    heads = ablate(reading, metric, all_heads(reading))
    told("what each feed-forward does")
    forwards = ablate(reading, metric, feed_forwards(reading))
    mean = np.nanmean(seen.values, axis=(0, 1))
    length = len(effects.values)
    agrees = {
        "attention": spearman(mean, effects.values[-len(mean) :]),
        "rollout": spearman(rolled.values[-1], effects.values[-len(mean) :]),
        "gradient": spearman(gradient.values, effects.values),
    }
    told("whether rankings are faithful")
    removed = {}
    for name, scores in (("attention", mean), ("gradient", gradient.values), ("effects", effects.values)):
        if len(scores) == length:
            curve = comprehensiveness(reading, metric, scores, by, (0.2,)).values[:, 0]
            removed[name] = (float(curve[0]), float(curve[1]))
    side = Evidence(
        effects.method, effects.values[-len(mean) :], (seen.axes[-1],), effects.score, effects.baseline
    )
    return Explained(
        model.loaded.files.name,
        tuple(str(label) for label in effects.axes[0].labels),
        asked.place,
        asked.named(asked.target),
        None if asked.against is None else asked.named(asked.against),
        float(asked.shares[asked.target]),
        asked.likeliest(5),
        metric.name,
        float(reading.value(metric)[0]),
        asked.named_token(asked.blank),
        effects,
        gradient,
        seen,
        agreement(seen, side),
        heads,
        forwards,
        tuple(_head(reading, maps, ranked) for ranked in heads.top(most)),
        asked.lens(),
        agrees,
        removed,
    )


class _Asked:
    """The reading, the answers it has, and the metric over them."""

    def __init__(self, model: Model, prompt: str, target: Any, against: Any, blank: Any):
        if model.tokenizer is None:
            raise RequestError("A text is explained by its tokens, and this model has no tokenizer.")
        self.model, self.tokenizer = model, model.tokenizer
        self.tokens = model.encode(prompt)
        spec = model.spec
        if spec.encoder is not None and spec.decoder is not None:
            self.reading = Reading(model, [start_token(model.loaded)], source=self.tokens)
        else:
            self.reading = Reading(model, self.tokens)
        self.classes = isinstance(spec.head, SequenceClass)
        self.place = None if self.classes else self._mask() if isinstance(spec.head, MaskedLanguage) else -1
        if self.place == -1:
            self.place = self.reading.length() - 1
        places = () if self.place is None else (self.place,)
        self.layers = logit_lens_answers(self.reading, places or (-1,))
        logits = torch.from_numpy(np.array(self.layers.values[-1, 0])).double()
        self.shares = logits.softmax(-1).numpy()
        self.target = int(self.shares.argmax()) if target is None else self._answer(target)
        self.against = None if against is None else self._answer(against)
        self.metric: Metric = (
            LogProbability(self.target, self.place)
            if self.against is None
            else Difference(self.target, self.against, self.place)
        )
        self.blank = self.tokenizer.encode(".")[-1] if blank is None else self._token(blank)

    def _mask(self) -> int:
        labels = [self.reading.label(token) for token in self.tokens]
        found = [place for place, label in enumerate(labels) if label.strip() in MASKS]
        if len(found) != 1:
            raise RequestError(f"The prompt must have one mask ({' or '.join(MASKS)}) and has {len(found)}.")
        return found[0]

    def _answer(self, given: str | int) -> int:
        count = len(self.shares)
        if isinstance(given, str) and not self.classes:
            return self._token(given)
        try:
            number = int(given)
        except ValueError:
            raise RequestError(f"{given!r} is no class: give its number, 0 to {count - 1}.") from None
        if not 0 <= number < count:
            raise RequestError(f"{number} is not one of this model's {count:,} answers.")
        return number

    def _token(self, given: str | int) -> int:
        if isinstance(given, int):
            return given
        ids = [token for token in self.tokenizer.encode(given) if token not in self.tokenizer.eos_ids]
        bare = self.model.encode("")
        ids = [token for token in ids if token not in bare] or ids
        if not ids:
            raise RequestError(f"{given!r} makes no token.")
        return ids[0]

    def named(self, answer: int) -> str:
        return f"class {answer}" if self.classes else self.named_token(answer)

    def named_token(self, token: int) -> str:
        return self.reading.label(token)

    def likeliest(self, count: int) -> tuple[tuple[str, float], ...]:
        order = np.argsort(-self.shares, kind="stable")[:count]
        return tuple((self.named(int(answer)), float(self.shares[answer])) for answer in order)

    def lens(self) -> tuple[Said, ...]:
        metrics = logit_lens(self.reading, self.metric)
        found = []
        for label, logits, value in zip(
            metrics.axes[0].labels, self.layers.values[:, 0], metrics.values, strict=True
        ):
            shares = torch.from_numpy(np.array(logits)).double().softmax(-1).numpy()
            best = int(shares.argmax())
            found.append(Said(str(label), self.named(best), float(shares[best]), float(value)))
        return tuple(found)


def _head(reading: Reading, maps: Evidence, ranked: Ranked) -> Head:
    """What a head does most, of what heads are known to do; how sure that is stands beside it."""
    layer, head = int(ranked.labels["layer"]), int(ranked.labels["head"])
    weights = torch.from_numpy(np.array(maps.at(layer=layer, head=head).values))[None, None]
    tokens = reading.sides[-1].given[:1]
    best, share = "no role that is looked for", 0.0
    for name, score in ROLES.items():
        try:
            found = float(score(weights, tokens.cpu())[0])
        except RequestError:  # nothing comes twice, or there is one token alone
            continue
        if found > max(share, 0.4):
            best, share = name, found
    return Head(layer, head, ranked.value, best, share)
