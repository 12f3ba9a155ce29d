"""Tokenizers, chat templates, incremental decoding: text to token ids and back, exactly."""

from qkv.text.decoding import IncrementalDecoder
from qkv.text.folder import from_folder
from qkv.text.gguf import from_gguf
from qkv.text.stops import StopStrings
from qkv.text.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopStrings", "Tokenizer", "from_folder", "from_gguf"]
