"""Programs give what the reference gives, over every variant they express; the rest is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qkv.errors import UnsupportedError
from qkv.nn import Transformer
from qkv.runtime import Interpreter, Kept, Lowered, Rows
from qkv.runtime.lower import lower
from qkv.runtime.program import Attend, Pick, Store
from qkv.spec import Attention, Gated, Language, Model, Projections, pre_norm
from tests.matrix.variants import BIDIRECTIONAL, ENCODER_DECODERS, VARIANTS, VOCAB
from tests.support import assert_close, random_model

ALL = VARIANTS | ENCODER_DECODERS | BIDIRECTIONAL
LENGTH, SOURCE = 13, 9
# Parts the operations do not have, by words that stand in the refusal
REFUSED = (
    *("Dilated", "Strided", "Global", "Shaw", "RelativeSinusoidal", "Disentangled", "LatentAttention"),
    *("GatedDelta", "StateSpace", "depends on the length", "Score.query_scale", "Sublayer.gate"),
    *("ScaleNorm", "DyT", "Router.", "Experts.", "MultiToken", "TokenClass", "Span", "Gate", "Pool"),
    *("Projections.value", "Branch.after", "BatchNorm"),
)


def programs(model: Model) -> Lowered | None:
    """The programs; None where they are refused for a reason that is known."""
    try:
        return lower(model)
    except UnsupportedError as refusal:
        assert any(word in str(refusal) for word in REFUSED), refusal
        return None


EXPRESSED = {name: found for name, model in ALL.items() if (found := programs(model)) is not None}


def some_tokens(length: int = LENGTH, seed: int = 1) -> list[int]:
    found: list[int] = torch.randint(
        0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return found


class Both:
    """The reference and the programs of a variant, with the same weights."""

    def __init__(self, name: str):
        self.model: Transformer = random_model(ALL[name])
        weights = {key: value.detach().numpy() for key, value in self.model.named_parameters()}
        self.kept, self.lowered = Kept(), EXPRESSED[name]
        self.main = Interpreter(self.lowered.main, weights, self.kept)
        self.source = Interpreter(self.lowered.source, weights, self.kept) if self.lowered.source else None

    def read(self, source: list[int], sequence: int = 0) -> None:
        if self.source is not None:
            self.source.step(Rows.of(source, sequence=sequence, wanted=[]))

    def expected(self, tokens: list[int], source: list[int]) -> np.ndarray:
        given = {"source": torch.tensor([source])} if self.source is not None else {}
        with torch.no_grad():
            found: np.ndarray = self.model(torch.tensor([tokens]), **given)[0].numpy()
        return found


def tolerance(name: str) -> float:
    return 1e-4 if "expert" in name else 1e-5


def test_most_variants_are_expressed() -> None:
    """The families people run: nothing of these may fall back in silence."""
    plain = {"multi-head", "grouped", "multi-query", "value-dim", "learned", "sinusoidal", "interleaved"}
    plain |= {
        "partial",
        "yarn",
        "llama3",
        "window",
        "chunk",
        "cap",
        "sink",
        "biased",
        "qk-norm",
        "gated-heads",
    }
    plain |= {"gated-heads", "post-norm", "deep-norm", "sandwich", "reordered", "parallel", "tied"}
    assert plain <= EXPRESSED.keys()
    assert ENCODER_DECODERS.keys() & EXPRESSED.keys() and BIDIRECTIONAL.keys() & EXPRESSED.keys()


@pytest.mark.parametrize("name", EXPRESSED)
def test_equals_the_reference(name: str) -> None:
    both, tokens, source = Both(name), some_tokens(), some_tokens(SOURCE, seed=7)
    both.read(source)
    assert_close(
        both.main.step(Rows.of(tokens)), both.expected(tokens, source), 1e-4 if "expert" in name else 1e-5
    )


@pytest.mark.parametrize("name", [name for name in EXPRESSED if name not in BIDIRECTIONAL])
def test_pieces_and_batch_mates_change_nothing(name: str) -> None:
    """Two sequences of unequal length in one batch, read in pieces, one token at a time at the end."""
    both, sources = Both(name), (some_tokens(SOURCE, seed=7), some_tokens(4, seed=8))
    rows = some_tokens(LENGTH), some_tokens(7, seed=2)
    for sequence, source in enumerate(sources):
        both.read(source, sequence)
    got: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for start, stop in ((0, 5), (5, 6), (6, 12), (12, 13)):
        pieces = [(s, tokens[start:stop]) for s, tokens in enumerate(rows) if tokens[start:stop]]
        answers = both.main.step(Rows.together(*(Rows.of(t, start, s) for s, t in pieces)))
        for sequence, piece in pieces:
            got[sequence].append(answers[: len(piece)])
            answers = answers[len(piece) :]
    for sequence, tokens in enumerate(rows):
        expected = both.expected(tokens, sources[sequence])
        assert_close(np.concatenate(got[sequence]), expected, tolerance(name))


def test_forgotten_tokens_are_gone() -> None:
    both, tokens = Both("grouped"), some_tokens()
    whole = both.main.step(Rows.of(tokens))
    both.kept.forget(0, 6)
    assert_close(both.main.step(Rows.of(tokens[6:], 6)), whole[6:])


@pytest.mark.parametrize("name", [name for name in EXPRESSED if name not in BIDIRECTIONAL])
def test_only_wanted_rows_are_answered(name: str) -> None:
    both, tokens = Both(name), some_tokens()
    for sequence in range(2):
        both.read(some_tokens(SOURCE, seed=7), sequence)
    whole = both.main.step(Rows.of(tokens))
    assert both.main.step(Rows.of(tokens[:6], 0, 1, wanted=[])).shape == (0, whole.shape[1])
    answer = both.main.step(Rows.of(tokens[6:], 6, 1, wanted=[3, 6]))
    assert answer.shape == (2, whole.shape[1])
    assert_close(answer, whole[[9, 12]], tolerance(name))


def test_rows_that_are_not_wanted_are_left_once_the_last_keys_are_stored() -> None:
    """Of the last layer they need no more; what its later operations read of the others is picked."""
    operations = lower(VARIANTS["gated-heads"]).main.operations
    at = next(i for i, each in enumerate(operations) if isinstance(each, Pick))
    assert isinstance(operations[at - 1], Store) and isinstance(operations[at + 1], Attend)
    assert not any(isinstance(each, Store) for each in operations[at:])
    assert str(operations[at]) == (
        "wanted[0:16]+wanted_projected[0:24]+wanted_normed[0:16] <- "
        "pick(x=stream[0:16]+projected[0:24]+normed[0:16])"
    )
    for each in operations[at + 1 :]:
        assert not {span.buffer for span in each.reads} & {"stream", "projected"}


def test_a_program_prints() -> None:
    """Readable from top to bottom: buffers, slots, one operation a line, the answer."""
    text = str(lower(VARIANTS["grouped"]).main)
    lines = text.splitlines()
    widths = "stream 16, normed 16, projected 48, attended 24, hidden 24, wanted 16, wanted_projected 48"
    assert lines[0] == f"buffers {widths}, logits 50"
    assert lines[1] == "slot decoder.0.attention: 2 x (6 + 6)"
    assert lines[3] == "stream[0:16] <- take_rows(table=decoder.embedding.weight)"
    assert "attended[0:24] <- attend(" in text and "sight=None:0:None" in text
    assert lines[-1] == "answer logits[0:50]"
    layer = [line.split("<- ")[1].split("(")[0] for line in lines[4:14]]
    assert layer == [
        *("norm", "linear", "rotate", "rotate", "store", "attend", "linear", "norm", "linear", "linear"),
    ]


def test_shared_parameters_are_read_under_one_name() -> None:
    tied = lower(VARIANTS["tied"]).main
    assert "head.weight" not in tied.weights and tied.weights[0] == "decoder.embedding.weight"


def test_what_a_description_learns_later_is_refused_until_it_is_lowered() -> None:
    """Every field of every node is read, or refused by its own name where it says something."""
    model = VARIANTS["grouped"]
    assert model.decoder is not None
    first = model.decoder.layers[0]
    attention = first.sublayers[0].branches[0].mixer
    assert isinstance(attention, Attention)
    changed = replace(attention, projections=Projections(value_scale=0.5))
    layers = (pre_norm(changed, Gated("silu", 24)), *model.decoder.layers)
    with pytest.raises(UnsupportedError, match=r"layers.0.attention: Projections.value_scale = 0.5 cannot"):
        lower(replace(model, decoder=replace(model.decoder, layers=layers)))


def test_what_is_not_expressed_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"layers.0.attention: Shaw positions cannot be lowered"):
        lower(VARIANTS["shaw"])
    with pytest.raises(UnsupportedError, match=r"layers.0.attention: a rotation that depends on"):
        lower(VARIANTS["dynamic-ntk"])
    assert isinstance(VARIANTS["shaw"].head, Language)
