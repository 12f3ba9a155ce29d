"""Heads: what each makes of the states, and that padding is never part of an answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import RequestError
from qkv.nn import ContiguousCache, Layout, Transformer
from qkv.nn.build import build
from qkv.spec import (
    Attention,
    Causal,
    Dense,
    Everything,
    Gated,
    Language,
    LayerNorm,
    MaskedLanguage,
    Model,
    MultiToken,
    Pool,
    PooledEmbedding,
    Project,
    RMSNorm,
    Rotary,
    SequenceClass,
    Span,
    Stack,
    TokenClass,
    Tokens,
    pre_norm,
)
from tests.support import assert_close, random_model

VOCAB, WIDTH = 41, 12
HOWS = ("first", "last", "mean", "max")
DENSE = Project(7, activation="tanh", norm=LayerNorm())


def model(head: Any, causal: bool = False, shared: str | None = None) -> Transformer:
    mask = Causal() if causal else Everything()
    layer = pre_norm(Attention(2, 2, 6, position=Rotary(100.0), mask=mask), Dense("gelu", 16))
    stack = Stack(Tokens(VOCAB, WIDTH, shared=shared), (layer, layer), RMSNorm())
    return random_model(Model(decoder=stack, head=head) if causal else Model(encoder=stack, head=head))


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def pool(how: Any, states: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    return build(Pool(how), states.shape[-1])(states, Layout.padded(present))


# --- pooling ------------------------------------------------------------------------------------

STATES = torch.tensor([[[9.0, -9], [1, -6], [2, -2], [9, 9]], [[-3, 1], [-1, 2], [-2, 6], [-5, 4]]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("first", [[1, -6], [-3, 1]]),
        ("last", [[2, -2], [-5, 4]]),
        ("mean", [[1.5, -4], [-2.75, 3.25]]),
        ("max", [[2, -2], [-1, 6]]),
    ],
)
def test_only_tokens_that_are_there_are_pooled(how: str, expected: list[list[float]]) -> None:
    """The first row has padding on both sides, holding larger values; the second has none."""
    present = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    assert pool(how, STATES, present).tolist() == expected


@pytest.mark.parametrize("how", HOWS)
def test_of_nothing_there_is_nothing_and_gradients_are_finite(how: str) -> None:
    states = STATES.clone().requires_grad_()
    pooled = pool(how, states, torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]))
    assert pooled[0].tolist() == [0, 0] and pooled[1].abs().min() > 0
    pooled.sum().backward()
    assert states.grad is not None and states.grad.isfinite().all() and (states.grad[0] == 0).all()


def test_a_mean_is_taken_in_fp32() -> None:
    """2,049 ones and a hundred: summed in bf16 the ones would stop counting at 256."""
    states = torch.ones(1, 2049, 1, dtype=torch.bfloat16)
    assert pool("mean", states, torch.ones(1, 2049, dtype=torch.long)).item() == 1.0


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["class", "embedding", "pool"])
def test_an_answer_for_a_row_is_the_same_among_padding(how: Any, kind: str) -> None:
    """On either side, whatever stands in the padding, and whoever the batch mates are."""
    head: Any = {
        "class": SequenceClass(3, Pool(how, DENSE)),
        "embedding": PooledEmbedding(Pool(how)),
        "pool": Pool(how, DENSE),
    }[kind]
    network, given = model(head), tokens(3, 9)
    present = torch.zeros(3, 9, dtype=torch.bool)
    present[0, 3:], present[1, :5], present[2, 2:4] = True, True, True
    answers = network(given, layout=Layout.padded(present))
    for row in range(3):
        assert_close(answers[row], network(given[row : row + 1, present[row]])[0])
    other = network(torch.where(present, given, 0), layout=Layout.padded(present))
    assert torch.equal(answers, other)


def test_an_embedding_has_unit_length_where_asked() -> None:
    long, unit = model(PooledEmbedding(normalise=False)), model(PooledEmbedding())
    plain, got = long(tokens()), unit(tokens())
    assert_close(got, plain / plain.square().sum(-1, keepdim=True).sqrt())
    assert (plain.norm(dim=-1) - 1).abs().min() > 0.1


def test_one_answer_for_several_documents_is_refused() -> None:
    with pytest.raises(RequestError, match="answers once for a row, and packed rows hold several"):
        model(PooledEmbedding())(tokens(1), layout=Layout.packed([3, 4]))


def test_one_answer_for_a_row_is_not_given_in_parts() -> None:
    network = model(SequenceClass(3, Pool("last")), causal=True)
    cache = ContiguousCache(network.spec.trunk, 2, 7)
    with pytest.raises(RequestError, match=r"answers once for a whole row, .* call without a cache"):
        network(tokens(), cache=cache)
    assert network(tokens()).shape == (2, 3)


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head", [TokenClass(3), Span(), TokenClass(3, bias=False, transform=DENSE), Span(DENSE)]
)
def test_scores_of_tokens_are_an_affine_map_of_the_states(head: Any) -> None:
    network = model(head)
    network_of_states = Transformer(Model(encoder=network.spec.encoder))
    network_of_states.load_state_dict(network.state_dict(), strict=False)
    states = network_of_states(tokens())
    if head.transform is not None:
        part = network.head.transform  # type: ignore[union-attr]
        hidden = torch.tanh(states @ part.linear.weight.T + part.linear.bias)  # type: ignore[union-attr]
        states = torch.nn.functional.layer_norm(hidden, (7,), part.norm.weight, part.norm.bias)  # type: ignore
    output = network.head.output  # type: ignore[union-attr]
    expected = states @ output.weight.T  # type: ignore[union-attr]
    expected = expected if output.bias is None else expected + output.bias  # type: ignore[union-attr]
    assert_close(network(tokens()), expected)
    assert network(tokens()).shape == (2, 7, 2 if isinstance(head, Span) else 3)


def test_parameters_are_those_of_the_description() -> None:
    for head in (TokenClass(3, transform=DENSE), Span(DENSE), SequenceClass(3, Pool("mean", DENSE))):
        network = model(head)
        ours = {name: tuple(p.shape) for name, p in network.named_parameters()}
        assert ours == {name: tensor.shape for name, tensor in network.spec.weights().items()}


def test_a_transform_comes_before_a_tied_matrix() -> None:
    head = MaskedLanguage(VOCAB, bias=True, transform=Project(WIDTH, activation="gelu"), shared="tokens")
    network = model(head, shared="tokens")
    assert network.head.weight is network.encoder.embedding.weight  # type: ignore[union-attr]
    assert network(tokens()).shape == (2, 7, VOCAB)


@pytest.mark.parametrize("head", [TokenClass(3), SequenceClass(3), PooledEmbedding(), None])
def test_the_last_place_alone_is_only_for_heads_over_the_vocabulary(head: Any) -> None:
    with pytest.raises(RequestError, match="Only a head over the vocabulary"):
        model(head)(tokens(), last_only=True)
    language = model(Language(VOCAB))
    assert_close(language(tokens(), last_only=True), language(tokens())[:, -1:])


# --- several tokens ahead -----------------------------------------------------------------------

FURTHER = pre_norm(Attention(2, 1, 6, position=Rotary(100.0)), Gated("silu", 20), norm=RMSNorm())


@pytest.fixture(scope="module")
def ahead() -> Transformer:
    return model(MultiToken(Language(VOCAB, shared="t"), (FURTHER, FURTHER)), causal=True, shared="t")


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps) ** -0.5 * weight


def test_the_next_token_is_told_as_without_further_layers(ahead: Transformer) -> None:
    plain = Transformer(Model(decoder=ahead.spec.decoder, head=Language(VOCAB, shared="t")))
    state = ahead.state_dict() | {"head.weight": ahead.state_dict()["head.next.weight"]}
    plain.load_state_dict(state, strict=False)
    assert torch.equal(ahead(tokens()), plain(tokens()))
    assert torch.equal(ahead.ahead(tokens())[0], plain(tokens()))
    assert_close(ahead(tokens(), last_only=True), plain(tokens())[:, -1:])


def test_each_further_layer_reads_the_states_and_the_token_ahead(ahead: Transformer) -> None:
    """DeepSeek-V3, equations 21 to 23, written out: the table and the matrix are the model's own."""
    given = tokens()
    bare = Transformer(Model(decoder=ahead.spec.decoder))
    bare.load_state_dict(ahead.state_dict(), strict=False)
    states, table, answers = bare(given), ahead.decoder.embedding.weight, ahead.ahead(given)  # type: ignore
    assert [answer.shape for answer in answers] == [(2, 7, VOCAB), (2, 6, VOCAB), (2, 5, VOCAB)]
    for k, further in enumerate(ahead.head.layers, 1):  # type: ignore[union-attr, arg-type]
        known = 7 - k
        rows = rms(table[given[:, k:]], further.token_norm.weight)  # type: ignore[union-attr, operator]
        both = torch.cat([rms(states[:, :known], further.hidden_norm.weight), rows], -1)  # type: ignore
        joined = both @ further.join.weight.T  # type: ignore[union-attr, operator]
        states = further.layer(joined, Layout.unpadded(2, known))  # type: ignore[union-attr, operator]
        expected = rms(states, further.norm.weight) @ table.T  # type: ignore[union-attr, operator]
        assert_close(answers[k], expected)


def test_looking_ahead_is_the_same_among_padding_and_packed(ahead: Transformer) -> None:
    given = tokens(1, 9)
    alone = ahead.ahead(given[:, 2:7])
    present = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
    padded = ahead.ahead(given, layout=Layout.padded(present))
    for k, (got, expected) in enumerate(zip(padded, alone, strict=True)):
        assert_close(got[:, 2 : 7 - k], expected)
    packed = ahead.ahead(given, layout=Layout.packed([4, 5]))
    first, second = ahead.ahead(given[:, :4]), ahead.ahead(given[:, 4:])
    for k in range(3):
        assert_close(packed[k][:, : 4 - k], first[k])
        assert_close(packed[k][:, 4 : 9 - k], second[k])


def test_looking_ahead_sees_up_to_the_token_it_reads_and_no_further(ahead: Transformer) -> None:
    """Place i of answer k depends on token i + k, and on none after it."""
    given = tokens(1, 8)
    before = ahead.ahead(given)
    given[0, 5] = (given[0, 5] + 1) % VOCAB
    after = ahead.ahead(given)
    for k in range(3):
        assert torch.equal(before[k][:, : 5 - k], after[k][:, : 5 - k])
        assert not torch.equal(before[k][:, 5 - k], after[k][:, 5 - k])


def test_too_short_a_row_cannot_look_ahead(ahead: Transformer) -> None:
    with pytest.raises(RequestError, match="To look 3 tokens ahead a row must hold more than 2"):
        ahead.ahead(tokens(1, 2))
    with pytest.raises(RequestError, match="tells nothing of the tokens after the next"):
        model(Language(VOCAB), causal=True).ahead(tokens())


def test_a_loss_over_further_tokens_reaches_the_whole_model(ahead: Transformer) -> None:
    ahead.requires_grad_(True)
    given = tokens(2, 9)
    loss = sum(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, k + 1 :].flatten())
        for k, logits in enumerate(ahead.ahead(given))
    )
    loss.backward()  # type: ignore[union-attr]
    for name, parameter in ahead.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    ahead.zero_grad()


def test_the_mean_of_one_token_is_itself() -> None:
    assert pool("mean", STATES, torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])).tolist() == [[1, -6], [-5, 4]]
