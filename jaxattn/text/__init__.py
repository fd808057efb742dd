"""Tokenizers and chat templates for every model that the package loads.

    tokenizer = load("Youtu-LLM-2B")
    tokens = tokenizer.chat([{"role": "user", "content": "Hello"}])
    stream = tokenizer.stream()
    for token in generated:
        print(stream.push(token), end="")
    print(stream.end())

This package runs no code from a model's repository, and does not use transformers.
"""

from jaxattn.text.gguf_tokenizer import tokenizer_of
from jaxattn.text.hub_tokenizer import load
from jaxattn.text.incremental_detokenizer import TokenStream
from jaxattn.text.json_files import TextError
from jaxattn.text.tokenizer import ByteTokenizer, Tokenizer
from jaxattn.text.tokenizer_config import SamplingDefaults

__all__ = [
    "ByteTokenizer",
    "SamplingDefaults",
    "TextError",
    "TokenStream",
    "Tokenizer",
    "load",
    "tokenizer_of",
]
