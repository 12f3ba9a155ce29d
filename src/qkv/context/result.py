"""A measured context: its verdict, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from qkv.context.order import TUNED, UNTUNED, pairs, verdict
from qkv.context.search import Searched
from qkv.context.tasks import SPAN, Bucket, Copied, Found, Given

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
WORSE = 0.05  # nats a token that more context may cost
FOUND = 0.8  # of the share of pass keys that came back from shorter texts
COPIED = 0.5  # of the first time's loss


@dataclass(frozen=True)
class Extended:
    """A method, in words what it did, and the loss with it by position of one text.

    `later` are mean losses of the stretches past the original length. What `stands_in` is not what the
    method's paper does; `searched` is how LongRoPE's divisors were found.
    """

    kind: str
    factor: float
    buckets: tuple[Bucket, ...] = ()
    later: tuple[float, ...] = ()
    words: str = ""
    stands_in: bool = False
    searched: Searched | None = None

    def measured(self, buckets: Sequence[Bucket], later: Sequence[float]) -> Extended:
        return replace(self, buckets=tuple(buckets), later=tuple(later))

    @property
    def beyond(self) -> float:
        """The mean loss past the original length."""
        return fmean(self.later)


@dataclass(frozen=True)
class Context:
    """What was measured of one model. Lengths in tokens, losses in nats a token."""

    name: str
    advertised: int
    read: int  # the longest text that was read
    given: tuple[Given, ...]
    found: tuple[Found, ...]
    copied: tuple[Copied, ...]
    extensions: tuple[Extended, ...] = ()
    about: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def by_loss(self) -> int:
        """The most context that costs the same tokens no more than 0.05 nats over the best with less."""
        best, end = float("inf"), 0
        for one in self.given:
            if one.loss > best + WORSE:
                break
            best, end = min(best, one.loss), one.context
        return end

    @property
    def by_retrieval(self) -> int:
        """The longest text from which keys came back at 80 % of the rate of all shorter ones, or better."""
        before, end = list[float](), 0
        for length, share in self.shares.items():
            if not share or (before and share < FOUND * fmean(before)):
                break
            before.append(share)
            end = length
        return end

    @property
    def shares(self) -> dict[int, float]:
        """Of each length: which share of the pass keys came back."""
        lengths = sorted({one.length for one in self.found})
        return {
            length: sum(f.right for f in self.found if f.length == length)
            / sum(f.asked for f in self.found if f.length == length)
            for length in lengths
        }

    @property
    def by_copying(self) -> int:
        """The furthest that tokens are copied from with at most half of their first loss."""
        end = 0
        for one in self.copied:
            if one.again > COPIED * one.first:
                break
            end = one.distance
        return end

    @property
    def usable(self) -> int:
        """The least of the three."""
        return min(self.by_loss, self.by_retrieval, self.by_copying)

    def order(self) -> list[tuple[str, float]]:
        """The extensions, and none, by their loss past the advertised length: the best first."""
        found = [(one.kind, one.beyond) for one in self.extensions]
        return sorted(found, key=lambda each: each[1])

    @property
    def ranked(self) -> dict[str, tuple[float, ...]]:
        """The losses of what can be set beside the papers: of all methods but stand-ins."""
        return {one.kind: one.later for one in self.extensions if not one.stands_in}

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            **asdict(self),
            "usable": self.usable,
            "by_loss": self.by_loss,
            "by_retrieval": self.by_retrieval,
            "by_copying": self.by_copying,
            "order": [{"kind": kind, "loss": loss} for kind, loss in self.order()],
            "papers": {"untuned": UNTUNED.ranks, "tuned": TUNED.ranks},
            "pairs": [pair.data() for pair in pairs(self.ranked)],
        }

    def __str__(self) -> str:
        return "\n".join(lines(self))


def lines(found: Context) -> Iterator[str]:
    yield f"{found.name}: advertised {found.advertised:,} tokens, usable {found.usable:,}"
    yield f"  by loss on {found.about}: {found.by_loss:,}"
    yield f"  by pass keys that came back: {found.by_retrieval:,}"
    yield f"  by copying: {found.by_copying:,}"
    yield ""
    yield f"Loss of the same {SPAN} tokens, with so many read:"
    yield f"{'tokens':>9}{'nats':>8}   gain"
    for one in found.given:
        error = "" if one.error is None else f" +- {one.error:.3f}"
        yield f"{one.context:>9,}{one.loss:>8.3f}{one.gain:>8.3f}{error}"
    yield ""
    yield "Pass keys that came back, by length and depth of the text:"
    yield f"{'tokens':>9}" + "".join(f"{depth:>6.0%}" for depth in DEPTHS) + f"{'all':>6}"
    for length, share in found.shares.items():
        row = {f.depth: f"{f.right}/{f.asked}" for f in found.found if f.length == length}
        yield f"{length:>9,}" + "".join(f"{row.get(depth, ''):>6}" for depth in DEPTHS) + f"{share:>6.0%}"
    yield ""
    yield "Copying tokens that stood so many tokens before:"
    for copied in found.copied:
        yield f"{copied.distance:>9,}  {copied.again:.3f} nats, the first time {copied.first:.3f}"
    if found.extensions:
        yield ""
        yield from extended_lines(found)


def extended_lines(found: Context) -> Iterator[str]:
    """The extensions in their order, and that order beside the papers'."""
    longest = found.extensions[0].buckets[-1].end + 1
    factor = found.extensions[0].factor
    yield f"Without training, slowed {factor:g} times: loss past {found.advertised:,} of {longest:,} tokens:"
    for one in sorted(found.extensions, key=lambda each: each.beyond):
        yield f"{one.kind:>10}  {one.beyond:.3f} nats  {one.words}"
    yield ""
    yield from verdict(found.ranked)
    for one in found.extensions:
        if one.stands_in:
            yield (
                f"{one.kind} is a stand-in here and not set beside the papers: with --search its "
                "divisors are looked for on the text."
            )
