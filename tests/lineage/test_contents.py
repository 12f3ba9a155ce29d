"""The package says what is in it, and is cheap to import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import qkv.lineage


def test_every_file_stands_in_the_table_of_contents() -> None:
    rows = set(re.findall(r"^    (\w+)  +\S", qkv.lineage.__doc__ or "", re.MULTILINE)) - {"file"}
    files = {path.stem for path in Path(qkv.lineage.__file__).parent.glob("*.py")} - {"__init__"}
    assert files <= rows


def test_the_table_of_contents_is_read_without_torch() -> None:
    code = "import sys, qkv.lineage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
