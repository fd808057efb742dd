"""Shapes and allocation of the engine's state on the device: caches, arena and rows."""

import jax
import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.engine.steps import device_batch as device_rows
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import CacheSize, DecodeState
from jaxattn.models.interface import Model, init_state, overlaid


def recurrent(model: Model) -> bool:
    """Whether rows have recurrent states in slots, in addition to their pages."""
    one, two = (CacheSize(pages=1, slots=slots) for slots in (1, 2))
    return any(cache.shapes(one) != cache.shapes(two) for cache in model.caches if cache.recurrent)


def row_shapes(limits: Limits) -> DeviceBatch:
    """Returns the shapes of an engine's rows."""
    return device_rows.shapes(limits.batch, limits.table_width, limits.max_model_len)


def op_specs(model: Model, limits: Limits, width: int) -> tuple[ArenaSpec, ...]:
    """Returns the scratch of every op of all decode steps; a small batch may need the most."""
    return tuple(
        spec
        for tokens in sorted({*limits.q_lens, limits.step_tokens}, reverse=True)
        for rows in limits.batches
        for spec in model.scratch(rows // limits.groups, max_pages=width, q_len=tokens)
    )


def arena_spec(model: Model, limits: Limits, width: int) -> ArenaSpec:
    """Returns the arena that serves all of these ops."""
    return overlaid(op_specs(model, limits, width))


def cache_size(limits: Limits) -> CacheSize:
    """Returns the size of an engine's caches."""
    beside = kept_checkpoints(limits) + limits.batch * limits.speculate
    return CacheSize(
        pages=limits.pages,
        slots=limits.rows_per_group,
        checkpoints=beside,
        drafts=limits.speculate if limits.uses_draft_head else 0,
    )


def kept_checkpoints(limits: Limits) -> int:
    """Returns the number of checkpoint slots; the slots of drafts come after them."""
    return limits.checkpoints if limits.prefix_cache else 0


def new_state(model: Model, limits: Limits) -> DecodeState:
    """Allocates the state of one device; under `jax.eval_shape`, returns its shapes."""
    return init_state(model, cache_size(limits), arena_spec(model, limits, limits.table_width))


def new_rows(limits: Limits) -> DeviceBatch:
    """Allocates rows, all of them empty."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), row_shapes(limits))
