"""What a request brings beside its tokens: images or audio, checked before anything runs."""

from __future__ import annotations

from typing import cast

import torch

from qkv.engine.requests import Request
from qkv.errors import RequestError, UnsupportedError
from qkv.loading import Loaded
from qkv.nn.inputs import Frames, Patches
from qkv.nn.layers import Stack
from qkv.nn.towers import Tower
from qkv.spec import Model, Read, Replace


def check(request: Request, loaded: Loaded) -> None:
    """Raises RequestError for features that this model cannot read with this prompt."""
    spec, given = loaded.spec, request.features
    if given is not None and not isinstance(given, torch.Tensor):
        raise RequestError(f"Features must be a tensor of images or audio, not {type(given).__name__}.")
    if spec.features is None:
        if given is not None:
            raise RequestError("This model has no use for features.")
        return
    if spec.features == "trunk":
        raise UnsupportedError("This model reads images or audio and no tokens, so it cannot generate.")
    if len(spec.towers) > 1:
        raise UnsupportedError("Models with several towers can be called, and cannot generate yet.")
    embedding = _embedding(loaded)
    batch = 0 if given is None else embedding.rows(given)[0]
    if _one_each(spec):
        if batch != 1:
            raise RequestError(
                f"This model reads {embedding.reads} beside its prompt: one for each prompt, not {batch}."
            )
        return
    _check_places(request, spec, batch)


def _check_places(request: Request, spec: Model, batch: int) -> None:
    """Each prompt's own: in a batch a row too many would take the place of another's."""
    (tower,) = spec.towers
    token = cast(Replace, tower.join).token
    places = request.prompt.count(token)
    rows = batch * tower.rows(request.features.shape[-1]) if request.features is not None else 0
    if rows != places:
        raise RequestError(
            f"The features make {rows:,} rows, and {places:,} places of the prompt hold token {token} "
            "for them to take."
        )


def placed(request: Request, loaded: Loaded) -> dict[str, torch.Tensor]:
    """What the modules are given beside the prompt."""
    if request.features is None:
        return {}
    return {"features": request.features.to(next(loaded.model.parameters()).device)}


def _one_each(spec: Model) -> bool:
    """Whether all of a prompt is read beside one image or audio."""
    return spec.features == "encoder" or any(isinstance(tower.join, Read) for tower in spec.towers)


def _embedding(loaded: Loaded) -> Patches | Frames:
    model = loaded.model
    stack = cast(Stack, cast(Tower, model.towers[0]).stack if len(model.towers) else model.encoder)
    return cast(Patches | Frames, stack.embedding)
