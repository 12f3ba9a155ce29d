"""What the commands say beside their output: notes, progress, and answers with what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from qkv.errors import TokenizerError
from qkv.memory import peak_memory

if TYPE_CHECKING:
    from rich.console import Console

    from qkv.engine import Completion
    from qkv.engine.files import Output, Run
    from qkv.model import Model


@cache
def notes() -> Console:
    """Standard error. Made when first written to: most commands never do."""
    from rich.console import Console

    # no markup: what is shown may hold a user's or a file's [brackets]
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class Progress(Protocol):
    """Is told how much is done, of how much where that is known, and what to show beside."""

    def __call__(self, done: int, total: int | None, beside: str = "") -> None: ...


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A line on a terminal that counts, once two seconds have passed, and is gone at the end."""
    started, status = time.perf_counter(), notes().status("")

    def report(done: int, total: int | None, beside: str = "") -> None:
        if time.perf_counter() - started > 2 and notes().is_terminal:
            status.start()
            status.update(f"{what}: {done:,}{'' if total is None else f' of {total:,}'}{beside}")

    try:
        yield report
    finally:
        status.stop()


def report(model: Model, done: list[Completion], load_seconds: float) -> dict[str, Any]:
    """What there is to know, of one answer at the top, of several in a list."""
    from qkv.engine.files import answer

    each = [answer(completion) for completion in done]
    return {
        **(each[0] if len(each) == 1 else {"answers": each}),
        "prompt_tokens": len(done[0].prompt),
        "load_seconds": load_seconds,
        "prefill_tokens_per_second": done[0].prefill_speed,
        "decode_tokens_per_second": sum(completion.decode_speed for completion in done),
        "peak_memory_bytes": peak_memory(),
        "parameters": model.spec.parameters(),
        "runtime": model.runtime,
    }


def ending(done: Completion) -> str:
    score = "" if done.score is None else f", score {done.score:.4f}"
    return f"{done.error or done.finish_reason}{score}"


def show_logprobs(model: Model, done: Completion) -> None:
    """A line for each token: its log-probability, its text, and the likeliest ones."""
    for place, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
        likeliest = done.top_logprobs[place] if done.top_logprobs else []
        beside = ", ".join(f"{_spelled(model, other)} {value:.3f}" for other, value in likeliest)
        notes().print(f"{logprob:9.3f}  {_spelled(model, token)}" + (f"  of {beside}" if beside else ""))


def _spelled(model: Model, token: int) -> str:
    try:
        return repr(model.tokenizer.decode([token], skip_special=False) if model.tokenizer else token)
    except TokenizerError:  # the model has more ids than its tokenizer has texts
        return str(token)


def show_speed(answers: list[Completion], load_seconds: float) -> None:
    done = answers[0]
    count = sum(len(completion.tokens) for completion in answers)
    ended = f" | ended by {ending(done)}" if len(answers) == 1 else ""
    notes().print(
        f"loaded in {load_seconds:.1f} s"
        f" | prompt {len(done.prompt):,} tokens at {done.prefill_speed:,.0f}/s"
        f" | text {count:,} tokens at {sum(each.decode_speed for each in answers):,.1f}/s"
        f"{_most_memory()}{ended}",
        style="dim",
    )


def show_run(run: Run, output: Output, load_seconds: float, seconds: float) -> None:
    """What a run over a file's lines made, and what of them failed."""
    kept = f", {output.kept:,} of them before" if output.kept else ""
    notes().print(
        f"loaded in {load_seconds:.1f} s | {output.lines:,} line{'s' * (output.lines != 1)}{kept}"
        f" | prompts {run.read:,} tokens | text {run.tokens:,} tokens at {run.tokens / seconds:,.1f}/s"
        f"{_most_memory()}",
        style="dim",
    )
    if output.failed:
        notes().print(f"{output.failed:,} of {output.lines:,} lines failed; {output.problem}")


def _most_memory() -> str:
    peak = peak_memory()
    return "" if peak is None else f" | {peak / 1e9:.2f} GB at most"
