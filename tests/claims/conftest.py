from __future__ import annotations

from pathlib import Path

import pytest

from tests.claims.made_up import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    folder = tmp_path / "made up"
    folder.mkdir()
    return Bench(folder, monkeypatch)
