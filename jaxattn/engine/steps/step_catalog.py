"""The executables of an engine: every step that serving can reach, compiled ahead of time.

    prefill of P x T tokens    a chunk of each of P prompts: the first, a later one (the cached
                               prefix is walked page by page up to the whole block table), the last
    score of P T tokens        log-probabilities of prompts, behind their prefill (score_step.py)
    pooling of P T tokens      embeddings of prompts, likewise (pooling_step.py)
    decode of B x 1 tokens     the last token of each row, from the rows on the device
    decode of B x S tokens     of tokens that are given, for callers of `Engine.executables`
    mask of B rows             what grammars do not allow, out of the logits (grammar_bitmask.py)
    sample of B rows: level    the rows' next tokens (token_selection.py)
    round of B rows: level     decode and sample in one, at the levels that most rows have
    N rounds of B rows: level  several of them in one call, where a step is short
                               (decode_step_count.py)
    draft of B x N tokens: level   in the place of rounds where rows speculate (prompt_lookup.py)
    update of rows             rows that come, and pages (device_batch.py)
    history of P x T tokens    prompts of rows with penalties
    copy of states             to a checkpoint and back, where there are checkpoints
                               (prefix_cache.py)

Prefill and decode are the model's own: (weights, state, batch) -> (logits, state), where `weights`
are the leaves of the packed parameters: to take a tree of modules apart costs the host more than
all the rest of a call. The others change rows: (rows, ...) -> rows, some with what they tell.

Lengths are data, so a row's length never asks for another executable; shapes are buckets.
"""

from jaxattn.engine.steps.batch_steps import (
    BatchUpdateStep,
    BitmaskStep,
    HistoryAppendStep,
    SampleStep,
    StateCopyStep,
    sampled_levels,
)
from jaxattn.engine.steps.engine_step import EngineStep
from jaxattn.engine.steps.model_steps import ModelStep, rounds
from jaxattn.engine.steps.pooling_step import PoolingStep
from jaxattn.engine.steps.score_step import ScoreStep
from jaxattn.memory.limits import Limits


def prefill_row_counts(limits: Limits) -> tuple[int, ...]:
    """How many prompts a prefill step reads of, as many of each data group: few, or most."""
    return tuple(sorted({rows for rows, _ in limits.prefill_shapes}))


def entry_points(limits: Limits) -> tuple[ModelStep, ...]:
    """The model's steps that an engine of these limits can run, the largest of a kind last."""
    prefills = (ModelStep("prefill", rows, chunk) for rows, chunk in limits.prefill_shapes)
    decodes = (
        ModelStep("decode", rows, tokens)
        for tokens in sorted(limits.q_lens, reverse=True)
        for rows in limits.batches
    )
    return *prefills, *decodes


def all_steps(limits: Limits) -> tuple[EngineStep, ...]:
    """Every step that an engine of these limits can run."""
    entries = entry_points(limits)
    read = sorted({entry.all_tokens for entry in entries if entry.kind == "prefill"})
    scores = (step(tokens) for step in (ScoreStep, PoolingStep) for tokens in read)
    histories = (HistoryAppendStep(e.rows, e.tokens) for e in entries if e.kind == "prefill")
    samples = (
        SampleStep(rows, level) for rows in limits.batches for level in sampled_levels(limits)
    )
    decodes = (step for rows in limits.batches for step in rounds(limits, rows))
    grammars = (BitmaskStep(rows) for rows in limits.batches)
    copies = (StateCopyStep(),) if limits.prefix_cache and limits.checkpoints else ()
    return *entries, *decodes, *samples, *grammars, *scores, *histories, BatchUpdateStep(), *copies
