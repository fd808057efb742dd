"""Deprecated module paths from the docs, which import the moved module for one more version."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

# Old name -> new name. The old names go with version 0.3.
MOVED = {
    "jaxattn.engine.crew": "jaxattn.engine.distributed.process_group",
    "jaxattn.engine.outcome": "jaxattn.engine.requests.outputs",
    "jaxattn.models.base": "jaxattn.models.interface",
    "jaxattn.models.catalog.public_models": "jaxattn.models.catalog.model_resolver",
    "jaxattn.models.decoder": "jaxattn.models.network.decoder_model",
    "jaxattn.models.decoder_spec": "jaxattn.models.network.decoder_spec",
    "jaxattn.models.hybrid": "jaxattn.models.embedded.hybrid_model",
    "jaxattn.models.layer_cache": "jaxattn.models.caches.layer_cache",
    "jaxattn.ops.all_reduce_norm": "jaxattn.ops.collectives.all_reduce_norm",
    "jaxattn.ops.norm_linear": "jaxattn.ops.linear.norm_linear",
    "jaxattn.ops.peer_exchange": "jaxattn.ops.collectives.peer_exchange",
    "jaxattn.server.page_files": "jaxattn.server.chat_page",
}

# Renamed public names of those modules.
RENAMED = {
    "jaxattn.engine.crew": {"Crew": "ProcessGroup"},
    "jaxattn.ops.norm_linear": {"Unnormed": "PendingNorm"},
}


class MovedModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by its old name, with a DeprecationWarning that gives the new one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: types.ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} is now {new}; version 0.3 will remove the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        found = importlib.import_module(new)
        for old_name, name in RENAMED.get(module.__name__, {}).items():
            setattr(found, old_name, getattr(found, name))
        sys.modules[module.__name__] = found


def install() -> None:
    """Adds the finder after Python's own, once per process."""
    if not any(isinstance(finder, MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedModuleFinder())
