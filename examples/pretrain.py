"""Trains a hybrid byte-level language model: delta nets, attention, and MLPs or experts.

    python3 examples/pretrain.py --steps 40                       # a tiny model, on a CPU
    python3 examples/pretrain.py --steps 300 --checkpoint RUN     # 130M parameters, on a GPU
    python3 examples/pretrain.py --steps 300 --mla                # MLA instead of GQA, and experts

The example needs optax and, for `--checkpoint`, orbax: `pip install 'jaxattn[train]'`. The
training text is the reference that Python's `help()` shows, 0.7 MB of English. `--data FILE` trains
on another text.

The layers are those of Qwen3.5, in groups of four, or of two in the sizes `tiny` and `20m`. The
last layer of a group has a `GroupedQueryAttention` with a gate, and the others have a
`GatedDeltaNet`. `lax.scan` runs the groups, so XLA compiles each kind of layer once. For the
backward pass, a layer saves only the arrays that `SAVED` names. With several devices, each device
holds a shard of every matrix, and gathers the matrices of a layer when the scan reaches the layer
(FSDP). With `--dtype float32` XLA runs all ops, because the kernels multiply in bfloat16. The
losses of both dtypes agree.

A run that finds its own checkpoint resumes from it. The losses equal those of an uninterrupted run,
because the batch of a step depends only on the step's number.
"""

import argparse
import json
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.moe import Router
from jaxattn.nn import (
    GatedDeltaNet,
    GatedMLP,
    GroupedQueryAttention,
    MixtureOfExperts,
    MultiHeadLatentAttention,
    RMSNorm,
)

P = jax.P
BYTES = 256
# Names of the residuals that kernels save; the backward pass recomputes the rest of a layer.
SAVED = jax.checkpoint_policies.save_only_these_names(
    "attention_out", "attention_lse", "delta_out", "moe_gate_up"
)
# Peak FLOP/s in bfloat16, without sparsity.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}


class Size(NamedTuple):
    """The sizes of a model. In each group of layers, all but the last are delta nets."""

    hidden: int
    groups: int
    group: int  # layers
    head_dim: int
    mlp: int
    expert: int
    experts: int
    top_k: int
    rows: int  # of a batch
    tokens: int  # of a row

    @property
    def heads(self) -> int:
        return max(2, self.hidden // self.head_dim)


SIZES = {
    "tiny": Size(64, 1, 2, 16, 128, 64, 4, 2, 4, 64),
    "20m": Size(512, 2, 2, 128, 1536, 256, 8, 2, 16, 256),
    "100m": Size(768, 3, 4, 128, 3072, 512, 16, 4, 8, 2048),
    "1b": Size(2048, 5, 4, 128, 8192, 1024, 16, 4, 8, 2048),
}


class Layer(nnx.Module):
    """A token mixer and a feed-forward layer, each with a residual connection."""

    def __init__(self, mixer: nnx.Module, feed_forward: nnx.Module, hidden: int):
        self.norms = nnx.List([RMSNorm(hidden), RMSNorm(hidden)])
        self.parts = nnx.List([mixer, feed_forward])

    def __call__(self, x: jax.Array) -> jax.Array:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class LayerMaker(NamedTuple):
    """Creates the layers of a model."""

    size: Size
    mla: bool
    experts: bool
    dtype: Any

    @property
    def options(self) -> dict[str, Any]:
        # With more layers, the initial output of each layer is smaller.
        scale = (2 * self.size.groups * self.size.group) ** -0.5
        return {"dtype": self.dtype, "out_init_scale": scale}

    def feed_forward(self, rngs: nnx.Rngs) -> nnx.Module:
        size = self.size
        if not self.experts:
            return GatedMLP(size.hidden, size.mlp, rngs=rngs, **self.options)
        router = Router(experts=size.experts, top_k=size.top_k, scores="softmax", normalize=True)
        return MixtureOfExperts(
            size.hidden, size.expert, router, shared_size=size.expert, rngs=rngs, **self.options
        )

    def delta_layer(self, rngs: nnx.Rngs) -> Layer:
        hidden, heads, dim = self.size.hidden, self.size.heads, self.size.head_dim
        mixer = GatedDeltaNet(
            hidden, heads, 2 * heads, head_k_dim=dim, head_v_dim=dim, rngs=rngs, **self.options
        )
        return Layer(mixer, self.feed_forward(rngs), hidden)

    def attention_layer(self, rngs: nnx.Rngs) -> Layer:
        hidden, heads, dim = self.size.hidden, self.size.heads, self.size.head_dim
        if self.mla:
            mixer: nnx.Module = MultiHeadLatentAttention(
                hidden, heads, kv_lora_rank=4 * dim, qk_nope_head_dim=dim,
                qk_rope_head_dim=dim // 2, v_head_dim=dim, rngs=rngs, **self.options,
            )  # fmt: skip
        else:
            mixer = GroupedQueryAttention(
                hidden, heads, heads // 2, dim, rope=RopeConfig(dim=dim // 4), qk_norm=True,
                gated=True, rngs=rngs, **self.options,
            )  # fmt: skip
        return Layer(mixer, self.feed_forward(rngs), hidden)


class Model(nnx.Module):
    """Maps bytes to logits of the next byte.

    The parameters of all delta layers are stacked as [groups, layers, ...], and those of all
    attention layers as [groups, ...].
    """

    def __init__(self, make: LayerMaker, rngs: nnx.Rngs):
        size = make.size
        self.embed = nnx.Embed(BYTES, size.hidden, rngs=rngs)
        self.norm = RMSNorm(size.hidden)
        split = partial(nnx.split_rngs, splits=size.groups)
        deltas = nnx.split_rngs(splits=size.group - 1)(nnx.vmap(make.delta_layer))
        self.deltas = split()(nnx.vmap(deltas))(rngs)
        self.attentions = split()(nnx.vmap(make.attention_layer))(rngs)


def embedded(model: Model, tokens: jax.Array) -> jax.Array:
    """The input of the first layer, as a matrix product with one-hot rows.

    On a GPU the gradient of a gather adds in a varying order, so a run that resumes would not
    reproduce its losses.
    """
    chosen = jax.nn.one_hot(tokens, BYTES)
    return jnp.matmul(chosen, model.embed.embedding[...], precision="highest")


def forward(model: Model, tokens: jax.Array, gather: Callable[[Any, str], Any]) -> jax.Array:
    """The logits; `gather` combines the shards of parameters to whole parameters."""

    def layers(name: str) -> tuple[Callable[..., Any], nnx.State]:
        """The layer function for `lax.scan`, and the stacked parameters."""
        definition, stacks = nnx.split(getattr(model, name))

        @partial(jax.checkpoint, policy=SAVED)
        def layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(definition, gather(params, name))(x), None

        return layer, stacks

    (delta, deltas), (attention, attentions) = layers("deltas"), layers("attentions")

    def group(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        x, _ = jax.lax.scan(delta, x, params[0])
        return attention(x, params[1])

    x, _ = jax.lax.scan(group, embedded(model, tokens), (deltas, attentions))
    return model.embed.attend(model.norm(x).astype(jnp.float32))


class Trainer:
    """A model and its optimizer over all devices, with a compiled training step."""

    def __init__(self, args: argparse.Namespace, size: Size):
        self.size, self.rows, self.tokens = size, args.rows or size.rows, args.tokens or size.tokens
        self.mesh = jax.make_mesh(
            (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        if self.rows % self.mesh.size:
            raise SystemExit(f"--rows {self.rows} must be a multiple of {self.mesh.size} devices")
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, args.rate, max(1, args.decay // 20), args.decay, 0.1 * args.rate
        )
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        )

        def new_model() -> Model:
            make = LayerMaker(size, args.mla, args.experts, args.dtype)
            return Model(make, nnx.Rngs(args.seed))

        def new_state() -> tuple[nnx.State, Any]:
            params = nnx.state(new_model(), nnx.Param)
            return params, self.optimizer.init(params)

        def new_definition() -> jax.Array:
            self.definition, _, self.rest = nnx.split(new_model(), nnx.Param, ...)
            return jnp.zeros(())

        jax.eval_shape(new_definition)
        shapes = jax.eval_shape(new_state)
        self.specs = jax.tree.map(self.spec_of, shapes[0])
        self.shardings = jax.tree.map(lambda x: NamedSharding(self.mesh, self.spec_of(x)), shapes)
        self.new_state = jax.jit(new_state, out_shardings=self.shardings)
        self.state = self.new_state()
        self.step = jax.jit(self._step, donate_argnums=0)
        self.evaluated = jax.jit(self.loss)

    def spec_of(self, x: Any) -> P:
        """Shards a matrix along its last axis, if the number of devices divides this axis."""
        whole = x.ndim < 2 or x.shape[-1] % self.mesh.size
        return P() if whole else P(*[None] * (x.ndim - 1), "data")

    def _loss(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        """The mean loss over all devices, each of which has some rows of the batch."""

        def gather(params: Any, name: str) -> Any:
            def whole(x: jax.Array, spec: P) -> jax.Array:
                if "data" not in spec:
                    return x
                return jax.lax.all_gather(x, "data", axis=x.ndim - 1, tiled=True)

            return jax.tree.map(whole, params, self.specs[name])

        stacked = {name: params[name] for name in ("deltas", "attentions")}
        others = {name: gather(params[name], name) for name in params if name not in stacked}
        model = nnx.merge(self.definition, nnx.State({**others, **stacked}), self.rest)
        logits = forward(model, tokens[:, :-1], gather)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jax.lax.pmean(losses.mean(), "data")

    def loss(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        """The loss in nats per byte."""
        run = jax.shard_map(
            self._loss, mesh=self.mesh, in_specs=(self.specs, P("data")), out_specs=P(),
            check_vma=False,  # Mosaic GPU kernels do not support this check
        )  # fmt: skip
        return run(params, tokens)

    def _step(self, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(self.loss)(params, tokens)
        updates, moments = self.optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    @property
    def flops(self) -> float:
        """FLOPs of a training step: 6 per token and parameter used, plus those of the mixers."""
        size, total = self.size, 0.0
        for path, x in jax.tree.leaves_with_path(self.state[0]):
            name = jax.tree_util.keystr(path)
            share = size.top_k + 1, size.experts + 1  # including the shared expert
            met = share[0] / share[1] if "gate_up_proj" in name or "down_proj" in name else 1
            total += 6 * met * x.size if x.ndim > 1 else 0
        attended = 3 * self.tokens * 2 * size.heads * size.head_dim  # half of all pairs, causal
        recurred = 18 * 2 * size.heads * size.head_dim**2
        total += size.groups * (attended + (size.group - 1) * recurred)
        return total * self.rows * self.tokens


def read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    return "\n\n".join(pydoc_data.topics.topics.values()).encode()


def batch(data: jax.Array, rows: int, tokens: int, step: int) -> jax.Array:
    """Random pieces of the text, int32 [rows, tokens + 1]."""
    starts = jax.random.randint(jax.random.key(step), (rows, 1), 0, len(data) - tokens)
    return data[starts + jnp.arange(tokens + 1)].astype(jnp.int32)


class Checkpoints:
    """An orbax folder, in which the name of each leaf of the state is its path."""

    def __init__(self, folder: Path | None):
        self.manager: Any = None
        if folder is not None:
            import orbax.checkpoint as ocp

            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self.ocp, self.manager = ocp, ocp.CheckpointManager(folder.resolve(), options=options)

    def restore(self, state: Any, shardings: Any) -> tuple[Any, int]:
        """The newest saved state and its step, or the given state and 0 if none is saved."""
        if self.manager is None or self.manager.latest_step() is None:
            return state, 0
        wanted = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state, shardings,
        )  # fmt: skip
        step = self.manager.latest_step()
        found = self.manager.restore(step, args=self.ocp.args.StandardRestore(named(wanted)))
        return jax.tree.unflatten(jax.tree.structure(state), found.values()), step

    def save(self, state: Any, step: int) -> None:
        if self.manager is not None:
            self.manager.save(step, args=self.ocp.args.StandardSave(named(state)))
            self.manager.wait_until_finished()  # the next step donates the state


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree in order, by number and path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {f"{i:04}{jax.tree_util.keystr(path)}": x for i, (path, x) in enumerate(leaves)}


def held_out(trainer: Trainer, text: jax.Array) -> list[jax.Array]:
    """Batches of consecutive pieces of a text, the same in every run."""
    count = len(text) // (trainer.tokens + 1) // trainer.rows
    pieces = text[: count * trainer.rows * (trainer.tokens + 1)].astype(jnp.int32)
    return list(pieces.reshape(count, trainer.rows, trainer.tokens + 1))


def evaluate(trainer: Trainer, batches: list[jax.Array], step: int) -> None:
    """Prints the loss on the held-out text."""
    params = trainer.state[0]
    mean = sum(float(trainer.evaluated(params, each)) for each in batches) / len(batches)
    print(f"step {step:5}: held-out text {mean:.4f} nats per byte", flush=True)


def losses(trainer: Trainer, data: jax.Array, steps: range) -> Iterator[tuple[int, float, float]]:
    """(step, loss, seconds) of each step. The trainer then holds the new state."""
    for step in steps:
        start = time.perf_counter()
        tokens = batch(data, trainer.rows, trainer.tokens, step)
        trainer.state, loss = trainer.step(trainer.state, tokens)
        yield step, float(loss), time.perf_counter() - start


def report(trainer: Trainer, step: int, loss: float, seconds: float) -> dict[str, float]:
    """Prints one line about a step, and returns the numbers in it."""
    rate = trainer.rows * trainer.tokens / seconds
    kind = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    line = {"step": step, "loss": loss, "tokens/s": rate}
    if peak is not None:
        line["mfu"] = trainer.flops / seconds / (peak * trainer.mesh.size)
    mfu = f", {line['mfu']:.1%} of the peak" if "mfu" in line else ""
    print(f"step {step:5}: {loss:.4f} nats per byte, {rate:,.0f} tokens/s{mfu}", flush=True)
    return line


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a hybrid language model of bytes.")
    parser.add_argument("--size", choices=SIZES, help="default: 100m on a GPU, else tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--decay", type=int, help="steps until the learning rate is lowest; default: --steps"
    )
    parser.add_argument("--rows", type=int, help="rows per batch")
    parser.add_argument("--tokens", type=int, help="tokens per row")
    parser.add_argument("--experts", action="store_true", help="experts instead of MLPs")
    parser.add_argument("--mla", action="store_true", help="MLA instead of GQA; implies --experts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's own reference")
    parser.add_argument("--every", type=int, default=10, help="steps between printed lines")
    parser.add_argument(
        "--eval-every", type=int, default=0, metavar="STEPS",
        help="hold out a twentieth of the text, and print the loss on it; default: train on all",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where to save and resume")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="file for losses, one line of JSON per step"
    )
    args = parser.parse_args(argv)
    args.size = args.size or ("100m" if jax.default_backend() == "gpu" else "tiny")
    args.experts = args.experts or args.mla
    args.decay = args.decay or args.steps
    return args


def main(argv: list[str] | None = None, trainer: Trainer | None = None) -> Trainer:
    """Trains and returns the trainer; a given trainer with equal options is not compiled again."""
    args = parsed(argv)
    text = read_text(args.data)
    trainer = trainer or Trainer(args, SIZES[args.size])
    if len(text) <= trainer.tokens + 1:
        raise SystemExit(f"the text has {len(text)} bytes, and a row {trainer.tokens} tokens")
    count = sum(x.size for x in jax.tree.leaves(trainer.state[0]))
    print(f"{count:,} parameters, {len(text):,} bytes of text, {trainer.mesh.size} device(s)")
    checkpoints = Checkpoints(args.checkpoint)
    trainer.state, done = checkpoints.restore(trainer.state, trainer.shardings)
    if done:
        print(f"resumed after step {done}")
    data, best = jnp.frombuffer(text, jnp.uint8), float("inf")
    kept: list[jax.Array] = []
    if args.eval_every:
        data, rest = jnp.split(data, [len(data) - len(data) // 20])
        kept = held_out(trainer, rest)
        if not kept or len(data) <= trainer.tokens + 1:
            raise SystemExit(
                f"--eval-every holds {len(rest)} bytes out, and a batch has "
                f"{trainer.rows} x {trainer.tokens + 1}; give a longer --data"
            )
    for step, loss, seconds in losses(trainer, data, range(done, args.steps)):
        last = step + 1 == args.steps
        best = min(best, seconds)
        if last or step % args.every == 0:
            line = report(trainer, step, loss, seconds)
        if args.log is not None:
            with args.log.open("a") as file:
                print(json.dumps({"step": step, "loss": loss, "seconds": seconds}), file=file)
        if kept and (last or (step + 1) % args.eval_every == 0):
            evaluate(trainer, kept, step)
        if last or (step + 1) % args.save_every == 0:
            checkpoints.save(trainer.state, step + 1)
    if done < args.steps:
        report(trainer, line["step"], line["loss"], best)
    return trainer


if __name__ == "__main__":
    main()
