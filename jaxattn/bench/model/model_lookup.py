"""Lookup of a model by name: a shipped configuration, or a folder with a config.json."""

from pathlib import Path
from typing import Any

from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.loading.huggingface_checkpoint import CONFIG, read_json
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat, read_model


class UnknownModelError(ValueError):
    """Raised if no model has this name or it cannot run; the message lists the valid names."""


def find(name: str, dense: WeightsFormat | None = None) -> tuple[str, dict[str, Any], DecoderModel]:
    """Returns (name, the fields of config.json, the model).

    Args:
        name: A shipped configuration's name or an unambiguous beginning of it, in any case, or the
            path of a folder.
        dense: The format of the matrices outside the experts; see `jaxattn.models.load`.

    Raises:
        UnknownModelError: there is no such model, or its family or one of its fields is not
            implemented.
    """
    shipped = {each.lower(): each for each in model_resolver.NAMES}
    begin = [each for each in shipped if each.startswith(name.lower())]
    if len(begin) == 1 and not Path(name).exists():
        name = begin[0]
    found = shipped.get(name.lower(), Path(name).resolve().name)
    path = model_resolver.DATA / f"{found}.json" if name.lower() in shipped else Path(name) / CONFIG
    if not path.is_file():
        raise UnknownModelError(
            f"unknown model {name!r}: use one of {', '.join(model_resolver.NAMES)}, or a folder "
            f"with a {CONFIG}"
        )
    try:
        fields = read_json(path)
        model = read_model(ConfigFields(fields, str(path)), dense=dense).model
    except (CheckpointError, ConfigError, ValueError) as error:
        raise UnknownModelError(str(error)) from error
    return found, fields, model
