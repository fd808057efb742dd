"""The executables of an engine: every step that serving can reach, compiled ahead of time.

    prefill of N tokens        pieces of prompts: first ones, later ones (the cached prefix is
                               walked up to the whole block table), last ones
    prefill of N tokens beside B rows   the same, while all decoding rows get a token; up to
                               `mixed_tokens`
    gather of N tokens         selects hidden states for scores, after a prefill (score_step.py)
    score of N tokens          log-probabilities from them, with N of the largest prefill
    filtered score of N tokens   the same with alternatives, or with top-k, top-p and min-p
    pooling of N tokens        embeddings of prompts, after their prefill (pooling_step.py)
    decode of B x 1 tokens     the last token of each row, from the rows on the device
    decode of B x S tokens     given tokens, for callers of `Engine.executables`
    mask of B rows             masks the tokens that grammars forbid (grammar_bitmask.py)
    sample of B rows: level    the rows' next tokens (token_selection.py)
    round of B rows: level     decode and sample in one, for the modes that most rows need
    N rounds of B rows: level  several of these in one call, if a step is short
                               (decode_step_count.py)
    draft of B x N tokens: level   with speculation, replaces rounds (speculation/); with a draft
                               head, in addition to them
    update of rows             new rows and pages (device_batch.py)
    history of N tokens        prompts of rows with penalties
    copy of states             to a checkpoint slot and back, if there are any (prefix_cache.py)

Prefill and decode are the model's own: (weights, state, batch) -> (logits, state). `weights` are
the leaves of the packed parameters, because flattening a tree of modules costs the host more than
the rest of a call. The other steps change rows: (rows, ...) -> rows, some with further results.

Lengths are data, so no row needs another executable because of its length; only shapes have
buckets.
"""

from jaxattn.engine.steps.batch_update_steps import (
    BatchUpdateStep,
    HistoryAppendStep,
    StateCopyStep,
)
from jaxattn.engine.steps.model_steps import ModelStep, rounds
from jaxattn.engine.steps.pooling_step import PoolingStep
from jaxattn.engine.steps.sampling_steps import BitmaskStep, SampleStep, sampled_levels
from jaxattn.engine.steps.score_step import FilteredScoreStep, GatherStep, ScoreStep
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits


def prefill_step(limits: Limits, tokens: int) -> ModelStep:
    """Returns the step that reads `tokens` prompt tokens; in a mixed step all rows have room."""
    mixes = limits.mixes and tokens in limits.mixed_sizes
    return ModelStep("prefill", limits.batch if mixes else 0, tokens)


def entry_points(limits: Limits) -> tuple[ModelStep, ...]:
    """Returns the model's steps of an engine with these limits, the largest of a kind last."""
    prefills = (prefill_step(limits, tokens) for tokens in limits.prefill_sizes)
    decodes = (
        ModelStep("decode", rows, tokens)
        for tokens in sorted(limits.q_lens, reverse=True)
        for rows in limits.batches
    )
    return *prefills, *decodes


def all_steps(limits: Limits) -> tuple[EngineStep, ...]:
    """Returns every step that an engine with these limits can run."""
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
