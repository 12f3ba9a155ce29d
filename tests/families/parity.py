"""Random small models of every family that has weights, beside what transformers makes of the same files."""

from __future__ import annotations

import inspect
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import qkv
from qkv import loading
from qkv.nn import Layout
from tests.families.parity_models import BASE, MODELS, VOCAB

AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")


def tokens(batch: int, length: int, seed: int = 7) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def present(batch: int, length: int, side: str) -> Tensor:
    """1 where a token is: the first row is full, the others lack three and five at one side."""
    found = torch.ones(batch, length, dtype=torch.long)
    for row, missing in zip(range(batch), (0, 3, 5), strict=False):
        found[row, : missing if side == "left" else 0] = 0
        found[row, length - missing if side == "right" else length :] = 0
    return found


class Pair:
    """The oracle, the files it saved, and our reading of them."""

    def __init__(self, name: str):
        kind, auto, changes = MODELS[name]
        # a norm over what a state gives makes gradients a thousand times larger, and their rounding
        self.loose = "experts" in name or "delta" in name
        settings = {**BASE.get(kind, BASE[""]), **changes}
        settings = {key: value for key, value in settings.items() if value != "absent"}
        torch.manual_seed(3)
        made = transformers.AutoConfig.for_model(kind, **settings)
        if settings.get("tie_word_embeddings") is False:
            made.tie_word_embeddings = False  # T5's class says otherwise of every file
        self.theirs = getattr(transformers, auto).from_config(made, attn_implementation="eager").eval()
        if kind == "t5":  # untied is the head alone
            self.theirs.set_input_embeddings(self.theirs.shared)
        _randomise(self.theirs)
        self.kept = tempfile.TemporaryDirectory(prefix="qkv-parity-")  # gone with the process
        self.folder = Path(self.kept.name)
        self.theirs.save_pretrained(self.folder)
        self.model = qkv.load(self.folder)
        self.ours = self.model.network
        self.reads_a_source = self.ours.encoder is not None and self.ours.decoder is not None
        self.causal = self.ours.decoder is not None
        self.asked = frozenset(inspect.signature(self.theirs.forward).parameters)
        # positions of these begin behind the row of the padding token
        self.first = self.theirs.config.pad_token_id + 1 if kind in AFTER_PADDING else 0
        self.counts_places = kind in ("bart", "mbart", "pegasus", "marian")
        self.typed = bool(getattr(self.ours.trunk.embedding, "types", None) is not None)

    @property
    def parameters(self) -> int:
        """Of theirs that this model has: not those carried along, and a bias that is a buffer there."""
        carried = self.model.loaded.carried
        ours = (p for name, p in self.theirs.named_parameters() if name not in carried and p.requires_grad)
        return sum(p.numel() for p in ours) + sum(b.numel() for b in _biases(self.theirs).values())

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.loose else 1e-5

    def outputs(
        self, batch: int, length: int, side: str | None = None, grad: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ours and theirs for one call, and where there are tokens."""
        ids, there = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
        if side is not None:
            there = present(batch, length, side)
        mine: dict[str, Any] = {"layout": Layout.padded(there)} if side else {}
        other: dict[str, Any] = {"attention_mask": there}
        if self.reads_a_source:
            source, seen = tokens(batch, 9, 11), present(batch, 9, side or "right")
            mine |= {"source": source, "source_layout": Layout.padded(seen)}
            other = {"input_ids": source, "attention_mask": seen, "decoder_attention_mask": there}
            other["decoder_input_ids"] = ids
        else:
            other["input_ids"] = ids
        if "position_ids" in self.asked:
            other["position_ids"] = (there.cumsum(-1) - 1).clamp(min=0) + self.first
        if self.typed:
            types = tokens(batch, length, 5) % 2
            mine["types"], other["token_type_ids"] = types, types
        with torch.set_grad_enabled(grad):
            if side == "left" and self.counts_places:
                return self.ours(ids, **mine), self._from_the_left(other), there.bool()
            return self.ours(ids, **mine), answer(self.theirs(**other)), there.bool()

    def _from_the_left(self, given: dict[str, Tensor]) -> Tensor:
        """Where padding would count as positions: with the padding moved to the right, and moved back."""
        empty = [int((row == 0).sum()) for row in given["decoder_attention_mask"]]
        moved = {name: _rolled(rows, [-n for n in empty]) for name, rows in given.items()}
        return _rolled(answer(self.theirs(**moved)), empty)


def _rolled(rows: Tensor, by: list[int]) -> Tensor:
    return torch.stack([row.roll(n, 0) for row, n in zip(rows, by, strict=True)])


def answer(given: Any) -> Tensor:
    """The one tensor an output stands for."""
    if hasattr(given, "start_logits"):
        return torch.stack([given.start_logits, given.end_logits], -1)
    found: Tensor = given.logits if hasattr(given, "logits") else given.last_hidden_state
    return found


def _biases(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Learned, and kept as buffers: what balances experts, and what only Marian's logits have."""
    return {name: values for name, values in model.named_buffers() if name.endswith(_endings(model))}


def _endings(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    if model.config.model_type == "marian":
        return ("final_logits_bias",)
    return ("e_score_correction_bias", "layer_scalar")


def _randomise(model: transformers.PreTrainedModel) -> None:
    """Every parameter counts: no bias is zero, no norm one; and none is so large that all else drowns."""
    trained = (values for values in model.parameters() if values.requires_grad)  # sinusoids are not
    with torch.no_grad():
        for values in (*trained, *_biases(model).values()):
            if values.ndim >= 2:
                values.normal_(std=0.15)
            else:
                values.add_(torch.randn_like(values) * 0.2)


@cache
def pair_of(name: str) -> Pair:
    return Pair(name)


def gradients_of(pair: Pair) -> dict[str, tuple[Tensor, Tensor]]:
    """Of one loss, by our names: ours, and theirs as they stand in a checkpoint of gradients."""
    ours, theirs, there = pair.outputs(2, 9, "right", grad=True)
    pick = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    if theirs.ndim == 3:
        pick = pick * there[..., None]
    (theirs * pick).sum().backward()
    pair.ours.requires_grad_(True)
    ours, _, _ = pair.outputs(2, 9, "right", grad=True)
    (ours * pick).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        every = (*pair.theirs.named_buffers(), *pair.theirs.named_parameters())
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in every}
        pair.theirs.save_pretrained(folder, state_dict=grads)
        stored = load_file(Path(folder) / "model.safetensors")
    places = loading.weight_map(pair.model.loaded.description)
    found = {}
    for name in places.ours:
        if places.ours[name][0].place.name.endswith(_endings(pair.theirs)):
            continue
        grad = pair.ours.get_parameter(name).grad
        assert grad is not None, name
        found[name] = grad, torch.tensor(places.read(name, lambda their: stored[their].numpy()))
    pair.ours.requires_grad_(False).zero_grad()
    pair.theirs.zero_grad()
    return found
