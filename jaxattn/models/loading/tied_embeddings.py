"""The output head of a model with tied embeddings whose folder also stores a head.

A folder may contain the matrix twice, or only under the head's name. If the two differ, the stored
head is used, as in transformers.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.checkpoint.safetensors_index import TensorEntry
from jaxattn.models.families.components.published_model import PublishedModel

COMPARED_BYTES = 2**22  # per step


def with_stored_head(
    folder: Path, published: PublishedModel, tensors: Mapping[str, TensorEntry]
) -> PublishedModel:
    """Returns the model with a separate head, and warns, if the folder's is not the embedding.

    Raises:
        CheckpointError: One of the two cannot be read.
    """
    if not published.model.spec.tie_embeddings or published.compared:
        return published
    names = published.embedding_and_head(tensors)
    if names[0] == names[1] or not all(name in tensors for name in names):
        return published
    embedding, head = (tensors[name] for name in names)
    if _same(embedding, head):
        return published._replace(compared=True)
    warnings.warn(
        f"{folder}: config.json has tie_word_embeddings, but {names[1]!r} differs from "
        f"{names[0]!r}; the stored head is used",
        stacklevel=2,
    )
    return published.untied()


def check_tied(folder: Path, published: PublishedModel, tensors: Mapping[str, TensorEntry]) -> None:
    """Rejects a separate head if the model was read as tied before its weights existed.

    Raises:
        CheckpointError: The folder's head differs from the embedding.
    """
    if with_stored_head(folder, published, tensors).model != published.model:
        raise CheckpointError(
            f"{folder}: config.json has tie_word_embeddings, but the weights have a different "
            "head; now that the weights are there, load the folder again"
        )


def _same(one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with open(one.file, "rb") as first, open(other.file, "rb") as second:
            first.seek(one.begin)
            second.seek(other.begin)
            for begin in range(0, one.nbytes, COMPARED_BYTES):
                size = min(COMPARED_BYTES, one.nbytes - begin)
                if first.read(size) != second.read(size):
                    return False
    except OSError as error:
        raise CheckpointError(f"cannot read {one.file}: {error.strerror}") from error
    return True
