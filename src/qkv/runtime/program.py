"""A description lowered: a flat list of operations over rows, for the machine that runs them all in one call.

A row is one token of one sequence. Buffers are (rows, width) in fp32; an operation reads and writes
spans of their columns, and names parameters as the description does. One program serves decode,
batched decode and pieces of prompts: they differ in their rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from qkv.spec.feed_forward import Activation, Router


def weight(default: Any = MISSING) -> Any:
    """A field that names one parameter, or several."""
    return field(default=default, metadata={"weight": True})


@dataclass(frozen=True, slots=True)
class Span:
    """Columns of a buffer."""

    buffer: str
    start: int
    width: int

    def part(self, start: int, width: int) -> Span:
        return Span(self.buffer, self.start + start, width)

    def holds(self, other: Span) -> bool:
        return self.buffer == other.buffer and self.around(other) == self

    def around(self, other: Span) -> Span:
        """The least that holds both, of one buffer."""
        start = min(self.start, other.start)
        return Span(self.buffer, start, max(self.start + self.width, other.start + other.width) - start)

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.start + self.width}]"


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a program. Its text names what it writes first."""

    changes: ClassVar[bool] = False  # whether what is in `out` counts; so it does with `add`

    @property
    def spans(self) -> dict[str, Span]:
        """The fields that are columns of buffers."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in given.items() if isinstance(value, Span)}

    @property
    def reads(self) -> list[Span]:
        """The columns that it depends on."""
        out = self.changes or getattr(self, "add", False)
        return [span for name, span in self.spans.items() if out or name != "out"]

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters it reads."""
        found: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("weight"):
                found += [name for name in (value if isinstance(value, tuple) else (value,)) if name]
        return tuple(found)

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        parts = [f"{name}={_shown(value)}" for name, value, usual in given[1:] if value != usual]
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("_")
        return f"{_shown(given[0][1])} <- {name}({', '.join(parts)})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 4 and not isinstance(value[0], str | Span):
        return f"({value[0]:.4g}, ..., {value[-1]:.4g})"
    if isinstance(value, tuple):
        return "+".join(str(item) for item in value if item is not None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class TakeRows(Operation):
    """out = scale * table[token] (or position + offset, or type); added to out with `add`."""

    out: Span
    table: str = weight()
    by: Literal["token", "position", "type"] = "token"
    scale: float = 1.0
    offset: int = 0
    add: bool = False


@dataclass(frozen=True, slots=True)
class Sinusoids(Operation):
    """Sines and cosines of position * base^(-2i / width) are added to out, in turn or in halves."""

    changes = True
    out: Span
    base: float
    layout: Literal["interleaved", "halves"] = "interleaved"


@dataclass(frozen=True, slots=True)
class Pick(Operation):
    """Each out = the rows of its x whose answer is wanted; the operations after it work on these alone.

    None after it is a rotation.
    """

    out: tuple[Span, ...]
    x: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """out = x normalised in `groups` equal parts: by root mean square, or mean and variance."""

    out: Span
    x: Span
    kind: Literal["rms", "layer"]
    eps: float
    scale: str | None = weight(None)
    bias: str | None = weight(None)
    offset: float = 0.0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """out = x times each matrix in turn, side by side; with `add`, out + scale times that.

    With `gate`, there are two matrices and out = gate(x first) * (x second).
    """

    out: Span
    x: Span
    matrices: tuple[str, ...] = weight()
    biases: tuple[str | None, ...] = weight(())
    add: bool = False
    scale: float = 1.0
    gate: Activation | None = None


@dataclass(frozen=True, slots=True)
class Clamp(Operation):
    """out bounded to [-bound, bound]."""

    changes = True
    out: Span
    bound: float


@dataclass(frozen=True, slots=True)
class Rotate(Operation):
    """out = x (None: out), the leading pairs of each of `heads` parts turned by position * frequency.

    Positions above `most` count as it.
    """

    changes = True
    out: Span
    heads: int
    frequencies: tuple[float, ...]
    factor: float = 1.0
    pairs: Literal["half", "interleaved"] = "half"
    x: Span | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """A slot of the cache receives the rows' keys and values."""

    slot: str
    key: Span
    value: Span


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys a query sees: `before` up to its own (None: all), `after` past it (None: all), its chunk.

    With `first`, those too: see `qkv.spec.Streaming`, whose window is `before`.
    """

    before: int | None = None
    after: int | None = None
    chunk: int | None = None
    first: int = 0

    def __str__(self) -> str:
        first = f"{self.first}+" if self.first else ""
        return "everything" if self == Sight() else f"{first}{self.before}:{self.after}:{self.chunk}"


@dataclass(frozen=True, slots=True)
class Attend(Operation):
    """out = softmax(scale * q k^T, capped, biased, over what is seen, with sinks) v, from a slot.

    `slopes`: minus one for each head times the distance is added. `buckets` is a table (buckets,
    heads); distances from starts[i] on fall in bucket i; with `both`, later keys have the second
    half of the table. Where a gap parts the first keys of the sight from its window, they meet `far`
    (None: the query), and distances to them are counted from its place.
    """

    out: Span
    query: Span
    slot: str
    heads: int
    kv_heads: int
    scale: float
    sight: Sight
    cap: float | None = None
    sink: str | None = weight(None)
    slopes: tuple[float, ...] | None = None
    buckets: str | None = weight(None)
    starts: tuple[int, ...] = ()
    both: bool = False
    far: Span | None = None


@dataclass(frozen=True, slots=True)
class Activate(Operation):
    """out = activation(out)."""

    changes = True
    out: Span
    activation: Activation


@dataclass(frozen=True, slots=True)
class Multiply(Operation):
    """out = out * x, whose one column multiplies all of out's where it has one."""

    changes = True
    out: Span
    x: Span


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """out = skip * out + scale * x."""

    changes = True
    out: Span
    x: Span
    scale: float = 1.0
    skip: float = 1.0


@dataclass(frozen=True, slots=True)
class ScaleCap(Operation):
    """out = scale * out, then cap * tanh(out / cap)."""

    changes = True
    out: Span
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """picks = the `top_k` experts of each row and what they weigh, as the router describes."""

    picks: str
    x: Span
    router: Router
    top_k: int
    matrix: str = weight()
    bias: str | None = weight(None)
    balance: str | None = weight(None)


@dataclass(frozen=True, slots=True)
class ExpertLinear(Operation):
    """out, (rows * top_k), = each row (or each pick of x) times the matrices of the experts it goes to."""

    out: Span
    x: Span
    picks: str
    matrices: tuple[str, ...] = weight()
    biases: tuple[str | None, ...] = weight(())
    gate: Activation | None = None
    from_picks: bool = False


@dataclass(frozen=True, slots=True)
class Combine(Operation):
    """out = the sum of the picks' rows of x by their weights; added to out with `add`."""

    out: Span
    x: Span
    picks: str
    add: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Slot:
    """What the cache keeps of a token for one attention."""

    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Program:
    """Operations in order; `output` holds the answer; buffers by name and width; slots of the cache."""

    operations: tuple[Operation, ...]
    output: Span
    buffers: dict[str, int]
    slots: dict[str, Slot]

    @property
    def weights(self) -> tuple[str, ...]:
        """Every parameter it reads, once, in order."""
        return tuple(dict.fromkeys(name for op in self.operations for name in op.weights))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "buffers " + ", ".join(f"{name} {width:,}" for name, width in self.buffers.items())
        for slot, size in self.slots.items():
            yield f"slot {slot}: {size.kv_heads} x ({size.head_dim} + {size.value_dim})"
        yield from map(str, self.operations)
        yield f"answer {self.output}"
