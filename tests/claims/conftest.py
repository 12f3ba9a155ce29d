from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.claims.made_up import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    folder = tmp_path / "made up"
    folder.mkdir()
    return Bench(folder, monkeypatch)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Smoke sizes are too small for two: on a busy machine they would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
