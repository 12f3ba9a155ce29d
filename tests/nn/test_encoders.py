"""Whole encoders with the heads they are used with, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from qkv.nn import Layout, Transformer
from qkv.spec import Model, PooledEmbedding
from tests.nn.transplant import BERT_INPUT, BERT_LAYER, layers, randomised, transplanted, under
from tests.support import assert_close

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "type_vocab_size": 3,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}
BERT = {
    **under("encoder", "bert.embeddings", BERT_INPUT),
    **layers("encoder", "bert.encoder.layer", BERT_LAYER),
}
ROBERTA = {name: theirs.replace("bert.", "roberta.", 1) for name, theirs in BERT.items()}
MASKED = {
    "head.transform.linear": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
    "head.weight": "cls.predictions.decoder.weight",
}
POOLED = {"head.pool.dense.linear": "bert.pooler.dense", "head.output": "classifier"}
DISTIL = {
    "embedding": "word_embeddings",
    "embedding.position": "position_embeddings",
    "embedding.norm": "LayerNorm",
}
DISTIL_LAYER = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "attention_post": "sa_layer_norm",
    "feed_forward.up": "ffn.lin1",
    "feed_forward.down": "ffn.lin2",
    "feed_forward_post": "output_layer_norm",
}

SIDES = ("none", "left", "right", "both")


def batch(side: str, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and where they are: rows of 11, 7 and 4 tokens among padding."""
    tokens = torch.randint(2, 61, (3, length), generator=torch.Generator().manual_seed(3))
    present = torch.zeros(3, length, dtype=torch.long)
    for row, count in enumerate((length, 7, 4) if side != "none" else (length,) * 3):
        start = {"left": length - count, "both": (length - count) // 2}.get(side, 0)
        present[row, start : start + count] = 1
    return torch.where(present == 1, tokens, 1), present


def places(present: torch.Tensor) -> torch.Tensor:
    return (present.cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Transformer]:
    theirs = randomised(hf.BertForMaskedLM(hf.BertConfig(**SIZES)))
    return theirs, transplanted(theirs, {**BERT, **MASKED})


@pytest.mark.parametrize("side", SIDES)
def test_bert_tells_masked_tokens(bert: tuple[Any, Transformer], side: str) -> None:
    theirs, ours = bert
    tokens, present = batch(side)
    types = torch.randint(0, 3, tokens.shape, generator=torch.Generator().manual_seed(8))
    expected = theirs(
        tokens, attention_mask=present, token_type_ids=types, position_ids=places(present)
    ).logits
    got = ours(tokens, types=types, layout=Layout.padded(present))
    there = present.bool()
    assert_close(got[there], expected[there])


def test_types_are_0_where_not_given(bert: tuple[Any, Transformer]) -> None:
    theirs, ours = bert
    tokens, _ = batch("none")
    assert_close(ours(tokens), theirs(tokens).logits)
    assert torch.equal(ours(tokens), ours(tokens, types=torch.zeros_like(tokens)))


def test_the_head_over_masked_tokens_is_tied(bert: tuple[Any, Transformer]) -> None:
    _, ours = bert
    assert ours.head.weight is ours.encoder.embedding.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("side", SIDES)
def test_bert_classifies_a_pair_of_sentences(side: str) -> None:
    theirs = randomised(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=5)))
    ours = transplanted(theirs, {**BERT, **POOLED})
    tokens, present = batch(side)
    types = torch.arange(11).ge(5).long().expand(3, -1)
    if side in ("left", "both"):  # their first token is the first column, ours the first that is there
        rows = [row[there.bool()] for row, there in zip(tokens, present, strict=True)]
        kinds = [row[there.bool()] for row, there in zip(types, present, strict=True)]
        pairs = zip(rows, kinds, strict=True)
        expected = torch.cat([theirs(row[None], token_type_ids=kind[None]).logits for row, kind in pairs])
    else:
        expected = theirs(tokens, attention_mask=present, token_type_ids=types).logits
    got = ours(tokens, types=types, layout=Layout.padded(present))
    assert got.shape == (3, 5)
    assert_close(got, expected)


@pytest.mark.parametrize("side", SIDES)
def test_roberta_counts_positions_from_behind_the_padding_row(side: str) -> None:
    """Position p reads row p + 2, and padding row 1, on whichever side it stands: case P16's kind."""
    theirs = randomised(hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES)))
    head = {
        "head.transform.linear": "lm_head.dense",
        "head.transform.norm": "lm_head.layer_norm",
        "head.bias": "lm_head.bias",
        "head.weight": "lm_head.decoder.weight",
    }
    ours = transplanted(theirs, {**ROBERTA, **head})
    tokens, present = batch(side)
    there = present.bool()
    expected = theirs(tokens, attention_mask=present).logits  # it works the positions out itself
    assert_close(ours(tokens, layout=Layout.padded(present))[there], expected[there])


def test_roberta_classifies_by_a_layer_of_its_own() -> None:
    theirs = randomised(hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES, num_labels=4)))
    head = {"head.pool.dense.linear": "classifier.dense", "head.output": "classifier.out_proj"}
    ours = transplanted(theirs, {**ROBERTA, **head})
    tokens, present = batch("right")
    assert_close(ours(tokens, layout=Layout.padded(present)), theirs(tokens, attention_mask=present).logits)


def test_distilbert_classifies_a_sequence() -> None:
    config = hf.DistilBertConfig(
        vocab_size=61, dim=24, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=32, num_labels=3
    )
    theirs = randomised(hf.DistilBertForSequenceClassification(config))
    names = {
        **under("encoder", "distilbert.embeddings", DISTIL),
        **layers("encoder", "distilbert.transformer.layer", DISTIL_LAYER),
        **{"head.pool.dense.linear": "pre_classifier", "head.output": "classifier"},
    }
    ours = transplanted(theirs, names)
    tokens, present = batch("right")
    assert_close(ours(tokens, layout=Layout.padded(present)), theirs(tokens, attention_mask=present).logits)


@pytest.mark.parametrize("side", SIDES)
def test_bert_answers_questions_with_a_start_and_an_end(side: str) -> None:
    theirs = randomised(hf.BertForQuestionAnswering(hf.BertConfig(**SIZES)))
    ours = transplanted(theirs, {**BERT, "head.output": "qa_outputs"})
    tokens, present = batch(side)
    expected = theirs(tokens, attention_mask=present, position_ids=places(present))
    got = ours(tokens, layout=Layout.padded(present))
    there = present.bool()
    assert_close(got[..., 0][there], expected.start_logits[there])
    assert_close(got[..., 1][there], expected.end_logits[there])


def test_bert_names_entities_token_by_token() -> None:
    theirs = randomised(hf.BertForTokenClassification(hf.BertConfig(**SIZES, num_labels=9)))
    ours = transplanted(theirs, {**BERT, "head.output": "classifier"})
    tokens, present = batch("right")
    there = present.bool()
    expected = theirs(tokens, attention_mask=present).logits
    assert_close(ours(tokens, layout=Layout.padded(present))[there], expected[there])


@pytest.mark.parametrize("side", SIDES)
def test_sentence_embeddings_are_means_of_unit_length(side: str) -> None:
    """As sentence-transformers pools MiniLM: the mean over tokens that are there, then to length 1."""
    theirs = randomised(hf.BertModel(hf.BertConfig(**SIZES), add_pooling_layer=False))
    bare = transplanted(theirs, {name: path.removeprefix("bert.") for name, path in BERT.items()})
    ours = Transformer(Model(encoder=bare.spec.encoder, head=PooledEmbedding()))
    ours.load_state_dict(bare.state_dict())
    tokens, present = batch(side)
    states = theirs(tokens, attention_mask=present, position_ids=places(present)).last_hidden_state
    mean = (states * present[..., None]).sum(1) / present.sum(1, keepdim=True)
    got = ours(tokens, layout=Layout.padded(present))
    assert_close(got, mean / mean.norm(dim=-1, keepdim=True))
    assert got.norm(dim=-1).tolist() == pytest.approx([1, 1, 1])


def test_electra_widens_its_narrow_table() -> None:
    theirs = randomised(hf.ElectraForMaskedLM(hf.ElectraConfig(**SIZES, embedding_size=10)))
    electra = {name: path.replace("bert.", "electra.", 1) for name, path in BERT.items()}
    head = {
        "encoder.embedding.projection.linear": "electra.embeddings_project",
        "head.transform.linear": "generator_predictions.dense",
        "head.transform.norm": "generator_predictions.LayerNorm",
        "head.bias": "generator_lm_head.bias",
        "head.weight": "generator_lm_head.weight",
    }
    ours = transplanted(theirs, {**electra, **head})
    tokens, present = batch("right")
    there = present.bool()
    expected = theirs(tokens, attention_mask=present).logits
    assert_close(ours(tokens, layout=Layout.padded(present))[there], expected[there])
