"""The source of a command's model: a folder of either format, a GGUF file, a hub name, or the
embedded model.

Each step can refuse the model before the next costs anything: config.json, then the tokenizer, then
the weights.
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
from jaxattn.models.loading.embedding_defaults import EmbeddingDefaults, read_embedding_defaults
from jaxattn.models.loading.gguf.gguf_header import is_gguf
from jaxattn.models.loading.huggingface_checkpoint import OnProgress
from jaxattn.models.loading.loader import (
    CheckpointWeights,
    GgufFile,
    ModelFolder,
    NativeFolder,
    read_folder,
)
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat

BYTES = 256
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model of which config.json was read, and no more.

    Attributes:
        name: on the hub; None for a folder.
    """

    folder: ModelFolder
    name: str | None = None

    def tokenizer(self) -> text.Tokenizer:
        """What turns text into the model's tokens; its files are fetched for it.

        Raises:
            InputError: it is missing or damaged.
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
                    f"{self.folder.path} is no model of bytes: its vocab_size is "
                    f"{self.folder.model.vocab_size}, not {BYTES}; for other tokens it needs a "
                    f"tokenizer: {error}"
                ) from error

    def embedding_defaults(self) -> EmbeddingDefaults:
        """What embeddings of the model are; its files were fetched with the tokenizer's.

        Raises:
            InputError: one is damaged.
        """
        if isinstance(self.folder, GgufFile):
            return EmbeddingDefaults()
        with refusals():
            return read_embedding_defaults(self.folder.path)

    def model(self, tokenizer: text.Tokenizer) -> DecoderModel:
        """The model, which samples none but the tokenizer's tokens."""
        model = self.folder.model
        if tokenizer.vocab_size < model.vocab_size:
            return model.with_tokens(tokenizer.vocab_size)
        return model

    def weights(self, on_fetch: OnProgress | None = None) -> CheckpointWeights:
        """The weights: fetched and checked, and not on the device.

        Args:
            on_fetch: called with the bytes that are fetched and the bytes in all.

        Raises:
            InputError: they are missing or damaged, or cannot be fetched.
        """
        with refusals():
            if self.name:
                from jaxattn.models.loading import hub_download

                hub_download.fetch_weights(self.name, self.folder.path, on_progress=on_fetch)
            return self.folder.open()


def choose(options: argparse.Namespace) -> ModelSource:
    """The model that the options name.

    Raises:
        InputError: there is none, its config.json is missing or damaged, or it is not supported.
    """
    given = options.checkpoint if options.model is None else options.model
    if given == "":
        raise InputError("--model is empty; give a folder, or a name on the hub as in org/name")
    with refusals():
        path, name = located(given or str(native_format.EMBEDDED), options.revision)
        draft_head = options.speculate_by == "mtp"
        folder = read(path, options.dtype, options.experts, options.dense, draft_head)
    try:
        folder = folder.in_cache_format(options.kv_cache_dtype, options.kv_cache_native_layers)
    except ValueError as error:
        raise InputError(in_options(error)) from error
    return ModelSource(folder=folder, name=name)


def located(given: str, revision: str | None = None) -> tuple[Path, str | None]:
    """(the folder with a model's config.json or the GGUF file, its name if it is one on the hub, of
    which no other file is fetched).

    Raises:
        InputError: it is neither a folder nor a name, or a folder with a revision.
        CheckpointError: the hub has no such model or revision, or is not reached.
    """
    path = Path(given).expanduser()
    name = given if not path.exists() and is_name(given) else None
    if revision and not name:
        raise InputError(f"--revision is for a name on the hub, and {path} is none")
    if name:
        # Half a second of imports, for which a folder does not wait.
        from huggingface_hub.utils import logging

        from jaxattn.models.loading import hub_download

        logging.set_verbosity_error()  # what ends a command is said in one line
        return hub_download.fetch_config(name, revision=revision), name
    if not path.is_dir() and not is_gguf(path):
        raise InputError(
            f"cannot read {path / 'config.json'}: there is no such folder or GGUF file, and a "
            "model of the hub is named as in org/name"
        )
    return path, None


def is_name(given: str) -> bool:
    """Whether a text can be a model's name on the hub, as "org/name" is."""
    return _NAME.fullmatch(given) is not None


def read(
    path: Path,
    dtype: str | None,
    experts: WeightsFormat | None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> ModelFolder:
    """A folder's config.json.

    Raises:
        CheckpointError: it is missing or damaged, or the model is not supported.
        InputError: the folder says its dtype itself.
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
        raise InputError(f"{option}: the config.json of {path} says its dtype") from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Says in one line what is wrong with a model's files."""
    try:
        yield
    except (CheckpointError, text.TextError) as error:
        raise InputError(one_line(error)) from error


def one_line(error: Any) -> str:
    return " ".join(str(error).split())
