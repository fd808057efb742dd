"""Every field of a model's configuration refuses what it cannot mean, and the message names it."""

import dataclasses
import json
import math
import time
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.core.numerics.rope import RopeConfig, YarnConfig
from jaxattn.core.validation.config_fields import Integer, check_fields, from_dict, rules
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid

YARN = YarnConfig(factor=40, original_max_position_embeddings=4096)
CONFIG = HybridConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_repeats=1,
    num_attention_heads=1,
    rope=RopeConfig(yarn=YARN),
)
PLACES = {HybridConfig: (), RopeConfig: ("rope",), YarnConfig: ("rope", "yarn")}
FIELDS = [(kind, field.name) for kind in PLACES for field in dataclasses.fields(kind)]
NEVER = (math.nan, math.inf, -math.inf, -1, -0.5, 10**400, "", "1", "true", [], [4], {"a": 1}, b"1")
TEXTS = ("dtype", "cache_dtype", "param_dtype")
FLAGS = ("tie_embeddings", "interleaved", "truncate")
FLOATS = (
    "rms_norm_eps", "theta", "factor", "linear", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
)  # fmt: skip
MAY_BE_NONE = ("q_lora_rank", "cache_dtype", "yarn", "llama3", "theta")
MAY_BE_ZERO = ("gdn_per_repeat", "mscale", "mscale_all_dim")
each_field = pytest.mark.parametrize("kind, field", FIELDS, ids=lambda x: getattr(x, "__name__", x))


def never(field: str) -> list:
    """Values that no meaning of the field covers."""
    values = list(NEVER)
    values += [] if field in FLAGS else [True, False]
    values += [] if field in MAY_BE_NONE else [None]
    values += [] if field in MAY_BE_ZERO else [0, 0.0]
    values += [1] if field in (*FLAGS, *TEXTS) else []
    values += [] if field in FLOATS else [4.0, 64.0]
    return values


def instance(kind: type):
    return {HybridConfig: CONFIG, RopeConfig: CONFIG.rope, YarnConfig: YARN}[kind]


@each_field
def test_a_field_refuses_what_it_cannot_mean(kind, field):
    for value in never(field):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}\.{field} must be .* got ") as told:
            dataclasses.replace(instance(kind), **{field: value})
        assert len(str(told.value)) < 300


@each_field
def test_a_field_of_a_file_is_named_by_its_place(kind, field):
    name = r"\.".join((*PLACES[kind], field))
    for value in never(field):
        values = CONFIG.to_dict()
        inner = values
        for key in PLACES[kind]:
            inner = inner[key]
        inner[field] = value
        # A broken object in place of a nested configuration may name a field of that.
        part = rf"({name} must be .* got |unknown field {name}\.)"
        with pytest.raises(ValueError, match=f"^{part}"):
            HybridConfig.from_dict(values)


def test_a_field_cannot_be_without_a_rule():
    @dataclasses.dataclass(frozen=True)
    class Loose:
        size: Annotated[int, Integer(1, 4)]
        scale: float = 1.0

    with pytest.raises(TypeError, match="Loose.scale: the type has no validation rule"):
        check_fields(Loose(1))
    for kind in PLACES:
        assert rules(kind).keys() == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    "values, message",
    [
        ([], "the configuration must be an object with the fields of HybridConfig; got"),
        ({1: 2}, "unknown field 1; known fields are vocab_size"),
        (
            {f"x{i}": 0 for i in range(9)},
            "unknown field x0, x1, x2, x3 and 5 more; known fields are",
        ),
        ({"y" * 10**6: 0}, "unknown field y{100};"),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_short_line(values, message):
    with pytest.raises(ValueError, match=message) as told:
        from_dict(HybridConfig, values)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gdn_per_repeat": 1_000_000}, "gdn_per_repeat must be an integer from 0 to 63; got 1000"),
        ({"num_repeats": 1_000_000}, "num_repeats must be an integer from 1 to 1,024; got 1000000"),
        ({"num_repeats": 257}, "num_repeats=257 .* are 1,028 layers; at most 1,024"),
        ({"vocab_size": 2**40}, "vocab_size must be an integer from 1 to 16,777,216"),
        ({"hidden_size": 2**40}, "hidden_size must be an integer from 1 to 1,048,576"),
        ({"num_attention_heads": 2**20}, r"num_attention_heads \* .* must be at most 16,777,216"),
        ({"linear_num_value_heads": 2**20}, r"linear_value_head_dim\) must be at most 16,777,216"),
        ({"linear_conv_kernel_dim": 2**20}, "linear_conv_kernel_dim must be an integer from 2 to"),
    ],
)
def test_absurd_sizes_are_refused_at_once(changes, message):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
    assert time.process_time() - start < 0.5


def test_the_most_layers_are_accepted():
    for repeats, gdn in (1024, 0), (256, 3), (16, 63):
        config = dataclasses.replace(CONFIG, num_repeats=repeats, gdn_per_repeat=gdn)
        assert config.num_mla_layers + config.num_gdn_layers == 1024


def test_an_fp8_cache_says_what_does_not_fit_it():
    with pytest.raises(ValueError, match="kv_lora_rank .* multiple of 128, got 96; change it"):
        dataclasses.replace(CONFIG, cache_dtype="uint8", kv_lora_rank=96)


def test_integers_and_numbers_of_numpy_become_plain_ones():
    config = dataclasses.replace(
        CONFIG, hidden_size=np.int64(16), rms_norm_eps=np.float64(1e-6), tie_embeddings=np.False_
    )
    assert config == CONFIG and hash(config) == hash(CONFIG)
    assert HybridConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def sizes(most: int):
    return st.integers(1, most)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_parameters_of_every_accepted_config_have_shapes(data):
    """What the configuration lets pass, the model's constructor does as well."""
    keys, rope_dim = data.draw(sizes(3)), 2 * data.draw(sizes(4))
    sized = {
        field.name: data.draw(sizes(9), label=field.name)
        for field in dataclasses.fields(HybridConfig)
        if field.name.endswith(("_size", "_head_dim", "_rank", "_heads"))
    }
    fixed = {
        "num_repeats": data.draw(sizes(2)),
        "gdn_per_repeat": data.draw(st.integers(0, 1)),
        "qk_rope_head_dim": rope_dim,
        "rope": RopeConfig(rope_dim),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * data.draw(sizes(3)),
        "linear_conv_kernel_dim": data.draw(st.integers(2, 64)),
    }
    config = HybridConfig(**sized | fixed)
    shapes = Hybrid(config).param_shapes()
    assert shapes["embedding"].shape == (config.vocab_size, config.hidden_size)
