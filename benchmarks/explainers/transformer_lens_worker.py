"""TransformerLens: hooks, a forward pass for each part that is changed, and its own patching functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from protocol import Question, Swept, serve
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge

# Norms are folded into the maps behind them, without which its attribution would leave them out. All
# else of its processing changes what a head's output or a logit is, and is left off.
PROCESSING = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}


class TransformerLens:
    name = f"TransformerLens {version('transformer-lens')}, torch {torch.__version__}"

    def load(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = TransformerBridge.boot_transformers(str(folder), device="cpu")
        self.model.enable_compatibility_mode(disable_warnings=True, fold_ln=True, **PROCESSING)

    def answers(self, question: Question) -> dict[str, np.ndarray]:
        tokens, other = torch.tensor([question.tokens]), torch.tensor([question.other])
        _, cache = self.model.run_with_cache(tokens)
        _, theirs = self.model.run_with_cache(other)
        _, reference = self.model.run_with_cache(torch.tensor(question.reference))
        metric = partial(_difference, question)
        own = metric(self.model(tokens))

        def patched(sweep: Callable) -> np.ndarray:
            return (sweep(self.model, tokens, theirs, metric) - own).numpy()

        stream = partial(
            patching.generic_activation_patch,
            patch_setter=patching.layer_pos_patch_setter,
            activation_name="resid_post",
            index_axis_names=("layer", "pos"),
        )
        return {
            "lens": self._lens(cache),
            **self._shares(cache, question),
            "ablation_zero": self._ablated(question, lambda layer: torch.zeros(())),
            "ablation_mean": self._ablated(
                question, lambda layer: reference[f"blocks.{layer}.attn.hook_z"].mean(0)
            ),
            "patching_stream": patched(stream),
            "patching_heads": patched(patching.get_act_patch_attn_head_out_all_pos),
        }

    def sweep(self, question: Question) -> Swept:
        return Swept(self._ablated(question, lambda layer: torch.zeros(())))

    def _ablated(self, question: Question, by: Callable[[int], torch.Tensor]) -> np.ndarray:
        """The loop that its users write: a pass with one hook for each head."""
        tokens, config = torch.tensor([question.tokens]), self.model.cfg
        own = _difference(question, self.model(tokens))
        effects = np.zeros((config.n_layers, config.n_heads))
        for layer in range(config.n_layers):
            value = by(layer)
            for head in range(config.n_heads):

                def put(z: torch.Tensor, hook: object, head: int = head, value: torch.Tensor = value):
                    z[:, :, head] = value if value.ndim == 0 else value[:, head]
                    return z

                hooks = [(f"blocks.{layer}.attn.hook_z", put)]
                logits = self.model.run_with_hooks(tokens, fwd_hooks=hooks)
                effects[layer, head] = own - _difference(question, logits)
        return effects

    def _lens(self, cache: object) -> np.ndarray:
        stack = [cache["blocks.0.hook_resid_pre"]]
        stack += [cache[f"blocks.{layer}.hook_resid_post"] for layer in range(self.model.cfg.n_layers)]
        return torch.cat([self.model.unembed(self.model.ln_final(state)) for state in stack]).numpy()

    def _shares(self, cache: object, question: Question) -> dict[str, np.ndarray]:
        """Its decomposition of the last place, and the unembedding's own bias."""
        stack, labels = cache.get_full_resid_decomposition(
            expand_neurons=False, pos_slice=-1, return_labels=True
        )
        shares = cache.logit_attrs(stack, question.token, question.against, pos_slice=-1)[:, 0]
        found = dict(zip(labels, shares.tolist(), strict=True))
        layers, heads = range(self.model.cfg.n_layers), range(self.model.cfg.n_heads)
        bias = self.model.b_U[question.token] - self.model.b_U[question.against]
        return {
            "attribution_embedding": np.array(found["embed"] + found["pos_embed"]),
            "attribution_heads": np.array([[found[f"L{i}H{h}"] for h in heads] for i in layers]),
            "attribution_feed_forwards": np.array([found[f"{i}_mlp_out"] for i in layers]),
            "attribution_bias": np.array(found["bias"] + float(bias)),
        }


def _difference(question: Question, logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, question.token] - logits[0, -1, question.against]


if __name__ == "__main__":
    serve(TransformerLens())
