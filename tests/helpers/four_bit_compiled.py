"""4-bit numbers, each call compiled as one program; compiling one operation takes as long."""

import jax

from jaxattn.core.numerics import four_bit_tiles

quantize = jax.jit(four_bit_tiles.quantize, static_argnums=1)
dequantize = jax.jit(four_bit_tiles.dequantize, static_argnums=(1, 2))
