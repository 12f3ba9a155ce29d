"""Reading and replacing what flows through a model, by name.

Modules call `tap("query", tensor)` at each named point and go on with what they get back. The
names a model has are listed by `tap_names`; an unknown one is an error, not a silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor

from qkv.errors import RequestError
from qkv.spec import Experts, Model, Stack
from qkv.spec.layers import Mixer

Replace = Callable[[Tensor], Tensor] | Tensor  # what gives the new value, or the new value itself


class Tap(Protocol):
    """What modules call."""

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Offers the value of a point; what it returns is used in its place."""
        ...

    def at(self, *names: str | int) -> Tap:
        """The tap for a part of the model."""
        ...

    def wants(self, name: str) -> bool:
        """Whether this point is read or replaced: a fast path that does not have it stands back."""
        ...


class NoTap:
    """Nothing is read or replaced."""

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return value

    def at(self, *names: str | int) -> NoTap:
        return self

    def wants(self, name: str) -> bool:
        return False


class Taps:
    """The values asked for, by full name, and the replacements to make.

    `taps["layers.3.attention.weights"]` is the value of the latest pass; `history` holds those of
    every pass, in order. Values keep their gradient; they are not copied. A replacement is a
    function of the value, or a tensor of its shape to put there.
    """

    def __init__(self, names: str | Iterable[str] | Mapping[str, Replace | None], known: Iterable[str]):
        known = list(known)
        asked = _asked(names)
        self.replacements: dict[str, list[Replace]] = {}
        self.history: dict[str, list[Tensor]] = {}
        for pattern, replace in asked.items():
            matched = [name for name in known if fnmatchcase(name, pattern)]
            if not matched:
                raise RequestError(f"No point is called {pattern!r}; this model's: {_abridged(known)}.")
            for name in matched:
                self.history.setdefault(name, [])
                if replace is not None:
                    self.replacements.setdefault(name, []).append(replace)

    def __getitem__(self, name: str) -> Tensor:
        """The value at the latest pass. Raises RequestError if it was not asked for or nothing ran."""
        if not self.history.get(name):
            raise RequestError(f"{name!r} was not tapped, or no pass has run since.")
        return self.history[name][-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, values in self.history.items() if values)

    def __len__(self) -> int:
        return sum(bool(values) for values in self.history.values())

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if name not in self.history:
            return value
        for replace in self.replacements.get(name, ()):
            changed = replace if isinstance(replace, Tensor) else replace(value)
            if not isinstance(changed, Tensor):
                raise RequestError(f"The replacement for {name!r} gives {_kind(changed)}, not a tensor.")
            if changed.shape != value.shape:
                got, must = tuple(changed.shape), tuple(value.shape)
                raise RequestError(f"The replacement for {name!r} has shape {got}; it must be {must}.")
            value = changed.to(value)
        self.history[name].append(value)
        return value

    def at(self, *names: str | int) -> Tap:
        return _Within(self, ".".join(map(str, names)) + ".") if names else self

    def wants(self, name: str) -> bool:
        return name in self.history


def _asked(names: Any) -> dict[str, Replace | None]:
    """The patterns and their replacements. Raises RequestError for what is neither."""
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Iterable):
        raise RequestError(f"Points are tapped by name, or by a list of names, not by {_kind(names)}.")
    names = dict(names) if isinstance(names, Mapping) else dict.fromkeys(map(_name, names))
    for name, replace in names.items():
        _name(name)
        if replace is not None and not isinstance(replace, Tensor) and not callable(replace):
            raise RequestError(
                f"The replacement for {name!r} is {_kind(replace)}; it must be a function or a tensor."
            )
    return names


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise RequestError(f"The name of a point to tap is a text, not {_kind(name)}.")
    return name


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


class _Within:
    """The same taps seen from inside a part of the model."""

    def __init__(self, taps: Taps, prefix: str):
        self.taps, self.prefix = taps, prefix

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return self.taps(self.prefix + name, value)

    def at(self, *names: str | int) -> Tap:
        return _Within(self.taps, self.prefix + ".".join(map(str, names)) + ".") if names else self

    def wants(self, name: str) -> bool:
        return self.taps.wants(self.prefix + name)


def tap_names(model: Model) -> list[str]:
    """Every point of a model that can be read and replaced, in the order of the computation.

    What a cache keeps of an encoder or a tower is made, and offered, at the first call only.
    """
    both = model.encoder is not None and model.decoder is not None
    names: list[str] = []
    for i, tower in enumerate(model.towers):
        names += [f"towers.{i}.{name}" for name in (*_stack_names(tower.stack, tower.until), "output")]
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is not None:
            names += [f"{side}.{name}" if both else name for name in _stack_names(stack)]
    return [*names, "logits"] if model.head is not None else names


def _stack_names(stack: Stack, until: int | None = None) -> Iterator[str]:
    yield "embedding"
    for i, layer in enumerate(stack.layers[:until]):
        yield f"layers.{i}.input"
        for place, (_, _, branches) in enumerate(layer.named()):
            for name, branch in branches:
                yield from (f"layers.{i}.{name}.{point}" for point in mixer_points(branch.mixer))
            if place == 0 and len(layer.sublayers) > 1:
                yield f"layers.{i}.middle"
        yield f"layers.{i}.output"
    if until is None:
        yield "final"


def mixer_points(mixer: Mixer) -> tuple[str, ...]:
    if isinstance(mixer, Experts):
        return ("router", "output")
    if mixer.role == "feed_forward":
        return ("hidden", "output")
    if mixer.role == "mixer":
        return ("heads", "output")
    return _ATTENTION_POINTS


_ATTENTION_POINTS = ("query", "key", "value", "scores", "weights", "heads", "output")


def _abridged(names: list[str]) -> str:
    general = dict.fromkeys(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names)
    return ", ".join(general)
