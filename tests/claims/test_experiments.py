"""Every claim at its smoke size: it runs, its checks are computed, its pictures are whole."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from qkv.claims.claim import Check, Figures, Run, drawn, verdict
from qkv.claims.registry import CLAIMS
from qkv.claims.running import plain
from qkv.errors import SourceError

measured: dict[str, Figures] = {}


def smoke(name: str) -> Figures:
    """The figures of one smoke run, measured once a process; skips, and says why, where there is no data."""
    if name not in measured:
        try:
            measured[name] = plain(CLAIMS[name].load().measure(Run(name, 0, "smoke")))
        except SourceError as problem:
            pytest.skip(str(problem))
    return measured[name]


@pytest.mark.parametrize("name", CLAIMS)
def test_its_figures_go_to_json_and_back(name: str) -> None:
    figures = smoke(name)
    assert figures and json.loads(json.dumps(figures, allow_nan=False)) == figures


@pytest.mark.parametrize("name", CLAIMS)
def test_it_is_judged(name: str) -> None:
    """Of one seed and of three."""
    for figures in ([smoke(name)], [smoke(name)] * 3):
        checks = CLAIMS[name].load().judge(figures)
        assert checks and all(isinstance(check, Check) and check.what and check.measured for check in checks)
        assert len({check.what for check in checks}) == len(checks)
        assert verdict(checks)


@pytest.mark.parametrize("name", CLAIMS)
def test_its_pictures_are_whole(name: str) -> None:
    for picture in drawn(CLAIMS[name].load(), [smoke(name)] * 3).values():
        root = ElementTree.fromstring(picture)
        assert root.get("width") == "360" and "nan" not in picture and "inf" not in picture
