"""A process that traces and lowers steps of a model for a GPU that another process has.

    python -m jaxattn.engine.compilation.lowering_process

It reads a `LoweringSetup` and then steps from standard input, and writes a `LoweredStep` for each
to standard output, all pickled. It ends with its input. JAX runs on the CPU there, and ops see the
device that the setup describes.
"""

import dataclasses
import os
import pickle
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.sharded_step import model_step
from jaxattn.engine.compilation.step_export import PortableExport, exported
from jaxattn.engine.runtime.gc_pause import gc_paused
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.kernels.hopper.build.trace_cache import Shared, share_launches
from jaxattn.memory.limits import Limits
from jaxattn.models.interface import Model

# Settings of a process itself, which decide nothing of what is lowered.
OWN_SETTINGS = ("jax_platforms", "jax_platform_name", "jax_enable_compilation_cache")
# What an op may ask of a device.
ASKED = ("platform", "device_kind", "compute_capability", "core_count")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweringSetup:
    """What decides how steps are lowered.

    Attributes:
        model: whose steps they are; with `limits`, `params` and `implementation` as the engine
            compiles them.
        params: the leaves of the packed parameters, as shapes.
        tree: their structure.
        device: facts of the device, by the names of `ASKED`.
        settings: of JAX.
    """

    model: Model
    limits: Limits
    params: list[jax.ShapeDtypeStruct]
    tree: Any
    implementation: Implementation | None
    device: Mapping[str, Any]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: Model,
        limits: Limits,
        params: Any,
        implementation: Implementation | None,
        device: jax.Device,
    ) -> "LoweringSetup":
        leaves, tree = jax.tree.flatten(params)
        # Some settings have another value in this thread.
        names = ("jax_enable_x64", "jax_default_matmul_precision")
        here = {name: getattr(jax.config, name) for name in names}
        return cls(
            model=model,
            limits=limits,
            params=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
            tree=tree,
            implementation=implementation,
            device={name: getattr(device, name) for name in ASKED if hasattr(device, name)},
            settings=dict(jax.config.values) | here,
        )

    def apply(self) -> None:
        """Makes this process one that has the device and the settings."""
        for name, value in self.settings.items():
            if name not in OWN_SETTINGS and jax.config.values.get(name) != value:
                jax.config.update(name, value)
        described: Any = types.SimpleNamespace(**self.device)
        jax.default_backend = lambda: described.platform
        jax.devices = lambda backend=None: [described]

    def lower(self, step: ModelStep, shared: Shared) -> PortableExport:
        function = model_step(step, self.model, self.limits, self.tree, self.implementation, None)
        params = jax.tree.unflatten(self.tree, self.params)
        with gc_paused(), share_launches(shared):
            given = step.arguments(self.model, self.limits, params)
            return PortableExport.of(exported(function, given, self.device["platform"]))


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """What became of a step.

    Attributes:
        export: None where it could not be lowered.
        warned: category and text of each warning.
    """

    export: PortableExport | None
    warned: tuple[tuple[type[Warning], str], ...] = ()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Lowers steps until there are no more."""
    setup: LoweringSetup = pickle.load(requests)
    setup.apply()
    shared: Shared = {}
    while True:
        try:
            step = pickle.load(requests)
        except EOFError:
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                export = setup.lower(step, shared)
            except Exception:  # the engine's process lowers it again, and has the error there
                export = None
        warned = tuple((each.category, str(each.message)) for each in caught) if export else ()
        replies.write(pickle.dumps(LoweredStep(export, warned)))
        replies.flush()


if __name__ == "__main__":
    # By the name that pickle has for its classes.
    from jaxattn.engine.compilation import lowering_process

    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    lowering_process.serve(sys.stdin.buffer, output)
