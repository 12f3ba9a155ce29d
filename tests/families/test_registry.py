"""The table of model types and the files that read them agree."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import qkv.families
from qkv.families import FILES


def test_every_family_is_registered_for_each_of_its_types() -> None:
    folder = Path(qkv.families.__file__).parent
    modules = [file.stem for file in folder.glob("*.py") if re.search("^FAMILY = ", file.read_text(), re.M)]
    found = {kind: name for name in modules for kind in import_module(f"qkv.families.{name}").FAMILY.types}
    assert found == FILES and len(FILES) >= 62
