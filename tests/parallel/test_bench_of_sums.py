"""`bench collectives` and `bench long-row` on virtual devices: their rows, counts and checks."""

import json
import shlex
from pathlib import Path

import pytest

from jaxattn.bench.multi_gpu import collectives, context_parallel
from jaxattn.parallel.hlo_all_reduces import all_reduces
from tests.helpers.virtual_devices import on_virtual_devices

COMMANDS = Path(__file__).parents[2] / "benchmarks" / "several-gpus.sh"


@on_virtual_devices
def test_sums_are_timed_less_the_loop_without_them(tmp_path):
    file = tmp_path / "run.json"
    argv = ["--gpus", "2", "--kib", "4", "--turns", "1", "--filler", "64", "--json", str(file)]
    assert collectives.main(argv, "bench") == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["dtype"], row["sum"]) for row in rows] == [
        ("bfloat16", "XLA"),
        ("bfloat16", "one launch"),
        ("float32", "XLA"),
    ]
    assert all(row["base us"] > 0 and row["KiB"] == 4 for row in rows)


def test_one_launch_is_for_whole_tokens_of_bfloat16_and_not_beside_nccl():
    def wanted(*argv):
        found = collectives.wanted(collectives.parse([*argv, "--gpus", "4"], "bench"))
        return [(each.method, each.dtype, each.kib) for each in found]

    assert ("one launch", "bfloat16", 64) in wanted("--kib", "64")
    assert ("one launch", "bfloat16", 4096) not in wanted("--kib", "4096")
    assert ("one launch", "bfloat16", 6) not in wanted("--kib", "6")
    assert {how for how, *_ in wanted("--nccl")} == {"NCCL"}


@on_virtual_devices
def test_loops_have_sums_that_xlas_kernel_takes_or_none():
    of = collectives.AllReduceCase(gpus=4, kib=64, dtype="float32", method="XLA")
    for each, count in (of, collectives.PER_TURN), (of.base, 0):
        loop = collectives.AllReduceLoop(each, 3, 64)
        loop.compile()
        sums = all_reduces(loop.compiled.as_text())
        assert len(sums) == count and all(each.serves for each in sums)
        assert all(each.nbytes == 64 * 1024 for each in sums)


@pytest.mark.slow(
    reason="a row that several devices compute otherwise, figures of another row; found by the "
    "tokens of rows spread over devices, in parallel/test_same_tokens, and by the benchmark "
    "on several GPUs, too"
)
@on_virtual_devices
def test_a_long_row_over_several_devices_is_that_of_one(tmp_path):
    file = tmp_path / "run.json"
    argv = ["--tokens", "280", "--heads", "16", "--gpus", "1", "4", "--layers", "1"]
    argv += ["--nccl", "--apart"]
    assert context_parallel.main([*argv, "--json", str(file)], "bench") == 0
    one, four, apart, xla = rows = json.loads(file.read_text())["rows"]
    assert [each["sent by"] for each in rows] == ["", "one launch", "launches", "XLA"]
    assert four["relative error"] == apart["relative error"] == xla["relative error"]
    assert one["relative error"] == 0 and 0 < four["relative error"] < 8e-3
    assert four["times one GPU"] == pytest.approx(one["us"] / four["us"])
    assert four["efficiency"] == pytest.approx((one["us"] / four["us"]) ** 0.5 / 2)
    flops = 2 * 16 * 280 * (576 + 512) / 4
    assert four["TFLOP/s"] == pytest.approx(flops / four["us"] / 1e6)
    assert four["GB/s"] == pytest.approx(280 * 1152 / 4 / four["us"] / 1e3)


@on_virtual_devices
def test_rows_say_launches_only_where_launches_send_them(monkeypatch):
    assert context_parallel.ContextParallelCase(16, 4, tokens=600).sent_by() == "one launch"
    assert (
        context_parallel.ContextParallelCase(16, 4, tokens=600, sent="apart").sent_by()
        == "launches"
    )
    assert context_parallel.ContextParallelCase(16, 4, tokens=600, sent="XLA").sent_by() == "XLA"
    assert (
        context_parallel.ContextParallelCase(16, 4, tokens=600, implementation="xla").pieces is None
    )
    for bench in (collectives, context_parallel):
        monkeypatch.setattr(bench, "peers_reach", lambda devices: False)
    assert context_parallel.ContextParallelCase(16, 4, tokens=600).sent_by() == "XLA"
    sums = collectives.wanted(collectives.parse(["--gpus", "4", "--kib", "64"], "bench"))
    assert {each.method for each in sums} == {"XLA"}


@on_virtual_devices
def test_a_long_row_that_is_wrong_is_refused():
    row = context_parallel.ContextParallelCase(4, 2, tokens=300, layers=1)
    row.compile()
    row.fill()
    right = row.output()
    assert context_parallel._checked(row, right) == 0
    with pytest.raises(AssertionError, match="4 heads on 2 GPUs: relative error"):
        context_parallel._checked(row, right * 1.01)


def test_the_commands_for_several_gpus_are_ones_that_there_are():
    found = []
    for line in COMMANDS.read_text().splitlines():
        for name, bench in ("collectives", collectives), ("long-row", context_parallel):
            _, there, rest = line.partition(f"jaxattn.bench {name} ")
            if there:
                found.append(name)
                bench.parse(shlex.split(rest.replace("$SUMS", "2 4 8"), comments=True), "bench")
    assert found == ["long-row", "collectives", "collectives"]


def test_numbers_that_do_not_fit_are_refused(capsys):
    for bench, argv, message in (
        (
            collectives,
            ["--gpus", "1"],
            "--gpus must be at least 2, because a sum needs two GPUs; got 1",
        ),
        (collectives, ["--kib", "1"], "--kib must be at least 4"),
        (context_parallel, ["--gpus", "3"], "--heads 32 must be a multiple of --gpus 3"),
        (context_parallel, ["--tokens", "0"], "must be positive"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(argv, "bench")
        assert message in capsys.readouterr().err
