"""Caches in another format than the model's own: of all layers, or of all but the outer ones."""

import dataclasses
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.cli.plan import main as plan_main
from jaxattn.cli.serve.command import main as serve_main
from jaxattn.core.cache.formats import CACHE_FORMATS, TURBOQUANT, KVFormat
from jaxattn.models.blocks import GQA, Block
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import DecodeBatch, PrefillBatch, init_state, jit_step, scratch_spec
from jaxattn.models.loading.loader import load
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.plan import plan
from tests.helpers.at_once import at_once
from tests.helpers.safetensors_files import read_file, write_file
from tests.models.test_gqa_decoder import ATTENTION, DELTA, MLPS, STREAM
from tests.models.test_hybrid import SMALL
from tests.parallel.cases import drawn_params

pytestmark = pytest.mark.lazy_steps

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
TOKENS = np.random.default_rng(1).integers(0, 48, (1, 12), np.int32)


@cache
def model(mixers=(ATTENTION, ATTENTION, DELTA, ATTENTION, ATTENTION, ATTENTION)) -> DecoderModel:
    """Five layers of attention and a delta layer among them."""
    blocks = tuple(Block(mixer, MLPS) for mixer in mixers)
    return DecoderModel(
        DecoderSpec(vocab_size=48, stream=STREAM, blocks=blocks, max_position_embeddings=64)
    )


def formats(of: DecoderModel) -> list[str | None]:
    return [b.mixer.cache_format for b in of.spec.blocks if isinstance(b.mixer, GQA)]


def stepped(made: DecoderModel, params) -> np.ndarray:
    """The logits of the last token, after a prefill in two chunks and two steps."""
    held, prefill, decode = (
        made.pack(params),
        jit_step(made.prefill, prefill=True),
        jit_step(made.decode),
    )
    size = CacheSize(pages=4, slots=1, page_size=4)
    state = init_state(made, size, scratch_spec(made, 1, max_pages=4, page_size=4))
    tables, row = np.array([[2, 0, 3, 1]], np.int32), np.array([0], np.int32)
    for done in (5, 10):
        chunk = TOKENS[:, done - 5 : done]
        lens = np.array([5], np.int32), np.array([done], np.int32)
        _, state = prefill(held, state, PrefillBatch(chunk, *lens, tables, row))
    for done in (11, 12):
        batch = DecodeBatch(TOKENS[:, done - 1 : done], np.array([done], np.int32), tables, row)
        logits, state = decode(held, state, batch)
    return np.asarray(logits[0], np.float64)


def test_steps_over_pages_of_two_formats_are_near_the_training_forward():
    made = model((ATTENTION,) * 3).with_cache_format("fp8", 1)
    params = made.init_params(jax.random.key(0))
    expected = np.asarray(at_once(made.bind(params), TOKENS)[0, -1], np.float64)
    error = np.linalg.norm(stepped(made, params) - expected) / np.linalg.norm(expected)
    # e4m3 keeps four bits of a number: a relative error of 2**-5 on average at most.
    assert 0 < error < 2**-5


def test_outer_layers_keep_their_format_in_a_cache_of_their_own():
    made = model().with_cache_format("fp8", 2)
    assert formats(made) == [None, None, "fp8", None, None]
    assert made.with_cache_format("fp8", 2) == made  # an engine asks for it once more
    assert formats(made.with_cache_format("fp8")) == ["fp8"] * 5
    shapes = {
        name: (shape.dtype.name, shape.shape[0])
        for each in made.caches
        for name, shape in each.shapes(CacheSize(pages=1, slots=1)).items()
    }
    assert shapes["kv_cache"] == ("float8_e4m3fn", 1)
    assert shapes["kv_cache_apart"] == ("float32", 4)


IN_FP8 = Limits(batch=2, max_model_len=64, prefill_chunk=8, cache_format="fp8")


@pytest.mark.slow(
    reason="a plan of another format; found by an engine over codes between native layers and "
    "steps over pages of two formats too"
)
def test_an_engine_serves_the_format_of_its_limits():
    made = model((ATTENTION,) * 2).with_cache_format("fp8")
    with Engine(made, made.init_params(jax.random.key(0)), IN_FP8, strict=True) as engine:
        done = engine.generate([Request([3, 1, 4], max_tokens=3), Request([2], max_tokens=3)])
        on_cpu = jax.default_backend() == "cpu"  # which has the bits of the numbers
        assert engine.state.caches["keys and values"]["kv_cache"].dtype == (
            "int8" if on_cpu else "float8_e4m3fn"
        )
        assert engine.plan["kv cache"] == 2 * 2 * 64 * 2 * KVFormat("fp8", 16).nbytes
    assert [len(each.tokens) for each in done] == [3, 3]


def test_a_format_that_the_parameters_have_no_scales_for_is_refused():
    plain = model((ATTENTION,) * 2)
    with pytest.raises(ValueError, match=r"kv_scale.*is missing; expected float32\[2, 2, 2\]"):
        Engine(plain, drawn_params(plain), IN_FP8)


def test_a_hybrid_of_latents_has_block_scaled_fp8():
    config = dataclasses.replace(SMALL, kv_lora_rank=128)
    made = Hybrid(config).with_cache_format("fp8_block")
    assert made == DecoderModel(Hybrid(dataclasses.replace(config, cache_dtype="uint8")).spec)


@pytest.mark.parametrize(
    "of, name, native, message",
    [
        (model, "fp8_block", 0, "'fp8_block' is not supported by GQA; .* fp8, k8v4, 4bit_nc"),
        (model, "k8v4", 0, "head_dim must be 64, 128 or 256 .*, got 16; use another cache format"),
        (model, "fp8", 3, "native_layers=3 at each end cover all 5 attention layers"),
        (model, "auto", 1, "needs a cache_format other than"),
        (model, "int8", 0, f"must be one of {', '.join(CACHE_FORMATS)}"),
        (lambda: Hybrid(SMALL), "fp8", 0, "not supported by MLA; .* auto, bfloat16, fp8_block"),
        (lambda: Hybrid(SMALL), "4bit_nc", 0, "'4bit_nc' is not supported by MLA"),
    ],
)
def test_what_a_family_lacks_is_refused_with_what_it_has(of, name, native, message):
    with pytest.raises(ValueError, match=message):
        of().with_cache_format(name, native)


@pytest.mark.parametrize("main", [serve_main, lambda argv: plan_main(["DeepSeek-V2-Lite", *argv])])
def test_commands_refuse_a_format_in_one_line(main, capsys):
    assert main(["--kv-cache-dtype", "3bit_nc"]) == 2
    said = capsys.readouterr().err
    assert "--kv-cache-dtype 3bit_nc is not supported by" in said and "fp8" in said


@pytest.mark.usefixtures("untraced_bounds")
def test_a_plan_counts_the_pages_of_each_format():
    limits = Limits(batch=2, max_model_len=640, num_pages=20)
    bf16, fp8, mixed = (
        plan(model_resolver.load("Qwen3-32B"), "h200", dataclasses.replace(limits, **more))
        for more in ({}, {"cache_format": "fp8"}, {"cache_format": "fp8", "native_layers": 2})
    )
    token = 8 * KVFormat("fp8", 128).nbytes * 20 * 64
    assert bf16["kv cache"] == 2 * fp8["kv cache"] == 2 * 64 * token
    assert (mixed["kv cache"], mixed["kv cache apart"]) == (60 * token, 2 * 4 * token)


def test_slots_have_the_bytes_of_the_published_presets():
    sizes = [[KVFormat(name, dim).nbytes for name in TURBOQUANT] for dim in (64, 128, 256)]
    assert sizes == [[100, 70, 62, 54], [196, 134, 118, 102], [388, 262, 230, 198]]
    # Qwen3-32B, k8v4 in 60 layers and bfloat16 in the first and last two.
    slots = 60 * KVFormat("k8v4", 128).nbytes + 4 * KVFormat("bfloat16", 128).nbytes
    assert 8 * slots == 110_464
    with pytest.raises(ValueError, match="power of two, got 96"):
        KVFormat("4bit_nc", 96)


def with_scales(tmp_path: Path, **scales: np.ndarray) -> Path:
    """A published folder whose attention has scales of its cache."""
    folder = tmp_path / "scaled"
    shutil.copytree(TINY / "qwen3_next_fp8", folder)
    tensors = read_file(folder / "model.safetensors")
    (name,) = {n for n in tensors if n.endswith("self_attn.k_norm.weight")}
    prefix = name.removesuffix("k_norm.weight")
    write_file(
        folder / "model.safetensors",
        tensors | {prefix + path.replace("_of_", "."): x for path, x in scales.items()},
    )
    return folder


def test_scales_come_from_the_checkpoint_and_are_1_without(tmp_path):
    given = {"k_proj_of_k_scale": np.array(0.25, np.float32), "v_scale": np.float32([1.5, 3])}
    folder = with_scales(tmp_path, **given)
    for path, wanted in (
        (folder, [[0.25] * 2, [1.5, 3]]),
        (TINY / "qwen3_next_fp8", [[1] * 2] * 2),
    ):
        made, params = load(path, cache_format="fp8")
        (found,) = (
            leaf
            for key, leaf in jax.tree.leaves_with_path(params)
            if "kv_scale" in jax.tree_util.keystr(key)
        )
        assert made.caches[-1].shapes(CacheSize(pages=1, slots=1))["kv_cache"].dtype == jnp.dtype(
            "float8_e4m3fn"
        )
        np.testing.assert_array_equal(found, [wanted])
    load(folder)  # a cache of floats has no use for them


def test_a_scale_of_another_size_or_sign_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"k_scale' \[3\] must have 1 or 2 numbers"):
        load(with_scales(tmp_path, k_scale=np.ones(3, np.float32)), cache_format="fp8")
    shutil.rmtree(tmp_path / "scaled")
    with pytest.raises(CheckpointError, match="k_scale' must be positive"):
        load(with_scales(tmp_path, k_scale=np.zeros(1, np.float32)), cache_format="fp8")
