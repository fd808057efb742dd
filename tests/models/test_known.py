"""Models that a plan knows: their parameters, their bytes, and how GPUs divide them."""

import dataclasses
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from flax import nnx

from jaxattn.memory.plan import nbytes
from jaxattn.models.blocks import MoE
from jaxattn.models.catalog import model_resolver
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.catalog.param_roles import param_role, with_local_heads
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.loading import huggingface_checkpoint
from jaxattn.models.registry import FAMILIES, read_decoder, read_model
from tests.helpers.engine_cases import CONFIG

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
# More of them, if they were made: a folder for each family.
MORE = os.environ.get("JAXATTN_TINY_CHECKPOINTS")
FOLDERS = {
    folder.name: folder
    for root in (TINY, *([Path(MORE)] if MORE else []))
    for folder in sorted(root.iterdir())
    if (folder / "config.json").is_file()
    and huggingface_checkpoint.read_json(folder / "config.json").get("model_type") in FAMILIES
}
BUILT = [
    name
    for name in model_resolver.NAMES
    if model_resolver.shipped_config(name)["model_type"] in FAMILIES
]


def vision_tower(hidden=1152, mlp=4304, depth=27, positions=2304, patch=2 * 16 * 16, out=2048):
    """Parameters beside the text model in Qwen3.5-35B-A3B's checkpoint, from its vision_config."""

    def linear(inputs, outputs):
        return inputs * outputs + outputs

    block = linear(hidden, 3 * hidden) + linear(hidden, hidden) + 2 * 2 * hidden
    block += linear(hidden, mlp) + linear(mlp, hidden)
    merged = 4 * hidden
    merger = 2 * hidden + linear(merged, merged) + linear(merged, out)
    return linear(3 * patch, hidden) + positions * hidden + depth * block + merger


def indexer(heads=64, dim=128, low=1536, hidden=7168):
    """Parameters that a layer of DeepSeek-V3.2 has and one of V3 has not."""
    return heads * dim * low + dim * hidden + 2 * dim + heads * hidden


def prediction_layer(name):
    """Parameters of a Qwen checkpoint's mtp.*: a layer with attention, two norms and a linear
    before it, and a norm behind it."""
    published = read_model(ConfigFields(model_resolver.shipped_config(name), name))
    tensors = {each.name: math.prod(each.shape) for each in published.placed()}
    hidden = published.model.spec.stream.hidden_size
    layer = sum(size for name, size in tensors.items() if name.startswith("model.layers.3."))
    return layer + 2 * hidden * hidden + 3 * hidden


QWEN_NEXT, QWEN = "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B"
QWEN_27B = "Qwen3.6-27B"


@pytest.mark.parametrize(
    "name, text, published, beside",
    [
        # `published`: all of the checkpoint's numbers as the hub lists them; `text`: without the
        # prediction layers, which the named size of the model leaves out.
        ("DeepSeek-V2-Lite", 15_706_484_224, 15_706_484_224, 0),
        pytest.param(
            QWEN_NEXT,
            79_674_391_296,
            81_324_862_720,
            lambda: prediction_layer(QWEN_NEXT),
            marks=pytest.mark.slow(reason="a layer's numbers; found by Qwen3.5's 35B there too"),
        ),
        (
            QWEN,
            34_660_610_688,
            35_951_822_704,
            lambda: vision_tower() + prediction_layer(QWEN),
        ),
        # Its index lists 55.56 GB, two bytes each.
        (
            QWEN_27B,
            26_895_998_464,
            27_781_427_952,
            lambda: vision_tower(out=5120) + prediction_layer(QWEN_27B),
        ),
        ("Qwen3.8-27B", 26_895_998_464, 26_895_998_464, 0),  # of the text; all sizes are Qwen3.6's
        ("Qwen3-32B", 32_762_123_264, 32_762_123_264, 0),
        ("Qwen3-30B-A3B", 30_532_122_624, 30_532_122_624, 0),
        ("Llama-3.1-8B", 8_030_261_248, 8_030_261_248, 0),
        ("Llama-3.3-70B", 70_553_706_496, 70_553_706_496, 0),
        # The model card (arXiv 2508.10925) rounds these to 20.9 and 116.8 billion; Ollama's pages
        # have all digits.
        ("gpt-oss-20b", 20_914_757_184, 20_914_757_184, 0),
        ("gpt-oss-120b", 116_829_156_672, 116_829_156_672, 0),
        # The hub rounds this one: 49.1 billion numbers, 98.2 GB.
        ("Kimi-Linear-48B-A3B", 49_122_681_728, 49_122_681_728, 0),
        # Its named size, to the digits that it has.
        ("DeepSeek-R1", 671_026_419_200, 671_026_419_200, 0),
        ("DeepSeek-V3", 671_026_419_200, 671_026_419_200, 0),
        ("GLM-4.7-Flash", 29_943_393_920, 29_943_393_920, 0),
        # DeepSeek-V3's, and in each layer an indexer; the named 744 billion of GLM-5.
        ("DeepSeek-V3.2", 671_877_944_064, 671_026_419_200, lambda: -61 * indexer()),
        ("GLM-5", 743_911_218_432, 743_911_218_432, 0),
        ("Kimi-K2", 1_026_408_232_448, 1_026_408_232_448, 0),
        ("Moonlight-16B-A3B", 15_960_110_208, 15_960_110_208, 0),
        ("Youtu-LLM-2B", 1_961_560_064, 1_961_560_064, 0),
    ],
)
def test_models_have_their_published_parameters(name, text, published, beside):
    model = model_resolver.load(name.lower())
    assert model.total_parameters() == text
    assert text + (beside() if callable(beside) else beside) == published


def test_every_shipped_configuration_names_its_source():
    for name in model_resolver.NAMES:
        assert model_resolver.shipped_config(name)["source"].startswith(
            "https://huggingface.co/"
        ), name


@pytest.mark.sampled
@pytest.mark.parametrize("name", BUILT)
def test_a_models_parameters_are_those_of_its_checkpoints_tensors(name):
    """The loader's table of tensors and the plan's shapes are two counts of one thing."""
    config = model_resolver.shipped_config(name)
    config.pop("quantization_config", None)
    placed = read_model(ConfigFields(config, name)).placed()
    tensors = {each.name: each.shape for each in placed}  # keys and values share one
    assert model_resolver.load(name).total_parameters() == sum(map(math.prod, tensors.values()))


# A count by hand of each tensor from config.json, which this package had before it had the models.
# With the prediction layer, R1's came to the numbers that the hub lists for its safetensors:
# 680,571,043,840 F8_E4M3, 3,918,786,560 BF16, 41,555,600 F32. Line -> (parameters, bytes in FP8).
BY_HAND = {
    "DeepSeek-R1": {
        "MLA": (11_413_547_008, 11_416_465_248),
        "dense MLP": (1_189_085_184, 1_189_375_488),
        "experts": (653_908_770_816, 654_068_416_512),
        "shared experts": (2_554_331_136, 2_554_954_752),
        "router": (106_445_312, 212_920_320),
        "norms": (881_664, 1_763_328),
        "embedding": (926_679_040, 1_853_358_080),
        "head": (926_679_040, 1_853_358_080),
    },
    "DeepSeek-V2-Lite": {
        "MLA": (371_602_944, 371_708_352),
        "dense MLP": (67_239_936, 67_256_448),
        "experts": (14_394_851_328, 14_398_365_696),
        "shared experts": (449_839_104, 449_948_928),
        "router": (3_407_872, 6_815_744),
        "norms": (112_640, 225_280),
        "embedding": (209_715_200, 419_430_400),
        "head": (209_715_200, 419_430_400),
    },
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def lines(model: ModelSizes) -> tuple[Counter[str], Counter[str]]:
    """(parameters, bytes) of each line."""
    numbers, sizes = Counter[str](), Counter[str]()
    for weights in model.weights:
        numbers[weights.kind] += weights.parameters
        sizes[weights.kind] += sum(model.stored_bytes(weights)) * weights.count
    return numbers, sizes


@pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("name", BY_HAND)
def test_shapes_and_the_count_by_hand_agree(name, quantized):
    config = model_resolver.shipped_config(name)
    config.pop("quantization_config", None)
    model = model_resolver.from_config(name, config | (FP8 if quantized else {}), name, "bfloat16")
    numbers, sizes = lines(model)
    by_hand = {line: count for line, (count, _) in BY_HAND[name].items()}
    assert numbers == by_hand and model.total_parameters() == sum(by_hand.values())
    # The loader makes the router float32, which checkpoints store in bfloat16.
    expected = {line: 2 * count for line, count in numbers.items()}
    expected["router"] = 4 * numbers["router"]
    if quantized:  # shared experts lie in the stack of the routed ones, in its format
        expected |= {line: BY_HAND[name][line][1] for line in ("experts", "shared experts")}
    assert sizes == expected
    if quantized:  # with all that the checkpoint has in FP8 kept so, to the byte
        stored = {line: size for line, (_, size) in BY_HAND[name].items()}
        assert model.whole_fp8_bytes == sum((stored | {"router": expected["router"]}).values())


@pytest.mark.sampled
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folders_weights_take_the_bytes_that_the_loader_allocates(folder):
    model = model_resolver.load(str(FOLDERS[folder]))
    assert isinstance(model, DecoderSizes)
    loaded, params = huggingface_checkpoint.load(FOLDERS[folder])
    assert model.total_bytes() == nbytes(params)
    assert model.copied_bytes() == nbytes(loaded.pack(params)) - nbytes(params)


@pytest.mark.parametrize("width", [64, 128, 192])
def test_each_matrix_of_an_fp8_expert_has_scales_of_its_own(width):
    """Of 64 columns of the gate and 64 beside them, each has a block of its own."""
    config = huggingface_checkpoint.read_json(TINY / "deepseek_v3" / "config.json") | FP8
    model = model_resolver.from_config("tiny", config | {"moe_intermediate_size": width}, "tiny")
    kinds = [block.feed_forward for block in model.model.spec.blocks]
    layers = sum(isinstance(kind, MoE) for kind in kinds)
    hidden, experts = model.sizes.hidden_size, model.sizes.experts
    blocks = 3 * -(-width // 128) * -(-hidden // 128)
    each = 3 * hidden * width + 4 * blocks
    assert lines(model)[1]["experts"] == layers * experts * each


@pytest.mark.parametrize(
    "name, experts",
    [
        (QWEN_NEXT, 48 * 512 * 3 * (2048 * 512 + 4 * 16 * 4)),
        ("Kimi-Linear-48B-A3B", 26 * 256 * 3 * (2304 * 1024 + 4 * 18 * 8)),
    ],
)
def test_a_checkpoint_in_fp8_has_a_scale_for_each_block(name, experts):
    plain, model = (
        model_resolver.load(name),
        model_resolver.from_config(name, model_resolver.shipped_config(name) | FP8, "x"),
    )
    assert model.total_parameters() == plain.total_parameters()
    assert lines(model)[1]["experts"] == experts


# How GPUs divide it -------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["hybrid", *BUILT])
def test_every_parameter_has_a_part_and_what_has_heads_shrinks_with_them(name):
    model = Hybrid(CONFIG) if name == "hybrid" else model_resolver.load(name).model
    half = with_local_heads(model, 2) if _heads_are_even(model) else None
    shapes = dict(nnx.to_flat_state(model.param_shapes()))
    halves = dict(nnx.to_flat_state(half.param_shapes())) if half else {}
    splits = Counter[str]()
    for key, leaf in shapes.items():
        part = param_role(model.spec, key)
        splits[part.split] += 1
        if half is not None and "mixer" in key:
            divisor = 2 if part.split == "attention" else 1
            assert halves[key].size * divisor == leaf.size, key
    assert splits["attention"] and splits["dense"] and splits["all"]


def _heads_are_even(model) -> bool:
    heads = [
        getattr(mixer, field.name)
        for mixer in model.spec.mixers.values()
        for field in dataclasses.fields(mixer)
        if field.name.endswith("_heads")
    ]
    return all(count % 2 == 0 for count in heads)


def test_a_parameter_without_a_part_is_named():
    spec = Hybrid(CONFIG).spec
    with pytest.raises(
        ValueError, match="no sharding rule for the parameter 'segments.0.layers.0.mix"
    ):
        param_role(spec, ("segments", 0, "layers", 0, "mixer", "adapter", "weight"))
    with pytest.raises(
        ValueError, match="'vision'; add one to jaxattn/models/catalog/param_roles.py"
    ):
        param_role(spec, ("vision",))


def test_one_gpu_of_a_group_has_its_heads_and_the_whole_latent():
    model = model_resolver.load("DeepSeek-R1").model
    eighth = with_local_heads(model, 8)
    assert {mixer.num_heads for mixer in eighth.spec.mixers.values()} == {16}
    assert eighth.caches == model.caches
    [narrow] = with_local_heads(model, 1, "uint8").caches
    assert narrow.format.width == 656
    assert with_local_heads(model, 1) is model


def test_scales_and_fp8_numbers_are_lines_of_the_experts():
    config = huggingface_checkpoint.read_json(TINY / "deepseek_v3" / "config.json")
    plain, loaded = (
        read_decoder(ConfigFields(config | more, "x"), dense="bfloat16")[0] for more in ({}, FP8)
    )
    before = dict(nnx.to_flat_state(plain.param_shapes()))
    after = dict(nnx.to_flat_state(loaded.param_shapes()))
    parts = {key: param_role(loaded.spec, key) for key in after}
    added = {key for key in after if key not in before}
    narrow = {key for key in before if after[key].dtype != before[key].dtype}
    assert added == {key for key, part in parts.items() if part.scales} and len(added) > 0
    assert narrow == {key for key, part in parts.items() if part.line == "experts"} - added
