"""The largest flow through layers of attention, by augmenting paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

TINY = 1e-12


def most_flow(steps: Sequence[np.ndarray], query: int, key: int) -> float:
    """From the query behind the last step to the key before the first, (query, key) capacities a step.

    Nodes are (depth, token); depth d + 1 sends to depth d what step d lets through. Shortest augmenting
    paths with residual edges: Edmonds and Karp 1972, section 1.
    """
    left: list[dict[int, float]] = []  # what each node can still send, by node
    size = len(steps[0])
    for depth in range(len(steps) + 1):
        for token in range(size):
            row = steps[depth - 1][token] if depth else ()
            left.append({(depth - 1) * size + k: float(c) for k, c in enumerate(row) if c > TINY})
    source, target = len(steps) * size + query, key
    total = 0.0
    while (path := _path(left, source, target)) is not None:
        room = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= room
            left[b][a] = left[b].get(a, 0.0) + room
        total += room
    return total


def _path(left: Sequence[dict[int, float]], source: int, target: int) -> list[tuple[int, int]] | None:
    """Edges of a shortest way that has room, or None."""
    came: dict[int, int] = {source: source}
    waiting = deque([source])
    while waiting and target not in came:
        here = waiting.popleft()
        for there, room in left[here].items():
            if room > TINY and there not in came:
                came[there] = here
                waiting.append(there)
    if target not in came:
        return None
    path = []
    while target != source:
        path.append((came[target], target))
        target = came[target]
    return path
