"""The model that a name stands for: a shipped configuration, or a folder with a config.json."""

from pathlib import Path
from typing import Any

from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.families.components.config_fields import ConfigError, ConfigFields
from jaxattn.models.loading.huggingface_checkpoint import CONFIG, read_json
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat, read_model


class UnknownModelError(ValueError):
    """No model has this name, or it cannot be run; the message says which can."""


def find(name: str, dense: WeightsFormat | None = None) -> tuple[str, dict[str, Any], DecoderModel]:
    """(name, the fields of its config.json, the model).

    Args:
        name: of a shipped configuration, or the beginning of one name alone (case does not
            matter), or a folder.
        dense: what matrices beside experts are kept in, see `jaxattn.models.load`.

    Raises:
        UnknownModelError: there is none, or its family or a field of it is not implemented.
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
