"""The source of a command's model: a folder in either format, a GGUF file, a hub name, or the
embedded model.

The commands read config.json, then the tokenizer, then the weights. Each step can reject the model
before the next, more expensive one.
"""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxattn import text
from jaxattn.cli.options.parser import InputError, in_options
from jaxattn.models.checkpoint import native_format
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.loading.gguf.gguf_header import is_gguf
from jaxattn.models.loading.huggingface_checkpoint import OnProgress
from jaxattn.models.loading.loader import (
    CheckpointWeights,
    GgufFile,
    ModelFolder,
    NativeFolder,
    read_folder,
)
from jaxattn.models.loading.pooling_config import PoolingConfig, read_pooling_config
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat

BYTES = 256
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model whose config.json has been read.

    Attributes:
        folder: The model's folder or GGUF file.
        name: The model's name on the hub; None for a local model.
    """

    folder: ModelFolder
    name: str | None = None

    def tokenizer(self) -> text.Tokenizer:
        """Loads the model's tokenizer. Downloads its files for a model on the hub.

        Raises:
            InputError: If the tokenizer is missing or damaged.
        """
        if isinstance(self.folder, NativeFolder) and self.folder.model.vocab_size == BYTES:
            return text.ByteTokenizer()
        with refusals():
            if isinstance(self.folder, GgufFile):
                return text.tokenizer_of(self.folder.header.metadata, self.folder.path)
            if self.name:
                from jaxattn.models.loading import hub_download

                hub_download.fetch_text(self.name, self.folder.path)
            try:
                return text.load(self.folder.path)
            except text.TextError as error:
                if not isinstance(self.folder, NativeFolder):
                    raise
                raise InputError(
                    f"{self.folder.path} is not a byte-level model: its vocab_size is "
                    f"{self.folder.model.vocab_size}, not {BYTES}; it needs a tokenizer: {error}"
                ) from error

    def embedding_defaults(self) -> PoolingConfig:
        """Reads the defaults of the model's embeddings. Their files come with the tokenizer's.

        Raises:
            InputError: If a file is damaged.
        """
        if isinstance(self.folder, GgufFile):
            return PoolingConfig()
        with refusals():
            return read_pooling_config(self.folder.path)

    def model(self, tokenizer: text.Tokenizer) -> DecoderModel:
        """Returns the model, restricted to sampling ids of the tokenizer's vocabulary."""
        model = self.folder.model
        if tokenizer.vocab_size < model.vocab_size:
            return model.with_tokens(tokenizer.vocab_size)
        return model

    def weights(self, on_fetch: OnProgress | None = None) -> CheckpointWeights:
        """Downloads and checks the weights, without placing them on a device.

        Args:
            on_fetch: Called with the number of downloaded bytes and the total number of bytes.

        Raises:
            InputError: If the weights are missing or damaged, or cannot be downloaded.
        """
        with refusals():
            if self.name:
                from jaxattn.models.loading import hub_download

                hub_download.fetch_weights(self.name, self.folder.path, on_progress=on_fetch)
            return self.folder.open()


def choose(options: argparse.Namespace) -> ModelSource:
    """Returns the model that the options name.

    Raises:
        InputError: If the model does not exist or is not supported, or its config.json is missing
            or damaged.
    """
    given = options.checkpoint if options.model is None else options.model
    if given == "":
        raise InputError("--model is empty; give a folder, or a name on the hub such as org/name")
    with refusals():
        path, name = located(given or str(native_format.EMBEDDED), options.revision)
        draft_head = options.speculate_by == "mtp"
        folder = read(path, options.dtype, options.experts, options.dense, draft_head)
    try:
        folder = folder.in_cache_format(options.kv_cache_dtype, options.kv_cache_native_layers)
    except ValueError as error:
        raise InputError(in_options(error)) from error
    return ModelSource(folder=folder, name=name)


def located(path_or_name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Returns the folder with a model's config.json or the GGUF file, and the model's name on the
    hub or None. Downloads only config.json.

    Raises:
        InputError: If `path_or_name` is neither a path nor a name, or is a path with a revision.
        CheckpointError: If the hub has no such model or revision, or cannot be reached.
    """
    path = Path(path_or_name).expanduser()
    name = path_or_name if not path.exists() and is_name(path_or_name) else None
    if revision and not name:
        raise InputError(f"--revision needs a name on the hub, but {path} is not one")
    if name:
        # These imports take half a second, and only hub models need them.
        from huggingface_hub.utils import logging

        from jaxattn.models.loading import hub_download

        logging.set_verbosity_error()  # the command prints its own one-line errors
        return hub_download.fetch_config(name, revision=revision), name
    if not path.is_dir() and not is_gguf(path):
        raise InputError(
            f"cannot read {path / 'config.json'}: there is no such folder or GGUF file; a model on "
            "the hub has a name such as org/name"
        )
    return path, None


def is_name(text: str) -> bool:
    """Whether a text has the form of a model's name on the hub, "org/name"."""
    return _NAME.fullmatch(text) is not None


def read(
    path: Path,
    dtype: str | None,
    experts: WeightsFormat | None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> ModelFolder:
    """Reads a folder's config.json.

    Raises:
        CheckpointError: If it is missing or damaged, or the model is not supported.
        InputError: If a dtype or format option does not apply because the folder fixes it, or if
            the model has no draft head for --speculate-by mtp.
    """
    try:
        return read_folder(path, dtype=dtype, experts=experts, dense=dense, draft_head=draft_head)
    except ValueError as error:
        given = {"dtype": dtype, "experts": experts, "dense": dense}
        options = [f"--{name} {value}" for name, value in given.items() if value]
        if isinstance(error, CheckpointError) or not (options or draft_head):
            raise
        if not options:
            raise InputError(f"--speculate-by mtp: {path} has no draft head") from error
        option = options[0]
        raise InputError(
            f"{option} is not supported for {path}: its config.json sets the dtype"
        ) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A context that turns errors in a model's files into a one-line InputError."""
    try:
        yield
    except (CheckpointError, text.TextError) as error:
        raise InputError(one_line(error)) from error


def one_line(error: Any) -> str:
    return " ".join(str(error).split())
