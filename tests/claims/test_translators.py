"""The systems: alike where they should be, on equal batches; and what is scored of what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from qkv.claims import translators
from qkv.claims.claim import Figures, Run
from qkv.claims.sentences import Characters, Corpus, Pair
from qkv.claims.translating import END, START, Pairs
from qkv.claims.translators import SPANISH, SYSTEMS, Sides, built, loss, measured, scored, translations
from tests.claims.bibles import write_pair

SIDES = Sides(30, 20, 12, 3)
RUN = Run("made-up", 0, "smoke")


@pytest.fixture(autouse=True)
def _its_own_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def batch(rows: int = 3) -> Pairs:
    source = torch.randint(4, 30, (rows, 9), generator=RUN.generator("source"))
    target = torch.randint(4, 20, (rows, 7), generator=RUN.generator("target"))
    target[:, 0], target[:, -1] = START, END
    return Pairs(source, torch.ones_like(source).bool(), target, torch.ones_like(target).bool())


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_learns_from_all_that_is_there_and_nothing_else(name: str) -> None:
    model, given = built(name, SIDES, RUN).eval(), batch()
    wider = Pairs(*(nn.functional.pad(part, (0, 3)) for part in given))
    assert loss(model)(wider).item() == pytest.approx(loss(model)(given).item(), rel=1e-5)
    model.train()
    loss(model)(given).backward()
    idle = [key for key, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert not idle


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_starts_the_same_from_the_same_seed_and_alone(name: str) -> None:
    first, second = (built(name, SIDES, RUN).state_dict() for _ in range(2))
    other = built(name, SIDES, Run("made-up", 1, "smoke")).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["RNNencdec", "global, general"])
def test_recurrent_models_start_by_their_number_of_inputs_which_is_one_for_a_word(name: str) -> None:
    stds = [
        float(p.detach().std())
        for p in built(name, Sides(2000, 2000, 50, 8), RUN).parameters()
        if p.ndim == 2
    ]
    tables = [std for std in stds if std > 0.5]
    assert tables == pytest.approx([1.0, 1.0], rel=0.02)
    assert all(0.05 < std < 0.1 for std in stds if std not in tables)  # 256 or 128 inputs


def test_sizes_are_within_a_factor_of_two() -> None:
    sides = Sides(2000, 2000, 50, 8)
    sizes = [sum(one.numel() for one in built(name, sides, RUN).parameters()) for name in SYSTEMS]
    assert max(sizes) < 2 * min(sizes)


def test_the_source_and_the_target_of_the_transformer_share_no_table() -> None:
    model = built("Transformer", SIDES, RUN)
    rows = sorted(len(one) for key, one in model.named_parameters() if "embedding" in key)
    assert rows == [20, 30]


def corpus() -> Corpus:
    test = [Pair("a " * n, "x " * (n + 1)) for n in (5, 1, 3)]
    train = [Pair("a a", "x y z")]

    class Letters(Characters):
        vocab = 30

    return Corpus(train, test, Letters(["a a"], 1), Characters(["x y z"], 1))


class Echo(nn.Module):
    """Says x as often as the source has tokens, its end included, whatever the batch."""

    def begin(self, source: torch.Tensor, present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(source), dtype=torch.long), present.sum(1)

    def next(self, state: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor):  # type: ignore[no-untyped-def]
        said, length = state
        logits = nn.functional.one_hot(torch.where(said < length, 4, END), 7).float()
        return logits, (said + 1, length)


def test_translations_stand_where_their_sources_do() -> None:
    assert translations(Echo(), corpus(), batch=2) == ["x x x x x x", "x x", "x x x x"]
    assert translations(Echo(), corpus(), longer=-6, batch=2) == ["x x x x x x", "x x", "x x"]  # 2 * 4 - 6


def test_scores_are_of_the_sentences_of_a_bucket() -> None:
    test = [Pair("a", "one two three four"), Pair("a b c", "five six seven eight"), Pair("a b", "x y z w")]
    said = ["one two three four", "nothing like it at all", "x y z w"]
    found = scored(said, test, (1, 3, 9), 0)
    assert found["bleu"]["buckets"] == [pytest.approx(100), 0] and found["chrf"]["buckets"][0] == 100
    assert 0 < found["bleu"]["all"] < 100 and 0 < found["chrf"]["buckets"][1] < 30
    assert set(found["bleu"]["bucket draws"][0]) == {100.0} and len(set(found["bleu"]["draws"])) > 3
    assert [len(found[name]["draws"]) for name in ("bleu", "chrf")] == [translators.DRAWS] * 2
    assert found["examples"][0] == ["a b c", "five six seven eight", "nothing like it at all"]


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figures:
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    write_pair(tmp_path)
    return measured(RUN, SPANISH, ("RNNencdec", "local-p"))


def test_a_smoke_run_of_bibles(figures: Figures) -> None:
    assert figures["test"] == sum(figures["sentences"]) <= 40 and figures["edges"] == [1, 17, 31]
    assert list(figures["systems"]) == ["RNNencdec", "local-p"]
    for system in figures["systems"].values():
        assert len(system["bleu"]["buckets"]) == len(figures["lengths"]) == 2
        assert system["curve"]["steps"] == [1, 2]


def test_a_system_that_diverges_has_no_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    write_pair(tmp_path)

    def lost(model: nn.Module) -> Callable[[Pairs], torch.Tensor]:
        return lambda batch: next(model.parameters()).sum() * float("nan")

    monkeypatch.setattr(translators, "loss", lost)
    found = measured(RUN, SPANISH, ("RNNencdec",))["systems"]["RNNencdec"]
    assert found["curve"]["diverged"] == 1 and set(found) == {"parameters", "curve"}
