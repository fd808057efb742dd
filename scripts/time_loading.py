"""Times `load` of loading/huggingface_checkpoint.py on random shards of a public model's layout.

    python -m scripts.time_loading make FOLDER --gigabytes 20 [--weights fp8]
    python -m scripts.time_loading make FOLDER --gigabytes 8 --model gpt-oss-20b
    python -m scripts.time_loading load FOLDER [--readers 8] [--cold]

`make` writes config.json and shards of 4 GB, by default of DeepSeek-V2-Lite; `/dev/shm` is the
fastest place for them. The numbers are random bytes in which no float is NaN or infinite. `load`
prints one line of JSON: seconds, GB per second, and the peaks of host and device memory above the
final state. `load` first loads a small folder, so its figures exclude the host memory that XLA, its
compilers and the device's runtime allocate on first use. On a GPU JAX's allocator keeps 8 bytes of
host memory for each 256 bytes of its pool. The allocator reserves them at the start, unless
XLA_PYTHON_CLIENT_PREALLOCATE is false: then they count here.
"""

import argparse
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.models.catalog.model_resolver import shipped_config
from jaxattn.models.checkpoint.safetensors_header import DTYPES
from jaxattn.models.checkpoint.safetensors_index import CONFIG, INDEX
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.families.components.quantization import stored_as
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.registry import read_model
from jaxattn.models.weight_map.encodings import EncodedTensor

SHARD_BYTES = 4 * 10**9
CHUNK = 64 * 2**20
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
# The differences of the folder that is loaded first, which has the same kinds of weights.
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "vocab_size": 1024,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write_folder(
    folder: Path,
    nbytes: int,
    *,
    weights: str = "bfloat16",
    sparse: bool = False,
    model: Mapping[str, Any] = V2_LITE,
    **fields: Any,
) -> int:
    """Writes a folder of about `nbytes` bytes, with a suitable number of layers; returns its size.

    Args:
        weights: "bfloat16", or "fp8" for all matrices of the layers.
        sparse: Whether the files are holes, which take no space and read as 0.
        model: The fields of config.json.
        fields: Fields that replace some of those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quantized = {"quantization_config": FP8} if weights == "fp8" else {}
    config = {**model, **fields, **quantized}

    def parts_of(layers: int) -> list[EncodedTensor]:
        return parts(config | {"num_hidden_layers": layers}, weights)

    two, three = (sum(map(_nbytes, parts_of(layers))) for layers in (2, 3))
    layers = max(2 + round((nbytes - two) / (three - two)), 2)
    (folder / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=1))
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(parts_of(layers))):
        name = f"model-{number:05d}.safetensors"
        with open(folder / name, "wb") as file:
            total += _write(file, sorted(shard, key=lambda part: part.name), sparse)
        index |= {part.name: name for part in shard}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return total


def parts(config: dict[str, Any], weights: str) -> list[EncodedTensor]:
    """The tensors of a folder with this configuration; the first of several dtypes counts."""
    placed = read_model(ConfigFields(config, CONFIG)).placed()
    found: dict[str, EncodedTensor] = {}
    for each in placed:
        matrix = ".layers." in each.name and len(each.shape) == 2 and ".gate." not in each.name
        dtypes = {each.name: "float8_e4m3fn"} if matrix and weights == "fp8" else {}
        stored = each.stored or stored_as(each.name, dtypes, "fp8" if dtypes else None)
        found |= {part.name: part for part in stored.parts(each.name, each.shape)}
    return list(found.values())


def _nbytes(part: EncodedTensor) -> int:
    return math.prod(part.shape) * jnp.dtype(part.dtypes[0]).itemsize


def _shards(found: list[EncodedTensor]) -> Iterator[list[EncodedTensor]]:
    shard: list[EncodedTensor] = []
    size = 0
    for part in found:
        nbytes = _nbytes(part)
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(part)
        size += nbytes
    yield shard


def _write(file: BinaryIO, shard: list[EncodedTensor], sparse: bool) -> int:
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, end = {}, 0
    for part in shard:
        begin, end = end, end + _nbytes(part)
        entries[part.name] = {
            "dtype": names[part.dtypes[0]], "shape": part.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    header = json.dumps(entries).encode()
    file.write(struct.pack("<Q", len(header)) + header)
    if sparse:
        file.truncate(file.tell() + end)
        return end
    # With this bit of the highest byte cleared, a bfloat16, float32 or e4m3 number is finite.
    chunk = np.random.default_rng(0).integers(0, 256, CHUNK, np.uint8) & 0xBF
    for begin in range(0, end, CHUNK):
        file.write(chunk[: end - begin])
    return end


# --- loading


def load(folder: Path, readers: int, cold: bool = False) -> dict[str, Any]:
    """Loads the folder once and returns time and memory.

    Args:
        cold: Whether to drop the files from the page cache first.
    """
    if cold:
        _drop(folder)
    with tempfile.TemporaryDirectory() as small:
        write_folder(Path(small), 1, sparse=True, **SMALL)
        jax.block_until_ready(huggingface_checkpoint.load(small, readers=readers)[1])
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun, total = time.perf_counter(), 0

    def on_progress(done: int, of: int) -> None:
        nonlocal total
        total = of

    _, params = huggingface_checkpoint.load(folder, readers=readers, on_progress=on_progress)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - begun
    final = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    on_host = final if device.platform == "cpu" else 0
    return {
        "device": device.device_kind,
        "readers": readers,
        "gigabytes": round(total / 1e9, 2),
        "seconds": round(seconds, 2),
        "gigabytes_per_second": round(total / 1e9 / seconds, 2),
        "parameter_bytes": final,
        "host_bytes_above_before": _memory("VmHWM") - before - on_host,
        "device_bytes_above_parameters": stats.get("peak_bytes_in_use", final) - final,
    }


def _memory(name: str) -> int:
    """Bytes of a field of this process in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _drop(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write a folder")
    make.add_argument("folder", type=Path)
    make.add_argument("--gigabytes", type=float, default=20)
    make.add_argument("--weights", choices=("bfloat16", "fp8"), default="bfloat16")
    make.add_argument("--model", help="a public model that is known by name")
    make.add_argument("--sparse", action="store_true", help="holes, which take no space")
    read = commands.add_parser("load", help="load a folder and print what it took")
    read.add_argument("folder", type=Path)
    read.add_argument("--readers", type=int, default=huggingface_checkpoint.READERS)
    read.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    args = parser.parse_args()
    if args.command == "make":
        nbytes = int(args.gigabytes * 1e9)
        model = shipped_config(args.model) if args.model else V2_LITE
        made = write_folder(
            args.folder, nbytes, weights=args.weights, sparse=args.sparse, model=model
        )
        print(f"{args.folder}: {made / 1e9:.2f} GB")
    else:
        print(json.dumps(load(args.folder, args.readers, args.cold)))


if __name__ == "__main__":
    main()
