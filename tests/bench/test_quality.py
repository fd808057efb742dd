"""Perplexity for each format of the cache: what it was, and that fewer bits lose more."""

import json
import math

import numpy as np
import pytest

from jaxattn.bench.model import quality
from jaxattn.bench.model.text_scorer import TextScorer
from jaxattn.cli.startup.model_source import read
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.models.blocks import GQA, MLP, Block, Stream
from jaxattn.models.checkpoint import EMBEDDED
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.network.decoder_spec import DecoderSpec
from tests.parallel.cases import drawn_params

TEXT = "".join(
    f"def add_{i}(self, value):\n    return self.total + value * {i}\n\n" for i in range(2)
)
PERPLEXITY = 3.457


def measured(folder, *given):
    """(cache, by) -> the row of the table, of the embedded model."""
    (folder / "text.txt").write_text(TEXT)
    argv = [str(EMBEDDED), str(folder / "text.txt"), "--json", str(folder / "run.json"), *given]
    argv += ["--context", "40", "--rows", "3", "--chunk", "40"]
    assert quality.main(argv, "bench") == 0
    result = json.loads((folder / "run.json").read_text())
    assert (result["windows"], result["context"]) == (len(TEXT) // 40, 40)
    for row in result["rows"]:
        assert row["perplexity"] == pytest.approx(PERPLEXITY, rel=0.02)
        assert row["from"] < row["perplexity"] < row["to"]
        assert float(row["ratio from"]) <= float(row["over auto"]) <= float(row["ratio to"])
        assert float(row["over auto"]) == pytest.approx(1, abs=0.01)
        assert float(row["top-1 %"]) >= 97
    found = {(row["cache"], row["by"]): row for row in result["rows"]}
    assert found["auto", "decode"]["top-1 %"] == "100.00"
    return found


def test_the_embedded_model_has_the_perplexity_that_it_had(tmp_path):
    found = measured(tmp_path, "--kv-cache-dtype", "auto")
    assert set(found) == {("auto", "decode"), ("auto", "prefill")}


@pytest.mark.slow(
    reason="a cache in FP8 that loses too much; found by models/test_hybrid and "
    "models/test_cache_formats too"
)
def test_a_cache_in_fp8_loses_little(tmp_path):
    found = measured(tmp_path)
    assert set(found) == {
        (cache, by) for cache in ("auto", "fp8_block") for by in ("decode", "prefill")
    }
    assert found["fp8_block", "decode"]["nats"] != found["auto", "decode"]["nats"]


def test_all_formats_that_a_model_supports_are_measured_unless_some_are_given():
    model = read(EMBEDDED, None, None).model
    assert quality.formats_of(model, None) == ["auto", "fp8_block"]
    assert quality.formats_of(model, ["auto"]) == ["auto"]


def test_fewer_bits_lose_more():
    attention = GQA(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeConfig(dim=64))
    stream = Stream(hidden_size=64, eps=1e-6, dtype="float32", param_dtype="float32")
    blocks = (Block(attention, MLP(intermediate_size=64)),) * 2
    spec = DecoderSpec(vocab_size=64, stream=stream, blocks=blocks, max_position_embeddings=128)
    model = DecoderModel(spec)
    params = drawn_params(model)
    texts = np.random.default_rng(0).integers(64, size=(2, 66)).astype(np.int32)
    found = {}
    for name in ("auto", "k8v4", "4bit_nc"):
        own = model.with_cache_format(name)
        found[name] = TextScorer(own, params, rows=2, context=66, chunk=66).by_decode(texts)
    exact = found.pop("auto")
    lost = [np.abs(each.logprobs - exact.logprobs).mean() for each in found.values()]
    same = [(each.best == exact.best).mean() for each in found.values()]
    assert 1e-5 < lost[0] < lost[1] < 0.2
    assert same[0] >= same[1] > 0.8


def test_an_interval_is_that_of_the_rows_means():
    values = np.array([[1.0, 3.0], [2.0, 4.0], [0.0, 2.0], [3.0, 5.0]])
    mean, half = quality.interval(values)
    assert mean == 2.5 and half == pytest.approx(1.96 * math.sqrt(5 / 3) / 2)
    assert math.isnan(quality.interval(values[:1])[1])


@pytest.mark.parametrize(
    "more, said",
    [
        (["--kv-cache-dtype", "k8v4"], "MLA; use one of auto"),
        (["--context", "1"], "--context must be at least 2"),
    ],
)
def test_what_cannot_be_measured_is_named(tmp_path, capsys, more, said):
    (tmp_path / "text").write_text(TEXT)
    try:
        code = quality.main([str(EMBEDDED), str(tmp_path / "text"), *more], "bench")
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err


def test_a_text_that_is_not_there_is_named(tmp_path, capsys):
    assert quality.main([str(EMBEDDED), str(tmp_path / "none")], "bench") == 2
    assert "cannot read" in capsys.readouterr().err
