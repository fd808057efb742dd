"""Resolution of a model's name: a shipped configuration, a folder, or a GGUF file.

    model_resolver.load("DeepSeek-R1")     model_resolver.load("path/of/a/folder")

The `model_type` selects a family (`models/registry.py`). The resolver builds the model, so its
parameters, caches and scratch are those of the served model.

The shipped configurations, `NAMES`, are in `models/catalog/known/*.json`, each with its source.
"""

from pathlib import Path
from typing import Any

from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.loading.gguf.gguf_header import is_gguf
from jaxattn.models.loading.huggingface_checkpoint import CONFIG, read_json
from jaxattn.models.loading.loader import HuggingFaceFolder, ModelFolder, read_folder
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat, family_of, read_decoder

DATA = Path(__file__).parent / "known"


class CatalogError(ValueError):
    """No such model exists, or its config.json is not supported."""


NAMES = tuple(sorted(path.stem for path in DATA.glob("*.json")))


def shipped_config(name: str) -> dict[str, Any]:
    """Returns the fields of a shipped configuration; the name is case-insensitive.

    Raises:
        CatalogError: No configuration has this name; the message lists them.
    """
    for known in NAMES:
        if known.lower() == name.lower():
            return read_json(DATA / f"{known}.json")
    raise CatalogError(
        f"unknown configuration {name!r}: use one of {', '.join(NAMES)}, a folder with a "
        "config.json, a GGUF file, or a name on the hub such as org/name"
    )


def load(name: str, dense: WeightsFormat | None = None, draft_head: bool = False) -> DecoderSizes:
    """Returns the sizes of a shipped model, or of a folder or GGUF file as the loader reads it.

    Args:
        dense, draft_head: See `jaxattn.models.load`.

    Raises:
        CatalogError: There is no such model, or its config.json is not supported. The message is
            the loader's.
    """
    for known in NAMES:
        if known.lower() == name.lower():
            return from_config(known, shipped_config(known), known, dense, draft_head)
    folder = Path(name)
    if not folder.exists():
        shipped_config(name)  # raises with the list of names
    if not is_gguf(folder) and not (folder / CONFIG).is_file():
        raise CatalogError(f"{folder} is neither a folder with a {CONFIG} nor a GGUF file")
    try:
        return of_folder(folder.name, read_folder(folder, dense=dense, draft_head=draft_head))
    except ValueError as error:
        raise CatalogError(str(error)) from error


def of_folder(name: str, folder: ModelFolder) -> DecoderSizes:
    """Returns the sizes of a model folder whose config.json was read.

    If the weights are present, they provide what config.json does not: a separate head, or float
    matrices in an FP8 model.
    """
    if not isinstance(folder, HuggingFaceFolder):
        return DecoderSizes.of(name, folder.model)
    published = folder.published
    unread = _words(published.skipped, published.model)
    return DecoderSizes.of(name, published.model, published.quantization, unread=unread)


def from_config(
    name: str,
    config: dict[str, Any],
    where: str,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> DecoderSizes:
    """Returns the sizes of a config.json's model.

    Args:
        where: Name of the file, for messages.
        dense, draft_head: As for `load`.

    Raises:
        CatalogError: The model type is unknown, or a field is missing or does not fit.
    """
    try:
        fields = ConfigFields(config, where)
        model, quantization = read_decoder(fields, dense=dense, draft_head=draft_head)
        unread = _words(family_of(fields).skipped(fields), model)
        return DecoderSizes.of(name, model, quantization, unread=unread)
    except ValueError as error:
        raise CatalogError(str(error)) from error


def _words(skipped: tuple[str, ...], model: DecoderModel) -> str:
    """Describes the tensors that the loader skips, from the prefixes of their names."""
    layers = [name.startswith(("mtp.", "model.layers.")) for name in skipped]
    found = [] if all(layers) else ["the vision tower"]
    if any(layers) and not model.has_draft_head:
        found.append("the prediction (MTP) layers")
    return " and ".join(found)
