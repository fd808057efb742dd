#!/usr/bin/env bash
# Tunix's GRPO takes a list of prompts, as its type says, and turns each into an array of strings.
#
# Seen with google-tunix 0.1.7 and jax 0.11.2 on a CPU. `TrainingInputT` is `Dict[str, List[str] | ArrayLike]`. The learner
# repeats each prompt for its generations by `jax.tree.map(np.repeat, batch)`, for which each string of a list is a leaf:
# the batch of 2 prompts has 2 entries still, and each of them is an array. A tokenizer then raises a TypeError about bytes
# or reads the text of the array. A NumPy array of strings becomes 2 times the generations.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile google-tunix==0.1.7 jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import contextlib
import types

import numpy as np
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.queue.data_queue import SimpleDataQueue
from tunix.rl.rl_cluster import Mode


class Seen(Exception):
    pass


def prompts_of(given):
    learner = object.__new__(GRPOLearner)
    learner._iter_steps = learner._last_iter_step = 0
    tracer = types.SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
    learner.rl_cluster = types.SimpleNamespace(
        perf=tracer, perf_v2=tracer, global_steps=0, buffer_metrics=lambda *_, **__: None
    )
    learner.algo_config = types.SimpleNamespace(num_generations=4)

    def seen(micro_batches, **_):
        raise Seen(micro_batches[0]["prompts"])

    learner._process_accumulated_batches = seen
    try:
        learner._prepare_data(
            iter([{"prompts": given}]), 1, 4, 1, 1, SimpleDataQueue(maxsize=4), mode=Mode.TRAIN
        )
    except Seen as found:
        return found.args[0]


listed, array = prompts_of(["a", "b"]), prompts_of(np.array(["a", "b"]))
print("list:", listed, "array:", array)
assert len(listed) == 2 and all(isinstance(each, np.ndarray) and each.shape == (4,) for each in listed)
assert array.tolist() == ["a"] * 4 + ["b"] * 4
PY
