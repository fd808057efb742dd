"""The flags of `plan` and `serve` that say how several GPUs divide a model."""

import json

import pytest

from jaxattn.cli.options.parallel_options import read_layout
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.plan import main
from jaxattn.cli.startup.engine_startup import shard_over_devices
from jaxattn.limits import Limits
from jaxattn.parallel import Parallel
from tests.helpers.kernel_cases import slow
from tests.parallel.cases import decoder

LITE = ["DeepSeek-V2-Lite", "--batch", "32", "--max-model-len", "32768"]


def facts(capsys, *flags: str) -> dict[str, str]:
    assert main([*LITE, *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["facts"]


@pytest.mark.usefixtures("untraced_bounds")
def test_a_plan_says_the_layout_and_that_spread_pages_hold_as_much_in_half_the_bytes(capsys):
    assert main([*LITE, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main([*LITE, "--tensor", "2", "--context", "2", "--json"]) == 0
    two = json.loads(capsys.readouterr().out)
    bytes_of = [{item["name"]: item["nbytes"] for item in each["items"]} for each in (one, two)]
    assert bytes_of[1]["kv cache"] == bytes_of[0]["kv cache"] // 2
    assert two["facts"]["layout"] == "--tensor 2 --context 2"
    assert two["facts"]["cache tokens in all"] == one["facts"]["cache tokens"]


@pytest.mark.usefixtures("untraced_bounds")
@pytest.mark.slow_cases(reason="a layout of an even number of GPUs; found by 3 GPUs there too")
@pytest.mark.parametrize("gpus", [slow("2"), "3"])
def test_so_many_gpus_are_planned_in_the_layout_that_is_named(gpus, capsys):
    """128 rows are no multiple of 3: rows that nobody fixed are."""
    assert main([LITE[0], "--gpus", gpus, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    flags = found["facts"]["layout"]
    assert f"each of {gpus} GPUs ({flags})" in found["title"]
    assert main([LITE[0], *flags.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.usefixtures("untraced_bounds")
def test_of_layouts_that_hold_as_much_the_best_has_the_fewest_data_groups(capsys):
    # 4 rows of 128 tokens have room in every layout.
    flags = ["--gpus", "2", "--batch", "4", "--max-model-len", "128"]
    assert facts(capsys, *flags)["layout"] == "--tensor 2"


@pytest.mark.usefixtures("untraced_bounds")
def test_a_layout_that_fits_is_planned_where_others_do_not(capsys):
    # States of 128 rows have no room beside weights that are whole on each GPU.
    flags = ["--gpus", "4", "--batch", "128", "--max-model-len", "32768", "--json"]
    assert main(["Qwen3.5-397B-A17B-FP8", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["layout"] == "--tensor 4 --context 2"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tensor", "3"], "tensor=3 does not divide the 16 attention heads"),
        (["--tensor", "4", "--context", "3"], "context=3 does not divide tensor=4"),
        (["--data", "3"], "--batch 32 must be a multiple of --data 3"),
    ],
)
def test_an_impossible_layout_is_one_line_and_exit_code_2(flags, message, capsys):
    assert main([*LITE, *flags]) == 2
    assert message in capsys.readouterr().err


def test_serve_refuses_more_devices_than_there_are_before_anything_is_loaded():
    options = parser().parse_args(["--tensor", "1024"])
    parallel = read_layout(options)
    assert parallel == Parallel(tensor=1024)
    with pytest.raises(InputError, match="needs 1024 devices, but JAX found"):
        shard_over_devices(decoder(("mla", "mlp")), Limits(), parallel)
