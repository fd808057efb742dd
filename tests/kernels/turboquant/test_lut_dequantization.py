"""What each of 128 threads makes of a step's bytes, against the operands of the products."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.turboquant.codec import E4M3, HEAD_DIMS, PRESETS, TurboFormat, levels
from jaxattn.kernels.turboquant.cache.lut_dequantization import (
    key_registers,
    middle,
    value_registers,
)
from tests.helpers.turbo_cases import random_slots
from tests.helpers.turbo_compiled import slot_pages, unpack

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


class Threads:
    """Words as arrays of 128, one for each thread, and PRMT by the manual of PTX."""

    def __init__(self, memory: np.ndarray):
        index = np.arange(128, dtype=np.uint32)
        self.memory = memory
        self.warp, self.g, self.t = index // 32, index // 4 % 8, index % 4

    def plus(self, *terms):
        return sum(terms).astype(np.uint32)

    def times(self, x, by):
        return (x * np.uint32(by)).astype(np.uint32)

    def both(self, x, mask):
        return x & np.uint32(mask)

    def either(self, x, y):
        return x | y

    def right(self, x, by):
        return x >> np.uint32(by)

    def left(self, x, by):
        return x << np.uint32(by)

    def constant(self, value):
        return np.full(128, value, np.uint32)

    held = constant

    def choose(self, x, equals, this, that):
        return np.where(x == equals, this, that)

    def permute(self, low, high, selectors):
        source = np.stack([low, high], axis=1).view(np.uint8)  # [128, 8]
        picks = selectors[:, None] >> np.arange(0, 16, 4).astype(np.uint32) & 15
        assert (picks < 8).all()  # 8 and more would spread a sign
        return np.take_along_axis(source, picks, axis=1).view(np.uint32)[:, 0]

    def load(self, at, fixed, count):
        first = at + fixed
        assert (first % (4 * count) == 0).all()
        some = self.memory[first[:, None] + np.arange(4 * count)].view(np.uint32)
        return list(some.T)


@pytest.mark.sampled
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_thread_has_its_part_of_the_operands(preset, dim):
    form = TurboFormat(preset=preset, head_dim=dim)
    slots = random_slots(form, (64,), np.random.default_rng(0))
    size = 16 * form.slot_bytes
    pitch = -(-size // 128) * 128
    memory = np.full(4 * pitch, 0xA5, np.uint8)
    for n, group in enumerate(np.asarray(slot_pages(form, jnp.asarray(slots))).reshape(4, size)):
        memory[n * pitch : n * pitch + size] = group
    codes = unpack(form, jnp.asarray(slots))
    keys, values = np.asarray(codes.keys), np.asarray(codes.values)
    if form.rotated:
        keys = levels(form.key_bits)[keys].astype(E4M3).view(np.uint8)
    values = (values - middle(form.value_bits)).astype(np.float32).astype(E4M3).view(np.uint8)

    on = Threads(memory)
    for operand, registers in (
        (keys, key_registers(on, form, pitch)),
        (values.T, value_registers(on, form, pitch)),
    ):
        rows, columns = operand.shape
        assert len(registers) == rows * columns // 512
        for number, register in enumerate(registers):
            # [64 rows][16 columns][8 rows], as WGMMA_LAYOUT_8BIT has them
            block, rest = divmod(number, columns // 8)
            column, half = divmod(rest, 2)
            row = 64 * block + 16 * on.warp + 8 * half + on.g
            at = 16 * column + 4 * on.t
            expected = operand[row[:, None], at[:, None] + np.arange(4)]
            np.testing.assert_array_equal(register[:, None].view(np.uint8), expected)
