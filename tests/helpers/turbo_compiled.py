"""TurboQuant's functions, each compiled as one program; compiling one operation takes as long."""

import jax

from jaxattn.core.turboquant import codec, slot_layout
from jaxattn.ops.turboquant import key_mean

quantize = jax.jit(codec.quantize, static_argnums=0)
dequantize = jax.jit(codec.dequantize, static_argnums=0)
rotate = jax.jit(codec.rotate)
pack = jax.jit(slot_layout.pack, static_argnums=0)
unpack = jax.jit(slot_layout.unpack, static_argnums=0)
group = jax.jit(slot_layout.group, static_argnums=0)
page_slots = jax.jit(slot_layout.page_slots, static_argnums=0)
slot_pages = jax.jit(slot_layout.slot_pages, static_argnums=0)
common_key = jax.jit(key_mean.common_key, static_argnums=0)
