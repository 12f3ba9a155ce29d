"""What makes of a model one that gives embeddings: the modules that sentence-transformers lists beside it.

Reimers and Gurevych 2019. `modules.json` names a Transformer, how its states are pooled, and perhaps
that the result has unit length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from qkv.errors import ConfigError, UnsupportedError
from qkv.families.config import Config, shown
from qkv.sources import read_json
from qkv.spec import Pool, PooledEmbedding

MODULES = "modules.json"
KNOWN = ("Transformer", "Pooling", "Normalize")
HOW = {"cls": "first", "lasttoken": "last", "mean": "mean", "max": "max"}
# the older spelling: one key for each way
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# the width, which is the model's; and what concerns prompts that nobody puts before a text here
UNREAD = ("word_embedding_dimension", "embedding_dimension", "include_prompt")


def kinds(modules: Any) -> dict[str, str]:
    """The kinds of the modules in order, and the folder of each. Raises for kinds not known."""
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) for module in modules
    ):
        raise ConfigError(f"{MODULES} must hold a list of objects with a type.")
    found = {module["type"].rsplit(".", 1)[-1]: str(module.get("path", "")) for module in modules}
    for kind in found:
        if kind not in KNOWN:
            raise UnsupportedError(
                f"{MODULES} names {shown(kind)}, which is not known ({', '.join(KNOWN)}). "
                f'Pass ignore=("{MODULES}",) to load without any of them.'
            )
    if len(found) != len(modules) or tuple(found) not in (KNOWN[:2], KNOWN):
        raise UnsupportedError(
            f"{MODULES} names {', '.join(found)}; only {', '.join(KNOWN)}, in this order and the last "
            f'of them optional, are known. Pass ignore=("{MODULES}",) to load without any of them.'
        )
    folder = found["Pooling"]
    if not folder or PurePath(folder).name != folder or folder == "..":
        raise ConfigError(f"{MODULES} names the folder {shown(folder)}; it must be one beside it.")
    return found


def files(folder: Path) -> dict[str, Any]:
    """What stands beside a model, by file: the modules, then how states are pooled; {} for nothing."""
    modules = read_json(folder / MODULES, list)
    if modules is None:
        return {}
    pooling = f"{kinds(modules)['Pooling']}/config.json"
    found = read_json(folder / pooling)
    if found is None:
        raise ConfigError(f"{folder} has no {pooling}, which its {MODULES} names.")
    return {MODULES: modules, pooling: found}


def head(found: Mapping[str, Any]) -> PooledEmbedding:
    """The head that these files amount to."""
    modules, pooling = found
    return embedding(found[modules], found[pooling], pooling)


def embedding(modules: Any, pooling: Mapping[str, Any], where: str) -> PooledEmbedding:
    """The head that the modules amount to. `pooling` is the configuration in the folder of theirs."""
    config = Config(pooling, where)
    ways = [way for key, way in FLAGS.items() if config.take(key, bool, False)]
    named = config.take("pooling_mode", str, None)
    if named is not None:
        ways.append(named)
    config.discard(*UNREAD)
    config.finish()
    if len(ways) != 1 or ways[0] not in HOW:
        said = " and ".join(map(shown, ways)) or "nothing"
        raise UnsupportedError(
            f"{where} pools by {said}; one of {', '.join(HOW)} is known. "
            f'Pass ignore=("{MODULES}",) to load without it.'
        )
    return PooledEmbedding(Pool(HOW[ways[0]]), normalise="Normalize" in kinds(modules))  # type: ignore[arg-type]
