"""Writes the lowered text of every kernel for a Hopper GPU, without one: a text file per case.

    JAX_PLATFORMS=cpu python -m scripts.lowered OUT         # from the root of the repository
    diff -rq OUT OTHER                                      # silent: no kernel has changed

A file contains the op's StableHLO, followed by the Mosaic GPU module of each launch. Source
locations are removed, so a tree whose files have moved gives the same text. All files together have
about 200 MB. The cases are those of scripts/cases.
"""

import argparse
import re
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src.lib.mlir import ir

import jaxattn
from scripts.cases import CASES

# The device properties that an op reads.
HOPPER = types.SimpleNamespace(device_kind="H200", compute_capability="9.0", core_count=132)
COUNTED = re.compile(r'(dump_basename = "\w+)_\d+"')  # a counter of the process's kernels
PLACES = re.compile(r"\.py\b|site-packages|jaxattn[/.]|\bloc\(|#loc")


def lowered(op: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The StableHLO of an op for CUDA, followed by the module of each launch in the same order.

    Only the op sees a Hopper GPU; JAX itself sees the real devices.
    """
    gpu: Any = {"default_backend": lambda: "gpu", "devices": lambda: [HOPPER]}
    with mock.patch.multiple(jax, **gpu):
        traced = jax.jit(op).trace(*arguments)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    launches: list[Any] = []

    def take_out(operation: Any) -> Any:
        target = operation.attributes.get("call_target_name")
        if target is not None and ir.StringAttr(target).value.startswith("mosaic_gpu"):
            config = {item.name: item.attr for item in operation.attributes["mhlo.backend_config"]}
            launches.append(ir.Module.parse(ir.StringAttr(config.pop("module")).value_bytes))
            del config["kernel_hash"]  # which covers the module's source locations
            operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
        return ir.WalkResult.ADVANCE

    with module.context as context:
        context.allow_unregistered_dialects = True  # kernels are stored in such a dialect
        module.operation.walk(take_out, ir.WalkOrder.PRE_ORDER)
    if not launches:
        raise ValueError("no kernel was launched")
    texts = [m.operation.get_asm(enable_debug_info=False) for m in (module, *launches)]
    text = COUNTED.sub(r'\1"', "\n".join(texts))
    if found := PLACES.search(text):
        raise ValueError(f"a place is left: {text[max(0, found.start() - 80) :][:160]}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder, made if there is none")
    names = list(CASES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print("of", Path(jaxattn.__file__).parent)
    for name in args.only:
        began = time.monotonic()
        text = lowered(*CASES[name].launch())
        (args.out / f"{name}.txt").write_text(text + "\n")
        print(f"{name}: {len(text):,} characters, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
