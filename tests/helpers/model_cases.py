"""Parameters and states of the hybrid decoder for tests, by its configuration."""

from typing import Any

import jax
from jax import Array

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.models import CacheSize, DecodeState, Hybrid, HybridConfig
from jaxattn.models.interface import init_state, scratch_spec


def params_of(config: HybridConfig, seed: int = 0) -> Any:
    return Hybrid(config).init_params(jax.random.key(seed))


def state_of(
    config: HybridConfig,
    rows: int,
    pages: int,
    slots: int,
    *,
    max_pages: int,
    q_len: int = 1,
    page_size: int = PAGE_SIZE,
) -> DecodeState:
    """Zeroed caches, and an arena for `rows` rows of `q_len` tokens and `max_pages` pages."""
    model = Hybrid(config)
    sizes = dict(max_pages=max_pages, q_len=q_len, page_size=page_size)
    return init_state(
        model,
        CacheSize(pages=pages, slots=slots, page_size=page_size),
        scratch_spec(model, rows, **sizes),
    )


def changed(state: DecodeState, **arrays: Array) -> DecodeState:
    """The state with some arrays replaced, by their names in any cache."""
    for name, array in arrays.items():
        [cache] = [cache for cache, found in state.caches.items() if name in found]
        state = state.replace(cache, {**state.caches[cache], name: array})
    return state
