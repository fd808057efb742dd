"""GRPO with Tunix: a model learns to write functions whose return value uses an argument.

    python3 examples/grpo.py --plot grpo.png                      # the embedded model, on a CPU
    python3 examples/grpo.py --model SmolLM2.gguf --tokens 24     # another model, on a GPU

The example needs `pip install 'jaxattn[tunix]'`, and matplotlib for `--plot`. A prompt is the
header of a function. The reward of a completion, up to its last complete line, is

    0      if Python cannot parse the function,
    0.5    if Python can parse the function, and
    1      if a `return` statement also uses an argument.

jaxattn's engine samples the completions. Tunix computes the advantages and the loss, and
differentiates the same network. After each step the engine reads the new parameters directly from
the trainer's arrays, or rounds a copy if the trainer's dtype differs.
"""

import argparse
import ast
import functools
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxattn import Limits, text
from jaxattn.integrations.tunix import EngineRollout, Policy, TokenIds
from jaxattn.models import DecoderModel, load
from jaxattn.models.checkpoint import EMBEDDED
from jaxattn.models.loading.gguf.gguf_header import read_gguf

TRAINED = (
    "add(a, b)", "area(width, height)", "total(values)", "first(items)", "larger(x, y)",
    "scale(value, by)", "name(self)", "is_even(number)",
)  # fmt: skip
HELD_OUT = ("multiply(one, other)", "length(line)", "power(base, exponent)", "reverse(words)")


def prompts_of(heads: Sequence[str]) -> list[str]:
    return [f"def {head}:\n    " for head in heads]


def reward_of(prompt: str, completion: str) -> float:
    whole = prompt + completion
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escape sequences
            [function, *_] = ast.parse(whole[: whole.rfind("\n") + 1]).body
    except (SyntaxError, ValueError):
        return 0.0
    assert isinstance(function, ast.FunctionDef)
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    inner = [each for value in returned if value for each in ast.walk(value)]
    used = {each.id for each in inner if isinstance(each, ast.Name)}
    return 1.0 if used & {each.arg for each in function.args.args} else 0.5


class RewardLog:
    """The mean reward and the time of each step."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def reward(self, prompts: Any, completions: Any, **others: Any) -> list[float]:
        """The reward function, which Tunix calls once per step."""
        found = [reward_of(*each) for each in zip(map(str, prompts), completions, strict=True)]
        now = time.perf_counter()
        self.means.append(float(np.mean(found)))
        self.seconds.append(now - self._last)
        self._last = now
        step = len(self.means)
        print(f"step {step:3}: reward {self.means[-1]:.3f}, {self.seconds[-1]:.1f} s", flush=True)
        return found


def opened(path: Path | None) -> tuple[DecoderModel, Any, text.Tokenizer]:
    """A model with its parameters and tokenizer, from a folder or a GGUF file."""
    if path is None:
        return *load(EMBEDDED), text.ByteTokenizer()
    model, params = load(path)
    if path.is_file():
        tokenizer = text.tokenizer_of(read_gguf(path).metadata, path)
    else:
        tokenizer = text.load(path)
    return model.with_tokens(min(tokenizer.vocab_size, model.vocab_size)), params, tokenizer


def batches(rows: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """The prompts of each step, as an array, because Tunix repeats the strings of a list singly."""
    rng, prompts = np.random.default_rng(seed), np.array(prompts_of(TRAINED))
    while True:
        yield {"prompts": prompts[rng.permutation(len(prompts))[:rows]]}


def cluster_of(args: argparse.Namespace) -> RLCluster:
    model, params, tokenizer = opened(args.model)
    dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    # Float32 parameters, because bfloat16 would round away the optimizer's small updates. The
    # engine rounds the parameters when it reads them.
    policy = Policy.of(model, params, dtype, "float32")
    config = RolloutConfig(
        max_prompt_length=max(len(tokenizer.encode(p)) for p in prompts_of(TRAINED + HELD_OUT)),
        max_tokens_to_generate=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        data_type=dtype,
    )
    rows = args.rows * args.samples
    limits = Limits(
        batch=rows, max_model_len=config.max_prompt_length + args.tokens, prefill_chunk=32,
        prefill_rows=min(rows, 8), steps_per_round=8,
    )  # fmt: skip
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return RLCluster(
        actor=policy,
        tokenizer=TokenIds(tokenizer),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
            rollout_engine=functools.partial(EngineRollout, limits=limits),
            rollout_config=config,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(args.rate),
                eval_every_n_steps=args.steps + 1,
                max_steps=args.steps,
            ),
        ),
    )


def held_out(cluster: RLCluster, samples: int) -> float:
    """The mean reward of prompts that training does not use."""
    prompts = [prompt for prompt in prompts_of(HELD_OUT) for _ in range(samples)]
    found = cluster.generate(prompts).text
    return float(np.mean([reward_of(*each) for each in zip(prompts, found, strict=True)]))


def draw(log: RewardLog, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(log.means) + 1), log.means, marker=".", color="#1f5fa8")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> RewardLog:
    parser = argparse.ArgumentParser(description="GRPO of a small model with Tunix.")
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file; else the embedded one")
    parser.add_argument("--dtype", help="dtype of matrix products: bfloat16 or float32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=4, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens per completion")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="a PNG of the rewards")
    parser.add_argument("--log", type=Path, help="a JSON file of rewards and seconds")
    args = parser.parse_args(argv)

    cluster = cluster_of(args)
    try:
        before = held_out(cluster, args.samples)
        log = RewardLog()
        learner = GRPOLearner(
            cluster, GRPOConfig(num_generations=args.samples, beta=0.0), reward_fns=log.reward
        )
        learner.train(batches(args.rows, args.seed))
        after = held_out(cluster, args.samples)
        [example] = cluster.generate(prompts_of(HELD_OUT[:1])).text
    finally:
        cluster.rollout.engine.close()
    print(f"prompts that were held out: reward {before:.3f} before, {after:.3f} after")
    print(prompts_of(HELD_OUT[:1])[0] + example)
    if args.plot:
        draw(log, args.plot)
    if args.log:
        result = {"held out": [before, after], "rewards": log.means, "seconds": log.seconds}
        args.log.write_text(json.dumps(result))
    return log


if __name__ == "__main__":
    main()
