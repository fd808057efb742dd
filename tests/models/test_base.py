"""What models and caches promise: odd caches fit, contradictions are refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.engine.startup.memory_plan import page_bytes
from jaxattn.models import CacheSize, Hybrid, LayerCache
from jaxattn.models.blocks import Block
from jaxattn.models.caches.cache_layouts import LatentPages, RecurrentState
from jaxattn.models.caches.layer_cache import check_caches
from jaxattn.models.interface import check_params, init_state, scratch_spec
from jaxattn.models.network.decoder_spec import DecoderSpec
from tests.helpers.engine_cases import RECURRENT

LATENTS = LatentPages(name="latents", layers=2, format=LatentFormat("bfloat16", 64, 16))
STATES = RecurrentState(
    name="delta", layers=3, conv_shape=(3, 8), conv_dtype="bfloat16", state_shape=(2, 4, 4)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rings(LayerCache):
    """Three convolutions as KDA has them, a ring of inputs, and a cursor for each row."""

    def shapes(self, size):
        rows = (self.layers, size.slots + size.checkpoints)
        inputs = {
            f"conv_{name}": jax.ShapeDtypeStruct((*rows, 3, width), jnp.bfloat16)
            for name, width in (("q", 8), ("k", 8), ("v", 16))
        }
        ring = jax.ShapeDtypeStruct((self.layers, size.pages, 5), jnp.uint8)
        return inputs | {"ring": ring, "cursor": jax.ShapeDtypeStruct(rows[1:], jnp.int32)}

    def describe(self, array, shape):
        return f"{array} {shape.shape}"


class Taken(Rings):
    def shapes(self, size):
        return {"arena": jax.ShapeDtypeStruct((1,), jnp.int32)}


def test_a_cache_may_hold_arrays_of_any_shape_and_dtype():
    cache = Rings(name="rings", layers=2)
    check_caches([cache, LATENTS, STATES])
    size = CacheSize(pages=7, slots=4, checkpoints=2)
    arrays = cache.init(size)
    assert {name: (x.shape, x.dtype.name) for name, x in arrays.items()} == {
        "conv_q": ((2, 6, 3, 8), "bfloat16"),
        "conv_k": ((2, 6, 3, 8), "bfloat16"),
        "conv_v": ((2, 6, 3, 16), "bfloat16"),
        "ring": ((2, 7, 5), "uint8"),
        "cursor": ((6,), "int32"),
    }
    assert [(item.name, item.nbytes) for item in cache.items(size)] == [
        (name.replace("_", " "), x.nbytes) for name, x in arrays.items()
    ]


def test_a_checkpoint_is_a_slot_behind_the_live_ones():
    arrays = STATES.init(CacheSize(pages=1, slots=4, checkpoints=2))
    arrays = {
        name: jax.random.normal(jax.random.key(0), x.shape).astype(x.dtype)
        for name, x in arrays.items()
    }
    saved = STATES.copy_slots(arrays, jnp.array([1, 3]), jnp.array([4, 5]))
    for name, before in arrays.items():
        np.testing.assert_array_equal(saved[name][:, [4, 5]], before[:, [1, 3]])
        np.testing.assert_array_equal(saved[name][:, :4], before[:, :4])
    pages = LATENTS.init(CacheSize(pages=3, slots=4))
    kept = LATENTS.copy_slots(pages, jnp.array([0]), jnp.array([1]))
    assert kept["kv_cache"] is pages["kv_cache"]
    rings = Rings(name="rings", layers=2)
    cursors = rings.init(CacheSize(pages=1, slots=2, checkpoints=1)) | {"cursor": jnp.arange(3)}
    found = rings.copy_slots(cursors, jnp.array([1]), jnp.array([2]))
    assert found["cursor"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "caches, message",
    [
        (
            (LATENTS, dataclasses.replace(STATES, name="latents")),
            "two caches have the name 'latents'",
        ),
        (
            (LATENTS, dataclasses.replace(LATENTS, name="others")),
            "caches 'latents' and 'others' both have an array 'kv_cache'",
        ),
        ((dataclasses.replace(STATES, layers=0),), "cache 'delta' has 0 layers"),
        ((Taken(name="odd", layers=1),), "'odd' has an array 'arena', but 'arena' is another item"),
    ],
)
def test_caches_that_contradict_each_other_are_refused_by_name(caches, message):
    with pytest.raises(ValueError, match=message):
        check_caches(caches)


def test_layers_of_one_cache_that_differ_are_refused_when_the_model_is_built():
    spec = Hybrid(RECURRENT).spec
    attention = spec.blocks[-1]
    other = dataclasses.replace(attention.mixer, kv_lora_rank=32)
    with pytest.raises(ValueError, match="layer 2 has a MLA that differs .* cache 'latents'"):
        dataclasses.replace(spec, blocks=(*spec.blocks, Block(other, attention.feed_forward)))
    with pytest.raises(ValueError, match="from 1 to 1,024 layers; got 0"):
        dataclasses.replace(spec, blocks=())
    assert isinstance(spec, DecoderSpec)


def test_what_a_page_takes_is_what_the_state_grows_by():
    model = Hybrid(RECURRENT)
    sizes = []
    for pages in (3, 4):
        state = jax.eval_shape(
            lambda pages=pages: init_state(
                model, CacheSize(pages=pages, slots=2), scratch_spec(model, 2, max_pages=3)
            )
        )
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))
    assert sizes[1] - sizes[0] == page_bytes(model.caches) == RECURRENT.num_repeats * 64 * 80 * 2


def test_parameters_of_another_model_are_named():
    shapes = Hybrid(RECURRENT).param_shapes()
    other = Hybrid(dataclasses.replace(RECURRENT, hidden_size=48)).param_shapes()
    with pytest.raises(
        ValueError, match=r"parameter 'embedding.* is bfloat16\[256, 48\]; expected"
    ):
        check_params(shapes, other)
    with pytest.raises(ValueError, match="is missing; expected bfloat16"):
        check_params(shapes, {})
    with pytest.raises(ValueError, match="unexpected parameter"):
        check_params({}, shapes)
    check_params(shapes, shapes)


def test_an_array_that_no_cache_has_is_named():
    state = jax.eval_shape(
        lambda: init_state(Hybrid(RECURRENT), CacheSize(pages=1, slots=1), ArenaSpec())
    )
    with pytest.raises(KeyError, match="no cache has an array 'kv'; the arrays are .*kv_cache"):
        state.array("kv")


def test_blocks_may_be_a_list_and_have_to_be_blocks():
    spec = Hybrid(RECURRENT).spec
    assert dataclasses.replace(spec, blocks=list(spec.blocks)) == spec
    with pytest.raises(TypeError, match=r"blocks\[1\] must be a Block, got str"):
        dataclasses.replace(spec, blocks=(spec.blocks[0], "MLP"))
