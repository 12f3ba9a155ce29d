"""Which layers, in as few words as say it exactly."""

from __future__ import annotations

from collections.abc import Iterable

from qkv.spec.text import ranges

ORDINALS = {2: "2nd", 3: "3rd"}


def places(layers: Iterable[int], total: int) -> str:
    """ "every layer", "every 6th layer", "all but every 6th layer", or the numbers, counted from 0."""
    chosen = sorted(layers)
    if chosen == list(range(total)):
        return "every layer"
    rest = sorted(set(range(total)) - set(chosen))
    for some, prefix in ((chosen, ""), (rest, "all but ")):
        for step in range(2, min(total // 2, 16) + 1):
            name = f"every {ORDINALS.get(step, f'{step}th')} layer"
            for words, start in ((name, step - 1), (f"{name} from the first", 0)):
                if some == list(range(start, total, step)):
                    return prefix + words
    return f"layer {chosen[0]}" if len(chosen) == 1 else f"layers {ranges(chosen)}"
