"""Rows that GPUs give each other in one launch: XLA's bits, over many calls of one mailbox.

    timeout -s KILL 60 python -m pytest -m gpu -p no:xdist tests/parallel/test_gpus_exchange.py

Where one GPU never hears of another, the kernel ends the program with an error.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import check_aliasing
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.ops.collectives.peer_exchange import peer_exchange
from jaxattn.parallel import DeviceGroup, Parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

LAYERS, MOST, WIDEST = 6, 80, 4608
EACH = (2, 4, 8)


def group_of(gpus: int) -> DeviceGroup:
    if jax.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs; there are {jax.device_count()}")
    return DeviceGroup(Parallel(tensor=gpus, context=gpus), tuple(jax.devices()[:gpus]))


def mailboxes(
    group: DeviceGroup, calls: int = 0, places: int = MOST, features: int = WIDEST
) -> SymmetricBuffer:
    """Behind so many calls."""

    def make() -> SymmetricBuffer:
        made = SymmetricBuffer.empty(group.parallel.gpus, places, features)
        return SymmetricBuffer(made.inbox, made.counts + jnp.int32(calls), made.addresses)

    made = jax.block_until_ready(group.make(make, group.each))
    return jax.block_until_ready(with_addresses(made))


def layers(group: DeviceGroup, implementation: str, room: int = 0) -> Any:
    """(queries, outputs, mailbox) -> (what each layer's two calls brought, mailbox), the first with
    zeros as of `room` more GPUs.

    Of each GPU, queries [T, 1, P, F] for all and outputs [T, N, P, F] with something for each; a
    layer turns their bits by one.
    """
    axes = group.parallel.axes("all")

    def turned(x: jax.Array, by: Any) -> jax.Array:
        bits = lax.bitcast_convert_type(x, jnp.uint16) + jnp.asarray(by).astype(jnp.uint16)
        return lax.bitcast_convert_type(bits, x.dtype)

    def step(queries: jax.Array, outputs: jax.Array, mailbox: SymmetricBuffer) -> Any:
        options: Any = dict(axes=axes, implementation=implementation)

        def layer(mailbox: SymmetricBuffer, number: jax.Array) -> Any:
            given = turned(queries[0], number)
            gathered, mailbox = peer_exchange(given, mailbox, room=room, **options)
            met, mailbox = peer_exchange(turned(outputs[0], number), mailbox, **options)
            bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in (gathered, met))
            return mailbox, tuple(bits)

        mailbox, found = lax.scan(layer, mailbox, jnp.arange(LAYERS))
        return jax.tree.map(lambda x: x[None], found), mailbox

    own = group.each
    return jax.jit(group.step(step, (own, own, own), (own, own)), donate_argnums=2)


def uneven(group: DeviceGroup, implementation: str) -> Any:
    """(queries, outputs, mailbox) -> (what three calls of each layer brought, mailbox).

    Calls differ in rows and width, so that rows have had different numbers of them. In each layer
    another GPU comes late: it multiplies matrices first.
    """
    axes, gpus = group.parallel.axes("all"), group.parallel.gpus

    def step(queries: jax.Array, outputs: jax.Array, mailbox: SymmetricBuffer) -> Any:
        number = lax.axis_index(axes)

        def layer(mailbox: SymmetricBuffer, at: jax.Array) -> Any:
            turns = jnp.where((at + number) % gpus == 0, 40, 0)
            ones = jnp.ones((512, 512), jnp.bfloat16)
            late = lax.fori_loop(0, turns, lambda _, x: (x @ x).clip(0, 1), ones)
            by = (at + (late[0, 0] > 1)).astype(jnp.uint16)  # never greater
            found = []
            for part, rows, width in (
                (queries, 1, 1024), (outputs, 33, 1536), (queries, 7, 4608), (queries, 64, 2560)
            ):  # fmt: skip
                bits = lax.bitcast_convert_type(part[0, :rows, ..., :width], jnp.uint16) + by
                sent = lax.bitcast_convert_type(bits, jnp.float16)
                met, mailbox = peer_exchange(
                    sent, mailbox, axes=axes, implementation=implementation
                )
                found.append(lax.bitcast_convert_type(met, jnp.uint16))
            return mailbox, tuple(found)

        mailbox, found = lax.scan(layer, mailbox, jnp.arange(2 * LAYERS))
        return jax.tree.map(lambda x: x[None], found), mailbox

    own = group.each
    return jax.jit(group.step(step, (own, own, own), (own, own)), donate_argnums=2)


def random_bits(*shape: int) -> jax.Array:
    """Of NaN too."""
    bits = np.random.default_rng(4).integers(0, 2**16, shape)
    return lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint16), jnp.bfloat16)


def has_the_bits_of_xla(
    group: DeviceGroup, made: Any, given: list[jax.Array], calls: int, **of_mailbox: int
) -> None:
    """Over three calls of a step that `made` gives for an implementation."""
    found = {}
    for implementation in ("xla", "mosaic_gpu"):
        mailbox = mailboxes(group, calls, **of_mailbox)
        compiled = made(group, implementation).lower(*given, mailbox).compile()
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


@pytest.mark.parametrize("gpus", EACH)
@pytest.mark.parametrize(
    "rows, pieces, widths, calls",
    [(1, 1, (4608, 4608), 0), (32, 2, (2304, 2560), 2**31 - 9), (64, 1, (1024, 1536), 0)],
)
def test_what_comes_has_the_bits_of_xlas_collectives(gpus, rows, pieces, widths, calls):
    group = group_of(gpus)
    given = [
        random_bits(gpus, rows, n, pieces, width)
        for n, width in zip((1, gpus), widths, strict=True)
    ]
    has_the_bits_of_xla(group, layers, given, calls)


@pytest.mark.parametrize("gpus", EACH)
def test_zeros_behind_what_came_fill_a_tile(gpus):
    group = group_of(gpus)
    given = [random_bits(gpus, 1, n, 9, 512) for n in (1, gpus)]
    has_the_bits_of_xla(group, functools.partial(layers, room=gpus), given, 0)


@pytest.mark.parametrize("gpus", EACH)
def test_calls_of_different_sizes_share_a_mailbox_and_gpus_come_late_in_turn(gpus):
    """In float16. What a GPU has not read yet is not written over, whoever comes first."""
    group = group_of(gpus)
    given = [random_bits(gpus, 64, 1, 1, 4608), random_bits(gpus, 64, gpus, 1, 1536)]
    has_the_bits_of_xla(group, uneven, given, calls=2**31 - 20)


@pytest.mark.parametrize("gpus", EACH)
def test_more_pieces_than_blocks_run_at_once(gpus):
    """A GPU runs 132 x 16 blocks of a warpgroup at most: the others wait for these to end."""
    group, rows, pieces, width = group_of(gpus), 256, 10, 512
    given = [random_bits(gpus, rows, n, pieces, width) for n in (1, gpus)]
    has_the_bits_of_xla(group, layers, given, 0, places=rows * pieces, features=width)
