"""What the figures of the benchmarks are computed as."""

from __future__ import annotations

from benchmarks.cases import Case, Group, full, grouped, narrowed, quick
from benchmarks.figures import agreement
from benchmarks.prompts import Prompts


def test_tokens_in_common_before_the_first_difference() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreement([1, 2], [1, 2, 3]) == 2
    assert agreement([5], [6]) == 0


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
