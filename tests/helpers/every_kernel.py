"""Each public op that has a kernel, once, on small arrays that the kernel supports.

`arguments(name)` gives (arrays, options), both by keyword, from scripts/cases/smoke.py.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import gqa
from scripts.cases import ops, smoke

HOPPER = types.SimpleNamespace(device_kind="H200", compute_capability="9.0", core_count=132)
cases = functools.cache(smoke.cases)

OPS = {name: ops.OPS[name].call for name in cases()}


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """Ops see a Hopper GPU; JAX itself sees the real devices."""
    gpu: Any = {"default_backend": lambda: "gpu", "devices": lambda: [HOPPER]}
    with mock.patch.multiple(jax, **gpu):
        yield


def arguments(name: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options) for two rows; random arrays depend on `seed`."""
    case = cases()[name]
    arrays = jax.tree.map(jnp.asarray, case.arrays(seed))
    if "seq_lens" in arrays:
        arrays["seq_lens"] += jnp.array([0, seed])
    if name == "turbo_attention":
        paged = {x: arrays[x] for x in ("block_tables", "seq_lens")}
        tokens = np.random.default_rng(seed).normal(size=(2, 2, 19, 2, 64))
        arrays["kv_cache"] = gqa.turbo_cache_write(
            arrays["kv_cache"],
            *jnp.asarray(tokens, jnp.bfloat16),
            form=smoke.FORM,
            query_lens=paged["seq_lens"],
            **paged,
        )
    return arrays, dict(case.options)
