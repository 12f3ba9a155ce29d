"""What a step takes while it runs, and what the program itself takes."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.planning.sizes import Part
from qkv.spec import Language, Model
from qkv.spec.attention import Attention, CrossAttention, LatentAttention
from qkv.spec.feed_forward import Experts
from qkv.spec.heads import MultiToken
from qkv.spec.layers import Mixer

ROWS = 512  # tokens that a step computes at most
FRAMEWORK = 48_000_000  # Python, numpy and this library, before a model
PER_TOKEN_ID = 680  # bytes of a tokenizer for each entry of its vocabulary
HUGE_PAGES = 0.031  # of the weights: what is left empty of the pages and chunks that they lie in
SPLITS, QUERIES = 1024, 8  # parts of attention that are held at once, of so many queries
ON_A_DEVICE = 600_000_000  # what a driver and its libraries keep on an accelerator


@dataclass(frozen=True)
class Widths:
    """How many numbers a row has at once while it passes through a layer, at most."""

    stream: int
    projected: int
    hidden: int
    value: int  # of one head

    @property
    def all(self) -> int:
        # the stream, it normalised, a branch's sum; queries, keys and values; what is mixed; the hidden ones
        return 3 * self.stream + 2 * self.projected + self.hidden


def widths(model: Model) -> Widths:
    stack = model.trunk
    mixers = list(stack.mixers())
    projected = max((_projected(mixer) for mixer in mixers), default=0)
    hidden = max((_hidden(mixer, stack.width) for mixer in mixers), default=0)
    value = max((_value(mixer) for mixer in mixers), default=0)
    return Widths(stack.width, projected, hidden, value)


def _projected(mixer: Mixer) -> int:
    if isinstance(mixer, Attention | CrossAttention):
        each = mixer.head_dim + (mixer.value_dim or mixer.head_dim)
        return mixer.heads * mixer.head_dim + mixer.kv_heads * each
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (mixer.head_dim + mixer.rotary_dim + mixer.value_dim)
    return 0


def _value(mixer: Mixer) -> int:
    if isinstance(mixer, Attention | CrossAttention | LatentAttention):
        return mixer.value_dim or mixer.head_dim
    return 0


def _hidden(mixer: Mixer, width: int) -> int:
    if isinstance(mixer, Experts):
        return mixer.top_k * (mixer.expert.hidden + width)
    return getattr(mixer, "hidden", 0)


def vocabulary(model: Model) -> int:
    head = model.head.next if isinstance(model.head, MultiToken) else model.head
    return head.vocab if isinstance(head, Language) else 0


def workspace(model: Model, concurrency: int, context: int, value: int = 4) -> Part:
    """Activations of a step and the logits of its answers. `value` are bytes of a number: 4 in fp32.

    Attention by blocks holds no scores.
    """
    rows = min(max(ROWS, concurrency), max(concurrency, 1) * context)
    size, vocab = widths(model), vocabulary(model)
    # what products read is kept beside, in a byte or two a number
    total = rows * (value * size.all + 2 * max(size.stream, size.projected, size.hidden))
    total += 4 * concurrency * vocab + 4 * SPLITS * QUERIES * (size.value + 2)
    formula = f"{rows:,} rows x {size.all:,} numbers, and {concurrency:,} x {vocab:,} logits"
    return Part("activations and workspace", total, formula, band=0.3)


def framework(model: Model, weights: int, device: str | None = None) -> Part:
    """The program, with a tokenizer of the model's vocabulary; or what stays taken on an accelerator."""
    if device is not None:
        return Part("framework", ON_A_DEVICE, f"driver and libraries on {device}", band=0.5)
    vocab = vocabulary(model)
    pages = round(HUGE_PAGES * weights)
    formula = (
        f"{FRAMEWORK / 1e6:.0f} MB of Python and numpy, a tokenizer of {vocab:,} entries, "
        f"and {pages / 1e6:,.1f} MB of pages that are not full"
    )
    return Part("framework", FRAMEWORK + PER_TOKEN_ID * vocab + pages, formula, band=0.15)
