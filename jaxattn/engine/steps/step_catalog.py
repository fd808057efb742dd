"""The executables of an engine: every step that serving can reach, compiled ahead of time.

    prefill of N tokens        pieces of prompts: first ones, later ones (the cached prefix is
                               walked up to the whole block table), last ones
    prefill of N tokens beside B rows   the same, while all rows that decode get a token; of up to
                               `mixed_tokens`
    gather of N tokens         what the head reads of prompts, behind their prefill (score_step.py)
    score of N tokens          log-probabilities of it, N of the largest prefill
    filtered score of N tokens with alternatives, or of what top-k, top-p and min-p leave
    pooling of N tokens        embeddings of prompts, behind their prefill (pooling_step.py)
    decode of B x 1 tokens     the last token of each row, from the rows on the device
    decode of B x S tokens     of tokens that are given, for callers of `Engine.executables`
    mask of B rows             what grammars do not allow, out of the logits (grammar_bitmask.py)
    sample of B rows: level    the rows' next tokens (token_selection.py)
    round of B rows: level     decode and sample in one, at the levels that most rows have
    N rounds of B rows: level  several of them in one call, where a step is short
                               (decode_step_count.py)
    draft of B x N tokens: level   in the place of rounds where rows speculate (speculation/), or
                               beside them where the model has a draft head
    update of rows             rows that come, and pages (device_batch.py)
    history of N tokens        prompts of rows with penalties
    copy of states             to a checkpoint and back, where there are checkpoints
                               (prefix_cache.py)

Prefill and decode are the model's own: (weights, state, batch) -> (logits, state), where `weights`
are the leaves of the packed parameters: to take a tree of modules apart costs the host more than
all the rest of a call. The others change rows: (rows, ...) -> rows, some with what they tell.

Lengths are data, so a row's length never asks for another executable; shapes are buckets.
"""

from jaxattn.engine.steps.batch_update_steps import (
    BatchUpdateStep,
    HistoryAppendStep,
    StateCopyStep,
)
from jaxattn.engine.steps.model_steps import ModelStep, rounds
from jaxattn.engine.steps.pooling_step import PoolingStep
from jaxattn.engine.steps.sample_step import BitmaskStep, SampleStep, sampled_levels
from jaxattn.engine.steps.score_step import FilteredScoreStep, GatherStep, ScoreStep
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.memory.engine_limits import Limits


def prefill_step(limits: Limits, tokens: int) -> ModelStep:
    """The step that reads so many tokens of prompts, with room for all rows where they may decode
    in it."""
    mixes = limits.mixes and tokens in limits.mixed_sizes
    return ModelStep("prefill", limits.batch if mixes else 0, tokens)


def entry_points(limits: Limits) -> tuple[ModelStep, ...]:
    """The model's steps that an engine of these limits can run, the largest of a kind last."""
    prefills = (prefill_step(limits, tokens) for tokens in limits.prefill_sizes)
    decodes = (
        ModelStep("decode", rows, tokens)
        for tokens in sorted(limits.q_lens, reverse=True)
        for rows in limits.batches
    )
    return *prefills, *decodes


def all_steps(limits: Limits) -> tuple[EngineStep, ...]:
    """Every step that an engine of these limits can run."""
    entries, sizes = entry_points(limits), limits.prefill_sizes
    behind = (kind.of(limits, tokens) for kind in (GatherStep, PoolingStep) for tokens in sizes)
    scores = *behind, ScoreStep.of(limits), FilteredScoreStep.of(limits)
    histories = (HistoryAppendStep(tokens) for tokens in sizes)
    samples = (
        SampleStep(rows, level) for rows in limits.batches for level in sampled_levels(limits)
    )
    decodes = (step for rows in limits.batches for step in rounds(limits, rows))
    grammars = (BitmaskStep(rows) for rows in limits.batches)
    copies = (StateCopyStep(),) if limits.prefix_cache and limits.checkpoints else ()
    return *entries, *decodes, *samples, *grammars, *scores, *histories, BatchUpdateStep(), *copies
