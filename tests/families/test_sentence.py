"""sentence-transformers' modules as a head, and what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.errors import ConfigError, QkvError, UnsupportedError
from qkv.families.sentence import embedding, kinds
from qkv.spec import Pool, PooledEmbedding


def modules(*names: str, path: str = "1_Pooling") -> list[dict[str, Any]]:
    return [
        {
            "idx": i,
            "name": str(i),
            "path": path if name.endswith("Pooling") else "",
            "type": f"st.models.{name}",
        }
        for i, name in enumerate(names)
    ]


PLAIN = modules("Transformer", "Pooling")
UNIT = modules("Transformer", "Pooling", "Normalize")
MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("listed", "pooling", "wanted"),
    [
        (UNIT, MEAN, PooledEmbedding(Pool("mean"))),
        (PLAIN, MEAN, PooledEmbedding(Pool("mean"), normalise=False)),
        (UNIT, {"pooling_mode_cls_token": True, "include_prompt": True}, PooledEmbedding(Pool("first"))),
        (UNIT, {"pooling_mode_lasttoken": True}, PooledEmbedding(Pool("last"))),
        (UNIT, {"pooling_mode": "max", "embedding_dimension": 8}, PooledEmbedding(Pool("max"))),
    ],
)
def test_heads(listed: Any, pooling: dict[str, Any], wanted: PooledEmbedding) -> None:
    assert embedding(listed, pooling, "1_Pooling/config.json") == wanted


@pytest.mark.parametrize(
    ("listed", "pooling", "kind", "said"),
    [
        (modules("Transformer", "Pooling", "Dense"), MEAN, UnsupportedError, "names 'Dense', which is not"),
        (modules("Transformer"), MEAN, UnsupportedError, "names Transformer; only Transformer, Pooling"),
        (modules("Pooling", "Transformer"), MEAN, UnsupportedError, "in this order"),
        (modules("Transformer", "Pooling", "Pooling"), MEAN, UnsupportedError, "in this order"),
        (modules("Transformer", "Pooling", path="../x"), MEAN, ConfigError, "names the folder '../x'"),
        (modules("Transformer", "Pooling", path=".."), MEAN, ConfigError, "names the folder '..'"),
        ({"type": "Pooling"}, MEAN, ConfigError, "modules.json must hold a list of objects"),
        (UNIT, {**MEAN, "pooling_mode_max_tokens": True}, UnsupportedError, "pools by 'mean' and 'max'"),
        (UNIT, {}, UnsupportedError, "p.json pools by nothing; one of cls, lasttoken, mean, max is known"),
        (UNIT, {"pooling_mode": "weightedmean"}, UnsupportedError, "p.json pools by 'weightedmean'"),
        (UNIT, {**MEAN, "flux": 3}, ConfigError, "p.json: flux = 3 is not known"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(
    listed: Any, pooling: dict[str, Any], kind: type[QkvError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        kinds(listed)
        embedding(listed, pooling, "p.json")
    assert said in str(caught.value)
