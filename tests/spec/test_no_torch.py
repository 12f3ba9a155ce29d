"""Describing needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import qkv.spec",
        "from qkv.spec import *; m = Model(decoder=Stack(Tokens(11, 8), (pre_norm(Attention(2, 1, 4)),)));"
        "from_json(to_json(m)); str(m); m - m; m.flops(5), m.cache_bytes(5), Rotary().frequencies(8, 5)",
    ],
)
def test_spec_imports_no_torch(code: str) -> None:
    check = f"import sys; {code}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
