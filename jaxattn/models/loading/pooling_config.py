"""A published model's settings for embeddings, from modules.json and the pooling's configuration.

Sentence Transformers writes both files next to the weights. Of its modules, this package supports
the transformer itself, two kinds of pooling and the normalization.
"""

import dataclasses
from pathlib import Path

from jaxattn.core.validation.config_fields import ListOf, json_object
from jaxattn.text.json_files import read_list, read_object
from jaxattn.text.tokenizer_config import FileFields

MODULES, POOLING = "modules.json", "1_Pooling"  # default folder if no pooling is listed
MOST_MODULES = 32
# Names in the files -> `Request.pooling`. The second name of each pooling is that of a flag.
POOLINGS = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
FLAG = "pooling_mode_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The embedding settings for requests that do not specify them.

    Attributes:
        pooling: "mean" or "last"; see `Request.pooling`.
        normalize: Whether embeddings are scaled to length 1.
        missing: Description of a module that the model needs and the engine lacks; "" if none.
    """

    pooling: str = "last"
    normalize: bool = True
    missing: str = ""


def read_pooling_config(folder: Path) -> PoolingConfig:
    """Reads the settings from the files of a folder, each of which may be missing.

    Raises:
        TextError: A file is damaged, or a field has a wrong type.
    """
    listed = read_list(folder / MODULES)
    modules = FileFields({"modules": listed}, str(folder / MODULES))
    items = modules.items("modules", ListOf(json_object, MOST_MODULES), "a list of objects")
    fields = [modules.of("modules", each) for each in items]
    kinds = [(each.text("type") or "").rpartition(".")[2] for each in fields]
    named = dict(zip(kinds, fields, strict=True)).get("Pooling")
    path = (named.text("path") or "") if named is not None else ""
    inside = path if path not in ("", "..") and Path(path).name == path else POOLING
    file = folder / inside / "config.json"
    pooling, missing = _pooling(FileFields(read_object(file), str(file)), inside)
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        missing = f"{MODULES} has the module {others[0]:.60}"
    return PoolingConfig(
        pooling=pooling, normalize=not kinds or "Normalize" in kinds, missing=missing
    )


def _pooling(fields: FileFields, path: str) -> tuple[str, str]:
    """Returns (pooling, what is unsupported), from older files' flags or newer files' name."""
    flags = [name for name in fields.values if name.startswith(FLAG)]
    named = [name.removeprefix(FLAG) for name in flags if fields.flag(name)]
    if (mode := fields.text("pooling_mode")) is not None:
        named = [mode]
    if not named:
        return PoolingConfig.pooling, ""
    if len(named) > 1 or named[0] not in POOLINGS:
        return PoolingConfig.pooling, f"{path} asks for {' and '.join(named):.60}"
    return POOLINGS[named[0]], ""
