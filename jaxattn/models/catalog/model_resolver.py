"""The model that a name stands for: a shipped configuration, a folder, or a GGUF file.

    model_resolver.load("DeepSeek-R1")     model_resolver.load("path/of/a/folder")

A `model_type` has a family (`models/registry.py`). The model is built, and its parameters, caches
and scratch are those of the model that is served.

Shipped: the fields of `NAMES`, in `models/catalog/known/*.json`, each with its source.
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
    """No such model, or a config.json that is not understood."""


NAMES = tuple(sorted(path.stem for path in DATA.glob("*.json")))


def shipped_config(name: str) -> dict[str, Any]:
    """The fields of a shipped configuration; case does not matter.

    Raises:
        CatalogError: there is none of that name; the message lists them.
    """
    for known in NAMES:
        if known.lower() == name.lower():
            return read_json(DATA / f"{known}.json")
    raise CatalogError(
        f"unknown configuration {name!r}: use one of {', '.join(NAMES)}, a folder with a "
        "config.json, a GGUF file, or a name on the hub such as org/name"
    )


def load(name: str, dense: WeightsFormat | None = None, draft_head: bool = False) -> DecoderSizes:
    """A shipped model by its name, or that of a folder or GGUF file, as the loader reads it.

    Args:
        dense, draft_head: see `jaxattn.models.load`.

    Raises:
        CatalogError: there is none, or its config.json is not understood. The words are those
            of the loader.
    """
    for known in NAMES:
        if known.lower() == name.lower():
            return from_config(known, shipped_config(known), known, dense, draft_head)
    folder = Path(name)
    if not folder.exists():
        shipped_config(name)  # says which names there are
    if not is_gguf(folder) and not (folder / CONFIG).is_file():
        raise CatalogError(f"{folder} is neither a folder with a {CONFIG} nor a GGUF file")
    try:
        return of_folder(folder.name, read_folder(folder, dense=dense, draft_head=draft_head))
    except ValueError as error:
        raise CatalogError(str(error)) from error


def of_folder(name: str, folder: ModelFolder) -> DecoderSizes:
    """The model of a folder whose config.json was read; its weights say what config.json does not
    (a head of its own, FP8 matrices that are floats), where they are there."""
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
    """The model of a config.json.

    Args:
        where: the file, for messages.
        dense, draft_head: of `load`.

    Raises:
        CatalogError: the model type is unknown, or a field is missing or does not fit.
    """
    try:
        fields = ConfigFields(config, where)
        model, quantization = read_decoder(fields, dense=dense, draft_head=draft_head)
        unread = _words(family_of(fields).skipped(fields), model)
        return DecoderSizes.of(name, model, quantization, unread=unread)
    except ValueError as error:
        raise CatalogError(str(error)) from error


def _words(skipped: tuple[str, ...], model: DecoderModel) -> str:
    """What the loader skips; the beginnings of its tensors' names say it."""
    layers = [name.startswith(("mtp.", "model.layers.")) for name in skipped]
    found = [] if all(layers) else ["the vision tower"]
    if any(layers) and not model.has_draft_head:
        found.append("the prediction (MTP) layers")
    return " and ".join(found)
