"""`bench parallel` on virtual devices: rows of one GPU and of the group, and what a step sends."""

import json
import shlex
from pathlib import Path

import jax
import pytest

from jaxattn.bench.multi_gpu import parallel_decode
from jaxattn.bench.multi_gpu.sharded_model import ShardedModel
from jaxattn.bench.plots import parallel_plot, result_plot
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import KNOWN
from jaxattn.models.catalog import model_resolver
from jaxattn.plan.layout_search import layouts_that_fit
from tests.helpers.virtual_devices import on_virtual_devices

YOUTU = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "youtu"
COMMANDS = Path(__file__).parents[2] / "benchmarks" / "several-gpus.sh"


@pytest.mark.slow(
    reason="a layout that is timed wrongly; found by the layouts of the first run too"
)
@on_virtual_devices
def test_a_layout_is_timed_beside_one_gpu(tmp_path):
    file, folder = tmp_path / "run.json", tmp_path / "youtu"
    folder.mkdir()
    config = json.loads((YOUTU / "config.json").read_text())
    # One launch sums rows of a multiple of 256 features.
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 256}))
    layout = ["--tensor", "2", "--context", "2"]
    options = ["--xla-options", "xla_cpu_enable_fast_min_max=True"]
    sizes = ["--rows", "4", "--tokens", "128"]
    argv = [str(folder), *sizes, *layout, "--one-launch", *options, "--json", str(file)]
    assert parallel_decode.main(argv, "bench") == 0
    one, two, again, fused = json.loads(file.read_text())["rows"]
    assert fused["one launch"] and not any(each["one launch"] for each in (one, two, again))
    assert [each["XLA options"] for each in (one, two)] == ["", ""]
    assert again["XLA options"] == options[1] and again["layout"] == two["layout"]
    assert (one["GPUs"], two["GPUs"], two["B"], two["T"]) == (1, 2, 4, 128)
    assert two["times one GPU"] == pytest.approx(one["ms"] / two["ms"]) and two["beside B"] == 4
    assert one["all-reduces"] == 0 and two["all-reduces"] > 0 and not two["other form"]


def test_what_no_layout_is_and_rows_that_groups_do_not_share_are_refused(capsys):
    for flags, message in (
        (["--tensor", "5"], "tensor=5 does not divide"),
        (["--tensor", "2", "--xla-options", "fast"], "'fast' is not an option: write KEY=VALUE"),
        (["--data", "2", "--rows", "3"], "--rows 3 must be a multiple of --data 2"),
    ):
        with pytest.raises(SystemExit):
            parallel_decode.parse([str(YOUTU), *flags], "bench")
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "Qwen3.5-35B-A3B"])
@on_virtual_devices
def test_cache_tokens_are_those_of_the_plan_of_each_layout(name, monkeypatch):
    whole = model_resolver.load(name)
    card, rows = KNOWN["h200"], 128
    limits = Limits(batch=rows, max_model_len=whole.max_position_embeddings, utilization=0.9)
    monkeypatch.setattr("jaxattn.bench.multi_gpu.sharded_model.device_memory", lambda device: card)
    planned = list(layouts_that_fit(whole.model, card, limits, 2))
    for tokens, layout in planned:
        over = ShardedModel(whole.model, layout, [rows], tokens=4096, devices=jax.devices()[:2])
        assert over.cache_tokens(rows, temp=0) == pytest.approx(tokens, rel=0.005), layout.flags
    assert {layout.context for _, layout in planned} == {1, 2}


def test_the_commands_for_2_4_and_8_gpus_name_models_and_layouts_that_there_are():
    found = []
    for line in COMMANDS.read_text().splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["bench"]:
            args = parallel_decode.parse([*words[1:], "--one-launch"], "bench")
            found.append(max(layout.gpus for layout in args.layouts))
    assert set(found) == {2, 4, 8}


def run(*rows: tuple[int, str, int, float]) -> dict:
    names = ("GPUs", "layout", "B", "tokens/s")
    made = [dict(zip(names, row, strict=True)) for row in rows]
    times = {"T": 4096, "roof ms": 1.0, "kernels ms": 2.0, "ms": 3.0}
    return {"what": "parallel", "model": "tiny", "rows": [{**row, **times} for row in made]}


def test_a_line_of_the_picture_is_beside_one_gpu_of_as_many_rows_or_of_a_groups():
    ran = run(
        (1, "", 32, 10.0),
        (2, "--tensor 2", 32, 15.0),
        (2, "--tensor 2", 32, 16.0),
        (4, "--tensor 4 --expert 4", 32, 25.0),
        (2, "--data 2 --expert 2", 64, 25.0),
        (4, "--data 4 --expert 4", 128, 50.0),
        (4, "--tensor 4 --context 4", 64, 50.0),  # nothing to compare with
    )
    found = parallel_plot.lines([{"model": "tiny", **row} for row in ran["rows"]])
    assert found == {
        "tiny, TP, 32 rows of 4,096": [(1, 1.0), (2, 1.6), (4, 2.5)],
        "tiny, DP + EP, 32 rows per GPU of 4,096": [(1, 1.0), (2, 2.5), (4, 5.0)],
    }


@pytest.mark.parametrize("alone", [True, False])
def test_a_picture_has_lines_bars_or_both(alone, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [(1, "", 32, 10.0)] * alone + [(2, "--tensor 2", 32, 15.0)]
    result_plot.save(run(*rows), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(result_plot.BenchPlotError, match="no decode steps"):
        result_plot.save(run(), tmp_path / "none.png")


def test_a_run_with_nothing_to_compare_is_no_picture(tmp_path):
    pytest.importorskip("matplotlib")
    of_one_gpu, without_roof = run((1, "", 32, 10.0)), run((2, "--tensor 2", 32, 15.0))
    without_roof["rows"][0]["roof ms"] = None  # of a card whose rate is not known
    for ran in (of_one_gpu, without_roof):
        with pytest.raises(result_plot.BenchPlotError, match="neither steps of several GPUs"):
            result_plot.save(ran, tmp_path / "none.png")
