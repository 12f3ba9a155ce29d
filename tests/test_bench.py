"""`qkv bench`: its figures by hand, its table and data of fixed samples, and what a small model does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import qkv
from qkv import cli
from qkv.benching import Bench, Row, bench, machine, measuring, peers
from qkv.benching.figures import (
    Sample,
    Spread,
    bytes_per_token,
    chosen,
    number,
    rotated,
    share_of_limit,
)
from qkv.benching.machine import Moment, busy_seconds, read_bandwidth, used_seconds
from qkv.benching.traffic import cache_bytes, stored_as, weight_bytes
from qkv.engine import scheduler as scheduling
from qkv.engine.timing import Timing, timed
from qkv.errors import CapacityError, QkvError, RequestError, UnsupportedError
from qkv.runtime import native
from qkv.spec import (
    Causal,
    Experts,
    Gated,
    Language,
    Model as Spec,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    Window,
    pre_norm,
)
from qkv.spec.attention import Attention
from tests.engine.tiny import VOCAB, greedily, save_llama, tiny
from tests.families.parity import pair_of
from tests.runtime.native_models import needs_native


def sample(
    decode: float = 100.0, others: float | None = 0.0, bandwidth: float = 30e9, prefill: float = 1000.0
) -> Sample:
    return Sample(prefill=prefill, decode=decode, bandwidth=bandwidth, others=others)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benched")
    save_llama(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


# the figures


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


def test_what_others_took_may_not_be_known() -> None:
    assert sample(others=None).quiet and sample(others=0.05).quiet and not sample(others=0.051).quiet


def test_each_setting_is_first_in_turn() -> None:
    names = ["a", "b", "c"]
    assert [rotated(names, round) for round in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip
    assert rotated([], 1) == []


def test_numbers_and_spreads_in_words() -> None:
    assert [number(x) for x in (2134.4, 100.2, 23.44, 1.234)] == ["2,134", "100", "23.4", "1.23"]
    assert (
        str(Spread(98.6, 9.0, 1234.0, 3)) == "98.6 (9.00-1,234)" and str(Spread(5.0, 5.0, 5.0, 1)) == "5.00"
    )


# what a step reads


def described(*, tied: bool = False, **attention: Any) -> Spec:
    """Two layers of width 16, one of them with four experts of which two are chosen."""
    each = Attention(4, 2, 6, position=Rotary(100.0), **attention)
    layers = (
        pre_norm(each, Gated("silu", 24), norm=RMSNorm()),
        pre_norm(each, Experts(4, 2, expert=Gated("silu", 8)), norm=RMSNorm()),
    )
    tokens = "tokens" if tied else None
    stack = Stack(Tokens(VOCAB, 16, shared=tokens), layers, RMSNorm())
    return Spec(decoder=stack, head=Language(VOCAB, shared=tokens))


EXPERT = 3 * 8 * 16  # numbers in one


@pytest.mark.parametrize(("streams", "experts"), [(1, 2), (2, 3), (3, 3.5)])
def test_of_weights_all_is_read_but_the_table_and_the_experts_nobody_chose(
    streams: int, experts: float
) -> None:
    """By lot, each of so many streams leaves half of the experts alone: 1 - 2 ** -streams are read."""
    for tied in (True, False):
        loaded = tiny(described=described(tied=tied)).loaded
        read = loaded.spec.parameters() - (4 - experts) * EXPERT - (0 if tied else VOCAB * 16)
        assert weight_bytes(loaded, streams) == pytest.approx(4 * read)
    assert stored_as(loaded) == "F32"


def test_a_token_needs_its_share_of_the_weights_and_its_own_cache() -> None:
    """Three streams read three and a half of four experts; 192 bytes for each of 12 tokens."""
    loaded = tiny(described=described(tied=True)).loaded
    row = measuring._Runs(loaded, 10, 4, 1, None)._row((1, 3), (sample(),))
    assert row.bytes_per_token == pytest.approx(4 * (loaded.spec.parameters() - EXPERT / 2) / 3 + 192 * 12)


def test_a_decoder_reads_no_encoder_and_makes_nothing_of_the_source_again() -> None:
    loaded = pair_of("bart").model.loaded
    network = loaded.model
    assert network.decoder is not None
    held = sum(parameter.numel() for parameter in network.decoder.parameters())  # its table is the head too
    cross = [layer for name, layer in network.decoder.named_modules() if name.endswith("cross")]
    made = [p for layer in cross for p in (*layer.key.parameters(), *layer.value.parameters())]  # type: ignore[union-attr, operator]
    looked_up = sum(
        parameter.numel()
        for name, parameter in network.decoder.named_parameters()
        if name.startswith("embedding.position")
    )
    found = weight_bytes(loaded, 1)
    assert len(cross) == len(loaded.spec.trunk.layers) and looked_up
    # a bias of the logits is the head's own
    own = sum(p.numel() for n, p in network.named_parameters() if n.startswith("head.") and "bias" in n)
    assert found == 4 * (held + own - looked_up - sum(p.numel() for p in made))


def test_the_cache_that_is_read_for_each_token_of_context() -> None:
    """Two layers, two heads of six, keys and values, in four bytes or two; a window of three, halfway."""
    loaded = tiny().loaded
    assert cache_bytes(loaded, 10, 4, 4) == (12, 2 * 2 * 6 * 2 * 4)
    assert cache_bytes(loaded, 10, 4, 2) == (12, 2 * 2 * 6 * 2 * 2)
    windowed = tiny(described=described(mask=Causal() & Window(3))).loaded
    assert cache_bytes(windowed, 10, 4, 4) == (12, 3 / 12 * 192)


def test_an_encoder_decoder_looks_back_at_its_own_tokens_and_at_the_source() -> None:
    loaded = pair_of("bart").model.loaded
    context, each = cache_bytes(loaded, 10, 4, 4)
    assert context == 3
    assert context * each == loaded.spec.cache_bytes(3, bytes_per_value=4, source=10)


# a run


def test_speeds_count_all_streams_and_leave_each_first_token_to_prefill() -> None:
    assert Timing(2.0, 0.5, [[1, 2, 3], [4, 5, 6]]).speeds(100) == (100.0, 8.0)
    assert Timing(1.0, 0.5, [[1, 2, 3], [4, 5]], early=1).speeds(1) == (2.0, 4.0)


def test_every_stream_has_its_greedy_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight tokens a step, the third prompt ends in the second: the first stream has gone on then.

    It ends two steps later, when all have made two more, and the others have one to go. Where two tokens
    are all, it has ended before, and the others' second ones are timed.
    """
    model = tiny()
    prompts = [[5, 9, 2, 100, 7], [3, 3, 8, 1, 60], [9, 1, 1, 4, 2]]
    found = timed(model.loaded, prompts, 4)
    assert found.early == 0 and found.prefill > 0 and found.decode > 0
    monkeypatch.setattr(scheduling, "CHUNK", 8)
    chunked = timed(model.loaded, prompts, 4)
    assert chunked.early == 1 + 2
    short = timed(model.loaded, prompts, 2)
    assert short.early == 1 and short.tokens == [tokens[:2] for tokens in found.tokens]
    assert found.tokens == chunked.tokens == [greedily(model, prompt, 4)[0] for prompt in prompts]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Runs that take no time: what was asked, and the threads and the memory that were measured."""
    seen: list[Any] = []

    def run(loaded: Any, prompts: list[list[int]], new: int) -> Timing:
        seen.append((torch.get_num_threads(), [tuple(prompt) for prompt in prompts], new))
        return Timing(0.5, 0.25, [[0] * new for _ in prompts])

    def read(threads: int) -> float:
        seen.append(threads)
        return 1e6 * threads

    monkeypatch.setattr(measuring, "timed", run)
    monkeypatch.setattr(measuring, "read_bandwidth", read)
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 4)
    yield seen


def test_rounds_are_interleaved_and_every_prompt_is_new(folder: Path, noted: list[Any]) -> None:
    before, told = torch.get_num_threads(), list[tuple[int, int]]()
    found = bench(folder, (1, 3), 70, 5, (1, 2), 2, "torch", lambda *counts: told.append(counts))
    warm, rest = noted[:4], noted[4:]
    assert [(threads, len(prompts), len(prompts[0]), new) for threads, prompts, new in warm] == [
        (1, 1, 64, 4), (1, 2, 64, 4), (3, 1, 64, 4), (3, 2, 64, 4),
    ]  # fmt: skip
    runs = rest[1::2]
    assert [(threads, len(prompts), new) for threads, prompts, new in runs] == [
        (1, 1, 5), (1, 2, 5), (3, 1, 5), (3, 2, 5), (1, 2, 5), (3, 1, 5), (3, 2, 5), (1, 1, 5),
    ]  # fmt: skip
    assert rest[0::2] == [threads for threads, _, _ in runs]  # the memory, before each with as many threads
    assert {len(prompt) for _, prompts, _ in runs for prompt in prompts} == {70}
    for count in (1, 2):
        taken = [p for threads, prompts, _ in runs for p in prompts if threads == 1 and len(prompts) == count]
        assert len(set(taken)) == 2 * count
    assert torch.get_num_threads() == before
    assert told == [(done, 8) for done in range(1, 9)]
    assert [(row.threads, row.streams) for row in found.rows] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    last = found.rows[-1]
    (first, _) = last.samples
    # two streams: 140 tokens in half a second, then four more of each in a quarter
    assert (first.prefill, first.decode, first.bandwidth) == (280, 32, 3e6)
    loaded = qkv.load(folder, runtime="torch").loaded
    needed = weight_bytes(loaded, 2) / 2 + loaded.spec.cache_bytes(72, bytes_per_value=4) * 72.5 / 72.5
    assert last.bytes_per_token == pytest.approx(needed)
    assert last.share == pytest.approx(32 * needed / 3e6)


@needs_native
def test_the_native_runtime_runs_on_the_threads_that_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = [], native.Native.run

    def counted(machine: native.Native, rows: Any) -> Any:
        seen.append(machine.threads)
        return step(machine, rows)

    monkeypatch.setattr(native.Native, "run", counted)
    monkeypatch.setattr(measuring, "read_bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 3)
    bench(folder, (3, 2), 5, 4, (1,), rounds=1, runtime="native")
    assert seen == [3] * 4 + [2] * 4 + [3] * 4 + [2] * 4  # each warm, and each in the round


RUNTIMES = ["torch", pytest.param("native", marks=needs_native)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_round_of_a_small_model_has_every_figure(folder: Path, runtime: str) -> None:
    done = run(
        folder, "--prompt", 12, "--new", 4, "--rounds", 1, "--runtime", runtime, "--threads", 1, "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["source"], found["stored"], found["runtime"]) == (folder.name, "F32", runtime)
    assert (found["prompt"], found["new"], found["notes"]) == (12, 4, [])
    assert [(row["threads"], row["streams"]) for row in found["rows"]] == [(1, 1), (1, 8)]
    for row in found["rows"]:
        (one,) = row["samples"]
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "bandwidth_bytes_per_second"):
            assert row[name] == dict.fromkeys(("median", "least", "greatest"), one[name]) and one[name] > 0
        assert row["bytes_per_token"] > 0 and row["share_of_limit"] == one["share_of_limit"] > 0
        assert one["counted"] is True and 0 <= (one["share_of_others"] or 0) <= 1
    assert found["load_seconds"] > 0 and found["peak_memory_bytes"] > 1e7
    assert found["machine"]["cores"] >= 1 and found["machine"]["processor"]


def test_where_there_is_no_native_runtime_numpy_reads_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (machine, measuring):
        monkeypatch.setattr(module, "missing", lambda: "it was not built")
    monkeypatch.setattr(machine, "LARGE", 1 << 21)
    seen, total = [], np.sum
    monkeypatch.setattr(machine.np, "sum", lambda part: seen.append(len(part)) or total(part))
    found = bench(folder, (2,), 5, 3, (1,), rounds=1, runtime="torch")
    assert seen == [1 << 17] * 2 * machine.PASSES  # two threads, half of it each
    assert found.rows[0].samples[0].bandwidth > 0
    assert found.notes[0].endswith("as there is no native runtime: it was not built.")


@needs_native
def test_the_native_runtime_reads_memory() -> None:
    assert all(1e8 < read_bandwidth(threads) < 1e13 for threads in (1, 2))
    with pytest.raises(ValueError, match="at least one thread"):
        read_bandwidth(0)


def test_memory_that_was_given_back_is_forgotten() -> None:
    """In a process of its own: what other tests hold here may be all there is to see."""
    code = """
import numpy as np
from qkv.memory import forget_peak, peak_memory
if forget_peak():
    held = np.ones(256 << 20, np.uint8)
    del held
    most = peak_memory()
    assert forget_peak() and most - peak_memory() > 200e6
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_system_without_counters_says_nothing_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, noted: list[Any]
) -> None:
    def absent(process: int | None = None) -> Moment:
        raise FileNotFoundError

    monkeypatch.setattr(measuring.Moment, "now", absent)
    monkeypatch.setattr(measuring, "forget_peak", lambda: False)
    found = bench(folder, (1,), 5, 3, (1,), rounds=1, runtime="torch")
    assert found.rows[0].samples[0].others is None
    assert "512 MiB" in found.notes[-1] and str(found).splitlines()[4].endswith("     -")
    assert found.data()["rows"][0]["samples"][0]["quiet"] is None


# what is refused

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 0}, "prompt is 0; it must be a whole number of at least 1."),
    ({"new": 1}, "new is 1; it must be a whole number of at least 2."),
    ({"rounds": 0}, "rounds is 0; it must be a whole number of at least 1."),
    ({"threads": (1, 0)}, "threads is 0; it must be a whole number from 1 to 4."),
    ({"threads": (10_000,)}, "threads is 10000; it must be a whole number from 1 to 4."),
    ({"streams": (0,)}, "streams is 0; it must be a whole number from 1 to 256."),
    ({"streams": (257,)}, "streams is 257; it must be a whole number from 1 to 256."),
    ({"streams": ()}, "streams is 0; it must be"),
    ({"prompt": 500, "new": 13}, "needs 513 tokens (500 of prompt, 13 new) and the context holds 512"),
    ({"runtime": "numpy", "threads": (1,)}, "takes its threads from OMP_NUM_THREADS: leave threads out."),
    ({"runtime": "fast"}, "runtime is 'fast'; it must be native, torch or numpy."),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_wrong_requests_are_refused_before_anything_runs(
    folder: Path, noted: list[Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        bench(folder, **given)
    assert said in str(caught.value) and noted == []


def test_what_generates_no_text_and_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not continue text, and only models that do can be"):
        bench(pair_of("bert-masked").folder)
    with pytest.raises(QkvError):
        bench(tmp_path / "missing")


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, two heads of six, keys and values in fp32: 192 bytes a token, in whole blocks of 16."""
    monkeypatch.setattr("qkv.loading.room.free_memory", lambda device: 64 * 192 * 64 - 1)
    with pytest.raises(CapacityError) as caught:
        measuring._Runs(qkv.load(folder, runtime="torch").loaded, 50, 14, 1, None)._check(64)
    assert str(caught.value) == (
        f"{folder.name} needs 0.8 MB of memory for the cache of 64 streams, 50 tokens and 14 new ones each, "
        "and 0.8 MB is free: ask for less, or choose a smaller model."
    )
    measuring._Runs(qkv.load(folder, runtime="torch").loaded, 50, 14, 1, None)._check(63)


# what is shown


@pytest.fixture
def fixed() -> Bench:
    """Five rounds, of which two were disturbed; and three, of which one was."""
    speeds, shares = (180, 20, 182, 30, 184), (0.0, 0.2, 0.01, 0.06, 0.05)
    one = [
        sample(speed, others, 36e9, 1000.0 + i)
        for i, (speed, others) in enumerate(zip(speeds, shares, strict=True))
    ]
    two = [sample(1200 + 50 * i, others, 40e9, 2000.0) for i, others in enumerate((0.0, 0.0, 0.5))]
    rows = (Row(1, 1, 120e6, tuple(one)), Row(2, 8, 26.04e6, tuple(two)))
    machine = {
        "processor": "Zen 4",
        "cores": 2,
        "instructions": ["avx2"],
        "system": "Linux 6",
        "python": "3.11",
    }
    return Bench("m.gguf", "mostly Q4_1", "native", machine, 512, 128, rows, 0.254, 412_300_000, ("A note.",))


TABLE = """\
m.gguf (mostly Q4_1), run by native on Zen 4, 2 cores
prompts of 512 tokens, 128 new ones in each stream; medians of 5 rounds, with the least and the greatest

threads  streams    prefill, tokens/s   decode, tokens/s      memory, GB/s  MB a token  of the limit   quiet
      1        1  1,002 (1,000-1,004)      182 (180-184)  36.0 (36.0-36.0)       120.0          61 %  3 of 5
      2        8  2,000 (2,000-2,000)  1,250 (1,200-1,300)  40.0 (40.0-40.0)        26.0          81 %  2 of 3

Loaded in 0.25 s; 0.41 GB of memory at most.
Of the limit: the bytes a second that decoding takes, of those that the memory gave in that round.
Others took more than 5 % of the cores in these rounds:
  1 thread, 1 stream: 2, 4 (left out)
  2 threads, 8 streams: 3 (counted, as fewer than three were quiet)
A note."""


def test_the_table(fixed: Bench) -> None:
    assert str(fixed) == TABLE


def test_the_data(fixed: Bench) -> None:
    found = json.loads(json.dumps(fixed.data(), allow_nan=False))
    first, second = found.pop("rows")
    assert found == {
        "source": "m.gguf",
        "stored": "mostly Q4_1",
        "runtime": "native",
        "machine": dict(fixed.machine),
        "prompt": 512,
        "new": 128,
        "load_seconds": 0.254,
        "peak_memory_bytes": 412_300_000,
        "notes": ["A note."],
    }
    assert first["decode_tokens_per_second"] == {"median": 182, "least": 180, "greatest": 184}
    assert first["share_of_limit"] == pytest.approx(182 * 120e6 / 36e9)
    assert [one["counted"] for one in first["samples"]] == [True, False, True, False, True]
    assert first["samples"][1] == {
        "prefill_tokens_per_second": 1001,
        "decode_tokens_per_second": 20,
        "bandwidth_bytes_per_second": 36e9,
        "share_of_limit": pytest.approx(20 * 120e6 / 36e9),
        "share_of_others": 0.2,
        "quiet": False,
        "counted": False,
    }
    assert (second["threads"], second["streams"], second["bytes_per_token"]) == (2, 8, 26.04e6)
    assert second["prefill_tokens_per_second"]["median"] == 2000
    assert second["bandwidth_bytes_per_second"]["greatest"] == 40e9
    assert second["decode_tokens_per_second"]["median"] == 1250
    assert [one["counted"] for one in second["samples"]] == [True] * 3


# the command


def test_the_command_prints_the_table(folder: Path, fixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("qkv.benching.bench", lambda *source, **given: asked.update(given) or fixed)
    done = run(folder)
    assert (done.exit_code, done.output) == (0, TABLE + "\n")
    asked.pop("progress")
    assert asked == {
        "threads": (), "prompt": 512, "new": 128, "streams": (1, 8), "rounds": 5, "runtime": None,
    }  # fmt: skip
    assert json.loads(run(folder, "--threads", "2,1", "--streams", 4, "--json").output) == fixed.data()
    assert (asked["threads"], asked["streams"]) == ((2, 1), (4,))


def test_lists_are_numbers_with_commas(folder: Path) -> None:
    done = run(folder, "--threads", "1,x")
    assert done.exit_code == 2 and "'1,x' is not of the form 1,2." in done.output


def test_peers_are_compared_by_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--peers")
    assert done.exit_code == 0 and done.output == peers() + "\n"
    repository = Path(__file__).resolve().parents[1]
    assert f"Run `make bench` in {repository}" in peers()
    assert json.loads(run("--peers", "--json").output) == {"peers": peers()}
    monkeypatch.setattr(qkv, "__file__", str(tmp_path / "src" / "qkv" / "__init__.py"))
    assert peers().startswith("The comparison with llama.cpp") and "comes with qkv's repository" in peers()


def test_help_shows_every_option_and_examples() -> None:
    done = run("--help")
    for part in (
        "--threads", "--prompt", "--new", "--streams", "--rounds", "--runtime", "--peers", "--json",
        "Examples:", "qkv bench model.gguf --prompt 2048",
    ):  # fmt: skip
        assert part in done.output
