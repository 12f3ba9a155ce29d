"""Small helpers that several test files use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv import spec
from qkv.nn import Transformer

ROOT = Path(__file__).resolve().parent.parent


def shared() -> Path:
    """The folder of real files beside the checkout; the test skips where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("../shared is absent")
    return folder


def packaged(package: str, file: str) -> Path:
    """A file inside an installed package; the test skips, naming the package, where it is not."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    pytest.skip(f"{package.replace('_', '-')} is not installed")


def random_model(model: spec.Model, seed: int = 0, std: float = 0.3) -> Transformer:
    """A model with random weights, large enough that nothing is lost in rounding."""
    network = Transformer(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return network


def relative(a: Any, b: Any) -> float:
    """max|a - b| / max|b|: the tolerance that is used everywhere."""
    a, b = torch.as_tensor(a).detach().float(), torch.as_tensor(b).detach().float()
    return float((a - b).abs().max() / b.abs().max())


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    assert relative(a, b) <= tolerance, f"differs by {relative(a, b):.2e}, more than {tolerance:.0e}"
