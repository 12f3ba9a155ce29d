"""End-to-end memory networks against loops over words, hops and sentences; what moves and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkv.errors import ConfigError, RequestError
from qkv.lineage import memory_network as memnet
from qkv.lineage.memory_network import Adjacent, Hyperparameters, LayerWise, MemoryNetwork
from qkv.nn.scores import attend
from tests.support import assert_close

VOCABULARY = 11
SMALL = Hyperparameters(width=6, hops=3, sentences=7, deviation=0.6)
TYINGS = pytest.mark.parametrize("tying", [Adjacent, LayerWise])
MIXES = pytest.mark.parametrize("mix", [attend, memnet.attend_linearly])


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(
    tying: Callable[..., memnet.Tying] = Adjacent,
    sizes: Hyperparameters = SMALL,
    encoding: memnet.Encoding = memnet.position_encoding,
) -> MemoryNetwork:
    torch.manual_seed(0)
    return MemoryNetwork(VOCABULARY, sizes, tying, encoding)


def stories(batch: int = 3, sentences: int = 5, words: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences of two words or more, some of them short, all present; and questions."""
    tokens = torch.randint(1, VOCABULARY, (batch, sentences, words), generator=draws(1))
    tokens[:, ::2, -1] = 0
    tokens[:, 1, -2:] = 0
    question = torch.randint(1, VOCABULARY, (batch, 3), generator=draws(2))
    return tokens, torch.ones(batch, sentences, dtype=torch.bool), question


def like_the_paper(
    model: MemoryNetwork, story: list[list[int]], question: list[int], softmax: bool
) -> Tensor:
    """Logits for one story by the formulas, a word and a sentence at a time, in fp64."""
    tying, hops, d = model.tying, model.sizes.hops, model.sizes.width

    def table(words: memnet.Words) -> Tensor:
        return torch.cat([torch.zeros(1, d), words.weight.detach()]).double()

    if isinstance(tying, Adjacent):
        made = list(tying.embeddings)
        A, C = made[:-1], made[1:]
        B, W, H = table(made[0].words), table(made[-1].words), torch.eye(d).double()
    else:
        assert isinstance(tying, LayerWise)
        A, C = [tying.keys] * hops, [tying.values] * hops
        B, W = table(tying.question), tying.output.weight.detach().double()
        H = tying.carry.weight.detach().double()

    def sentence(tokens: list[int], rows: Tensor) -> Tensor:
        tokens, total = [t for t in tokens if t], torch.zeros(d).double()
        J = len(tokens)
        for j, token in enumerate(tokens, 1):
            for k in range(1, d + 1):
                total[k - 1] += ((1 - j / J) - (k / d) * (1 - 2 * j / J)) * rows[token, k - 1]
        return total

    u = sentence(question, B)
    for hop in range(hops):
        scores, values = [], []
        for i, tokens in enumerate(reversed(story)):  # the last before the question is the first place
            m, c = (
                sentence(tokens, table(e.words)) + e.places[i].detach().double() for e in (A[hop], C[hop])
            )
            scores.append(float(u @ m))
            values.append(c)
        weights = [math.exp(s) / sum(map(math.exp, scores)) for s in scores] if softmax else scores
        o = sum((p * c for p, c in zip(weights, values, strict=True)), torch.zeros(d).double())
        u = H @ u + o
    return W @ u


@TYINGS
@MIXES
def test_logits_follow_the_paper_word_by_word(tying: type, mix: memnet.Mix) -> None:
    model = network(tying)
    tokens, present, question = stories()
    with torch.no_grad():
        logits = model(tokens, present, question, mix).logits
    for row in range(3):
        expected = like_the_paper(model, tokens[row].tolist(), question[row].tolist(), mix is attend)
        assert_close(logits[row], expected)


@pytest.mark.parametrize("hops", [1, 2, 6])
@TYINGS
def test_any_number_of_hops(hops: int, tying: type) -> None:
    model = network(tying, Hyperparameters(width=6, hops=hops, sentences=7, deviation=0.4))
    tokens, present, question = stories()
    with torch.no_grad():
        answer = model(tokens, present, question)
    assert answer.weights.shape == (3, hops, 5)
    assert_close(answer.weights.sum(-1), torch.ones(3, hops))
    assert_close(answer.logits[0], like_the_paper(model, tokens[0].tolist(), question[0].tolist(), True))


# How words become a sentence


def test_the_papers_position_encoding() -> None:
    encoding = memnet.position_encoding(torch.tensor(6), 6, 20).T  # elements down, words across
    assert_close(encoding[0], torch.tensor([0.8, 0.65, 0.5, 0.35, 0.2, 0.05]))
    assert_close(encoding[9], torch.full((6,), 0.5))
    assert_close(encoding[19], torch.tensor([1, 2, 3, 4, 5, 6]) / 6)


def test_the_official_encoding_is_about_twice_the_papers() -> None:
    paper, official = (
        encoding(torch.tensor(6), 6, 20)
        for encoding in (memnet.position_encoding, memnet.official_position_encoding)
    )
    assert float((official - 2 * paper).abs().max()) == pytest.approx(0.208, abs=5e-4)
    assert official[0, 0] == pytest.approx(1 + 4 * (1 - 10.5) * (1 - 3.5) / 120)
    assert official.mean() == pytest.approx(1)


def test_an_encoding_counts_each_sentences_own_words() -> None:
    for encoding in (memnet.position_encoding, memnet.official_position_encoding):
        several = encoding(torch.tensor([[6, 3], [0, 1]]), 6, 20)
        assert several.shape == (2, 2, 6, 20) and several.isfinite().all()
        assert_close(several[0, 1, :3], encoding(torch.tensor(3), 3, 20))


def test_positions_multiply_words() -> None:
    """An element-wise product: twice the embedding is twice the sentence, and nothing stays nothing."""
    model = network()
    tokens, _, _ = stories()
    encoding = memnet.position_encoding((tokens != 0).sum(-1), 4, 6)
    words = memnet.Words(VOCABULARY, 6)
    words.weight.data.normal_()
    once = words(tokens, encoding)
    words.weight.data *= 2
    assert_close(words(tokens, encoding), 2 * once)
    words.weight.data.zero_()
    assert torch.equal(words(tokens, encoding), torch.zeros(3, 5, 6))
    assert not any("encoding" in name for name, _ in model.named_parameters())  # fixed


@TYINGS
def test_a_bag_of_words_is_blind_to_their_order_and_positions_are_not(tying: type) -> None:
    tokens, present, question = stories(words=3)
    tokens[tokens == 0] = 3
    swapped = tokens.flip(-1)
    for encoding, blind in (
        (memnet.bag_of_words, True),
        (memnet.position_encoding, False),
        (memnet.official_position_encoding, False),
    ):
        model = network(tying, encoding=encoding)
        with torch.no_grad():
            a, b = (model(t, present, question).logits for t in (tokens, swapped))
        assert torch.allclose(a, b, atol=1e-5) == blind


def test_a_bag_of_words_sums_embeddings() -> None:
    words = memnet.Words(VOCABULARY, 6)
    words.weight.data.normal_()
    tokens = torch.tensor([[3, 7, 7, 0]])
    made = words(tokens, memnet.bag_of_words(torch.tensor([3]), 4, 6))
    assert_close(made[0], words.weight[2] + 2 * words.weight[6])


@TYINGS
def test_padding_words_stay_zero_and_change_nothing(tying: type) -> None:
    model = network(tying)
    tokens, present, question = stories()
    wider = torch.nn.functional.pad(tokens, (0, 3)), present, torch.nn.functional.pad(question, (0, 2))
    assert_close(model(*wider).logits, model(tokens, present, question).logits)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # also where the last embedding is the answer's, whose softmax pulls at every word
        rule.zero_grad()
        memnet.loss(model(*wider), torch.tensor([1, 2, 3])).backward()
        rule.step()
    tables = [module.table() for module in model.modules() if isinstance(module, memnet.Words)]
    assert len(tables) == (4 if tying is Adjacent else 3)
    for table in tables:
        assert table.shape == (VOCABULARY, 6)
        assert torch.equal(table[0], torch.zeros(6)) and (table[1:] != 0).all()


# Where sentences stand


def test_places_count_back_from_the_question() -> None:
    present = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    places = memnet.back_from_the_question(present)
    assert places[present].tolist() == [3, 2, 1, 0, 1, 0, 1, 0, 1, 0]


def test_places_are_learned_and_added() -> None:
    sentences = memnet.Sentences(VOCABULARY, 6, 7)
    for parameter in sentences.parameters():
        parameter.data.normal_()
    tokens, _, _ = stories()
    encoding = memnet.position_encoding((tokens != 0).sum(-1), 4, 6)
    here, there = (sentences(tokens, encoding, torch.full((3, 5), place)) for place in (1, 4))
    moved = sentences.places[4] - sentences.places[1]
    assert_close(there - here, moved.expand(3, 5, 6))
    here.sum().backward()
    assert sentences.places.grad is not None and sentences.places.grad[1].tolist() == [15] * 6


@TYINGS
def test_without_places_the_order_of_sentences_is_lost(tying: type) -> None:
    model = network(tying)
    tokens, present, question = stories()
    turned = tokens.flip(1)
    with torch.no_grad():
        assert not torch.allclose(*(model(t, present, question).logits for t in (tokens, turned)), atol=1e-3)
        for module in model.modules():
            if isinstance(module, memnet.Sentences):
                module.places.zero_()
        assert_close(*(model(t, present, question).logits for t in (tokens, turned)))


@TYINGS
@MIXES
def test_sentences_that_are_not_there_change_nothing(tying: type, mix: memnet.Mix) -> None:
    """Whatever stands in their rows, on whichever side, and between."""
    model = network(tying)
    tokens, present, question = stories()
    kept = model(tokens, present, question, mix)
    for slots in ([0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 2, 3, 5, 6]):
        padded = torch.randint(0, VOCABULARY, (3, 8, 4), generator=draws())
        there = torch.zeros(3, 8, dtype=torch.bool)
        padded[:, slots], there[:, slots] = tokens, True
        answer = model(padded, there, question, mix)
        assert_close(answer.logits, kept.logits)
        assert_close(answer.weights[..., slots], kept.weights)
        assert (answer.weights.masked_select(~there[:, None].expand_as(answer.weights)) == 0).all()


@TYINGS
@MIXES
def test_only_the_last_sentences_are_read(tying: type, mix: memnet.Mix) -> None:
    model = network(tying)
    tokens, present, question = stories(sentences=12)
    answer = model(tokens, present, question, mix)
    cut = model(tokens[:, -7:], present[:, -7:], question, mix)
    assert_close(answer.logits, cut.logits)
    assert (answer.weights[..., :5] == 0).all() and (answer.weights[..., 5:] != 0).all()
    assert Hyperparameters().sentences == 50


def test_a_story_of_no_sentences_is_answered_by_the_question() -> None:
    model = network()
    tokens, present, question = stories()
    answer = model(tokens, present & False, question)
    encoding = memnet.position_encoding(torch.full((3,), 3), 3, 6)
    assert_close(answer.logits, model.tying.answer(model.tying.asked(question, encoding)))


# Which parameters there are


def test_tying_leaves_the_expected_parameters() -> None:
    """Untied, three hops would have A, T_A, C and T_C each, B and W: fourteen tensors."""
    adjacent, layer_wise = network(Adjacent), network(LayerWise)
    assert len(list(adjacent.parameters())) == 2 * (3 + 1)
    assert sorted(name.removeprefix("tying.") for name, _ in layer_wise.named_parameters()) == [
        "carry.weight", "keys.places", "keys.words.weight", "output.weight", "question.weight",
        "values.places", "values.words.weight",
    ]  # fmt: skip
    assert len(adjacent.state_dict()) == 8 and len(layer_wise.state_dict()) == 7


def test_adjacent_hops_share_what_one_answers_and_the_next_finds_by() -> None:
    model = network()
    tokens, _, _ = stories()
    encoding = memnet.position_encoding((tokens != 0).sum(-1), 4, 6)
    first, second, third = model.tying.memories(tokens, encoding, torch.arange(4, -1, -1).expand(3, 5))
    assert torch.equal(first.values, second.keys) and torch.equal(second.values, third.keys)
    assert not torch.equal(first.keys, first.values)


def test_layer_wise_hops_map_what_goes_on() -> None:
    """u' = H u + o: without memories K hops apply H that many times."""
    model = network(LayerWise)
    tokens, present, question = stories()
    assert isinstance(model.tying, LayerWise)
    encoding = memnet.position_encoding(torch.full((3,), 3), 3, 6)
    state = model.tying.asked(question, encoding) @ torch.matrix_power(model.tying.carry.weight.T, 3)
    expected = state @ model.tying.output.weight.T
    assert_close(model(tokens, present & False, question).logits, expected)


@pytest.mark.parametrize(
    ("tying", "count"),
    [
        (Adjacent, 4 * (99 * 20 + 50 * 20)),
        (LayerWise, 2 * (99 * 20 + 50 * 20) + 99 * 20 + 20 * 20 + 100 * 20),
    ],
)
def test_sizes_of_the_paper(tying: type, count: int) -> None:
    with torch.device("meta"):
        model = MemoryNetwork(100, tying=tying)
    assert sum(p.numel() for p in model.parameters()) == count


@TYINGS
def test_every_parameter_begins_normal_with_a_tenth(tying: type) -> None:
    torch.manual_seed(0)
    for parameter in MemoryNetwork(400, Hyperparameters(), tying).parameters():
        values = parameter.detach()
        assert abs(float(values.mean())) < 0.02 and float(values.std()) == pytest.approx(0.1, rel=0.1)


# Training


def test_without_softmaxes_the_weights_are_the_scores() -> None:
    scores, values = torch.tensor([[[2.0, -1.0, 5.0]]]), torch.tensor([[[1.0], [10.0], [100.0]]])
    mixed, weights = memnet.attend_linearly(scores, values, torch.tensor([[[True, True, False]]]))
    assert weights.tolist() == [[[2, -1, 0]]] and mixed.tolist() == [[[2 - 10]]]


def test_a_linear_start_is_linear_in_the_values() -> None:
    """Twice every embedding, one hop: u, m and c double, o = (u . m) c is eightfold; after a softmax not."""
    model = network(sizes=Hyperparameters(width=6, hops=1, sentences=7, deviation=0.3))
    tokens, present, question = stories()
    with torch.no_grad():
        encoding = memnet.position_encoding(torch.full((3,), 3), 3, 6)

        def found(mix: memnet.Mix) -> Tensor:
            """W o, which is sixteenfold: W (o + u) less W u."""
            alone = model.tying.answer(model.tying.asked(question, encoding))
            return model(tokens, present, question, mix).logits - alone

        before, soft = found(memnet.attend_linearly), found(attend)
        for parameter in model.parameters():
            parameter *= 2
        assert_close(found(memnet.attend_linearly), 16 * before)
        assert not torch.allclose(found(attend), 16 * soft, rtol=0.1)


def test_the_rate_halves_every_25_epochs() -> None:
    rates = [memnet.learning_rate(epoch) for epoch in (0, 24, 25, 49, 50, 75, 99)]
    assert rates == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.00125, 0.00125]
    training = memnet.Training()
    linear = [memnet.learning_rate(epoch, training.linear_rate, training.halving) for epoch in (0, 25)]
    assert linear == [0.005, 0.0025]
    assert (training.epochs, training.batch, training.clip, training.empty) == (100, 32, 40, 0.1)


def test_a_linear_start_ends_when_validation_stalls() -> None:
    begun = [[], [3.0], [3.0, 2.0], [3.0, 1.0, 0.5]]
    over = [[3.0, 2.0, 2.0], [3.0, 1.0, 2.0, 1.5]]
    assert not any(map(memnet.stalled, begun)) and all(map(memnet.stalled, over))


def test_the_loss_is_summed_over_the_batch() -> None:
    logits = torch.randn(5, VOCABULARY, generator=draws())
    words = torch.tensor([1, 4, 0, 10, 3])
    expected = -sum(math.log(float(logits[i].softmax(-1)[word])) for i, word in enumerate(words.tolist()))
    assert memnet.loss(memnet.Answer(logits, logits), words) == pytest.approx(expected, rel=1e-5)


def test_empty_sentences_stand_among_the_real_ones() -> None:
    tokens, present, _ = stories(batch=200, sentences=10)
    noisy, there = memnet.with_empty_sentences(tokens, present, 0.1, draws())
    empty = there & (noisy == 0).all(-1)
    assert float(empty.sum() / present.sum()) == pytest.approx(0.1, abs=0.02)
    assert noisy.shape[1] == 10 + int(empty.sum(-1).max())
    for row in range(200):  # those that were there are, in their order
        assert torch.equal(noisy[row][there[row] & ~empty[row]], tokens[row])
    assert empty[:, 1].any() and empty[torch.arange(200), there.sum(-1) - 1].any()  # near both ends


def test_empty_sentences_move_the_others_to_later_places() -> None:
    tokens, present, question = stories()
    noisy, there = memnet.with_empty_sentences(tokens, present, 1.0)
    assert there.all() and torch.equal(noisy[:, ::2], tokens) and not noisy[:, 1::2].any()
    assert memnet.back_from_the_question(there)[0, ::2].tolist() == [9, 7, 5, 3, 1]
    model = network(sizes=Hyperparameters(width=6, hops=1, sentences=10, deviation=0.5))
    memnet.loss(model(noisy, there, question), torch.tensor([1, 2, 3])).backward()
    assert isinstance(model.tying, Adjacent)
    reached = model.tying.embeddings[0].places.grad
    assert bool((reached[9] != 0).any())


def test_no_empty_sentence_follows_one_that_is_not_there() -> None:
    tokens, present, _ = stories()
    present[0, :2] = present[1, 3:] = present[2, 2] = False
    noisy, there = memnet.with_empty_sentences(tokens, present, 1.0)
    for row in range(3):
        assert torch.equal(noisy[row][there[row]][::2], tokens[row][present[row]])
        assert there[row].sum() == 2 * present[row].sum()
    assert noisy.shape[1] == 5 + 4  # no wider than the row with the most
    unchanged = memnet.with_empty_sentences(tokens, present, 0.0)
    assert torch.equal(unchanged[0], tokens) and torch.equal(unchanged[1], present)


def test_three_hops_learn_where_somebody_went_last() -> None:
    """Two people move among three places: 2 x 3 words, a verb, and "where"."""
    generator = draws()
    who = torch.randint(0, 2, (320, 4), generator=generator)
    where = torch.randint(0, 3, (320, 4), generator=generator)
    tokens = torch.stack([1 + who, torch.full_like(who, 3), 4 + where], -1)
    asked = who[:, 0]  # is there at least once
    last = torch.where(who == asked[:, None], torch.arange(4), -1).amax(1)
    words = 4 + where.gather(1, last[:, None])[:, 0]
    question = torch.stack([torch.full_like(asked, 7), 1 + asked], -1)
    present = torch.ones(320, 4, dtype=torch.bool)
    torch.manual_seed(0)
    model = MemoryNetwork(8, Hyperparameters(sentences=8))
    rule = torch.optim.SGD(model.parameters(), lr=memnet.learning_rate(0))
    for step in range(240):
        batch = slice(32 * (step % 8), 32 * (step % 8 + 1))
        noisy, there = memnet.with_empty_sentences(tokens[batch], present[batch], generator=generator)
        rule.zero_grad()
        memnet.loss(model(noisy, there, question[batch]), words[batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), memnet.Training.clip)
        rule.step()
    unseen = slice(256, 320)
    answers = model(tokens[unseen], present[unseen], question[unseen]).logits.argmax(-1)
    assert float((answers == words[unseen]).float().mean()) > 0.95


def test_what_does_not_fit_is_said() -> None:
    tokens, present, question = stories()
    model = network()
    with pytest.raises(RequestError, match=r"\(3, 5, 4\) and \(2, 3\)"):
        model(tokens, present, question[:2])
    with pytest.raises(RequestError, match=r"for each: \(3, 5\), not \(3, 4\)"):
        model(tokens, present[:, 1:], question)
    with pytest.raises(ConfigError, match="at least 1, not 20, 0 and 50"):
        Hyperparameters(hops=0)
