"""The proof: every trap in which a donated buffer is copied is found by name, its good twin passes.

Each trap was seen in a real program, most of them in XLA's issues or in a serving engine's.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxattn.aliasing.checker import AliasingError, check_aliasing
from jaxattn.arena import Arena, ArenaSpec

LAYERS = 12
OUT = ArenaSpec.of("op", out=((256, 1024), jnp.float32))  # 1 MiB
LARGER = OUT | ArenaSpec.of("other", out=((512, 1024), jnp.float32))  # 2 MiB
ARENA = "state.arena['float32']"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    arena: Arena
    cache: jax.Array  # [L, N, C, D]


def abstract_state(layers=LAYERS, spec=LARGER):
    arena = jax.eval_shape(lambda: Arena.allocate(spec))
    return State(arena, jax.ShapeDtypeStruct((layers, 64, 16, 128), jnp.float32))


X = jax.ShapeDtypeStruct((256, 32), jnp.float32)


def compiled(step, *args, donate="state"):
    return jax.jit(step, donate_argnames=donate).lower(*args).compile()


def scanned(layer):
    """A step that scans `layer(state, x, i) -> state, x` over the layers."""

    def step(state, x):
        indices = jnp.arange(state.cache.shape[0])
        return lax.scan(lambda carry, i: (layer(*carry, i), None), (state, x), indices)[0]

    return step


def check(layer, **options):
    return check_aliasing(compiled(scanned(layer), abstract_state(), X), **options)


def wide(x):
    return jnp.tile(x, (1, 1024 // 32))


# What passes --------------------------------------------------------------------------------------


def good_layer(state, x, i):
    """Writes a token's row and the scratch, then reads the scratch, a page and a few rows."""
    arena = state.arena.write(OUT, "out", wide(x))
    cache = state.cache.at[i, jnp.arange(4), jnp.arange(4)].set(wide(x)[:4, :128])
    pages = cache[i, jnp.array([3, 1, 2])]
    x = jnp.tanh(x + arena.read(OUT, "out")[:, :32] + pages.sum())
    return State(arena, cache), x


def test_a_step_that_updates_in_place_passes_with_its_bytes():
    report = check(good_layer)
    assert report.donated_bytes == report.aliased_bytes == (2 + 12 * 0.5) * 2**20
    assert report.temp_bytes < 2**20
    assert report.largest_copy_in_loop is None
    assert "donated 8,388,608 bytes, aliased 8,388,608, temp" in str(report)


def test_the_same_in_bfloat16_by_keyword_and_after_an_unused_argument():
    spec = ArenaSpec.of("op", out=((256, 1024), jnp.bfloat16))

    def step(unused, x, *, arena):
        def layer(carry, _):
            arena, x = carry
            arena = arena.write(spec, "out", wide(x))
            return (arena, x + arena.read(spec, "out")[:, :32]), None

        return lax.scan(layer, (arena, x), length=3)[0]

    arena = jax.eval_shape(lambda: Arena.allocate(spec | spec))
    x = jax.ShapeDtypeStruct((256, 32), jnp.bfloat16)
    jitted = jax.jit(step, donate_argnames="arena")
    report = check_aliasing(jitted.lower(X, x, arena=arena).compile())
    assert report.aliased_bytes == spec.nbytes


def test_an_update_in_one_branch_passes():
    def layer(state, x, i):
        def write(cache, x):
            return cache.at[i, 3, 5].set(x[0, 0])

        cache = lax.cond(i % 2 == 0, write, lambda cache, x: cache, state.cache, x)
        return State(state.arena, cache), x + cache[i, 3, 5, 0]

    check(layer)


def test_the_whole_lane_as_rows_stays_in_place():
    def layer(state, x, i):
        buffer, row = state.arena.lane(OUT, "out", 128)
        buffer = lax.dynamic_update_slice(buffer, wide(x).reshape(-1, 128), (row, 0))
        arena = state.arena.with_lane(OUT, "out", buffer)
        return State(arena, state.cache), x + arena.read(OUT, "out")[:, :32]

    check(layer)


# Donations that came to nothing -------------------------------------------------------------------


def test_a_step_that_donates_nothing_proves_nothing():
    step = compiled(scanned(good_layer), abstract_state(), X, donate=())
    with pytest.raises(AliasingError, match="no argument is donated"):
        check_aliasing(step)


def test_a_leaf_that_is_not_returned_is_named():
    def step(state, x):
        final, x = scanned(good_layer)(state, x)
        return final.cache, x + final.arena.read(OUT, "out").sum()

    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        step = compiled(step, abstract_state(), X)
    with pytest.raises(AliasingError) as caught:
        check_aliasing(step)
    assert f"{ARENA}: donated, but its 2,097,152 bytes are aliased to no output" in str(
        caught.value
    )
    assert "cache" not in str(caught.value)


def test_a_leaf_returned_in_another_dtype_is_named():
    def step(state, x):
        return State(state.arena, state.cache.astype(jnp.bfloat16)), x

    with pytest.raises(AliasingError, match=r"state\.cache: .*aliased to no output"):
        check_aliasing(compiled(step, abstract_state(), X))  # JAX does not warn


@pytest.mark.parametrize("argument", ["state", "positional", "keyword"])
def test_an_unused_leaf_that_jax_dropped_is_named(argument):
    if argument == "state":  # other leaves of it are kept
        name, args, kwargs = ARENA, (abstract_state(), X), {}

        def step(state, x):
            return state.cache, x

    else:
        args, kwargs = (X, X), {"cache": X}
        name = {"positional": "args[0]", "keyword": "cache"}[argument]

        def step(state, x, cache):
            return x

    donate = ["state", "cache"] if argument != "state" else "state"
    step = jax.jit(step, donate_argnames=donate).lower(*args, **kwargs).compile()  # no warning
    with pytest.raises(AliasingError) as caught:
        check_aliasing(step)
    assert f"{name}: donated but unused, so JAX dropped it" in str(caught.value)


# Copies -------------------------------------------------------------------------------------------


def old_value_after_a_write(state, x, i):
    arena = state.arena.write(OUT, "out", wide(x))
    # Where the old value is read depends on the new lane. Were it known before the write, the GPU
    # backend would read it then, write after that, and have nothing to copy.
    row = arena.lanes["float32"][i * 40_000].astype(jnp.int32)
    old = lax.dynamic_index_in_dim(state.arena.read(OUT, "out"), row)
    return State(arena, state.cache), x + old[:, :32]


def moved_within_itself(state, x, i):
    lane = state.arena.lanes["float32"]
    lane = lax.dynamic_update_slice(lane, lane[: lane.size // 2], (lane.size // 2,))
    return State(state.arena.with_lane(OUT, "out", lane), state.cache), x + lane[:32]


@pytest.mark.parametrize("layer", [old_value_after_a_write, moved_within_itself])
def test_a_copy_of_the_arena_in_every_layer_is_named(layer):
    with pytest.raises(AliasingError) as caught:
        check(layer)
    assert ARENA in str(caught.value) and "copied in each iteration of while" in str(caught.value)
    assert "cache" not in str(caught.value)


def test_an_arena_that_is_returned_and_also_stacked_by_layer_is_named():
    def step(state, x):
        def layer(carry, i):
            state, x = good_layer(*carry, i)
            return (state, x), state.arena.lanes  # 12 x 2 MiB

        return lax.scan(layer, (state, x), jnp.arange(LAYERS))

    with pytest.raises(AliasingError, match=r"state\.arena.*: 2,097,152 of its 2,097,152 bytes"):
        check_aliasing(compiled(step, abstract_state(), X))


def test_a_layer_sliced_out_of_the_stack_is_named_and_rows_gathered_from_it_are_not():
    def layer(state, x, i):
        layer = lax.dynamic_index_in_dim(state.cache, i, keepdims=False)
        layer = layer.at[3, 5].set(x[0, 0])
        x = x + (layer.reshape(-1, 128) @ wide(x)[:128, :32]).sum()
        return State(state.arena, lax.dynamic_update_index_in_dim(state.cache, layer, i, 0)), x

    with pytest.raises(AliasingError, match=r"state\.cache: 524,288 of its 6,291,456 bytes"):
        check(layer, fraction=1 / LAYERS)
    copy = check(layer).largest_copy_in_loop  # a twelfth: under the default, but in the report
    assert copy.leaf == "state.cache" and copy.nbytes == 512 * 1024
    assert check(good_layer, fraction=0.001, slack=1024).largest_copy_in_loop.leaf == "x"


def test_a_cache_that_is_scanned_over_instead_of_carried_is_named():
    def step(state, x):
        def layer(x, cache):
            return x + cache[0, 0, :32], cache.at[3].set(x[0, 0])

        x, cache = lax.scan(layer, x, state.cache)
        return State(state.arena, cache), x

    with pytest.raises(AliasingError, match=r"state\.cache: 6,291,456 of .* once per step"):
        check_aliasing(compiled(step, abstract_state(), X))


def test_a_copy_once_a_step_is_named():
    def step(state, x):
        return State(state.arena, state.cache[::-1]), x

    with pytest.raises(AliasingError, match=r"state\.cache: 6,291,456 of .* once per step"):
        check_aliasing(compiled(step, abstract_state(), X))


def test_buffers_that_change_places_are_both_named():
    def step(state, x):
        return {"a": state["b"], "b": state["a"]}, x

    state = {"a": abstract_state().cache, "b": abstract_state().cache}
    with pytest.raises(AliasingError) as caught:
        check_aliasing(compiled(step, state, X))
    assert "state['a']: 6,291,456 of" in str(caught.value)
    assert "state['b']: 6,291,456 of" in str(caught.value)


def test_an_old_value_kept_in_another_donated_buffer_is_named():
    def step(state, x):  # a copy that needs no memory of its own
        return {"new": state["new"] * 2 + 1, "old": state["new"]}, x

    state = {"new": abstract_state().cache, "old": abstract_state().cache}
    step = jax.jit(step, donate_argnames="state", keep_unused=True).lower(state, X).compile()
    assert step.memory_analysis().temp_size_in_bytes < 1024
    with pytest.raises(AliasingError, match=r"state\['new'\]: 6,291,456 of .* once per step"):
        check_aliasing(step)


def test_a_cache_scanned_over_within_each_layer_is_named():
    def layer(state, x, i):
        def inner(x, cache):
            return x + cache[0, 0, :32], jnp.full_like(cache, x[0, 0])

        x, cache = lax.scan(inner, x, state.cache)
        return State(state.arena, cache), x

    with pytest.raises(
        AliasingError, match=r"state\.cache: 6,291,456 .* in each iteration of while"
    ):
        check(layer)


def test_a_copy_in_one_branch_is_named():
    def layer(state, x, i):
        cache = lax.cond(i == 3, lambda cache: cache[::-1], lambda cache: cache, state.cache)
        return State(state.arena, cache), x + cache[0, 0, 0, :32]

    with pytest.raises(AliasingError, match=r"state\.cache: .* copied in each iteration of while"):
        check(layer)


def read_by_a_loop_before_it_changes(state, x):
    """openxla/xla#45912: a full-size second buffer since jaxlib 0.7.2."""
    cache = state.cache * 2
    x, _ = lax.scan(
        lambda x, i: (x + cache[i, 0, 0, :32], None), x, jnp.arange(state.cache.shape[0])
    )
    return State(state.arena, cache + 1), x


def test_a_copy_before_a_loop_that_reads_is_named():
    if jax.default_backend() != "cpu":
        pytest.skip(
            "XLA's GPU backend copies nothing here: one fusion writes `cache` and `cache + 1`, and "
            "the second buffer is temp, which the next test finds by its growth"
        )
    step = compiled(read_by_a_loop_before_it_changes, abstract_state(), X)
    with pytest.raises(AliasingError, match=r"state\.cache: 6,291,456 of .* once per step"):
        check_aliasing(step)


def test_a_second_buffer_for_a_loop_that_reads_is_found_by_its_growth():
    deep, shallow = (
        compiled(read_by_a_loop_before_it_changes, abstract_state(layers), X) for layers in (12, 2)
    )
    with pytest.raises(AliasingError, match="temp: growth of .* bytes with depth"):
        check_aliasing(deep, shallower=shallow)


def test_what_is_excluded_or_under_the_slack_passes():
    report = check(old_value_after_a_write, exclude=["arena"])
    assert report.largest_copy_in_loop.leaf == ARENA  # not hidden
    assert not check(old_value_after_a_write, slack=2**21).copies
    with pytest.raises(ValueError, match="matches none of the donated leaves"):
        check(good_layer, exclude=["arean"])


# The GPU's HLO ------------------------------------------------------------------------------------

# Written by hand in the GPU backend's form, which the CPU does not produce: command buffers, async
# copies, copies wrapped in a fusion, kernels that alias an operand, matmuls that read a slice.
GPU = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, \
may-alias) }, entry_computation_layout={(bf16[524288]{0}, bf16[8,65536]{1,0})->(bf16[524288]{0}, \
bf16[8,65536]{1,0})}

%wrapped_copy_computation (param_0.1: bf16[8,65536]) -> bf16[8,65536] {
  %param_0.1 = bf16[8,65536]{1,0} parameter(0)
  ROOT %copy.3 = bf16[8,65536]{1,0} copy(%param_0.1)
}

%update_computation (param_0.4: bf16[8,65536]) -> bf16[8,65536] {
  %param_0.4 = bf16[8,65536]{1,0} parameter(0)
  %convert.1 = f32[8,65536]{1,0} convert(%param_0.4)
  %constant.3 = f32[1,64]{1,0} constant({...})
  %constant.4 = s32[] constant(0)
  %dynamic-update-slice.1 = f32[8,65536]{1,0} dynamic-update-slice(%convert.1, %constant.3, \
%constant.4, %constant.4)
  ROOT %convert.2 = bf16[8,65536]{1,0} convert(%dynamic-update-slice.1)
}

%async_computation (param_0.2: bf16[8,65536]) -> bf16[8,65536] {
  %param_0.2 = bf16[8,65536]{1,0} parameter(0)
  ROOT %copy.4 = bf16[8,65536]{1,0} copy(%param_0.2)
}

%dynamic-slice-fusion (param_0.3: bf16[524288]) -> (bf16[256,256], s8[256]) {
  %param_0.3 = bf16[524288]{0} parameter(0)
  %slice.1 = bf16[262144]{0} slice(%param_0.3), slice={[0:262144]}
  %bitcast.1 = bf16[1024,256]{1,0} bitcast(%slice.1)
  %custom-call.1 = (bf16[256,256]{1,0}, s8[256]{0}) custom-call(%bitcast.1, %bitcast.1), \
custom_call_target="__cublas$gemm"
  %get-tuple-element.1 = bf16[256,256]{1,0} get-tuple-element(%custom-call.1), index=0
  %get-tuple-element.2 = s8[256]{0} get-tuple-element(%custom-call.1), index=1
  ROOT %tuple.1 = (bf16[256,256]{1,0}, s8[256]{0}) tuple(%get-tuple-element.1, \
%get-tuple-element.2)
}

%command_buffer (p.0: bf16[524288], p.1: bf16[8,65536], p.2: s32[]) -> (bf16[524288], \
bf16[8,65536]) {
  %p.0 = bf16[524288]{0} parameter(0)
  %p.1 = bf16[8,65536]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  BEFORE
  %bitcast.2 = bf16[512,1024]{1,0} bitcast(%p.0)
  %mosaic_gpu.1 = (bf16[512,1024]{1,0}, /*index=1*/bf16[8,65536]{1,0}, f32[64]{0}) \
custom-call(%p.2, %bitcast.2, %cache), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}, api_version=API_VERSION_TYPED_FFI, \
metadata={op_name="jit(step)/while/body/mla_decode"}, backend_config={"hash":"{(%cache"}
  %get-tuple-element.3 = bf16[512,1024]{1,0} get-tuple-element(%mosaic_gpu.1), index=0
  %bitcast.3 = bf16[524288]{0} bitcast(%get-tuple-element.3)
  %get-tuple-element.4 = bf16[8,65536]{1,0} get-tuple-element(%mosaic_gpu.1), index=1
  AFTER
  %matmul = (bf16[256,256]{1,0}, s8[256]{0}) fusion(%bitcast.3), kind=kCustom, \
calls=%dynamic-slice-fusion, control-predecessors={%cache}
  ROOT %tuple.2 = (bf16[524288]{0}, bf16[8,65536]{1,0}) tuple(%bitcast.3, %get-tuple-element.4)
}

%body (arg: (s32[], bf16[524288], bf16[8,65536])) -> (s32[], bf16[524288], bf16[8,65536]) {
  %arg = (s32[], bf16[524288]{0}, bf16[8,65536]{1,0}) parameter(0)
  %get-tuple-element.5 = s32[] get-tuple-element(%arg), index=0
  %get-tuple-element.6 = bf16[524288]{0} get-tuple-element(%arg), index=1
  %get-tuple-element.7 = bf16[8,65536]{1,0} get-tuple-element(%arg), index=2
  %call = (bf16[524288]{0}, bf16[8,65536]{1,0}) call(%get-tuple-element.6, \
%get-tuple-element.7, %get-tuple-element.5), to_apply=%command_buffer
  %get-tuple-element.8 = bf16[524288]{0} get-tuple-element(%call), index=0
  %get-tuple-element.9 = bf16[8,65536]{1,0} get-tuple-element(%call), index=1
  ROOT %tuple.3 = (s32[], bf16[524288]{0}, bf16[8,65536]{1,0}) tuple(%get-tuple-element.5, \
%get-tuple-element.8, %get-tuple-element.9)
}

%condition (arg.1: (s32[], bf16[524288], bf16[8,65536])) -> pred[] {
  %arg.1 = (s32[], bf16[524288]{0}, bf16[8,65536]{1,0}) parameter(0)
  ROOT %constant.1 = pred[] constant(true)
}

ENTRY %main (arena.1: bf16[524288], cache.1: bf16[8,65536]) -> (bf16[524288], bf16[8,65536]) {
  %arena.1 = bf16[524288]{0} parameter(0), metadata={op_name="state[\\'arena\\']"}
  %cache.1 = bf16[8,65536]{1,0} parameter(1), metadata={op_name="state[\\'cache\\']"}
  %constant.2 = s32[] constant(0)
  %tuple.4 = (s32[], bf16[524288]{0}, bf16[8,65536]{1,0}) tuple(%constant.2, %arena.1, %cache.1)
  %while.1 = (s32[], bf16[524288]{0}, bf16[8,65536]{1,0}) while(%tuple.4), \
condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %get-tuple-element.10 = bf16[524288]{0} get-tuple-element(%while.1), index=1
  %get-tuple-element.11 = bf16[8,65536]{1,0} get-tuple-element(%while.1), index=2
  ROOT %tuple.5 = (bf16[524288]{0}, bf16[8,65536]{1,0}) tuple(%get-tuple-element.10, \
%get-tuple-element.11)
}
"""
CACHE = "bf16[8,65536]{1,0}"
AS_IT_IS = f"%cache = {CACHE} bitcast(%p.1)"


def check_text(text):
    state = {
        "arena": jax.ShapeDtypeStruct((524288,), jnp.bfloat16),
        "cache": jax.ShapeDtypeStruct((8, 65536), jnp.bfloat16),
    }
    real = compiled(lambda state: state, state)
    other = SimpleNamespace(
        as_text=lambda: text,
        memory_analysis=lambda: None,
        args_info=real.args_info,
        in_tree=real.in_tree,
        input_shardings=real.input_shardings,
    )
    return check_aliasing(other)


def check_gpu_text(before=AS_IT_IS, after=""):
    """With these lines before and after the kernel that updates the cache."""
    return check_text(GPU.replace("BEFORE", before).replace("AFTER", after))


def test_gpu_text_without_copies_passes():
    report = check_gpu_text()
    assert report.aliased_bytes == report.donated_bytes == 2 * 2**20
    assert report.copies == () and report.temp_bytes is None
    assert "temp unknown" in str(report)


COPIES = {
    "copy": f"%cache = {CACHE} copy(%p.1)",
    "fusion": f"%cache = {CACHE} fusion(%p.1), kind=kLoop, calls=%wrapped_copy_computation",
    "updated elsewhere": f"%cache = {CACHE} fusion(%p.1), kind=kLoop, calls=%update_computation",
    "copy-start": f"%copy-start.1 = ({CACHE}, {CACHE}, u32[]) copy-start(%p.1)\n"
    f"  %cache = {CACHE} copy-done(%copy-start.1)",
    "async-start": f"%async-start.1 = (({CACHE}), {CACHE}, u32[]) "
    "async-start(%p.1), calls=%async_computation\n"
    f"  %cache = {CACHE} async-done(%async-start.1)",
}
COPY_AFTER = f"%copy.5 = {CACHE} copy(%get-tuple-element.4)"
ASYNC_KERNEL = (
    f"%custom-call-start.1 = (({CACHE}), {CACHE}, u32[]) custom-call-start(%p.1), "
    'custom_call_target="x", output_to_operand_aliasing={{}: (0, {})}\n'
    f"  %cache = {CACHE} custom-call-done(%custom-call-start.1)"
)


COPY_OF_WHAT_WAS_COMPUTED = (
    f"%multiply.1 = {CACHE} multiply(%get-tuple-element.4, %get-tuple-element.4)\n"
    f"  %copy.6 = {CACHE} copy(%multiply.1)"
)


@pytest.mark.parametrize(
    "before, after",
    [
        *((line, "") for line in COPIES.values()),
        (AS_IT_IS, COPY_AFTER),
        (ASYNC_KERNEL, COPY_AFTER),
        (AS_IT_IS, COPY_OF_WHAT_WAS_COMPUTED),
    ],
    ids=[*COPIES, "after a kernel", "after an asynchronous kernel", "of what was computed"],
)
def test_a_copy_in_gpu_text_is_named(before, after):
    with pytest.raises(AliasingError) as caught:
        check_gpu_text(before, after)
    message = (
        "state['cache']: 1,048,576 of its 1,048,576 bytes are copied in each iteration of while.1"
    )
    assert str(caught.value).startswith(message)
    assert "arena" not in str(caught.value)


def test_a_copy_of_what_a_buffer_was_a_round_earlier_is_named():
    text = GPU.replace("BEFORE", AS_IT_IS).replace("AFTER", "")
    text = text.replace(f"bf16[524288]{{0}}, {CACHE})", f"bf16[524288]{{0}}, {CACHE}, {CACHE})")
    text = text.replace(
        "ROOT %tuple.3 =",
        f"%earlier = {CACHE} get-tuple-element(%arg), index=3\n  %copy.6 = {CACHE} copy(%earlier)\n"
        "  ROOT %tuple.3 =",
    )
    text = text.replace(
        "%get-tuple-element.9)\n}", "%get-tuple-element.9, %get-tuple-element.9)\n}"
    )
    text = text.replace("%arena.1, %cache.1)", "%arena.1, %cache.1, %broadcast.1)")
    text = text.replace(
        "  %tuple.4", f"  %broadcast.1 = {CACHE} broadcast(%constant.2)\n  %tuple.4"
    )
    with pytest.raises(AliasingError, match=r"^state\['cache'\]: 1,048,576 .*\(copy\.6\)"):
        check_text(text)


# Depth --------------------------------------------------------------------------------------------


def at_depth(step, layers):
    return compiled(step, abstract_state(layers), X)


def test_temporary_memory_that_grows_with_depth_is_found():
    def step(state, x):
        state, x = scanned(good_layer)(state, x)
        every = [jnp.sort(wide(x) + i, axis=0) for i in range(state.cache.shape[0])]
        return state, jnp.sort(jnp.stack(every), axis=0)[0, :, :32]

    deep, shallow = at_depth(step, 6), at_depth(step, 2)
    check_aliasing(deep)
    with pytest.raises(AliasingError, match="temp: growth of .* from 2 to 6 layers"):
        check_aliasing(deep, shallower=shallow, layers=(6, 2))
    check_aliasing(deep, shallower=shallow, layers=(6, 2), layer_bytes=4 * 2**20)


def test_outputs_that_grow_with_depth_are_found():
    def step(state, x):
        def layer(carry, i):
            state, x = good_layer(*carry, i)
            return (state, x), x * 2

        return lax.scan(layer, (state, x), jnp.arange(state.cache.shape[0]))

    deep, shallow = at_depth(step, 12), at_depth(step, 2)
    with pytest.raises(
        AliasingError, match="outputs that are not aliased: growth of 327,680 bytes"
    ):
        check_aliasing(deep, shallower=shallow)
    check_aliasing(deep, shallower=shallow, layers=(12, 2), layer_bytes=32 * 1024)


def test_a_step_that_does_not_grow_passes_at_any_depth():
    deep = at_depth(scanned(good_layer), 61)
    for layers in (1, 2):
        shallow = at_depth(scanned(good_layer), layers)
        check_aliasing(deep, shallower=shallow, layers=(61, layers))


def test_half_of_what_the_depth_check_needs_is_refused():
    step = at_depth(scanned(good_layer), 2)
    for options in ({"layers": (61, 2)}, {"layer_bytes": 8}, {"shallower": step, "layer_bytes": 8}):
        with pytest.raises(ValueError, match="needs shallower="):
            check_aliasing(step, **options)
