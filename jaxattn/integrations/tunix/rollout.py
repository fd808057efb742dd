"""A Tunix rollout that samples from the trained policy with jaxattn's engine.

    ClusterConfig(rollout_engine=EngineRollout, ...)
    ClusterConfig(rollout_engine=functools.partial(EngineRollout, limits=Limits(batch=256)), ...)

Prompts and completions have the same form as in Tunix's vanilla rollout: prompts are padded on the
left, and completions have no padding and no end token.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxattn import Engine, Limits, Request
from jaxattn.engine.requests.outputs import Completion, FinishReason
from jaxattn.integrations.tunix.policy import Policy
from jaxattn.limits import MOST_STEPS

MOST_BATCH = 256  # rows of the engine without `limits`


class EngineRollout(BaseRollout):
    """A rollout that uses an `Engine` instead of Tunix's sampler. Tunix's `RLCluster` creates it.

    Args:
        rollout_actor: The policy, whose model the engine serves.
        tokenizer: The tokenizer given to `RLCluster`, with or without Tunix's adapter.
        mesh: The mesh of the role ROLLOUT, with the engine's device.
        rollout_config: The configuration of training. `data_type` is the dtype of the engine's
            weights; None means the policy's. Fields that begin with `rollout_vllm` and
            `rollout_sglang_jax` are ignored.
        limits: The engine's limits. None means at most 256 rows of `max_prompt_length` plus
            `max_tokens_to_generate` tokens, and rounds of 8 decode steps, as no client waits.
        keep_eos: Whether a completion includes its end token, as in Tunix's vLLM rollout, so that
            the policy learns when to end. The vanilla rollout leaves it out.

    Attributes:
        engine: The engine that generates.

    Raises:
        TypeError: If `rollout_actor` is not a `Policy`.
        ValueError, PlanError, Refusal: See `Engine`. Also ValueError if the mesh has several
            devices.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        *,
        limits: Limits | None = None,
        keep_eos: bool = False,
    ):
        if not isinstance(rollout_actor, Policy):
            raise TypeError(
                "EngineRollout: the actor must be a jaxattn.integrations.tunix.Policy, got "
                f"{type(rollout_actor).__name__}; create one with "
                "Policy.of(*jaxattn.models.load(...))"
            )
        if mesh.devices.size != 1:
            raise ValueError(
                f"EngineRollout: the mesh of Role.ROLLOUT has {mesh.devices.size} devices, but "
                "only one is supported; give that role jax.make_mesh((1,), ...)"
            )
        self.tokenizer = (
            tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        )
        self.keep_eos, self._calls = keep_eos, 0
        self._temperature = rollout_config.temperature
        self._device = mesh.devices.flat[0]
        model = rollout_actor.model
        if rollout_config.data_type is not None:
            model = model.with_dtype(jnp.dtype(rollout_config.data_type).name)
        self._shapes = model.param_shapes()
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        limits = limits or Limits(
            batch=MOST_BATCH, max_model_len=longest, steps_per_round=MOST_STEPS
        )
        self.engine = Engine(model, self._as_served(rollout_actor.params), limits, self._device)

    # --- the interface of Tunix

    def generate(
        self, prompts: str | Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Generates a completion for each prompt.

        The random draws depend on the configuration's seed, the number of earlier calls, and the
        prompt's index. A call therefore does not repeat the draws of an earlier one.

        Returns:
            The completions. `logprobs` are set if the configuration asks for them. As the policy's
            loss needs them, they are at its temperature and normalized over the whole vocabulary,
            before top-p and top-k. `logits` is None.

        Raises:
            TypeError: If there are other keyword arguments, such as images.
            ValueError: If a prompt and its completion may exceed the engine's rows, or a field of
                the configuration is invalid.
            RuntimeError: If the engine did not complete a row. The message gives the reason.
        """
        if kwargs:
            raise TypeError(f"EngineRollout.generate accepts only text; got {', '.join(kwargs)}")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(
                    f"EngineRollout.generate: prompt {place} must be a string, got "
                    f"{type(text).__name__}; Tunix converts a list of strings to arrays, so give "
                    "the batch's prompts as a NumPy array"
                )
        tokens = [self._tokens(text) for text in texts]
        self._check_lengths(tokens, rollout_config)
        completions = self.engine.generate(self._requests(tokens, rollout_config))
        for place, each in enumerate(completions):
            if each.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise RuntimeError(
                    f"EngineRollout.generate: prompt {place}: {each.finish_reason}: {each.detail}"
                )
        return RolloutOutput(
            text=[self.tokenizer.decode(self._shown(each, rollout_config)) for each in completions],
            logits=None,
            tokens=[np.array(each.tokens, np.int32) for each in completions],
            left_padded_prompt_tokens=self._pad_left(tokens, rollout_config.max_prompt_length),
            logprobs=self._logprobs(completions, rollout_config),
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Returns completion tokens' log-probabilities at the training temperature; 0 at padding.

        Args:
            prompt_tokens: The prompts, padded on the left.
            completion_tokens: The completions, padded on the right.
        """
        pad, completions = self.pad_id(), np.asarray(completion_tokens)
        rows = []
        for prompt, completion in zip(np.asarray(prompt_tokens), completions, strict=True):
            own, completion_positions = (
                np.flatnonzero(prompt != pad),
                np.flatnonzero(completion != pad),
            )
            begin, end = (
                (own[0] if own.size else len(prompt)),
                (completion_positions[-1] + 1 if completion_positions.size else 0),
            )
            rows.append((prompt[begin:].tolist(), completion[:end].tolist()))
        logprobs = np.zeros(completions.shape, np.float32)
        for place, own in enumerate(self._scored(rows, self._temperature)):
            logprobs[place, : len(own)] = own
        return jnp.asarray(logprobs)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the engine's parameters by the policy's, without copies where possible.

        The engine can share the arrays, because Tunix's trainer donates no parameters.

        Raises:
            ValueError: If `params` are not those of a whole policy, as with LoRA.
        """
        if "decoder" not in params:
            kinds = ", ".join(each.__name__ for each in filter_types or ())
            raise ValueError(
                f"EngineRollout.update_params needs the parameters of a Policy; got {kinds} under "
                f"{', '.join(map(str, params)) or 'no name'}. LoRA is not supported"
            )
        # Tunix forbids host-device transfers here if JAX runs on a CPU.
        with jax.transfer_guard("allow"):
            self.engine.update(self._as_served(params["decoder"]), share=True)

    def pad_id(self) -> int:
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        return self.tokenizer.eos_id()

    def model(self) -> None:
        """Returns None. Tunix compares the result with the policy, and would pass no parameters if
        both were the same model."""
        return None

    # --- requests

    def _as_served(self, params: Any) -> Any:
        """Returns the policy's parameters on the engine's device, in the engine's dtypes."""

        def placed(param: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
            param = (
                param if param.devices() == {self._device} else jax.device_put(param, self._device)
            )
            return param if param.dtype == shape.dtype else param.astype(shape.dtype)

        return jax.tree.map(placed, params, self._shapes)

    def _tokens(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, with one BOS if the tokenizer has it, as Tunix's sampler
        does."""
        bos = self.tokenizer.bos_id()
        ids = list(self.tokenizer.encode(text))
        return self.tokenizer.dedup_bos_ids([bos, *ids] if bos else ids)

    def _check_lengths(self, tokens: list[list[int]], config: RolloutConfig) -> None:
        max_model_len = self.engine.limits.max_model_len
        for place, each in enumerate(tokens):
            if len(each) + config.max_tokens_to_generate > max_model_len:
                raise ValueError(
                    f"EngineRollout.generate: prompt {place} has {len(each)} tokens, which with "
                    f"max_tokens_to_generate={config.max_tokens_to_generate} exceeds the engine's "
                    f"max_model_len={max_model_len}; increase max_prompt_length, or give limits"
                )

    def _requests(self, tokens: list[list[int]], config: RolloutConfig) -> list[Request]:
        seeds = np.random.SeedSequence([*_numbers(config.seed), self._calls])
        self._calls += 1
        has_engine_logprobs = config.return_logprobs and not self._scores(config)
        ends = self._ends(config)
        options: dict[str, Any] = {"stop_tokens": tuple(ends)}
        if self.keep_eos:  # the engine would leave a stop token out of the completion
            options = {"ends_at": ends.__contains__}
        return [
            Request(
                each,
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=max(config.top_k or 0, 0),
                logprobs=0 if has_engine_logprobs else None,
                processed_logprobs=has_engine_logprobs and self._scales_logprobs(config),
                seed=int(seed),
                **options,
            )
            for each, seed in zip(tokens, seeds.generate_state(len(tokens)), strict=True)
        ]

    def _ends(self, config: RolloutConfig) -> frozenset[int]:
        """Returns the tokens that end a completion."""
        known = getattr(self.tokenizer.tokenizer, "stop_tokens", None)
        return frozenset(config.eos_tokens or known or [self.eos_id()])

    def _shown(self, completion: Completion, config: RolloutConfig) -> list[int]:
        """Returns the tokens of a completion's text, without an end token."""
        tokens = list(completion.tokens)
        if self.keep_eos and tokens and tokens[-1] in self._ends(config):
            tokens.pop()
        return tokens

    def _pad_left(self, tokens: list[list[int]], length: int) -> Int[np.ndarray, "B P"]:
        longest = max(map(len, tokens))
        if longest > length:  # as Tunix's sampler does
            length = 2 ** math.ceil(math.log2(longest))
        found = np.full((len(tokens), length), self.pad_id(), np.int32)
        for row, each in zip(found, tokens, strict=True):
            row[length - len(each) :] = each
        return found

    # --- log-probabilities

    @staticmethod
    def _scales_logprobs(config: RolloutConfig) -> bool:
        """Whether the temperature changes log-probabilities. As in Tunix, greedy rows use 1."""
        return config.temperature not in (0.0, 1.0)

    def _scores(self, config: RolloutConfig) -> bool:
        """Whether to score the completions after the rollout, because the engine's processed
        log-probabilities would be normalized after top-p and top-k."""
        filtered = (config.top_p or 1.0) < 1 or (config.top_k or 0) > 0
        return self._scales_logprobs(config) and filtered

    def _logprobs(
        self, completions: list[Completion], config: RolloutConfig
    ) -> list[Float[np.ndarray, " T"]] | None:
        if not config.return_logprobs:
            return None
        if self._scores(config):
            rows = [(list(each.request.prompt), list(each.tokens)) for each in completions]
            return self._scored(rows, config.temperature)
        return [np.array([own.token for own in each.logprobs], np.float32) for each in completions]

    def _scored(
        self, rows: list[tuple[list[int], list[int]]], temperature: float
    ) -> list[Float[np.ndarray, " T"]]:
        """Returns each completion's token log-probabilities, given (prompt, completion) rows."""
        texts = [[*prompt, *said] for prompt, said in rows]
        found = self.engine.score(texts, temperature=temperature or 1.0)
        behind = (each[len(prompt) :] for each, (prompt, _) in zip(found, rows, strict=True))
        # The first token after an empty prompt has no log-probability.
        return [np.array([own.token if own else 0 for own in each], np.float32) for each in behind]


def _numbers(seed: Any) -> list[int]:
    """Returns the integers of a seed or a JAX key; [0] for None."""
    if seed is None:
        return [0]
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [int(each) for each in np.asarray(seed).reshape(-1)]
