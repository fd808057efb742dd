"""Rows that GPUs give each other in one launch: XLA's bits, over many calls of one mailbox.

    timeout -s KILL 60 python -m pytest -m gpu -p no:xdist tests/parallel/test_two_gpus_exchange.py

Where one GPU never hears of another, the kernel ends the program with an error after a minute.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import check_aliasing
from jaxattn.ops.all_reduce_norm import Mailbox, addressed
from jaxattn.ops.peer_exchange import peer_exchange
from jaxattn.parallel import Group, Parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

LAYERS, MOST, WIDEST = 6, 80, 4608
EACH = (2, 4, 8)


def group_of(gpus: int) -> Group:
    if jax.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs; there are {jax.device_count()}")
    return Group(Parallel(tensor=gpus, context=gpus), tuple(jax.devices()[:gpus]))


def mailboxes(group: Group, calls: int = 0) -> Mailbox:
    """Behind so many calls."""

    def make() -> Mailbox:
        made = Mailbox.empty(group.parallel.gpus, MOST, WIDEST)
        return Mailbox(made.inbox, made.counts + jnp.int32(calls), made.addresses)

    made = jax.block_until_ready(group.make(make, group.each))
    addresses = addressed(made.inbox, made.addresses)
    return Mailbox(made.inbox, made.counts, jax.block_until_ready(addresses))


def layers(group: Group, implementation: str) -> Any:
    """(queries, outputs, mailbox) -> (what each layer's two calls brought, mailbox).

    Of each GPU, queries [T, 1, P, F] for all and outputs [T, N, P, F] with something for each; a
    layer turns their bits by one.
    """
    axes = group.parallel.axes("all")

    def turned(x: jax.Array, by: Any) -> jax.Array:
        bits = lax.bitcast_convert_type(x, jnp.uint16) + jnp.asarray(by).astype(jnp.uint16)
        return lax.bitcast_convert_type(bits, x.dtype)

    def step(queries: jax.Array, outputs: jax.Array, mailbox: Mailbox) -> Any:
        options: Any = dict(axes=axes, implementation=implementation)

        def layer(mailbox: Mailbox, number: jax.Array) -> Any:
            gathered, mailbox = peer_exchange(turned(queries[0], number), mailbox, **options)
            met, mailbox = peer_exchange(turned(outputs[0], number), mailbox, **options)
            bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in (gathered, met))
            return mailbox, tuple(bits)

        mailbox, found = lax.scan(layer, mailbox, jnp.arange(LAYERS))
        return jax.tree.map(lambda x: x[None], found), mailbox

    own = group.each
    return jax.jit(group.step(step, (own, own, own), (own, own)), donate_argnums=2)


@pytest.mark.parametrize("gpus", EACH)
@pytest.mark.parametrize(
    "rows, pieces, widths, calls",
    [(1, 1, (4608, 4608), 0), (32, 2, (2304, 2560), 2**31 - 9), (64, 1, (1024, 1536), 0)],
)
def test_what_comes_has_the_bits_of_xlas_collectives(gpus, rows, pieces, widths, calls):
    group, random = group_of(gpus), np.random.default_rng(4)
    shapes = [(gpus, rows, n, pieces, width) for n, width in zip((1, gpus), widths, strict=True)]
    given = [
        jnp.asarray(random.integers(0, 2**16, shape), jnp.uint16) for shape in shapes
    ]  # of NaN too
    given = [lax.bitcast_convert_type(x, jnp.bfloat16) for x in given]
    found = {}
    for implementation in ("xla", "mosaic_gpu"):
        mailbox = mailboxes(group, calls)
        compiled = layers(group, implementation).lower(*given, mailbox).compile()
        check_aliasing(compiled, slack=2**20)
        for call in range(3):
            begin = time.perf_counter()
            arrays, mailbox = compiled(*given, mailbox)
            arrays = [np.asarray(each) for each in jax.block_until_ready(arrays)]
            print(f"{implementation}, call {call}: {(time.perf_counter() - begin) * 1e3:.1f} ms")
            before = found.setdefault(implementation, arrays)
            for one, other in zip(before, arrays, strict=True):
                np.testing.assert_array_equal(one, other)
    for one, other in zip(found["xla"], found["mosaic_gpu"], strict=True):
        np.testing.assert_array_equal(one, other)
