"""The arena: what specs promise about bytes and layout, and that one buffer serves every layer."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import arena as arena_module
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.arena import ALIGNMENT, Arena, ArenaError, ArenaSpec

DTYPES = ["bfloat16", "float32", "int32", "float8_e4m3fn", "uint8"]
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
regions = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=4
)
specs = st.builds(
    lambda regions, counters: ArenaSpec.of(
        "op", persistent={f"counter{n}": ((n,), jnp.int32) for n in counters}, **regions
    ),
    regions,
    st.sets(st.integers(1, 3), max_size=2),
)


def bytes_and_names(spec):
    return {d: n for d, n in spec.sizes.items() if n}, dict(spec.persistent), spec.nbytes


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


# Specs --------------------------------------------------------------------------------------------


def r1_decode(heads=128, rank=512):
    return ArenaSpec.of("mla_decode", out=((2048, heads, rank), jnp.bfloat16))


@pytest.mark.parametrize("layers", [1, 2, 61])
def test_deepseek_r1_decode_takes_256_mib_whatever_the_depth(layers):
    spec = functools.reduce(operator.or_, [r1_decode()] * layers, ArenaSpec())
    assert spec.nbytes == 268_435_456
    arena = jax.eval_shape(lambda: Arena.allocate(spec))  # needs neither memory nor a GPU
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arena)) == 268_435_456


def test_a_buffer_per_layer_would_take_61_times_that():
    assert functools.reduce(operator.add, [r1_decode()] * 61).nbytes == 16_374_562_816


@pytest.mark.parametrize("order", [*itertools.permutations([(128, 512), (64, 256), (16, 512)])])
def test_layers_of_several_shapes_take_the_largest_and_not_the_first_or_the_sum(order):
    spec = functools.reduce(operator.or_, [r1_decode(*layer) for layer in order])
    assert spec.nbytes == 268_435_456


def test_dtypes_are_overlaid_lane_by_lane():
    a = ArenaSpec.of("a", x=((2048,), jnp.bfloat16), y=((1024,), jnp.float32))
    b = ArenaSpec.of("b", x=((1024,), jnp.bfloat16), y=((4096,), jnp.float32))
    assert (a | b).sizes == {"bfloat16": 2048, "float32": 4096}
    assert (a + b).sizes == {"bfloat16": 3072, "float32": 5120}


@given(regions)
def test_regions_are_aligned_and_do_not_overlap(regions):
    spec = ArenaSpec.of("op", **regions)
    for dtype, size in spec.sizes.items():
        assert size % ALIGNMENT == 0
        lane = sorted((r.offset, r.offset + r.size) for _, r in spec.regions if r.dtype == dtype)
        assert all(first % ALIGNMENT == 0 and end <= size for first, end in lane)
        assert all(end <= following for (_, end), (following, _) in itertools.pairwise(lane))
    asked = sum(
        int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in regions.values()
    )
    assert asked <= spec.nbytes
    assert (
        spec.nbytes - asked
        < sum(ALIGNMENT * jnp.dtype(d).itemsize for _, d in regions.values()) + 1
    )


@given(specs, specs, specs)
def test_or_is_a_maximum_and_plus_a_sum(a, b, c):
    same = bytes_and_names
    assert same(a | b) == same(b | a)
    assert same(a + b) == same(b + a)
    assert same((a | b) | c) == same(a | (b | c))
    assert same((a + b) + c) == same(a + (b + c))
    assert same(a | a) == same(a) == same(a | ArenaSpec()) == same(a + ArenaSpec())
    assert same((a | b) + c) == same((a + c) | (b + c))
    for dtype in a.sizes.keys() | b.sizes.keys():
        sizes = a.sizes.get(dtype, 0), b.sizes.get(dtype, 0)
        assert (a | b).sizes[dtype] == max(sizes)
        assert (a + b).sizes[dtype] == sum(sizes)


def test_specs_are_hashable_and_equal_by_value():
    assert hash(r1_decode()) == hash(r1_decode())
    assert r1_decode() == r1_decode() != r1_decode(heads=64)


def test_one_name_for_two_persistent_buffers_is_refused():
    a = ArenaSpec.of("a", persistent={"counter": ((4,), jnp.int32)})
    b = ArenaSpec.of("b", persistent={"counter": ((8,), jnp.int32)})
    for combine in (operator.or_, operator.add):
        with pytest.raises(ArenaError, match=r"'counter' is int32\[4\].* int32\[8\]"):
            combine(a, b)


def test_bad_regions_are_refused_by_name():
    with pytest.raises(ArenaError, match="op: region 'x': .*negative"):
        ArenaSpec.of("op", x=((4, -1), jnp.float32))
    for narrow in (jnp.int4, jnp.uint2, jnp.float4_e2m1fn):
        with pytest.raises(ArenaError, match="op: region 'x': .* is narrower than a byte"):
            ArenaSpec.of("op", x=((4,), narrow))
    with pytest.raises(ArenaError, match="both regions and persistent"):
        ArenaSpec.of("op", x=((4,), jnp.int32), persistent={"x": ((4,), jnp.int32)})
    with pytest.raises(ArenaError, match="op: region 'x': .*must have static integers"):
        jax.eval_shape(lambda n: ArenaSpec.of("op", x=((n,), jnp.int32)).nbytes, 3)


# Buffers ------------------------------------------------------------------------------------------


def test_allocation_is_zero_and_of_the_planned_bytes():
    spec = ArenaSpec.of(
        "op", x=((3, 5), jnp.bfloat16), y=((7,), jnp.float32), persistent={"n": ((3,), jnp.int32)}
    )
    arena = Arena.allocate(spec, device=jax.devices()[0])
    assert arena.nbytes == spec.nbytes == 1024 * 2 + 1024 * 4 + 12
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(arena)) == spec.nbytes
    assert not any(leaf.any() for leaf in jax.tree.leaves(arena))


def test_allocation_of_other_bytes_than_planned_is_refused():
    spec = ArenaSpec.of("op", x=((3,), jnp.float64))
    with pytest.warns(UserWarning), pytest.raises(ArenaError, match="8,192.*float64 as float32"):
        Arena.allocate(spec)


def test_leaves_are_named_by_dtype_and_persistent_name():
    spec = ArenaSpec.of("op", x=((3,), jnp.bfloat16), persistent={"n": ((3,), jnp.int32)})
    arena = Arena.allocate(spec)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arena)]
    assert paths == ["['bfloat16']", ".persistent['n']"]
    assert repr(jax.tree.map(jnp.shape, arena)) == "Arena(lanes=['bfloat16'], persistent=['n'])"


@settings(max_examples=15, deadline=None)
@given(specs, st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_and_no_other_region_changes(spec, seed):
    rng = np.random.default_rng(seed)
    named = dict(spec.regions) | dict(spec.persistent)
    values = {n: jnp.asarray(rng.integers(0, 100, r.shape), r.dtype) for n, r in named.items()}
    arena = Arena.allocate(spec).poison()
    for name, value in values.items():
        arena = arena.write(spec, name, value)
    for name, value in values.items():
        read = arena.read(spec, name)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(read), np.asarray(value))


def test_a_write_leaves_the_bytes_around_the_region():
    spec = ArenaSpec.of("op", a=((5,), jnp.uint8), b=((3, 7), jnp.uint8), c=((5,), jnp.uint8))
    arena = Arena.allocate(spec)
    arena = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0xA5), arena)
    after = np.asarray(arena.write(spec, "b", jnp.zeros((3, 7), jnp.uint8)).lanes["uint8"])
    offset = spec.region("b").offset
    assert (after[offset : offset + 21] == 0).all()
    assert (np.delete(after, np.s_[offset : offset + 21]) == 0xA5).all()


def test_a_lane_is_rows_of_any_power_of_two_up_to_the_alignment():
    spec = ArenaSpec.of("op", a=((100,), jnp.float32), b=((2, 3, 512), jnp.float32))
    arena = Arena.allocate(spec)
    value = jnp.arange(2 * 3 * 512, dtype=jnp.float32).reshape(2, 3, 512)
    for width in (1, 64, 512, 1024):
        buffer, row = arena.lane(spec, "b", width)
        assert buffer.shape == (4096 // width, width) and row == 1024 // width
        assert type(row) is int
        buffer = buffer.at[row : row + 3072 // width].set(value.reshape(-1, width))
        np.testing.assert_array_equal(arena.with_lane(spec, "b", buffer).read(spec, "b"), value)


def test_a_region_that_is_its_lane_is_read_written_and_taken_by_reshapes_alone():
    spec = ArenaSpec.of("op", out=((4, 2, 512), jnp.float32))

    def step(arena, value):
        buffer, _ = arena.lane(spec, "out", 512)
        return arena.with_lane(spec, "out", buffer).write(spec, "out", value).read(spec, "out")

    jaxpr = jax.make_jaxpr(step)(Arena.allocate(spec), jnp.zeros((4, 2, 512)))
    assert {eqn.primitive.name for eqn in jaxpr.eqns} == {"reshape"}


def test_importing_the_module_makes_no_array():
    assert not [name for name, value in vars(arena_module).items() if isinstance(value, jax.Array)]


# Errors -------------------------------------------------------------------------------------------


def asks_for_too_much(arena):
    spec = ArenaSpec.of("mla_decode", lse=((4,), jnp.bfloat16), out=((4, 128, 512), jnp.bfloat16))
    return arena.read(spec, "lse")


def test_a_larger_request_is_refused_while_tracing_with_all_that_matters():
    arena = jax.eval_shape(lambda: Arena.allocate(ArenaSpec.of("x", a=((2048,), jnp.bfloat16))))
    with pytest.raises(ArenaError) as caught:
        jax.eval_shape(asks_for_too_much, arena)
    for part in ("mla_decode", "'out'", "bfloat16[4,128,512]", "526,336 bytes", "has 4,096"):
        assert part in str(caught.value)


def test_a_missing_lane_is_refused():
    arena = Arena.allocate(ArenaSpec.of("x", a=((2048,), jnp.float32)))
    with pytest.raises(ArenaError, match="526,336 bytes of bfloat16 .* has 0"):
        asks_for_too_much(arena)


def test_a_missing_or_other_persistent_buffer_is_refused():
    spec = ArenaSpec.of("op", persistent={"n": ((4,), jnp.int32)})
    with pytest.raises(
        ArenaError, match=r"op: the spec needs persistent 'n' int32\[4\] \(16 bytes\).* has none"
    ):
        Arena.allocate(ArenaSpec()).read(spec, "n")
    other = Arena.allocate(ArenaSpec.of("op", persistent={"n": ((4,), jnp.float32)}))
    with pytest.raises(ArenaError, match=r"has float32\[4\] \(16 bytes\)"):
        other.read(spec, "n")


def test_misuse_is_refused_by_name():
    spec = ArenaSpec.of("op", x=((4, 256), jnp.float32), persistent={"n": ((4,), jnp.int32)})
    arena = Arena.allocate(spec)
    with pytest.raises(ArenaError, match=r"op: no region 'y' in \['n', 'x'\]"):
        arena.read(spec, "y")
    with pytest.raises(ArenaError, match="combined spec has none"):
        arena.read(spec | spec, "x")
    with pytest.raises(
        ArenaError, match=r"'x' is float32\[4,256\], but the value is float32\[256\]"
    ):
        arena.write(spec, "x", jnp.zeros(256))
    with pytest.raises(
        ArenaError, match=r"the value is bfloat16\[4,256\]; values are neither cast"
    ):
        arena.write(spec, "x", jnp.zeros((4, 256), jnp.bfloat16))
    with pytest.raises(ArenaError, match="width=576 must divide the 1,024 elements of the float32"):
        arena.lane(spec, "x", 576)
    with pytest.raises(ArenaError, match="'n' is persistent and not in a lane"):
        arena.lane(spec, "n", 4)
    with pytest.raises(ArenaError, match=r"the buffer is float32\[2,512\]; .*whole lane"):
        Arena.allocate(spec + spec).with_lane(spec, "x", jnp.zeros((2, 512)))


def test_a_region_past_int32_elements_is_for_kernels_only():
    spec = ArenaSpec.of("op", big=((2**31,), jnp.uint8), small=((4,), jnp.uint8))

    def write(arena, value):
        return arena.write(spec, "small", value)

    arena = jax.eval_shape(lambda: Arena.allocate(spec))
    with pytest.raises(ArenaError, match="'small' starts at element 2,147,483,648"):
        jax.eval_shape(write, arena, jax.ShapeDtypeStruct((4,), jnp.uint8))
    rows = []
    jax.eval_shape(lambda arena: rows.append(arena.lane(spec, "small", 1024)[1]), arena)
    assert rows == [2**21]


# In a step ----------------------------------------------------------------------------------------

ROWS = 64


def attention(rows=ROWS):
    return ArenaSpec.of("attention", out=((rows, 1024), jnp.float32))


def recurrence(rows=ROWS):
    return ArenaSpec.of(
        "recurrence",
        partial=((rows, 512), jnp.float32),
        sums=((rows,), jnp.float32),
        persistent={"recurrence/calls": ((2,), jnp.int32)},
    )


def two_ops(arena, x, poison=False):
    """A layer of two ops that use the arena one after the other."""
    rows = x.shape[0]
    spec = attention(rows)
    buffer, row = arena.lane(spec, "out", 1024)
    buffer = jax.lax.dynamic_update_slice(buffer, jnp.tile(x, (1, 16)), (row, 0))
    arena = arena.with_lane(spec, "out", buffer)
    x = jnp.tanh(x + arena.read(spec, "out")[:, :64])
    if poison:
        arena = arena.poison()
    spec = recurrence(rows)
    arena = arena.write(spec, "sums", x.sum(1))
    arena = arena.write(spec, "partial", jnp.tile(x, (1, 8)))
    calls = arena.read(spec, "recurrence/calls")
    arena = arena.write(spec, "recurrence/calls", calls + jnp.array([1, 0]))
    x = x + arena.read(spec, "partial")[:, 64:128] * arena.read(spec, "sums")[:, None] / 64
    return (arena.poison() if poison else arena), x


def model(layers, poison=False):
    def step(arena, x):
        def layer(carry, _):
            return two_ops(*carry, poison=poison), None

        return jax.lax.scan(layer, (arena, x), length=layers)[0]

    return jax.jit(step, donate_argnames="arena")


def inputs(rows=ROWS, seed=0):
    return jax.random.normal(jax.random.key(seed), (rows, 64))


@functools.cache
def compiled(layers):
    arena = jax.eval_shape(lambda: Arena.allocate(attention() | recurrence()))
    return model(layers).lower(arena, inputs()).compile()


def test_depth_changes_neither_the_arena_nor_the_temporary_memory():
    arguments = {compiled(layers).memory_analysis().argument_size_in_bytes for layers in (1, 2, 61)}
    assert arguments == {(attention() | recurrence()).nbytes + inputs().nbytes}
    temps = [compiled(layers).memory_analysis().temp_size_in_bytes for layers in (1, 2, 61)]
    assert max(temps) - min(temps) <= 64 * 1024
    report = check_aliasing(compiled(61), shallower=compiled(2), layers=(61, 2))
    assert report.aliased_bytes == report.donated_bytes == (attention() | recurrence()).nbytes


def test_buffers_stay_where_they_are_for_100_steps():
    arena, x = Arena.allocate(attention() | recurrence()), inputs()
    before = pointers(arena)
    step = model(2)
    for _ in range(100):
        arena, x = step(arena, x)
    assert pointers(arena) == before
    np.testing.assert_array_equal(arena.read(recurrence(), "recurrence/calls"), [200, 0])


def test_buffers_stay_where_they_are_through_batches_of_every_size():
    arena = Arena.allocate(attention() | recurrence())
    before = pointers(arena)
    step = model(2)
    for rows in (1, 4, ROWS, 4, 1):
        arena, _ = step(arena, inputs(rows))
        assert pointers(arena) == before
    with pytest.raises(ArenaError, match=r"attention: region 'out' float32\[128,1024\]"):
        step(arena, inputs(128))
    assert pointers(arena) == before  # refused while tracing: nothing was lost


def test_poison_between_ops_changes_nothing_and_persistent_buffers_survive_it():
    spec = attention() | recurrence()
    clean_arena, clean = model(3)(Arena.allocate(spec), inputs())
    arena, poisoned = model(3, poison=True)(Arena.allocate(spec).poison(), inputs())
    np.testing.assert_array_equal(np.asarray(poisoned), np.asarray(clean))
    assert jnp.isnan(arena.lanes["float32"]).all()
    for each in (arena, clean_arena):
        np.testing.assert_array_equal(each.persistent["recurrence/calls"], [3, 0])


def test_two_models_with_an_arena_each_do_not_disturb_each_other():
    spec = attention() | recurrence()
    apart = [model(layers)(Arena.allocate(spec), inputs(seed=layers))[1] for layers in (1, 3)]
    arenas = [Arena.allocate(spec).poison() for _ in range(2)]
    assert not set(pointers(arenas[0])) & set(pointers(arenas[1]))
    for _ in range(2):
        for n, layers in enumerate((1, 3)):
            arenas[n], x = model(layers)(arenas[n], inputs(seed=layers))
            np.testing.assert_array_equal(np.asarray(x), np.asarray(apart[n]))


def test_a_donated_arena_cannot_be_used_again():
    arena = Arena.allocate(attention() | recurrence())
    model(1)(arena, inputs())
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        model(1)(arena, inputs())


def concurrent(arena, x):
    """The second op runs in what is left after the first one's scratch, which is read after it."""
    first, second = attention(), recurrence()
    arena = arena.write(first, "out", jnp.tile(x, (1, 16)))
    rest = arena.after(first)
    rest = rest.write(second, "partial", jnp.tile(x + 1, (1, 8)))
    buffer, row = rest.lane(second, "sums", 1024)
    assert (
        row == (first + ArenaSpec.of(partial=((ROWS, 512), jnp.float32))).sizes["float32"] // 1024
    )
    rest = rest.with_lane(second, "sums", buffer)
    arena = arena.join(rest)
    return arena, arena.read(first, "out")[:, :64] + rest.read(second, "partial")[:, :64]


def test_concurrent_scratch_is_disjoint_and_stays_in_place():
    spec = attention() + recurrence()
    assert spec.nbytes == attention().nbytes + recurrence().nbytes
    arena, x = Arena.allocate(spec).poison(), inputs()
    joined, out = concurrent(arena, x)
    np.testing.assert_array_equal(out, x + (x + 1))
    assert jax.tree.structure(joined) == jax.tree.structure(arena)  # it can be carried again

    def step(arena, x):
        return jax.lax.scan(lambda carry, _: (concurrent(*carry), None), (arena, x), length=4)[0]

    check_aliasing(jax.jit(step, donate_argnames="arena").lower(arena, x).compile())


def test_concurrent_scratch_does_not_fit_an_arena_for_one_after_another():
    with pytest.raises(ArenaError, match="recurrence: region 'partial' .* does not fit"):
        concurrent(Arena.allocate(attention() | recurrence()), inputs())
