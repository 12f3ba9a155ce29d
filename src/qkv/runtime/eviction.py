"""Keeping the keys that got most attention: how much each got, and which of a sequence's then go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.nn import Tap
from qkv.nn.paged import PagedCache
from qkv.runtime.blocks import Pool
from qkv.runtime.compression import SnapKV, Weighing

Got = dict[str, Float[Tensor, "kv_heads held"]]  # by layer: the attention that each held key got


class Part(Protocol):
    """The rows of one sequence in a step."""

    sequence: int
    start: int
    tokens: list[int]
    total: int


@dataclass
class Evictions:
    """What a policy knows of each sequence, and its work after a pass.

    Keys of one layer and head stay in the order of their tokens, and each head has its own. `layers`
    are the cache's names by those of the points where their weights can be read.
    """

    policy: Weighing
    cache: PagedCache
    pool: Pool
    layers: dict[str, str]
    got: dict[int, Got] = field(default_factory=dict)  # by sequence

    def begin(self, parts: Sequence[Part]) -> None:
        """Takes note of the prompts of sequences that come for the first time."""
        for part in parts:
            if part.sequence not in self.got:
                self.got[part.sequence] = {}
                self.pool.prompts[part.sequence] = part.total

    def tap(self, parts: Sequence[Part], inner: Tap) -> Tap:
        """The tap for a pass of these rows, which hands everything on to another."""
        counted = [self._counted(part) for part in parts]
        return _Weighing(self, parts, counted, inner) if any(counted) else inner

    def _counted(self, part: Part) -> list[int]:
        """The rows of a part whose attention counts, from the last: -1 and so on."""
        prompt, count = self.pool.prompts[part.sequence], len(part.tokens)
        return [at - count for at in range(count) if self.policy.counts(prompt, part.start + at)]

    def take(self, part: Part, layer: str, weights: Float[Tensor, "heads counted key"]) -> None:
        """Adds what some of a part's queries gave each key, to those that they share heads of."""
        held = part.start + len(part.tokens) - self.pool.evicted[part.sequence]
        kv_heads = self.cache.layers[layer][0].shape[1]
        given = weights[:, :, :held].sum(1).unflatten(0, (kv_heads, -1)).sum(1)
        before = self.got[part.sequence].get(layer)
        if before is not None:
            given = given + F.pad(before, (0, held - before.shape[1]))
        self.got[part.sequence][layer] = given

    def after(self, part: Part) -> None:
        """Gives up what the policy no longer keeps."""
        sequence, end = part.sequence, part.start + len(part.tokens)
        held = end - self.pool.evicted[sequence]
        kept = self.policy.held(self.pool.prompts[sequence], end)
        if kept >= held:
            return
        table = torch.from_numpy(self.pool.table[sequence].astype("int64")).to(self.cache.device)
        for layer, got in self.got[sequence].items():
            places = chosen(self.policy, F.pad(got, (0, held - got.shape[1])), kept)
            self._compact(layer, table, places)
            self.got[sequence][layer] = got.gather(1, places)
        self.pool.shrink(sequence, held - kept)

    def _compact(
        self, layer: str, table: Int[Tensor, " blocks"], places: Int[Tensor, "kv_heads kept"]
    ) -> None:
        """Moves the keys and values at these places to the first ones, in their order."""
        size, heads = self.cache.size, torch.arange(len(places), device=places.device)[:, None]
        to = torch.arange(places.shape[1], device=places.device).expand_as(places)
        for held in self.cache.layers[layer]:
            held[table[to // size], heads, to % size] = held[table[places // size], heads, places % size]

    def fork(self, parent: int, child: int) -> None:
        self.got[child] = dict(self.got[parent])

    def forget(self, sequence: int) -> None:
        self.got.pop(sequence, None)
        self.pool.prompts.pop(sequence, None)


def chosen(policy: Weighing, got: Float[Tensor, "kv_heads held"], keep: int) -> Int[Tensor, "kv_heads keep"]:
    """The places of the latest keys, and of those before them that got most; of equals the earlier."""
    early = got[:, : got.shape[1] - policy.latest]
    if isinstance(policy, SnapKV):
        early = F.max_pool1d(early, policy.around, stride=1, padding=policy.around // 2)
    most = early.argsort(stable=True, dim=-1, descending=True)[:, : keep - policy.latest].sort(-1).values
    latest = torch.arange(early.shape[1], got.shape[1], device=got.device).expand(len(got), -1)
    return torch.cat([most, latest], -1)


@dataclass
class _Weighing:
    """Hears the weights of some rows on their way."""

    evictions: Evictions
    parts: Sequence[Part]
    counted: list[list[int]]
    inner: Tap
    prefix: str = ""

    def __call__(self, name: str, value: Tensor) -> Tensor:
        value = self.inner(name, value)
        layer = self.evictions.layers.get(self.prefix + name)
        if layer is not None:
            for row, (part, rows) in enumerate(zip(self.parts, self.counted, strict=True)):
                if rows:
                    self.evictions.take(part, layer, value[row][:, rows])
        return value

    def at(self, *names: str | int) -> Tap:
        inside = self.prefix + "".join(f"{name}." for name in names)
        return _Weighing(self.evictions, self.parts, self.counted, self.inner.at(*names), inside)

    def wants(self, name: str) -> bool:
        return self.prefix + name in self.evictions.layers or self.inner.wants(name)
