"""How much memory the cache may take, and what can never fit into it."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.engine.requests import Request
from qkv.errors import CapacityError
from qkv.memory import free_memory
from qkv.runtime.blocks import BLOCK, Pool, blocks
from qkv.runtime.machine import Machine

CHUNK = 512  # rows a step: bounds its memory, how long others wait, and what a window holds beside itself
KEPT = 1 << 30  # bytes of beginnings that are kept before the oldest of them are given up


@dataclass
class Budget:
    """Bytes for keys and values, None: what is free when a request comes; and the longest text, in tokens."""

    bytes: int | None
    context: int | None = None
    device: str = "cpu"

    def apply(self, machine: Machine) -> None:
        """Divides the bytes among the pools as a long text needs them."""
        free = free_memory(self.device)
        whole = free if self.bytes is None else self.bytes
        pools = [*machine.own, *machine.beside]
        each = {pool.group: pool.most(self.context or 1 << 15, CHUNK) * pool.bytes for pool in pools}
        total = sum(each.values())
        for pool in pools:
            if total and whole is not None:
                pool.limit = max(1, int(whole * each[pool.group] / total) // max(1, pool.bytes))
            if total and pool.bytes:
                pool.keep = max(blocks(self.context or 0), int(KEPT * each[pool.group] / total) // pool.bytes)

    def check(self, request: Request, start: int, source: int, machine: Machine) -> None:
        """Raises CapacityError, with both numbers, where a request does not fit though it were alone."""
        tokens, rows = start + request.max_new_tokens - 1, request.rows
        need = sum(needed(pool, start, tokens, rows) * pool.bytes for pool in machine.own)
        if not machine.own:
            need = rows * machine.bytes_for(tokens, source)
        elif source:
            need += machine.bytes_for(0, source)
        have = free_memory(self.device)
        if have is not None:  # what the pools have taken before is theirs to give
            have += sum((len(pool.free) + len(pool.cached)) * pool.bytes for pool in machine.own)
        if self.bytes is not None:
            have = self.bytes if have is None else min(have, self.bytes)
        over = any(
            pool.limit is not None and needed(pool, start, tokens, rows) > pool.limit for pool in machine.own
        ) or any(pool.limit is not None and blocks(source) > pool.limit for pool in machine.beside)
        if have is not None and (need > have or over):
            every = f" in each of {rows:,} rows" if rows > 1 else ""
            raise CapacityError(
                f"A cache of {tokens:,} tokens{every} needs {need / 1e6:,.0f} MB of memory, and "
                f"{have / 1e6:,.0f} MB is free: ask for fewer new tokens, or shorten the prompt."
            )


def needed(pool: Pool, start: int, tokens: int, rows: int) -> int:
    """Blocks that rows of one prompt hold at most: what is full of it is shared."""
    shared = start // BLOCK if rows > 1 else 0
    return min(shared + rows * (blocks(tokens) - shared), rows * pool.most(tokens, CHUNK, start))
