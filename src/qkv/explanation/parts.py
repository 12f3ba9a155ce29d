"""The parts of a model that can be taken out, patched or asked for their share, by point and place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Label, numbered
from qkv.spec.layers import Mixer

Grouped = dict[tuple[int, ...], tuple["Part", ...]]
ATTENTIONS = (spec.Attention, spec.CrossAttention, spec.LatentAttention)


@dataclass(frozen=True)
class Part:
    """A part of what one point holds: `where` indexes one row's value, so without the batch axis.

    Head 2 of `layers.3.attention.heads` (length, heads, dim) is `(slice(None), 2)`; () is all of it.
    """

    point: str
    where: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class Parts:
    """Parts by their place on axes: each place has one part or several that go together."""

    what: str
    axes: tuple[Axis, ...]
    parts: Mapping[tuple[int, ...], tuple[Part, ...]]


class Site(NamedTuple):
    """Where a mixer stands: its side, layer and name, and the beginning of its points."""

    side: int
    layer: int
    name: str
    mixer: Mixer
    label: Label

    def point(self, reading: Reading, name: str) -> str:
        return f"{reading.sides[self.side].prefix}layers.{self.layer}.{self.name}.{name}"


def every_mixer(reading: Reading) -> Iterator[Site]:
    """All mixers, in the order of the computation.

    The label is the layer's number, with its side before it where there are two, and the mixer's name
    behind where the layer has several of a kind.
    """
    for number, side in enumerate(reading.sides):
        for layer, node in enumerate(side.node.layers):
            for name, mixer in node.mixers():
                label = f"{side.prefix}{layer}" + (f".{name}" if name != mixer.role else "")
                yield Site(number, layer, name, mixer, int(label) if label.isdigit() else label)


def sites(reading: Reading, role: str, side: int | None = None) -> list[Site]:
    """The mixers of a role: attention, cross, feed_forward, mixer. Raises UnsupportedError for none."""
    found = [
        site
        for site in every_mixer(reading)
        if site.mixer.role == role and (side is None or site.side == side % len(reading.sides))
    ]
    if not found:
        raise UnsupportedError(f"This model has no {role.replace('_', '-')} to look at here.")
    return found


def heads(reading: Reading, role: str = "attention", side: int | None = None) -> Parts:
    """Each head's mixed values at all tokens, as the last map of its attention reads them.

    Axes (layer, head). `role` is "attention", "cross", or "mixer" (recurrent ones).
    """
    return _heads_of(reading, sites(reading, role, side))


def every_head(reading: Reading, side: int | None = None) -> Parts:
    """The heads of every attention, those that read another side included. Axes (layer, head).

    A layer that also reads another side has a second place on the axis: "decoder.3 cross".
    """
    found = [
        site._replace(label=f"{site.label} cross") if site.mixer.role == "cross" else site
        for site in every_mixer(reading)
        if site.mixer.role in ("attention", "cross")
        and side in (None, site.side, site.side - len(reading.sides))
    ]
    if not found:
        raise UnsupportedError("This model has no attention to look at here.")
    return _heads_of(reading, found)


def _heads_of(reading: Reading, found: Sequence[Site]) -> Parts:
    counts = [_heads(site.mixer) for site in found]
    parts: Grouped = {
        (row, head): (Part(site.point(reading, "heads"), (slice(None), head)),)
        for row, site in enumerate(found)
        for head in range(counts[row])
    }
    return Parts("heads", (_layers(found), numbered("head", max(counts))), parts)


def projected(
    reading: Reading,
    which: Literal["query", "key", "value"],
    role: str = "attention",
    side: int | None = None,
) -> Parts:
    """Each head's queries, keys or values at all tokens. Axes (layer, head).

    Keys and values have as many heads as are kept: where several query heads share them, a part
    touches just these, query heads h with h // (heads / kv_heads) its own number.
    """
    if which not in ("query", "key", "value"):
        raise RequestError(f"A head has a query, a key and a value, and no {which!r}.")
    found = [site for site in sites(reading, role, side) if isinstance(site.mixer, ATTENTIONS)]
    if not found:
        raise UnsupportedError("Recurrent mixers have no points for queries, keys and values.")
    counts = [_heads(site.mixer) if which == "query" else _kv_heads(site.mixer) for site in found]
    parts: Grouped = {
        (row, head): (Part(site.point(reading, which), (head,)),)
        for row, site in enumerate(found)
        for head in range(counts[row])
    }
    name = "head" if which == "query" else "kv head"
    return Parts(f"{which} heads", (_layers(found), numbered(name, max(counts))), parts)


def sublayers(reading: Reading, side: int | None = None) -> Parts:
    """What each mixer adds to the stream, at all tokens. Axes (layer, sublayer); no such mixer: NaN."""
    found = [s for s in every_mixer(reading) if side is None or s.side == side % len(reading.sides)]
    layers = list(dict.fromkeys((s.side, s.layer) for s in found))
    names = tuple(dict.fromkeys(s.name for s in found))
    parts: Grouped = {
        (layers.index((s.side, s.layer)), names.index(s.name)): (Part(s.point(reading, "output")),)
        for s in found
    }
    labels = tuple(_layer_label(reading, *layer) for layer in layers)
    return Parts("sublayers", (Axis("layer", labels), Axis("sublayer", names)), parts)


def feed_forwards(reading: Reading, side: int | None = None) -> Parts:
    """What each feed-forward adds, at all tokens. Axis (layer)."""
    found = sites(reading, "feed_forward", side)
    parts: Grouped = {(row,): (Part(site.point(reading, "output")),) for row, site in enumerate(found)}
    return Parts("feed-forwards", (_layers(found),), parts)


def layers(reading: Reading, side: int | None = None) -> Parts:
    """All that each layer adds, at all tokens. Axis (layer)."""
    each = sublayers(reading, side)
    parts: Grouped = {}
    for (layer, _), added in each.parts.items():
        parts[layer,] = parts.get((layer,), ()) + added
    return Parts("layers", each.axes[:1], parts)


def positions(reading: Reading, role: str, side: int = -1) -> Parts:
    """What each mixer of a role adds at each token. Axes (layer, token)."""
    found = sites(reading, role, side)
    tokens = reading.tokens_axis(side)
    parts: Grouped = {
        (row, place): (Part(site.point(reading, "output"), (place,)),)
        for row, site in enumerate(found)
        for place in range(len(tokens.labels))
    }
    return Parts(f"{role.replace('_', '-')} at a token", (_layers(found), tokens), parts)


def stream(reading: Reading, side: int = -1) -> Parts:
    """The stream behind each layer, at each token. Axes (layer, token). Meng et al. 2022, section 2."""
    one, tokens = reading.sides[side], reading.tokens_axis(side)
    parts: Grouped = {
        (layer, place): (Part(f"{one.prefix}layers.{layer}.output", (place,)),)
        for layer in range(one.depth)
        for place in range(len(tokens.labels))
    }
    return Parts("stream", (numbered("layer", one.depth), tokens), parts)


def tokens(reading: Reading, side: int | None = None) -> Parts:
    """Each token's embedding, positions included. Axis (token): the source's first where there are two."""
    labels: list[Label] = []
    parts: Grouped = {}
    for number, one in enumerate(reading.sides):
        if side is None or number == side % len(reading.sides):
            names = reading.tokens_axis(number).labels
            for place in range(len(names)):
                parts[len(labels) + place,] = (Part(f"{one.prefix}embedding", (place,)),)
            labels += names
    return Parts("tokens", (Axis("token", tuple(labels)),), parts)


def neurons(reading: Reading, layer: int, which: Sequence[int] | None = None, side: int = -1) -> Parts:
    """Hidden units of a layer's feed-forward at all tokens: all of them, or these. Axis (neuron)."""
    site, mixer = feed_forward(reading, layer, side)
    hidden = mixer.hidden
    chosen = range(hidden) if which is None else which
    for neuron in chosen:
        if not 0 <= neuron < hidden:
            raise RequestError(f"Layer {layer} has no neuron {neuron}: it has {hidden:,}.")
    point = site.point(reading, "hidden")
    parts: Grouped = {(row,): (Part(point, (slice(None), neuron)),) for row, neuron in enumerate(chosen)}
    return Parts("neurons", (Axis("neuron", tuple(chosen)),), parts)


def feed_forward(reading: Reading, layer: int, side: int = -1) -> tuple[Site, spec.Dense | spec.Gated]:
    """A layer's feed-forward with hidden units of its own.

    Raises RequestError for none, UnsupportedError for experts.
    """
    for site in every_mixer(reading):
        if (site.side, site.layer, site.mixer.role) == (side % len(reading.sides), layer, "feed_forward"):
            if not isinstance(site.mixer, spec.Dense | spec.Gated):
                raise UnsupportedError("Experts have no hidden units of their own to look at.")
            return site, site.mixer
    raise RequestError(f"Layer {layer} has no feed-forward.")


def _layers(found: Sequence[Site]) -> Axis:
    return Axis("layer", tuple(site.label for site in found))


def _layer_label(reading: Reading, side: int, layer: int) -> Label:
    prefix = reading.sides[side].prefix
    return f"{prefix}{layer}" if prefix else layer


def _heads(mixer: Mixer) -> int:
    """Of queries, or of the values of a recurrent mixer. Raises UnsupportedError for what has none."""
    if isinstance(mixer, spec.GatedDelta):
        return mixer.value_heads
    if isinstance(mixer, (*ATTENTIONS, spec.StateSpace)):
        return mixer.heads
    raise UnsupportedError(f"{type(mixer).__name__} has no heads.")


def _kv_heads(mixer: Mixer) -> int:
    if isinstance(mixer, spec.Attention | spec.CrossAttention):
        return mixer.kv_heads
    raise UnsupportedError("Latent attention shares its keys and values between all heads: patch its heads.")
