"""What the figures of the benchmarks are computed as."""

from __future__ import annotations

import pytest

from benchmarks.cases import Case, Group, full, grouped, narrowed, quick, rotated
from benchmarks.figures import Sample, Spread, agreement, bytes_per_token, chosen, share_of_limit
from benchmarks.machine import Moment, busy_seconds, used_seconds
from benchmarks.prompts import Prompts


def sample(decode: float = 100.0, others: float = 0.0, bandwidth: float = 30e9) -> Sample:
    return Sample(prefill=1000.0, decode=decode, bandwidth=bandwidth, others=others)


def test_a_spread_is_the_median_and_its_ends() -> None:
    assert Spread.of([3.0, 9.0, 1.0, 4.0, 5.0, 2.0, 6.0]) == Spread(4.0, 1.0, 9.0, 7)
    assert Spread.of([]) is None


def test_disturbed_rounds_are_left_out_where_three_others_remain() -> None:
    quiet, loud = [sample(100 + i) for i in range(3)], sample(5, others=0.4)
    assert chosen([loud, *quiet]) == quiet
    assert chosen([loud, *quiet[:2]]) == [loud, *quiet[:2]]


def test_bytes_a_token() -> None:
    # SmolLM2 in Q8_0: 143 MB of weights, 23,040 bytes of keys and values a token of context
    assert bytes_per_token(143_025_408, 23_040, 576, streams=1) == 143_025_408 + 13_271_040
    assert bytes_per_token(143_025_408, 23_040, 576, streams=32) == 143_025_408 / 32 + 13_271_040


def test_share_of_the_memory_of_its_own_round() -> None:
    assert share_of_limit(sample(decode=100, bandwidth=20e9), 150e6) == pytest.approx(0.75)


def test_tokens_in_common_before_the_first_difference() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreement([1, 2], [1, 2, 3]) == 2
    assert agreement([5], [6]) == 0


STAT = "cpu  {user} 10 {system} 9000 70 5 5 {steal} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"


def test_busy_and_stolen_seconds() -> None:
    ticks = 100
    busy, stolen = busy_seconds(STAT.format(user=100, system=80, steal=50))
    assert (busy * ticks / 100, stolen * ticks / 100) == pytest.approx((2.0, 0.5))


def test_seconds_of_a_process_whose_name_has_brackets_and_spaces() -> None:
    fields = ["S", *["0"] * 10, "250", "50", *["0"] * 30]
    assert used_seconds("77 (a (b) c) " + " ".join(fields)) == pytest.approx(3.0)


def test_others_are_what_was_busy_and_not_ours_and_what_was_taken_away() -> None:
    before = Moment(clock=0.0, busy=10.0, stolen=1.0, own=5.0)
    after = Moment(clock=4.0, busy=17.0, stolen=1.5, own=11.5)
    assert before.others(after, cores=2) == pytest.approx((7 - 6.5 + 0.5) / 8)
    assert before.others(Moment(4.0, 10.0, 1.0, 6.0), cores=2) == 0.0  # counters of unlike grain


def test_each_engine_is_first_in_turn() -> None:
    names = ["a", "b", "c"]
    assert [rotated(names, round) for round in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip
    assert rotated([], 1) == []


def test_cases_share_what_is_loaded_for_them() -> None:
    one, two = Group("m", "Q8_0", 1), Group("m", "Q8_0", 2)
    cases = [Case(one), Case(two), Case(one, prompt=1024)]
    assert grouped(cases) == {one: [cases[0], cases[2]], two: [cases[1]]}


def test_full_size_reaches_the_ends_of_both_contexts() -> None:
    cases = full([1, 2])
    reach: dict[str, int] = {}
    for case in cases:
        reach[case.group.model] = max(reach.get(case.group.model, 0), case.prompt + case.new)
    assert reach == {
        "smollm2-135m": 8192,
        "random-1b": 16384,
        "gemma3-270m": 640,
        "random-qwen-0.5b": 576,
    }
    assert {case.streams for case in cases} == {1, 8, 32}
    assert all(case.rounds == 7 for case in cases if case.prompt == 512 and case.streams == 1)


def test_quick_has_three_rounds_of_a_few_cases_and_the_most_threads() -> None:
    cases = quick([1, 2])
    assert {case.rounds for case in cases} == {3}
    assert {case.group.threads for case in cases} == {2}


def test_cases_are_picked_by_parts_of_their_names() -> None:
    cases = full([1, 2])
    found = narrowed(cases, ["Q8_0, 2 threads, 512+128"], rounds=1)
    assert [str(case) for case in found] == ["smollm2-135m Q8_0, 2 threads, 512+128"]
    assert found[0].rounds == 1
    assert narrowed(cases, [], None) == cases


def test_mean_context_is_the_middle_of_what_is_decoded() -> None:
    assert Case(Group("m", "Q8_0", 1), prompt=512, new=128).mean_context == 576


def test_prompts_of_a_round_start_at_different_places_and_have_the_length() -> None:
    prompts = Prompts(range(10_000))
    seen = [prompts.take(round, 8, 512) for round in range(7)]
    assert {len(each) for round in seen for each in round} == {512}
    assert len({each[0] for round in seen for each in round}) == 56
    assert prompts.take(2, 8, 512) == seen[2]
    assert Prompts([1, 2, 3]).take(0, 1, 7) == [[1, 2, 3, 1, 2, 3, 1]]
