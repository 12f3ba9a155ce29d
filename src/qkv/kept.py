"""What is kept between runs, where the system has such things."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Where: it need not exist, nor be writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qkv"
