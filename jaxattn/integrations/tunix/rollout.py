"""jaxattn's engine as Tunix's rollout: samples from the policy that Tunix trains.

    ClusterConfig(rollout_engine=EngineRollout, ...)
    ClusterConfig(rollout_engine=functools.partial(EngineRollout, limits=Limits(batch=256)), ...)

Prompts and completions have the form that Tunix's vanilla rollout gives them: prompts padded on the
left, completions without padding and without the token that ended them.
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
from jaxattn.memory.engine_limits import MOST_STEPS

MOST_BATCH = 256  # rows of an engine whose limits nobody gives


class EngineRollout(BaseRollout):
    """Rows of an `Engine` in place of Tunix's sampler. Tunix's `RLCluster` makes it.

    Args:
        rollout_actor: the policy. The engine serves its model.
        tokenizer: what `RLCluster` was given, in Tunix's adapter or not.
        mesh: of the role ROLLOUT; the engine runs on its devices.
        rollout_config: of training. Its `data_type` is that of the engine's weights, and None the
            policy's. Fields that begin with `rollout_vllm` and `rollout_sglang_jax` are not read.
        limits: of the engine. None: rows for `max_prompt_length` and `max_tokens_to_generate`, at
            most 256 together, and 8 decode steps of a round, as nobody waits for a token.
        keep_eos: the token that ends a completion is part of it, as with Tunix's vLLM rollout, so
            that the policy learns when to end. The vanilla rollout leaves it out.

    Attributes:
        engine: what generates.

    Raises:
        TypeError: `rollout_actor` is no `Policy`.
        ValueError, PlanError, Refusal: see `Engine`; or the mesh has several devices.
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
                f"{type(rollout_actor).__name__}; make one by Policy.of(*jaxattn.models.load(...))"
            )
        if mesh.devices.size != 1:
            raise ValueError(
                f"EngineRollout: the mesh of Role.ROLLOUT has {mesh.devices.size} devices, and one "
                "is supported; give that role jax.make_mesh((1,), ...)"
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
        """A completion of each prompt.

        The draws depend on the seed of the configuration, how often this was called, and the
        prompt's place in the list. A call repeats no draws of an earlier one.

        Returns:
            `logprobs` of the tokens, if the configuration asks for them: at its temperature, of all
            tokens that top-p and top-k choose from, as the policy's loss reads them. `logits` is
            None.

        Raises:
            TypeError: there are further keywords, such as images.
            ValueError: a prompt and its tokens are longer than the engine's rows, or a field of the
                configuration does not fit.
            RuntimeError: a row was not served; the message says why.
        """
        if kwargs:
            raise TypeError(f"EngineRollout.generate reads text alone; got {', '.join(kwargs)}")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(
                    f"EngineRollout.generate: prompt {place} must be a string, got "
                    f"{type(text).__name__}; Tunix makes arrays of a list of strings, so give the "
                    "batch's prompts as a NumPy array"
                )
        tokens = [self._tokens(text) for text in texts]
        self._check_lengths(tokens, rollout_config)
        served = self.engine.generate(self._requests(tokens, rollout_config))
        for place, each in enumerate(served):
            if each.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise RuntimeError(
                    f"EngineRollout.generate: prompt {place}: {each.finish_reason}: {each.detail}"
                )
        return RolloutOutput(
            text=[self.tokenizer.decode(self._shown(each, rollout_config)) for each in served],
            logits=None,
            tokens=[np.array(each.tokens, np.int32) for each in served],
            left_padded_prompt_tokens=self._left_padded(tokens, rollout_config.max_prompt_length),
            logprobs=self._logprobs(served, rollout_config),
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Log-probabilities of completions' tokens at the temperature of training; 0 at padding.

        Args:
            prompt_tokens: padded on the left.
            completion_tokens: padded on the right.
        """
        pad, completions = self.pad_id(), np.asarray(completion_tokens)
        rows = []
        for prompt, completion in zip(np.asarray(prompt_tokens), completions, strict=True):
            own, said = np.flatnonzero(prompt != pad), np.flatnonzero(completion != pad)
            begin, end = (own[0] if own.size else len(prompt)), (said[-1] + 1 if said.size else 0)
            rows.append((prompt[begin:].tolist(), completion[:end].tolist()))
        found = np.zeros(completions.shape, np.float32)
        for place, own in enumerate(self._scored(rows, self._temperature)):
            found[place, : len(own)] = own
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """The engine goes on with these parameters of the policy, and copies none that it can read
        where they are. Tunix's trainer donates no parameters.

        Raises:
            ValueError: they are not the whole policy's, as those of LoRA are.
        """
        if "decoder" not in params:
            kinds = ", ".join(each.__name__ for each in filter_types or ())
            raise ValueError(
                f"EngineRollout.update_params: it takes the parameters of a Policy; got {kinds} "
                f"under {', '.join(map(str, params)) or 'no name'}. LoRA is not supported"
            )
        # Tunix forbids transfers between host and device here, where JAX runs on a CPU.
        with jax.transfer_guard("allow"):
            self.engine.update(self._as_served(params["decoder"]), share=True)

    def pad_id(self) -> int:
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        return self.tokenizer.eos_id()

    def model(self) -> None:
        """None. Tunix compares this with the policy, and passes no parameters on if both are one
        model."""
        return None

    # --- requests

    def _as_served(self, params: Any) -> Any:
        """The policy's parameters on the engine's device, in its dtypes."""

        def placed(own: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
            own = own if own.devices() == {self._device} else jax.device_put(own, self._device)
            return own if own.dtype == to.dtype else own.astype(to.dtype)

        return jax.tree.map(placed, params, self._shapes)

    def _tokens(self, text: str) -> list[int]:
        """With one BOS, if the tokenizer has it, as Tunix's sampler begins a prompt."""
        bos = self.tokenizer.bos_id()
        ids = list(self.tokenizer.encode(text))
        return self.tokenizer.dedup_bos_ids([bos, *ids] if bos else ids)

    def _check_lengths(self, tokens: list[list[int]], config: RolloutConfig) -> None:
        most = self.engine.limits.max_model_len
        for place, each in enumerate(tokens):
            if len(each) + config.max_tokens_to_generate > most:
                raise ValueError(
                    f"EngineRollout.generate: prompt {place} has {len(each)} tokens, and with "
                    f"max_tokens_to_generate={config.max_tokens_to_generate} more than the "
                    f"engine's max_model_len={most}; raise max_prompt_length or give limits"
                )

    def _requests(self, tokens: list[list[int]], config: RolloutConfig) -> list[Request]:
        seeds = np.random.SeedSequence([*_numbers(config.seed), self._calls])
        self._calls += 1
        told = config.return_logprobs and not self._scores(config)
        ends = self._ends(config)
        options: dict[str, Any] = {"stop_tokens": tuple(ends)}
        if self.keep_eos:  # a stop token of the engine is no part of a completion
            options = {"ends_at": ends.__contains__}
        return [
            Request(
                each,
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=max(config.top_k or 0, 0),
                logprobs=0 if told else None,
                processed_logprobs=told and self._heated(config),
                seed=int(seed),
                **options,
            )
            for each, seed in zip(tokens, seeds.generate_state(len(tokens)), strict=True)
        ]

    def _ends(self, config: RolloutConfig) -> frozenset[int]:
        """The tokens that end a completion."""
        known = getattr(self.tokenizer.tokenizer, "stop_tokens", None)
        return frozenset(config.eos_tokens or known or [self.eos_id()])

    def _shown(self, done: Completion, config: RolloutConfig) -> list[int]:
        """The tokens of a completion's text."""
        tokens = list(done.tokens)
        if self.keep_eos and tokens and tokens[-1] in self._ends(config):
            tokens.pop()
        return tokens

    def _left_padded(self, tokens: list[list[int]], length: int) -> Int[np.ndarray, "B P"]:
        longest = max(map(len, tokens))
        if longest > length:  # as Tunix's sampler does
            length = 2 ** math.ceil(math.log2(longest))
        found = np.full((len(tokens), length), self.pad_id(), np.int32)
        for row, each in zip(found, tokens, strict=True):
            row[length - len(each) :] = each
        return found

    # --- log-probabilities

    @staticmethod
    def _heated(config: RolloutConfig) -> bool:
        """Whether a temperature changes log-probabilities. Those of greedy rows are at 1, as in
        Tunix."""
        return config.temperature not in (0.0, 1.0)

    def _scores(self, config: RolloutConfig) -> bool:
        """Whether the log-probabilities are read after the rollout: those with which the engine
        draws are of the tokens that top-p and top-k leave."""
        filtered = (config.top_p or 1.0) < 1 or (config.top_k or 0) > 0
        return self._heated(config) and filtered

    def _logprobs(
        self, served: list[Completion], config: RolloutConfig
    ) -> list[Float[np.ndarray, " T"]] | None:
        if not config.return_logprobs:
            return None
        if self._scores(config):
            rows = [(list(each.request.prompt), list(each.tokens)) for each in served]
            return self._scored(rows, config.temperature)
        return [np.array([own.token for own in each.logprobs], np.float32) for each in served]

    def _scored(
        self, rows: list[tuple[list[int], list[int]]], temperature: float
    ) -> list[Float[np.ndarray, " T"]]:
        """Of each (prompt, completion) the log-probabilities of the completion's tokens."""
        texts = [[*prompt, *said] for prompt, said in rows]
        found = self.engine.score(texts, temperature=temperature or 1.0)
        behind = (each[len(prompt) :] for each, (prompt, _) in zip(found, rows, strict=True))
        # Nothing stands before the first token behind an empty prompt.
        return [np.array([own.token if own else 0 for own in each], np.float32) for each in behind]


def _numbers(seed: Any) -> list[int]:
    """What a seed or a key of JAX is made of; 0 where there is none."""
    if seed is None:
        return [0]
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [int(each) for each in np.asarray(seed).reshape(-1)]
