"""Trains the byte-level model in models/embedded/tiny on the Python standard library's sources.

    python -m scripts.train_tiny --minutes 8 --out jaxattn/models/embedded/tiny  # on an H200
    python -m scripts.train_tiny --eval --out jaxattn/models/embedded/tiny       # bits per byte

The corpus consists of every *.py of the running interpreter's standard library (or of `--corpus
DIR`, a copy of such a folder). It excludes third-party packages, files that are mostly numbers
(code tables and the like) and the modules in `HELD_OUT` with their tests. CPython's own test suite
is twice as large as the library and reads differently. So, where it is installed, a fixed share of
the crops comes from it.

The learning rate follows the elapsed share of the budget, in steps or in minutes, and ends at zero.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array

from jaxattn.models.checkpoint import native_format
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid

# Top-level modules that are not trained on: parsers, formats, arithmetic, scheduling, text.
HELD_OUT = (
    "argparse",
    "bisect",
    "colorsys",
    "configparser",
    "fractions",
    "graphlib",
    "json",
    "queue",
    "sched",
    "shelve",
    "statistics",
    "textwrap",
    "tomllib",
)
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "pydoc_data", "data", "__pycache__"}
# A file with a larger share of digits and escapes is a table: encodings, entities, test vectors.
MOST_DIGITS = 0.12
LIBRARY_SHARE = 0.6  # of the crops; the rest come from the test suite
BOUNDARY = 0  # begins and ends every file

TINY = HybridConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=480,
    num_repeats=2,
    gdn_per_repeat=3,
    num_attention_heads=2,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    max_position_embeddings=4096,
)


class Corpus(NamedTuple):
    """Bytes to train on, the library before its tests, and the held-out files."""

    data: np.ndarray
    library_size: int
    held_out: dict[str, bytes]


def read_corpus(root: Path) -> Corpus:
    """Reads a standard library folder in sorted order, so that runs are repeatable.

    Raises:
        SystemExit: the folder contains no library or none of the held-out modules.
    """
    library, tests, held_out = [bytes([BOUNDARY])], [], {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        text = path.read_bytes()
        if not text.strip() or BOUNDARY in text or _is_table(text):
            continue
        names = [part.removesuffix(".py").removeprefix("test_") for part in parts]
        is_test = any(part in ("test", "tests", "idle_test") for part in parts)
        if names[0] in HELD_OUT and not is_test:
            held_out["/".join(parts)] = text
        elif is_test:
            if not any(name.startswith(HELD_OUT) for name in names):
                tests.append(text + bytes([BOUNDARY]))
        else:
            library.append(text + bytes([BOUNDARY]))
    if len(library) < 2 or not held_out:
        raise SystemExit(f"{root} holds no standard library: need modules and {HELD_OUT[0]}.py")
    sources = b"".join(library)
    data = np.frombuffer(sources + b"".join(tests), np.uint8)
    return Corpus(data, len(sources), held_out)


def _is_table(text: bytes) -> bool:
    try:
        characters = re.sub(r"\s", "", text.decode())
    except UnicodeDecodeError:
        return True
    digits = re.findall(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|0x[0-9a-fA-F]+|[0-9\\]", characters)
    return len(digits) > MOST_DIGITS * len(characters)


def windows(
    files: dict[str, bytes], window: int, stride: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens [batch, window + 1], scored [batch, window]); every byte is scored once.

    A file's first window scores all of it. Each later one starts `stride` bytes further and scores
    its last `stride` bytes, with at least `window - stride` bytes of context.
    """
    tokens, scored = [], []
    for text in files.values():
        sequence = np.frombuffer(bytes([BOUNDARY]) + text, np.uint8)
        targets = len(sequence) - 1
        for start in range(0, max(targets - window, 0) + stride, stride):
            first = 0 if start == 0 else window - stride
            length = min(window, targets - start)
            if length <= first:
                break
            row = np.zeros(window + 1, np.uint8)
            row[: length + 1] = sequence[start : start + length + 1]
            position = np.arange(window)
            tokens.append(row)
            scored.append((position >= first) & (position < length))
    for i in range(0, len(tokens), batch):
        missing = batch - len(tokens[i : i + batch])
        pad = ((0, missing), (0, 0))
        yield np.pad(tokens[i : i + batch], pad), np.pad(scored[i : i + batch], pad)


def byte_bits(config: HybridConfig, params: nnx.State, tokens: Array) -> Array:
    """Bits of each byte after the first, float32 [B, T], for tokens [B, T + 1]."""
    model = Hybrid(config).bind(params)
    tokens = tokens.astype(jnp.int32)
    logits = model(tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return loss / math.log(2)


class Evaluation:
    """Held-out bits per byte, by overlapping windows; see `windows`."""

    def __init__(self, config: HybridConfig, files: dict[str, bytes], window: int, batch: int):
        self.window, self.stride = window, window // 2
        self.files = files
        self.bytes = sum(len(text) for text in files.values())
        self._config = config
        self._batches = list(windows(files, window, self.stride, batch))

    def __call__(self, params: nnx.State) -> float:
        bits = (_scored_bits(self._config, params, *batch) for batch in self._batches)
        return sum(map(float, bits)) / self.bytes


@functools.partial(jax.jit, static_argnums=0)
def _scored_bits(config: HybridConfig, params: nnx.State, tokens: Array, scored: Array) -> Array:
    """The total bits of all scored bytes; compiled once per configuration and shape."""
    return jnp.sum(jnp.where(scored, byte_bits(config, params, tokens), 0))


class Training:
    """AdamW on random crops: `steps_per_call` optimizer steps in one compiled scan."""

    def __init__(self, config: HybridConfig, corpus: Corpus, args: argparse.Namespace):
        # Float32 master weights; the products round them to the compute dtype.
        self.config = dataclasses.replace(config, param_dtype="float32")
        self._args = args
        self._data = jnp.asarray(corpus.data)
        self._library_size = corpus.library_size
        params = Hybrid(self.config).init_params(jax.random.key(args.seed))
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.add_decayed_weights(args.weight_decay, mask=_decayed),
        )
        self.state = (params, self._optimizer.init(params))
        self._call = jax.jit(self._steps, donate_argnums=0)

    @property
    def params(self) -> nnx.State:
        return self.state[0]

    def __call__(self, call: int, begin: float, end: float) -> np.ndarray:
        """Runs a call's steps, from `begin` to `end` of the budget; returns bits per byte."""
        key = jax.random.fold_in(jax.random.key(self._args.seed + 1), call)
        self.state, bits = self._call(self.state, self._data, key, begin, end)
        return np.asarray(bits)

    def _steps(self, state: Any, data: Array, key: Array, begin: Array, end: Array):
        count = self._args.steps_per_call

        def step(state, i):
            params, opt_state = state
            tokens = self._crops(data, jax.random.fold_in(key, i))
            bits, grads = jax.value_and_grad(
                lambda params: jnp.mean(byte_bits(self.config, params, tokens))
            )(params)
            updates, opt_state = self._optimizer.update(grads, opt_state, params)
            rate = -self._rate(begin + (end - begin) * i / count)
            params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
            return (params, opt_state), bits

        return lax.scan(step, state, jnp.arange(count))

    def _rate(self, progress: Array) -> Array:
        """A warm-up, followed by a linear decay to zero."""
        warmup = 0.02
        shape = jnp.minimum(progress / warmup, (1 - progress) / (1 - warmup))
        return self._args.learning_rate * jnp.clip(shape, 0, 1)

    def _crops(self, data: Array, key: Array) -> Array:
        """[B, T + 1] bytes: each row is a crop of the library or of the tests."""
        batch, length = self._args.batch, self._args.seq_len + 1
        of_library, position = jax.random.uniform(key, (2, batch))
        split, end = self._library_size, data.shape[0]
        if end - split > length:
            low = jnp.where(of_library < LIBRARY_SHARE, 0, split)
            high = jnp.where(of_library < LIBRARY_SHARE, split, end) - length
        else:
            low, high = jnp.zeros(batch), jnp.full(batch, split - length)
        starts = (low + position * (high - low)).astype(jnp.int32)
        return jax.vmap(lambda start: lax.dynamic_slice(data, (start,), (length,)))(starts)


def _decayed(params: nnx.State) -> Any:
    """A mask for weight decay: only matrices, not norms or the gates' rates and biases."""
    return jax.tree.map(lambda leaf: leaf.size > 4096, params)


def train(args: argparse.Namespace, config: HybridConfig, corpus: Corpus) -> None:
    """Trains, prints a line per call, and writes the model and its card to `args.out`."""
    began = time.monotonic()
    training = Training(config, corpus, args)
    evaluation = Evaluation(training.config, corpus.held_out, args.seq_len, args.eval_batch)
    sizes = [leaf.size for leaf in jax.tree.leaves(training.params)]
    print(
        f"{jax.devices()[0].device_kind}: {sum(sizes):,} parameters, {corpus.data.size:,} bytes "
        f"({corpus.library_size:,} library), {evaluation.bytes:,} bytes held out",
        flush=True,
    )
    steps, progress, held_out = 0, 0.0, math.nan
    per_call = 0.0
    while progress < 1:
        call_began = time.monotonic()
        if args.steps:
            end = min((steps + args.steps_per_call) / args.steps, 1.0)
        else:
            left = args.minutes * 60 - (call_began - began)
            # The last call is the one that leaves no time for another.
            end = 1.0 if left < 2 * per_call else progress + (1 - progress) * per_call / left
        bits = training(steps // args.steps_per_call, progress, end)
        now = time.monotonic()
        # The first call compiles, so its time is not used, and the schedule waits for the next.
        per_call = now - call_began if steps else 0.0
        steps += len(bits)
        progress = end
        if not np.isfinite(bits).all():
            raise SystemExit(f"the loss is not finite after {steps} steps: lower --learning-rate")
        call = steps // args.steps_per_call
        if progress == 1 or call % args.eval_every == 0:
            held_out = evaluation(training.params)
            save(args, config, training.params)
        rate = len(bits) * args.batch * args.seq_len / (time.monotonic() - call_began)
        print(
            f"{now - began:6.1f} s  {progress:6.1%}  step {steps}  "
            f"train {bits.mean():.4f}  held out {held_out:.4f} bits per byte  {rate:,.0f} bytes/s",
            flush=True,
        )
    write_card(args, config, corpus, steps, time.monotonic() - began)


def save(args: argparse.Namespace, config: HybridConfig, params: nnx.State) -> None:
    shapes = Hybrid(config).param_shapes()
    stored = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, shapes)
    native_format.save(args.out, config, stored)


def evaluate(args: argparse.Namespace, corpus: Corpus) -> str:
    """A line with the saved model's held-out bits per byte."""
    config, params = native_format.load(args.out)
    evaluation = Evaluation(config, corpus.held_out, args.seq_len, args.eval_batch)
    return (
        f"{evaluation(params):.4f} bits per byte on the {evaluation.bytes:,} held-out bytes "
        f"(windows of {evaluation.window} bytes, stride {evaluation.stride})"
    )


CARD = """\
# tiny

A byte-level hybrid of gated delta nets and multi-head latent attention that writes Python. It is
here so that `python -m jaxattn.serve` has something real to decode; it knows no facts and its
programs do not run.

| | |
|---|---|
| parameters | {parameters:,}, {megabytes:.2f} MB in {dtype} |
| layers | {repeats} x ({gdn} gated delta net, 1 MLA), gated MLPs of {mlp}, hidden size {hidden} |
| gated delta net | {hk} key and {hv} value heads of {dk} and {dv}, convolution over {conv} tokens |
| MLA | {heads} heads, kv_lora_rank {rank}, {nope} + {rope} query and key dims, {value} value dims |
| vocabulary | bytes; byte 0 begins and ends a file |
| trained on | {trained:,} bytes of {python}'s standard library, {tests:.0%} of it test suite |
| training | {steps:,} steps of {batch} x {seq_len} bytes on one {device}, {minutes:.1f} minutes |
| held out | **{result}** |

Held out whole, with their tests: {held_out}.

Trained and measured by

    python -m scripts.train_tiny --out {out} {options}
    python -m scripts.train_tiny --eval --out {out}

Each byte of a held-out file is scored once: a file's first window scores all of its bytes, each
later one its last `stride`, which see the bytes before them in the window.

## License

The weights are under the project's Apache-2.0. The training text is part of CPython: copyright
Python Software Foundation, PSF License Version 2 (https://docs.python.org/3/license.html). The
model can repeat short passages of it.
"""


def write_card(
    args: argparse.Namespace, config: HybridConfig, corpus: Corpus, steps: int, seconds: float
) -> None:
    shapes = Hybrid(config).param_shapes()
    leaves = jax.tree.leaves(shapes)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    names = ("minutes", "steps", "batch", "seq_len", "learning_rate", "weight_decay", "seed")
    defaults = parse(["--out", "."])
    changed = {n: getattr(args, n) for n in names if getattr(args, n) != getattr(defaults, n)}
    text = CARD.format(
        parameters=sum(leaf.size for leaf in leaves),
        megabytes=size / 1e6,
        dtype=config.param_dtype,
        repeats=config.num_repeats,
        gdn=config.gdn_per_repeat,
        mlp=config.intermediate_size,
        hidden=config.hidden_size,
        hk=config.linear_num_key_heads,
        hv=config.linear_num_value_heads,
        dk=config.linear_key_head_dim,
        dv=config.linear_value_head_dim,
        conv=config.linear_conv_kernel_dim,
        heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        trained=corpus.data.size,
        python=args.source,
        tests=1 - corpus.library_size / corpus.data.size,
        steps=steps,
        batch=args.batch,
        seq_len=args.seq_len,
        device=jax.devices()[0].device_kind,
        minutes=seconds / 60,
        result=evaluate(args, corpus),
        held_out=", ".join(f"`{name}`" for name in HELD_OUT),
        out="jaxattn/models/embedded/tiny",
        options=" ".join(f"--{n.replace('_', '-')} {value}" for n, value in changed.items()),
    )
    (args.out / "README.md").write_text(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--eval", action="store_true", help="only measure the model in --out")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument(
        "--source",
        default=f"CPython {platform.python_version()}",
        help="what the model card calls the corpus",
    )
    parser.add_argument("--config", type=Path, help="a config.json other than the tiny model's")
    parser.add_argument("--minutes", type=float, default=8.0, help="budget, compilation included")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps-per-call", type=int, default=20)
    parser.add_argument("--eval-batch", type=int, default=16, help="windows at a time")
    parser.add_argument("--eval-every", type=int, default=20, help="calls between evaluations")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    corpus = read_corpus(args.corpus)
    if args.eval:
        print(evaluate(args, corpus))
        return
    config = TINY
    if args.config:
        config = HybridConfig.from_dict(json.loads(args.config.read_text()))
    train(args, config, corpus)
    print(evaluate(args, corpus))


if __name__ == "__main__":
    main(sys.argv[1:])
