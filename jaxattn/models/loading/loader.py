"""Loading of a model from a folder in any supported format.

    model, params = load("models/Youtu-LLM-2B")

or in three steps, each of which can reject the folder before the next one costs anything:

    folder = read_folder("models/Youtu-LLM-2B") only config.json
    weights = folder.open()                     the headers of the weights
    params = weights.place()                    reads the weights to the device
"""

import abc
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxattn.models.checkpoint import native_format
from jaxattn.models.checkpoint.safetensors_index import CONFIG, read_json
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid, from_stored
from jaxattn.models.families.components.published_model import PublishedModel
from jaxattn.models.interface import Model
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.loading.gguf import gguf_checkpoint
from jaxattn.models.loading.gguf.gguf_header import GgufHeader, is_gguf, read_gguf
from jaxattn.models.loading.read_plan import PublishedWeight
from jaxattn.models.loading.sharded_weight_loader import load_sharded_weights
from jaxattn.models.loading.weight_loader import OnProgress
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import WeightsFormat
from jaxattn.models.sharding.decoder import ShardedDecoder, divided
from jaxattn.models.weight_map.tensor_mapping import Key
from jaxattn.parallel import ALONE, DeviceGroup, Parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """The weights of a folder, checked but not yet on a device.

    Attributes:
        nbytes: Bytes of all tensors to load, in their stored form.
        load: Implementation of `place` on one device.
        load_sharded: Implementation on several devices. None puts everything on one device first.
    """

    nbytes: int
    load: Callable[[OnProgress | None], Any]
    load_sharded: Callable[[ShardedDecoder, DeviceGroup, OnProgress | None], Any] | None = None

    def place(
        self,
        on_progress: OnProgress | None = None,
        *,
        model: Model | None = None,
        group: DeviceGroup | None = None,
    ) -> Any:
        """Loads the parameters to JAX's default device, or each GPU's share to its device.

        Args:
            on_progress: Callback with the bytes loaded and the total bytes. An exception from it
                ends the loading.
            model, group: The result of `divided` for the folder's model, and the devices of its
                GPUs.
        """
        if group is None or not isinstance(model, ShardedDecoder):
            return self.load(on_progress)
        if self.load_sharded is None:
            return model.place_params(self.load(on_progress), group)
        return self.load_sharded(model, group, on_progress)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFolder(abc.ABC):
    """A folder of which only config.json was read."""

    path: Path
    model: DecoderModel

    def in_cache_format(self, name: str, native_layers: int = 0) -> Self:
        """Returns the folder with another cache format; see `Model.with_cache_format`.

        Raises:
            ValueError: The model does not support the format.
        """
        model = self.model.with_cache_format(name, native_layers)
        return dataclasses.replace(self, model=model)

    @abc.abstractmethod
    def open(self) -> CheckpointWeights:
        """Opens the folder's weights without allocating anything.

        Raises:
            CheckpointError: A file is missing or damaged, or the tensors are not the model's.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder(ModelFolder):
    """A folder in the layout of the Hugging Face Hub."""

    published: PublishedModel

    def in_cache_format(self, name: str, native_layers: int = 0) -> Self:
        found = super().in_cache_format(name, native_layers)
        published = self.published._replace(model=found.model)
        return dataclasses.replace(found, published=published)

    def open(self) -> CheckpointWeights:
        return self._opened(*huggingface_checkpoint.open_weights(self.path, self.published))

    def _opened(
        self, weights: list[PublishedWeight], scales: dict[Key, np.ndarray]
    ) -> CheckpointWeights:
        put = functools.partial(huggingface_checkpoint.place, self.model, weights, scales)
        nbytes = sum(weight.nbytes for weight in weights)
        return CheckpointWeights(
            nbytes=nbytes,
            load=lambda on_progress: put(on_progress=on_progress),
            load_sharded=lambda model, group, on_progress: load_sharded_weights(
                model, weights, scales, group, on_progress=on_progress
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeFolder(ModelFolder):
    """A folder in the package's own format; `open` verifies its checksums."""

    config: HybridConfig

    def open(self) -> CheckpointWeights:
        tensors = native_format.read_tensors(self.path, self.config)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())

        def put(on_progress: OnProgress | None) -> Any:
            params = from_stored(self.config, tensors)
            if on_progress:
                on_progress(nbytes, nbytes)
            return params

        return CheckpointWeights(nbytes=nbytes, load=put)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFile(HuggingFaceFolder):
    """A GGUF file, which contains configuration, weights and tokenizer."""

    header: GgufHeader

    def open(self) -> CheckpointWeights:
        return self._opened(*huggingface_checkpoint.open_gguf(self.header, self.published))


def read_folder(
    path: str | os.PathLike,
    *,
    dtype: str | None = None,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
) -> ModelFolder:
    """Reads the model from a folder's config.json, or from the metadata of a GGUF file.

    The presence of `model_type` distinguishes the two formats of folders.

    Args:
        dtype: "bfloat16" or "float32", for a folder from the Hub or a GGUF file. None means
            bfloat16. The package's own format stores its dtype.
        experts: Format of routed experts in memory, for a folder from the Hub: "fp8", "4bit" or
            "bfloat16". None keeps the stored format if a kernel supports it.
        dense: The same for the other matrices.
        draft_head: Whether to read the draft head (MTP) too, for `Limits(speculate_by="mtp")`.

    Raises:
        CheckpointError: config.json is missing or damaged, or the model is not supported.
        ValueError: A dtype, weight format or draft head was given for the package's own format.
    """
    folder = Path(path)
    given: dict[str, Any] = {
        "experts": experts, "dense": dense, "draft_head": draft_head or None,
    }  # fmt: skip
    if is_gguf(folder):
        return _read_gguf(folder, dtype, given)
    if "model_type" in read_json(folder / CONFIG):
        published = huggingface_checkpoint.read_config(folder, dtype, experts, dense, draft_head)
        return HuggingFaceFolder(path=folder, model=published.model, published=published)
    for name, value in ({"dtype": dtype} | given).items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is only for folders from the hub; {folder} is in jaxattn's own "
                "format"
            )
    config = native_format.read_config(folder)
    return NativeFolder(path=folder, model=Hybrid(config), config=config)


def _read_gguf(path: Path, dtype: str | None, formats: Mapping[str, Any]) -> GgufFile:
    """Returns the model of a GGUF file."""
    for name, value in formats.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is only for folders from the hub, but {path} is a file"
            )
    header = read_gguf(path)
    fields = gguf_checkpoint.read_fields(header)
    published = huggingface_checkpoint.published_model(fields, dtype)
    return GgufFile(path=path, model=published.model, published=published, header=header)


def load(
    folder: str | os.PathLike,
    *,
    dtype: str | None = None,
    experts: WeightsFormat | None = None,
    dense: WeightsFormat | None = None,
    draft_head: bool = False,
    cache_format: str = "auto",
    native_layers: int = 0,
    parallel: Parallel = ALONE,
) -> tuple[DecoderModel, Any]:
    """Loads the model of a folder and its parameters, on JAX's default device.

    Args:
        folder: Folder in the layout of the Hugging Face Hub
            (`jaxattn.models.loading.huggingface_checkpoint`) or in the package's own format
            (`jaxattn.models.checkpoint`), or a GGUF file (`jaxattn.models.loading.gguf`).
        dtype, experts, dense, draft_head: See `read_folder`.
        cache_format, native_layers: Those of the `Limits` with which the model will be served. For
            an FP8 cache, scales come from the folder, or are 1.
        parallel: Layout of several GPUs, for an `Engine` of the same layout. The first of JAX's
            devices receive one share each.

    Raises:
        TypeError: The folder is not a path.
        CheckpointError: The folder or a file is missing, a file is damaged, or the model is not
            supported.
        ValueError: A dtype or weight format was given for the package's own format, or the model
            does not support the cache format or layout.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"load: folder must be a path, got {type(folder).__name__}")
    if not Path(folder).exists():
        raise native_format.CheckpointError(
            f"load: folder {str(folder)!r} does not exist; download a model with "
            "huggingface_hub.snapshot_download first, and load the folder that it returns"
        )
    found = read_folder(folder, dtype=dtype, experts=experts, dense=dense, draft_head=draft_head)
    found = found.in_cache_format(cache_format, native_layers)
    if parallel.gpus == 1:
        return found.model, found.open().place()
    group = DeviceGroup(parallel, tuple(jax.devices()[: parallel.gpus]))
    own = divided(found.model, parallel)
    return found.model, found.open().place(model=own, group=group)
