"""Packed cases for tests of the delta rule's prefill kernels, and their float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn import gdn, kda
from tests.helpers.kernel_cases import poisoned, relative

BOUND = 5e-3  # relative L2 error of outputs and states in bfloat16


@dataclasses.dataclass
class Case:
    q: Array  # [1, T, Hk, 128]
    k: Array
    v: Array  # [1, T, Hv, 128]
    g: Array  # [1, T, Hv], or with decays per channel [1, T, Hv, 128]
    beta: Array
    initial_state: Array  # [n, Hv, 128, 128]
    cu_seqlens: Array
    tokens: int  # T without the padding

    @property
    def args(self):
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def packed(self):
        return {"initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}


def make_case(
    lens, *, key_heads=1, value_heads=2, dtype=jnp.bfloat16, padding=10, gates=1.0, seed=0,
    channels=False,
):  # fmt: skip
    """Sequences packed in one row, followed by `padding` tokens of NaN."""
    rng = np.random.default_rng(seed)
    tokens = sum(lens)
    total = tokens + padding

    def draw(*shape):
        x = rng.normal(size=(1, total, *shape))
        x[:, tokens:] = np.nan
        return x

    of_gate = (value_heads, 128) if channels else (value_heads,)
    gate = -gates * rng.exponential(size=(1, total, *of_gate))
    beta = rng.uniform(size=(1, total, value_heads))
    gate[:, tokens:] = beta[:, tokens:] = np.nan
    return Case(
        *(
            jnp.asarray(draw(heads, 128).astype(dtype))
            for heads in (key_heads, key_heads, value_heads)
        ),
        jnp.asarray(gate.astype(np.float32)),
        jnp.asarray(beta.astype(np.float32)),
        jnp.asarray(rng.normal(size=(len(lens), value_heads, 128, 128)).astype(np.float32)),
        jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        tokens,
    )


def oracle(case, *, l2norm=True, scale=128**-0.5):
    """(o [1, tokens, Hv, 128], final states), token by token in float64."""
    q, k, v, g, beta = (np.asarray(x)[0, : case.tokens].astype(np.float64) for x in case.args)
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, group, axis=1) for x in (q, k))
    out, states = np.zeros(v.shape), np.asarray(case.initial_state, np.float64).copy()
    offsets = np.asarray(case.cu_seqlens)
    for state, start, end in zip(states, offsets[:-1], offsets[1:], strict=True):
        for t in range(start, end):
            state *= np.exp(g[t])[:, None] if g.ndim == 3 else np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
            state += delta[..., None] * k[t][:, None]
            out[t] = scale * (state @ q[t][..., None])[..., 0]
    return out[None], states


def run(case, implementation, **options):
    options = {"use_qk_l2norm": True, "output_final_state": True} | options
    rule = kda.chunk_kda if case.g.ndim == 4 else gdn.chunk_gated_delta_rule
    step = functools.partial(rule, implementation=implementation, **case.packed, **options)
    return jax.jit(step)(*case.args)


def assert_matches(case, out, states, *, bound=BOUND, **options):
    expected, expected_states = oracle(case, **options)
    out = np.asarray(out)
    assert relative(out[:, : case.tokens], expected) < bound
    assert relative(states, expected_states) < bound
    assert (out[:, case.tokens :] == 0).all()
    untouched = np.diff(case.cu_seqlens) == 0
    np.testing.assert_array_equal(
        np.asarray(states)[untouched].view(np.uint32),
        np.asarray(case.initial_state)[untouched].view(np.uint32),
    )


@dataclasses.dataclass
class PoolCase:
    """A `Case` whose states are in slots of layer 1; everything else is NaN."""

    case: Case
    pool: Array  # [2, Z, Hv, 128, 128]
    reads: list[int]  # -1: a padding sequence
    writes: list[int]
    kept: list[list[int]]  # slots of the states after every `every` tokens
    every: int
    fresh: list[bool]

    @property
    def live(self):
        """Which tokens belong to a sequence that is not padding."""
        return live_tokens(self.case, self.reads)

    @property
    def arguments(self):
        """The arguments of `gated_delta_rule_prefill`, by name."""
        names = ("q", "k", "v", "g", "beta")
        slots = dict(state_indices=self.reads, write_indices=self.writes)
        return dict(
            zip(names, self.case.args, strict=True),
            state=self.pool,
            cu_seqlens=self.case.cu_seqlens,
            has_initial_state=~jnp.asarray(self.fresh),
            checkpoints=gdn.Checkpoints(slots=jnp.asarray(self.kept, jnp.int32), tokens=self.every),
            layer=jnp.int32(1),
            **{name: jnp.asarray(slots, jnp.int32) for name, slots in slots.items()},
        )


def live_tokens(case, reads):
    offsets, tokens = np.asarray(case.cu_seqlens), np.zeros(case.v.shape[1], bool)
    for read, start, end in zip(reads, offsets[:-1], offsets[1:], strict=True):
        tokens[start:end] = read >= 0
    return tokens


def on_a_pool(case, reads, writes, kept, *, num_slots, every=64, fresh=(), dtype=jnp.float32):
    count, token = len(reads), live_tokens(case, reads)
    state = case.initial_state.astype(dtype)
    started = np.array([i for i in range(count) if reads[i] >= 0 and i not in fresh])
    pool = poisoned(
        np.asarray(reads)[started], state[started], shape=(2, num_slots, *state.shape[1:]), layer=1
    )
    first = [i in fresh for i in range(count)]
    names = ("q", "k", "v", "g", "beta")
    own, states = _own(token, np.asarray(first), case.args, state)
    case = dataclasses.replace(case, **dict(zip(names, own, strict=True)), initial_state=states)
    return PoolCase(case, pool, reads, writes, kept, every, first)


@jax.jit
def _own(token, first, args, state):
    """The arguments with NaN for other tokens, and states with zeros for fresh sequences."""
    mask = lambda x: jnp.where(token.reshape(-1, *[1] * (x.ndim - 2)), x, jnp.nan)  # noqa: E731
    own = [mask(x) for x in args]
    return own, jnp.where(first[:, None, None, None], 0.0, state.astype(jnp.float32))


def assert_pool_matches(pooled, out, new):
    """Compares with float64, and asserts that every slot that is not written keeps its bits."""
    out, new = np.asarray(out), np.asarray(new)
    case, every, untouched = pooled.case, pooled.every, np.ones(new.shape[:2], bool)
    inputs, initial = [np.asarray(x) for x in case.args], np.asarray(case.initial_state)
    offsets, real = np.asarray(case.cu_seqlens), np.zeros(case.v.shape[1], bool)
    for i, read in enumerate(pooled.reads):
        length = int(offsets[i + 1] - offsets[i])
        kept = pooled.kept[i][: length // every]
        ends = [(length, pooled.writes[i]), *((every * (j + 1), z) for j, z in enumerate(kept))]
        for tokens, slot in ends if read >= 0 and length else ():
            here = slice(offsets[i], offsets[i] + tokens)
            part = Case(
                *(x[:, here] for x in inputs),
                initial[i : i + 1],
                np.array([0, tokens]),
                tokens,
            )
            expected, state = oracle(part)
            assert relative(out[:, here], expected) < BOUND
            real[here] = True
            if slot >= 0:
                assert relative(new[1, slot], state[0]) < BOUND
                untouched[1, slot] = False
    assert (out[:, ~real] == 0).all()
    unsigned = np.uint32 if new.dtype == jnp.float32 else np.uint16
    bits = lambda x: np.asarray(x)[untouched].view(unsigned)  # noqa: E731
    np.testing.assert_array_equal(bits(new), bits(pooled.pool))
