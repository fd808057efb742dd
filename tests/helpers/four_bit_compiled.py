"""Numbers of 4 bits, each call compiled as one: one operation by itself takes as long."""

import jax

from jaxattn.core.numerics import four_bit_tiles

quantize = jax.jit(four_bit_tiles.quantize, static_argnums=1)
dequantize = jax.jit(four_bit_tiles.dequantize, static_argnums=(1, 2))
