"""What a draft is, and what of it counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Limits
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.device_batch import CONTROLS, INTEGERS, NUMBERS, STOPS
from jaxattn.engine.steps.engine_state import row_shapes
from jaxattn.engine.steps.speculation import prompt_lookup, verification
from jaxattn.engine.steps.token_selection import FinishCode


def on_the_host(function):
    return lambda *given, **options: jax.device_get(function(*given, **options))


# Compiled as one; what they give is NumPy's, of which a part is no operation of JAX.
draft = on_the_host(jax.jit(prompt_lookup.draft, static_argnums=(2, 3)))
draft_batch = on_the_host(jax.jit(verification.draft_batch, static_argnames="recurrent"))
verify = on_the_host(jax.jit(verification.verify, static_argnames="level"))


def rows_of(histories, *, batch=None, **numbers):
    """Rows that said these tokens; the last of each is not cached yet."""
    limits = Limits(batch=batch or len(histories), max_model_len=64)
    rows = jax.tree.map(lambda shape: np.zeros(shape.shape, np.int32), row_shapes(limits))
    cursor, controls, history = (
        rows.cursor.copy(),
        np.zeros((limits.batch, CONTROLS), np.int32),
        rows.history,
    )
    controls[:, -STOPS:] = -1
    controls[:, INTEGERS.index("slot")] = np.arange(limits.batch)
    controls[:, INTEGERS.index("last")] = 60
    for name, value in numbers.items():
        if name in NUMBERS:
            column = len(INTEGERS) + NUMBERS.index(name)
            controls[:, column] = np.float32(value).view(np.int32)
        else:
            controls[:, INTEGERS.index(name)] = value
    for name in ("top_p", "repetition_penalty"):
        controls[:, len(INTEGERS) + NUMBERS.index(name)] = np.float32(1).view(np.int32)
    for row, tokens in enumerate(histories):
        cursor[row] = tokens[-1], len(tokens) - 1, 1
        history[row, : len(tokens)] = tokens
    rows = dataclasses.replace(rows, cursor=cursor, controls=controls, history=history)
    return jax.tree.map(jnp.asarray, rows)


@pytest.mark.parametrize(
    ("said", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3]),  # three equal tokens before two later ones
        ([5, 1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # of equals the latest
        ([4, 4, 4], [4, 4, 4]),  # what repeats goes on
        ([7, 8, 7, 8, 7], [8, 7, 8]),
        ([1, 2, 3, 4], None),
        ([2], None),
        ([3, 1, 3], None),  # one token is no match
    ],
)
def test_a_draft_is_what_followed_before(said, drafted):
    made = draft(rows_of([said]), jnp.arange(1), 3, 0)
    assert bool(made.has_draft[0]) == (drafted is not None)
    assert made.tokens[0, 0] == said[-1]
    if drafted:
        assert made.tokens[0, 1:].tolist() == drafted


def test_each_row_has_slots_of_its_own_wherever_it_is_now():
    rows = rows_of([[1, 2]] * 3)
    for turn in range(4):
        slots = np.arange(3) if not turn else 5 + 3 * (turn - 1) + np.arange(3)
        controls = np.array(rows.controls)
        controls[:, INTEGERS.index("slot")] = slots
        moved = dataclasses.replace(rows, controls=controls)
        made = draft(moved, jnp.array([0, 1, 2, -1]), 3, 2)
        assert made.slots.tolist() == [[i, 5 + i, 8 + i, 11 + i] for i in range(3)] + [[-1] * 4]
        batch = draft_batch(moved, made, recurrent=True)
        assert batch.state_indices.tolist() == [*slots, -1]
        assert batch.seq_lens.tolist() == [5, 5, 5, 0]


def logits_of(tokens, vocab=12):
    return 9.0 * jax.nn.one_hot(jnp.asarray(tokens), vocab)


@pytest.mark.parametrize(
    ("says", "given"),
    [([3, 4, 5, 6], [3, 4, 5, 6]), ([3, 4, 9, 6], [3, 4, 9]), ([9, 4, 5, 6], [9])],
)
def test_a_draft_counts_as_far_as_it_is_right(says, given):
    rows = rows_of([[1, 2, 3, 4, 5, 1, 2]])
    made = draft(rows, jnp.arange(1), 3, 0)
    after, told = verify(rows, logits_of([says]), made, level=SamplingMode.GREEDY)
    kept = told[0, :, 1] != FinishCode.IDLE
    assert told[0, :, 0][kept].tolist() == given
    assert after.cursor[0].tolist() == [given[-1], 6 + len(given), 1]
    assert after.controls[0, INTEGERS.index("slot")] == len(given) - 1
    assert after.history[0, 7 : 7 + len(given)].tolist() == given


@pytest.mark.parametrize(("last", "reason"), [(8, FinishCode.LENGTH), (60, FinishCode.STOP)])
def test_nothing_counts_behind_the_end_of_a_row(last, reason):
    rows = rows_of([[1, 2, 3, 4, 5, 1, 2]], last=last)
    if reason == FinishCode.STOP:
        controls = np.array(rows.controls)
        controls[0, -1] = 4
        rows = dataclasses.replace(rows, controls=controls)
    made = draft(rows, jnp.arange(1), 3, 0)
    after, told = verify(rows, logits_of([[3, 4, 5, 6]]), made, level=SamplingMode.GREEDY)
    assert told[0, :, 1].tolist() == [FinishCode.NONE, reason, FinishCode.IDLE, FinishCode.IDLE]
    assert after.cursor[0].tolist() == [4, 8, 0]


def test_drafts_leave_the_distribution_as_it_is():
    """Chi-square of the first two tokens of 4,000 rows against their chances, at p = 0.001."""
    count, vocab = 4000, 4
    said = [1, 2, 3, 1, 2, 3, 1, 2]  # the draft is 3 1 2
    rows = rows_of([said] * count, temperature=1.0, seed=np.arange(count, dtype=np.int32))
    made = draft(rows, jnp.arange(count), 3, 0)
    chances = np.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.4, 0.15, 0.2]])
    behind = np.log(np.stack([chances[0], chances[1], chances[0], chances[0]]))
    logits = jnp.broadcast_to(jnp.asarray(behind, jnp.float32), (count, 4, vocab))
    _, told = verify(rows, logits, made, level=SamplingMode.DRAWS)
    told = np.asarray(told)
    first = np.bincount(told[:, 0, 0], minlength=vocab)
    assert chi_square(first, chances[0] * count) < 16.27  # 3 degrees of freedom
    right = told[:, 1, 1] != FinishCode.IDLE
    assert (right == (told[:, 0, 0] == 3)).all()
    second = np.bincount(told[right, 1, 0], minlength=vocab)
    assert chi_square(second, chances[1] * right.sum()) < 16.27


def chi_square(found, wanted):
    return (((found - wanted) ** 2) / wanted).sum()
