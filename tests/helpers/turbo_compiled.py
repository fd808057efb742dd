"""TurboQuant's moves and numbers, each compiled as one: one operation by itself takes as long."""

import jax

from jaxattn.core import turbo_slots, turboquant

quantize = jax.jit(turboquant.quantize, static_argnums=0)
dequantize = jax.jit(turboquant.dequantize, static_argnums=0)
rotate = jax.jit(turboquant.rotate)
pack = jax.jit(turbo_slots.pack, static_argnums=0)
unpack = jax.jit(turbo_slots.unpack, static_argnums=0)
group = jax.jit(turbo_slots.group, static_argnums=0)
page_slots = jax.jit(turbo_slots.page_slots, static_argnums=0)
slot_pages = jax.jit(turbo_slots.slot_pages, static_argnums=0)
