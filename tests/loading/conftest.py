"""A small model's files, for the tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.families.models import saved


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("pristine")
    return folder, saved(folder)


@pytest.fixture
def folder(pristine: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of a small untied llama, to spoil."""
    return Path(shutil.copytree(pristine[0], tmp_path / "model"))
