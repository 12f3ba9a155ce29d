"""Beginnings of texts that are still in the cache, block by block, for others that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from qkv.runtime.blocks import BLOCK, Pool


@dataclass
class Node:
    """A block of a beginning: what is before it and its tokens; where each pool has it, if it still has."""

    number: int
    key: tuple[int, tuple[int, ...]]
    held: list[int | None]


@dataclass
class Prefixes:
    """A tree of beginnings. Each node is found by the number of the one before it and its own tokens.

    So tokens are compared and not only their hashes, and equal blocks after different beginnings are
    different nodes. Texts of different `salt` share nothing (tenants, adapters).
    """

    pools: Sequence[Pool]
    nodes: dict[tuple[int, tuple[int, ...]], Node] = field(default_factory=dict)
    roots: dict[str, int] = field(default_factory=dict)
    owners: dict[tuple[int, int], Node] = field(default_factory=dict)  # by group and block
    numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        for pool in self.pools:
            pool.forgotten = self._forgotten

    def root(self, salt: str) -> int:
        if salt not in self.roots:
            self.roots[salt] = next(self.numbers)
        return self.roots[salt]

    def find(self, tokens: Sequence[int], salt: str) -> list[Node]:
        """The longest beginning that every pool has as far as the next query sees.

        The last token is never taken from it: something has to be computed to have an answer.
        """
        found, parent = [], self.root(salt)
        for place in range((len(tokens) - 1) // BLOCK):
            node = self.nodes.get((parent, tuple(tokens[place * BLOCK : (place + 1) * BLOCK])))
            if node is None:
                break
            found.append(node)
            parent = node.number
        while found and not all(self._there(found, at, pool) for at, pool in enumerate(self.pools)):
            found.pop()
        return found

    def _there(self, found: list[Node], at: int, pool: Pool) -> bool:
        gap = pool.reach.places(len(found) * BLOCK)
        return all(node.held[at] is not None for place, node in enumerate(found) if place not in gap)

    def adopt(self, sequence: int, found: list[Node]) -> None:
        """Lets a sequence that holds nothing begin with what was found."""
        for at, pool in enumerate(self.pools):
            gap = pool.reach.places(len(found) * BLOCK)
            held = [None if place in gap else node.held[at] for place, node in enumerate(found)]
            pool.adopt(sequence, held)

    def publish(self, sequence: int, place: int, parent: int, tokens: Sequence[int]) -> int:
        """Keeps a block that is full and computed; the number that the next block comes after."""
        key = (parent, tuple(tokens))
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(next(self.numbers), key, [None] * len(self.pools))
        for at, pool in enumerate(self.pools):
            if node.held[at] is None:
                block = node.held[at] = pool.publish(sequence, place)
                if block is not None:
                    self.owners[pool.group, block] = node
        if all(block is None for block in node.held):
            del self.nodes[key]
        return node.number

    def clear(self) -> None:
        """Forgets all beginnings; blocks that texts hold stay theirs."""
        for pool in self.pools:
            pool.free += pool.cached
            pool.cached.clear()
            pool.published.clear()
        self.nodes.clear()
        self.owners.clear()
        self.roots.clear()

    def _forgotten(self, group: int, block: int) -> None:
        node = self.owners.pop((group, block))
        node.held = [
            None if pool.group == group else held for pool, held in zip(self.pools, node.held, strict=True)
        ]
        if all(held is None for held in node.held):
            self.nodes.pop(node.key, None)
