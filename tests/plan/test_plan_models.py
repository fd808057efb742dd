"""Models that jaxattn runs, planned from their shapes; folders; and what a plan says of kernels."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxattn import mla
from jaxattn.cli.plan import main
from jaxattn.core.dispatch import Refusal, traced_for_hopper
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from jaxattn.engine.startup.executable_memory import from_shapes
from jaxattn.engine.startup.memory_plan import packed_shapes, plan_engine
from jaxattn.engine.steps.step_catalog import ModelStep, prefill_step
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import known_device
from jaxattn.models.caches.cache_layouts import LatentPages, SparseLatentPages
from jaxattn.models.caches.layer_cache import CacheSize, LayerCache
from jaxattn.models.catalog import model_resolver
from jaxattn.models.checkpoint import CheckpointError
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.interface import Model
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.plan import PlanError, plan
from jaxattn.plan.device_plan import _bound_in, traced_bounds
from jaxattn.plan.layout_search import layouts_that_fit
from jaxattn.plan.placement import CACHE_DTYPES, ModelPlacement, caches, latents_of
from jaxattn.plan.plan_notes import notes
from tests.helpers.engine_cases import CONFIG, LIMITS
from tests.helpers.kernel_cases import slow

ROWS = Limits(batch=2, max_model_len=1024, num_pages=40, prefill_chunk=64)
SMALL = "Youtu-LLM-2B"


def of(name: str):
    return model_resolver.load(name).model


# One GPU ------------------------------------------------------------------------------------------


@pytest.mark.slow(
    reason="a line of a published model that the engine counts otherwise; found by "
    "engine/test_requests, whose engine takes what was planned without a device, too"
)
def test_one_gpu_is_planned_as_the_engine_plans_it():
    model = of(SMALL)
    made = plan(model_resolver.load(SMALL), "h100", ROWS)
    engine = plan_engine(model, ROWS, known_device("h100"), packed_shapes(model), {})
    for line in ("weights", "arena", "kv cache"):
        assert made[line] == engine[line]
    limits = choose_decode_steps(ROWS, packed_shapes(model), gpu=True)
    with traced_for_hopper(True):
        bounds = from_shapes(model, limits, packed_shapes(model), None)
    assert traced_bounds(model, limits, True) == bounds
    assert made.limits is not None
    own = traced_bounds(model, made.limits, True)  # with what `ROWS` leave open
    assert made["xla temp"] == max(each.temp for each in own.values())
    parts = made.items[0].parts
    assert sum(part.nbytes for part in parts) == made["weights"]
    assert {part.name for part in parts} == {
        "embedding weights", "MLA weights", "dense MLP weights", "norms weights", "packed weights"
    }  # fmt: skip


def test_what_xla_would_hold_is_not_counted_where_a_kernel_runs():
    """Qwen3-32B, 1,024 rows: XLA's decode would hold 512 tokens of every row, 7 GiB."""
    limits = Limits(batch=1024, max_model_len=40_960, num_pages=1024, prefill_chunk=2048)
    step = ModelStep("decode", 1024, 1)
    model = of("Qwen3-32B")
    hopper, host = (_bound_in(model, step, limits, on_hopper).temp for on_hopper in (True, False))
    assert host - hopper > 6 * 2**30 and hopper < 1.5 * 2**30


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.parametrize(
    "cache_dtype, width", [("bfloat16", 1152), ("float8", 576), ("uint8", 656)]
)
def test_one_gpu_counts_the_cache_that_is_asked_for(cache_dtype, width):
    place = ModelPlacement(cache_dtype=cache_dtype)
    made = plan(model_resolver.load(SMALL), "h100", ROWS, placement=place)
    assert made["kv cache"] == 32 * 40 * 64 * width
    served = "No jaxattn model serves a float8 cache yet"
    assert any(served in note for note in made.notes) == (cache_dtype == "float8")


def test_a_model_too_large_for_one_gpu_is_not_traced(monkeypatch):
    monkeypatch.setattr(jax, "make_jaxpr", lambda *_: pytest.fail("traced"))
    model, limits = model_resolver.load("DeepSeek-R1"), Limits(batch=8, max_model_len=4096)
    with pytest.raises(PlanError, match="the item that does not fit is the weights") as refused:
        plan(model, "h100", limits)
    [advised] = refused.value.advice
    gpus = int(advised.split()[0])
    assert advised.startswith(f"{gpus} GPUs (--gpus {gpus})")
    memory = known_device("h100")
    assert next(layouts_that_fit(model.model, memory, limits, gpus))
    assert not any(
        next(layouts_that_fit(model.model, memory, limits, n), 0) for n in range(8, gpus)
    )


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.slow_cases(
    reason="a limit that does not fit; found by the batch and the pages there too"
)
@pytest.mark.parametrize(
    "name, given",
    [
        slow("max_model_len", {"max_model_len": 16_384}),
        ("batch", {"batch": 16_384, "max_model_len": 512}),
        ("num_pages", {"batch": 64, "max_model_len": 1024, "num_pages": 1024}),
    ],
)
def test_an_advised_limit_is_the_largest_half_that_fits_with_the_others_as_given(name, given):
    """What is left open is chosen again by whoever follows the advice."""
    limits, option = Limits(**given), f"--{name.replace('_', '-')} "
    with pytest.raises(PlanError) as refused:
        plan(model_resolver.load(SMALL), "4.9GiB", limits)
    [advised] = [each for each in refused.value.advice if each.startswith(option)]
    value = int(advised.removeprefix(option))
    assert (given[name] // value).bit_count() == 1
    fitting = dataclasses.replace(limits, **{name: value})
    assert plan(model_resolver.load(SMALL), "4.9GiB", fitting).reserve >= 0
    with pytest.raises(PlanError):
        larger = dataclasses.replace(limits, **{name: 2 * value})
        plan(model_resolver.load(SMALL), "4.9GiB", larger)


@pytest.mark.slow(
    reason="temp that advice forgets; found by the limits that are advised without temp and by the "
    "share that is advised, in test_plan too"
)
def test_what_is_advised_for_one_gpu_fits_it_with_its_temp():
    limits = Limits(batch=512, max_model_len=8192, prefill_chunk=512)
    with pytest.raises(PlanError) as refused:
        plan(model_resolver.load(SMALL), "6GiB", limits)
    # With fewer rows a step still packs as few prompt tokens as a chunk has.
    assert "--batch 256" in refused.value.advice
    fitting = dataclasses.replace(limits, batch=256)
    assert plan(model_resolver.load(SMALL), "6GiB", fitting).reserve >= 0


def test_a_table_of_fewer_tokens_than_a_chunk_has_a_bound():
    """The advice for a device with room for a page looks at such limits."""
    limits = Limits(batch=512, max_model_len=8192, prefill_chunk=512, prefill_rows=16, num_pages=1)
    assert limits.table_width * limits.page_tokens < limits.chunks[-1]
    step = prefill_step(limits, limits.prefill_sizes[-1])
    assert step.tokens == 8192
    whole = dataclasses.replace(limits, num_pages=512 * 128)
    bounds = [_bound_in(of(SMALL), step, each, True).temp for each in (limits, whole)]
    assert 0 < bounds[0] <= bounds[1]


def test_an_fp8_checkpoint_says_what_stays_in_fp8():
    made = plan(
        model_resolver.load("DeepSeek-R1"),
        "h200",
        Limits(batch=8, max_model_len=4096),
        placement=ModelPlacement(gpus=8),
    )
    assert "routed and shared experts" in made.items[0].why
    assert "in FP8 with one scale per 128 x 128" in made.items[0].why
    assert "dequantized to bfloat16 on loading" in made.items[0].why
    whole = "With every FP8 matrix kept in FP8, all weights would take 673,363,472,736 bytes"
    assert any(whole in note for note in made.notes)
    assert "The loader skips the prediction (MTP) layers." in made.notes


def test_a_plan_says_what_layers_with_a_window_keep():
    found = notes(model_resolver.load("gpt-oss-20b"), ROWS, ModelPlacement())
    assert any("but read only the last 128." in note for note in found)


# A decoder of one's own ---------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced_bounds")
def test_a_decoder_is_placed_as_a_known_model_is():
    model = Hybrid(dataclasses.replace(CONFIG, linear_num_key_heads=2))
    limits = dataclasses.replace(LIMITS, num_pages=7)
    plain = plan(model, "2GiB", limits)
    placed = plan(model, "2GiB", limits, placement=ModelPlacement())
    assert {i.name: i.nbytes for i in placed.items} == {i.name: i.nbytes for i in plain.items}
    assert placed.title.startswith("Hybrid on a device of 2 GiB")
    halves = plan(model, "4GiB", limits, placement=ModelPlacement(gpus=2, attention="tensor"))
    for cut in ("ssm state", "conv state"):
        assert halves[cut] * 2 == plain[cut]
    assert halves["kv cache"] == plain["kv cache"] and halves["weights"] < plain["weights"]


class Cached(Model):
    """A model that is no decoder."""

    vocab_size, max_position_embeddings, caches = 4, 4096, tuple[LayerCache, ...]()

    def param_shapes(self):
        return {"w": jax.ShapeDtypeStruct((4, 4), "float32")}

    hidden_shape = jax.ShapeDtypeStruct((4,), "float32")

    def prefill_hidden(self, params, state, batch, *, implementation=None):
        raise NotImplementedError

    decode = head = prefill_hidden


def test_what_is_no_decoder_cannot_be_placed():
    with pytest.raises(TypeError, match="placement needs a jaxattn.models.DecoderModel .* Cached"):
        plan(Cached(), "2GiB", LIMITS, placement=ModelPlacement())


@pytest.mark.parametrize(
    "name, place, message",
    [
        (SMALL, ModelPlacement(gpus=3, attention="tensor"), "16 attention heads .* over 3 GPUs"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_by_name(name, place, message):
    with pytest.raises(ValueError, match=message):
        plan(model_resolver.load(name), "h200", ROWS, placement=place)


# Folders ------------------------------------------------------------------------------------------


def written(folder, values) -> str:
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "config.json").write_text(text)
    return str(folder)


def changed(name, **fields):
    config = model_resolver.shipped_config(name) | fields
    return {field: value for field, value in config.items() if value is not ...}


BROKEN = {
    "no json": ("{", "config.json: Expecting property name enclosed"),
    "no object": ([], "config.json"),
    "null": (None, "config.json"),
    "type": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are"),
    "no type": ({"model_type": ["x"]}, "model_type ['x'] is not supported; supported are"),
    "missing": (changed(SMALL, vocab_size=...), "field vocab_size is missing"),
    "negative": (changed(SMALL, hidden_size=-1), "hidden_size must be an integer from 1 to"),
    "text": (changed(SMALL, v_head_dim="128"), "v_head_dim must be an integer from 1 to"),
    "a fraction": (changed(SMALL, num_hidden_layers=1.5), "num_hidden_layers must be an integer"),
    "absurd": (
        changed("DeepSeek-V2-Lite", n_routed_experts=10**30),
        "n_routed_experts must be an integer from 1 to",
    ),
    "quantization": (
        changed(SMALL, quantization_config={"quant_method": "nvfp4"}),
        "'compressed-tensors' or 'mxfp4' or 'awq' or 'gptq' to be supported; got 'nvfp4'",
    ),
    "block": (
        changed(SMALL, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 0]}),
        "weight_block_size must be [128, 128] to be supported; got [128, 0]",
    ),
    "activation": (changed(SMALL, hidden_act="gelu"), "hidden_act must be 'silu' to be supported"),
    "no heads": (
        changed("Qwen3-Next-80B-A3B", num_key_value_heads=...),
        "field num_key_value_heads is missing",
    ),
    "text config": (
        {"model_type": "qwen3_5_moe", "text_config": [1]},
        "text_config must be an object",
    ),
    "interval": (
        changed("Qwen3-Next-80B-A3B", full_attention_interval=49),
        "full_attention_interval=49 exceeds num_hidden_layers=48",
    ),
}


@pytest.mark.parametrize("values, message", BROKEN.values(), ids=BROKEN)
def test_a_bad_folder_is_one_line_in_the_loaders_words(values, message, tmp_path, capsys):
    folder = written(tmp_path, values)
    assert main([folder]) == 2
    error = capsys.readouterr().err
    program = "python -m jaxattn.plan: error: "
    assert error.startswith(program) and error.count("\n") == 1 and message in error
    with pytest.raises(CheckpointError) as refused:
        huggingface_checkpoint.load(folder)
    assert error.removeprefix(program).startswith(" ".join(str(refused.value).split()))


COUNTED = {
    "linear": (
        changed("Kimi-Linear-48B-A3B", linear_attn_config=3),
        "linear_attn_config must be an object; got 3",
    ),
    "linear layers": (
        changed(
            "Kimi-Linear-48B-A3B",
            linear_attn_config={
                "num_heads": 1,
                "head_dim": 1,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [0],
            },
        ),
        "full_attn_layers must be a list of layers from 1 to 27; got [0]",
    ),
}


@pytest.mark.parametrize("values, message", COUNTED.values(), ids=COUNTED)
def test_what_a_plan_counts_itself_is_refused_as_briefly(values, message, tmp_path, capsys):
    assert main([written(tmp_path, values)]) == 2
    error = capsys.readouterr().err
    where = f"python -m jaxattn.plan: error: {tmp_path / 'config.json'}: "
    assert error.startswith(where) and error.count("\n") == 1 and message in error


def test_a_nested_text_config_is_the_model(tmp_path):
    text = model_resolver.shipped_config("Qwen3.5-35B-A3B")
    folder = written(tmp_path, {"model_type": "qwen3_5_moe", "text_config": text})
    assert model_resolver.load(folder).weights == model_resolver.load("Qwen3.5-35B-A3B").weights
    (tmp_path / "config.json").unlink()
    with pytest.raises(model_resolver.CatalogError, match="neither a folder .* nor a GGUF"):
        model_resolver.load(str(tmp_path))


# Claims about kernels -----------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.sampled
@pytest.mark.parametrize("ways", [1, 8])
@pytest.mark.parametrize("cache_dtype", [None, *sorted(CACHE_DTYPES)])
@pytest.mark.parametrize(
    "name", [n for n in model_resolver.NAMES if not n.startswith(("Qwen", "Llama", "gpt-oss"))]
)
def test_a_plan_says_what_dispatch_does_with_the_cache(name, cache_dtype, ways):
    """The interpreted kernel refuses the shapes that the GPU's refuses."""
    model = model_resolver.load(name)
    assert latents_of(model)
    place = ModelPlacement(gpus=ways, attention="tensor", cache_dtype=cache_dtype)
    said = f"reads the {cache_dtype or 'bfloat16'} cache"
    [note] = [note for note in notes(model, ROWS, place) if said in note]
    [latents] = [each for each in caches(model, place) if isinstance(each, LatentPages)]
    cache = latents.shapes(CacheSize(pages=2, slots=1))["kv_cache"]
    sparse = isinstance(latents, SparseLatentPages)
    form = latents.format
    width = form.kv_lora_rank + form.qk_rope_head_dim
    q = jax.ShapeDtypeStruct((1, 1, model.num_heads // ways, width), model.dtype)
    scaled = {"kv_scale": 1.0} if cache_dtype == "float8" else {}
    rows = jax.ShapeDtypeStruct((1,), "int32"), jax.ShapeDtypeStruct((1, 2), "int32")

    def decode(q, cache, lens, tables):
        options = dict(scale=1.0, layer=0, implementation="mosaic_gpu_interpret", **scaled)
        if sparse:
            chosen = jnp.zeros((1, 1, 64), "int32")
            return mla.mla_sparse_decode(q, cache, tables, lens, chosen, **options)
        return mla.mla_decode(q, cache, tables, lens, **options)

    try:
        jax.eval_shape(decode, q, cache, *rows)
        kernel = "The sparse MLA kernel reads" if sparse else "MLA's decode kernel reads"
        assert note.startswith(kernel)
    except Refusal as refusal:
        assert note.startswith("XLA reads") and str(refusal).split(";")[0] in note


def test_plans_of_one_gpu_and_of_a_group_say_it():
    for place in (ModelPlacement(), ModelPlacement(gpus=8)):
        made = plan(model_resolver.load("DeepSeek-V2-Lite"), "h200", ROWS, placement=place)
        assert "MLA's decode kernel reads the bfloat16 cache: 1,152 bytes per token and layer." in (
            made.notes
        )


@pytest.mark.parametrize(
    "cache_dtype, nbytes", [("bfloat16", 1152), ("float8", 576), ("uint8", 656)]
)
def test_a_token_takes_the_bytes_of_its_format(cache_dtype, nbytes):
    place = ModelPlacement(gpus=8, cache_dtype=cache_dtype)
    made = plan(model_resolver.load("DeepSeek-R1"), "h200", ROWS, placement=place)
    assert made["kv cache"] == 61 * 40 * 64 * nbytes


@pytest.mark.parametrize("cache_dtype", ["uint8", "float8"])
def test_a_cache_of_keys_and_values_in_a_format_of_latents_is_refused(cache_dtype):
    with pytest.raises(ValueError, match=f"{cache_dtype!r} is a format for MLA latents, .* out"):
        plan(
            model_resolver.load("Qwen3-Next-80B-A3B"),
            "h200",
            Limits(),
            placement=ModelPlacement(gpus=4, cache_dtype=cache_dtype),
        )
