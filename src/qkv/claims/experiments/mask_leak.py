"""H16: a language model of characters whose mask shows the future: all of it, or one token (diagonal=1).

Each is trained alike, then asked under the causal mask with the same weights. A sample is written from a
text's beginning, token by token, each model with its own mask; it is garbage to the extent that its words
are in no text. The Jacobian test asks whether an output depends on later inputs. Matrices start at
1 / sqrt(inputs): at GPT-2's 0.02 a model without a mask had not found the next token after 800 steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import Corpus, characters, text
from qkv.claims.judging import below, within
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import held_out, mean_loss, next_token_loss, train, windows
from qkv.nn import Taps, Transformer, tap_names

LENGTH, BATCH = 64, 32
MASKS: dict[str, spec.Mask] = {
    "causal": spec.Causal(),
    "no mask": spec.Everything(),
    "diagonal=1": spec.Window(before=LENGTH, after=1),
}
LEAKS = ("no mask", "diagonal=1")


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    rows = held_out(corpus.tokens, LENGTH, run.of(128, 8))
    known = set(words_of(text(corpus.name)))
    found: Figures = {"corpus": corpus.name}
    for name, mask in MASKS.items():
        network = initialised(described(corpus, mask), run.generator("weights"))
        batches = windows(corpus.tokens[: -rows.numel()], LENGTH, BATCH, run.generator("batches"))
        curve = train(
            network,
            batches,
            next_token_loss(network),
            run.of(800, 4),
            told=run.progress,
            note=name,
            points=40,
        )
        causal = initialised(described(corpus, spec.Causal()), run.generator("weights"))
        causal.load_state_dict(network.state_dict())
        written = corpus.decode(sample(network, rows[0, :16], run.of(400, 20), run.generator("sample")))
        found[name] = {
            "curve": curve.data(),
            "masked": mean_loss(causal, rows),
            "future": future(network, rows[:1, :-1]),
            "words": share_known(written, known),
            "sample": written[:160],
        }
    return found


def described(corpus: Corpus, mask: spec.Mask) -> spec.Model:
    return small_lm(corpus.vocab, position=spec.Learned(LENGTH), mask=mask)


def future(network: Transformer, rows: Tensor) -> float:
    """The greatest derivative of logits in the middle by embeddings after it: 0 for a causal model."""
    taps = Taps("embedding", tap_names(network.spec))
    logits = network(rows, tap=taps)
    middle = rows.shape[1] // 2
    (slope,) = torch.autograd.grad(logits[:, middle].square().sum(), taps["embedding"])
    return float(slope[:, middle + 1 :].abs().max())


@torch.no_grad()
def sample(network: Transformer, start: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` tokens drawn one by one from the model's own distribution, after `start`."""
    tokens = start.tolist()
    for _ in range(count):
        logits = network(torch.tensor([tokens[-LENGTH:]]))[0, -1]
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return tokens[len(start) :]


def words_of(written: str) -> list[str]:
    return re.findall("[a-z]+", written.lower())


def share_known(written: str, known: set[str]) -> float:
    """The share of letters in words that are in the corpus; the first and last word may be cut."""
    words = words_of(written)[1:-1]
    letters = sum(map(len, words))
    return sum(len(word) for word in words if word in known and len(word) > 1) / letters if letters else 0.0


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, what: str) -> list[float | None]:
        return [each[name]["curve"]["last"] if what == "last" else each[name][what] for each in figures]

    checks = [within("the causal model passes the Jacobian test", of("causal", "future"), 0, 0)]
    for name in LEAKS:
        checks += [
            below(
                f"{name}: the training loss ends under a tenth of the causal one",
                of(name, "last"),
                of("causal", "last"),
                ".3f",
                " nats",
                by=10,
            ),
            below(
                f"{name}: under the causal mask its loss is over one and a half times the causal model's",
                of("causal", "masked"),
                of(name, "masked"),
                ".2f",
                " nats",
                by=1.5,
            ),
            below(
                f"{name}: of what it writes, less than half as much is words as of the causal model's",
                of(name, "words"),
                of("causal", "words"),
                ".2f",
                by=2,
            ),
            within(f"{name}: the Jacobian test fails", of(name, "future"), low=1e-6),
        ]
    return tuple(checks)


def draw(figures: Sequence[Figures]) -> Pictures:
    losses = [
        Series(name, figures[0][name]["curve"]["steps"], [each[name]["curve"]["losses"] for each in figures])
        for name in MASKS
    ]
    masked = [Bar(name, [each[name]["masked"] for each in figures]) for name in MASKS]
    words = [Bar(name, [each[name]["words"] for each in figures]) for name in MASKS]
    return {
        "training": picture(
            curves("Loss in training", losses, Axis("step"), Axis("nats a character", low=0))
        ),
        "after": picture(
            bars("Loss under the causal mask", masked, Axis("nats a character")),
            bars("Words among what is written", words, Axis("share of letters", high=1)),
        ),
    }
