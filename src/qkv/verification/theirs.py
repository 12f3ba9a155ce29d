"""transformers, as a second opinion on the reference: its own reading of the files, in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

from qkv.errors import UnsupportedError
from qkv.loading import Loaded
from qkv.runtime.interpreter import Floats
from qkv.spec import Language
from qkv.verification.passes import BUDGET
from qkv.verification.text import Text


def through_transformers(network: Any, text: Text) -> Iterator[Floats]:
    """The answers of its modules, of all tokens in one pass where their logits are not too large."""
    import torch

    ids = torch.tensor([text.tokens])
    given = {"input_ids": ids}
    if text.source is not None:
        given = {"input_ids": torch.tensor([text.source]), "decoder_input_ids": ids}
    # without it, tokens that happen to be those of padding are taken for padding
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    size = max(1, BUDGET // (4 * network.get_input_embeddings().weight.shape[0]))
    parts = text.causal and text.probable and text.source is None and len(text.tokens) > size
    with torch.no_grad():
        if parts and "logits_to_keep" in signature(network.forward).parameters:
            for wanted in torch.arange(len(text.tokens)).split(size):
                yield network(**given, logits_to_keep=wanted).logits[0].numpy()
            return
        answers = _answers(network(**given))
        yield answers.reshape(-1, answers.shape[-1]).float().numpy()


def _answers(found: Any) -> Any:
    """What its classes call what a head says, or the states without one."""
    import torch

    if "start_logits" in found:
        return torch.stack([found["start_logits"], found["end_logits"]], -1)
    return found["logits"] if "logits" in found else found["last_hidden_state"]


def network_of(loaded: Loaded) -> Any:
    """The modules it makes of the files, with its plainest attention. Raises what it raises, and
    UnsupportedError where it has none or fills them in part only."""
    import torch
    import transformers

    path, spec = loaded.source, loaded.spec
    auto: Any = transformers.AutoModel
    if isinstance(spec.head, Language) and spec.decoder is not None:
        paired = spec.encoder is not None
        auto = transformers.AutoModelForSeq2SeqLM if paired else transformers.AutoModelForCausalLM
    plain = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix.lower() == ".gguf":
        return _of_gguf(path, auto, plain).eval()
    name = next(iter(loaded.config.get("architectures") or ()), None)
    kind = auto if name is None else getattr(transformers, name, None)
    if kind is None:
        raise UnsupportedError(f"it has no {name}")
    folder = path if path.is_dir() else path.parent
    network, told = kind.from_pretrained(folder, **plain, local_files_only=True, output_loading_info=True)
    _check_missing(told["missing_keys"])
    return network.eval()


def _of_gguf(path: Path, auto: Any, plain: Mapping[str, Any]) -> Any:
    """By the parts of its `from_pretrained`, which as a whole asks for a library that knows devices."""
    import gguf
    import torch
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # what it does once for the configuration and once for the weights, and once for each module
    with _once(gguf, "GGUFReader"), _once(gguf, "get_tensor_name_map"):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with torch.device("meta"):
            names = auto.from_config(config, **plain)
        with redirect_stderr(StringIO()):  # its bar heeds no setting
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)["tensors"]
    network, told = type(names).from_pretrained(
        None, config=config, state_dict=tensors, **plain, output_loading_info=True
    )
    _check_missing(told["missing_keys"])
    return network


@contextmanager
def _once(module: Any, name: str) -> Iterator[None]:
    """A function of a module that for a while remembers what it gave for the same arguments."""
    before = getattr(module, name)
    setattr(module, name, lru_cache(None)(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def _check_missing(names: Iterable[str]) -> None:
    """What is not read stays random. A pooler makes nothing that is compared."""
    missed = sorted(name for name in names if "pooler" not in name)
    if missed:
        raise UnsupportedError(f"it finds no {missed[0]} in the files")


@contextmanager
def quietly() -> Iterator[str]:
    """transformers without its bars and warnings; its version."""
    import transformers
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers.__version__
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
