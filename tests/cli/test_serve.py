"""python -m jaxattn.serve: its options, what it refuses, what it prints and how it ends."""

import argparse
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import jaxattn
from jaxattn.__main__ import main as list_main
from jaxattn.cli.options.parser import in_options
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.options.value_types import size
from jaxattn.cli.plan import main as plan_main
from jaxattn.cli.plan_report import plan_lines
from jaxattn.cli.serve.command import main
from jaxattn.cli.serve.default_prompts import PROMPTS
from jaxattn.cli.serve.request_inputs import Prompt, read_prompts
from jaxattn.cli.serve.run_report import ending
from jaxattn.cli.serve.text_stream import TextPrinter, TextStream
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.requests.outputs import Completion, GenerationInterrupted
from jaxattn.engine.requests.request import GenerationStats, Request
from jaxattn.engine.startup import executable_memory
from jaxattn.limits import Limits
from jaxattn.memory.plan import MemoryBudget, MemoryPlan, PlanItem
from jaxattn.memory.temp_bound import TempBound
from jaxattn.models.checkpoint import native_format
from jaxattn.models.embedded.hybrid_config import HybridConfig
from jaxattn.models.embedded.hybrid_model import Hybrid
from jaxattn.text import ByteTokenizer
from tests.helpers.engine_cases import FLOAT32, resized_params
from tests.helpers.lazy_steps import is_lazy, use_lazy_steps

pytestmark = pytest.mark.lazy_steps

CONFIG = HybridConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=16,
    num_repeats=1,
    gdn_per_repeat=0,
    num_attention_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    rope=RopeConfig(dim=16),
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    dtype="float32",
    param_dtype="float32",
)
SMALL = ["--max-model-len", "64", "--prefill-chunk", "16"]
# Of the tests that generate, so that XLA compiles their steps once.
ONE_PAGE = ["--num-pages", "1", "--batch", "1", "--prefill-chunk", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model of bytes; its name can be given to --model."""
    folder = tmp_path_factory.mktemp("model")
    native_format.save(folder, CONFIG, resized_params(CONFIG, FLOAT32))
    return str(folder)


@pytest.mark.parametrize(
    "text, value", [("4096", 4096), ("4k", 4096), ("4K", 4096), ("2m", 2**21), (" 7 ", 7)]
)
def test_sizes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "0", "0k", "-4", "4.5k", "k", "4kb", "4 k", "1e3", "four"])
def test_what_is_no_size_is_shown_with_an_example(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size: .* as in 4096 or 4k"):
        size(text)


def test_help_is_grouped_and_shows_every_default(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in ("model:", "prompts:", "sampling:", "batch and memory:", "output:"):
        assert group in text
    for action in parser()._actions[1:]:
        assert action.option_strings[0] in text
        if action.default not in (None, False, argparse.SUPPRESS):
            assert f"(default: {action.default})" in text
        elif action.default is None:
            assert "(default: " in action.help


BAD_INPUT = {
    "empty prompt": (["--prompt", ""], "--prompt number 1 is empty"),
    "second prompt empty": (["--prompt", "x", "--prompt", ""], "--prompt number 2 is empty"),
    "stdin twice": (["--prompt", "-", "--prompt", "-"], "--prompt - can be given only once"),
    "prompt too long": (
        ["--prompt", "x", "--prompt", "y" * 64, *SMALL],
        "prompt 2 has 64 bytes, but the model length is 64",
    ),
    "length beyond the model": (["--max-model-len", "8k"], "--max-model-len 8192 exceeds"),
    "no checkpoint": (["--model", "/no/such"], "cannot read /no/such/config.json"),
    "implementation": (["--implementation", "cuda"], "invalid choice: 'cuda'"),
    "batch": (["--batch", "0"], "argument --batch: '0' is not a size"),
    "length": (["--max-model-len", "4kb"], "argument --max-model-len: '4kb' is not a size"),
    "pages": (["--num-pages", "-3"], "argument --num-pages: '-3' is not a size"),
    "pages beyond int32": (["--num-pages", "4000m"], "--num-pages must be at most 2,147,483,647"),
    "too many pages": (
        ["--batch", "1000m", "--max-model-len", "256"],
        "--batch 1048576000 times --max-model-len 256 needs 4,194,304,000 pages",
    ),
    "utilization": (["--utilization", "1.1"], "'1.1' is not a fraction"),
    "several shapes": (
        ["--reproducible", "--decode-buckets", "2"],
        "--decode-buckets 2 adds shapes, but --reproducible uses only one; leave one of them out",
    ),
    "bucket": (
        ["--decode-buckets", "8", "--batch", "4"],
        "--decode-buckets 8 must be at most --batch 4",
    ),
    "chunk above the length": (
        ["--prefill-chunk", "256", "--max-model-len", "64"],
        "--prefill-chunk 256 exceeds --max-model-len 64, and no prompt is as long as a chunk; "
        "decrease it, or leave one of them out",
    ),
    "bucket above the chunk": (
        ["--prefill-buckets", "8,32", *SMALL],
        "--prefill-buckets 8,32 must be at most --prefill-chunk 16",
    ),
    "more prompts than rows": (
        ["--prefill-rows", "4", "--batch", "2"],
        "--prefill-rows 4 exceeds --batch 2",
    ),
    "more tokens beside rows than without": (
        ["--mixed-tokens", "4096", "--prefill-tokens", "2048"],
        "--mixed-tokens 4096 exceeds --prefill-tokens 2048",
    ),
    "less than a line beside rows": (
        ["--mixed-tokens", "64", "--prefill-chunk", "2048"],
        "--mixed-tokens 64 is less than the 128 tokens of a prompt that a step processes together; "
        "give 128 or more, or 0 for prompt steps of their own",
    ),
    "rows beside prompts and one shape": (
        ["--reproducible", "--mixed-tokens", "256"],
        "--mixed-tokens 256 processes prompts in steps that also decode other rows, which "
        "--reproducible does not allow",
    ),
    "pages below the length": (
        ["--num-pages", "1", "--max-model-len", "256"],
        "--num-pages 1 has room for only 64 tokens of --max-model-len 256; give 4 pages or more",
    ),
    "a bucket and one shape": (
        ["--reproducible", "--decode-buckets", "1"],
        "--decode-buckets 1 adds shapes, but --reproducible uses only one",
    ),
    "guesses and one shape": (
        ["--reproducible", "--speculate", "2"],
        "--speculate 2 needs steps of a second shape for batches without drafts, but "
        "--reproducible compiles one shape; leave one of them out",
    ),
    "states of no prefixes": (
        ["--checkpoints", "2", "--no-prefix-cache"],
        "--checkpoints 2 stores states of cached prefixes, but --no-prefix-cache disables",
    ),
    "states of data groups": (
        ["--checkpoints", "2", "--data", "2"],
        "but --data 2 has no prefix cache",
    ),
    "rows of data groups": (
        ["--batch", "3", "--data", "2"],
        "--batch 3 must be a multiple of --data 2, because all groups have the same number of rows",
    ),
    "context and tensor": (
        ["--tensor", "2", "--context", "3"],
        "context=3 does not divide tensor=2",
    ),
    "layers of no format": (
        ["--kv-cache-native-layers", "1"],
        "--kv-cache-native-layers 1 needs a",
    ),
    "a server's option": (
        ["--max-queue", "3"],
        "--max-queue applies only to a server; give --port too",
    ),
    "a prompt and a port": (
        ["--port", "0", "--prompt", "x"],
        "--prompt applies only in the terminal, but --port serves over HTTP; leave one of them out",
    ),
    "buckets": (["--prefill-buckets", "8,x"], "'x' is not a size"),
    "temperature": (["--temperature", "-1"], "'-1' is not a temperature: use 0 or more"),
    "temperature nan": (["--temperature", "nan"], "'nan' is not a temperature"),
    "top-p": (["--top-p", "1.5"], "'1.5' is not a probability"),
    "seed": (["--seed", "x"], "'x' is not a seed"),
    "option": (["--tempo", "1"], "unrecognized arguments: --tempo 1"),
    "word": (["hello"], "unrecognized arguments: hello (a prompt is given as --prompt TEXT)"),
    "no name": (["--model", ""], "--model is empty; give a folder, or a name on the hub"),
}


@pytest.mark.parametrize("arguments, message", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_before_compiling(
    arguments, message, model, capsys, monkeypatch
):
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled something")
    )
    assert main(["--model", model, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err.strip().splitlines()[-1]
    assert line.startswith("python -m jaxattn.serve: error: ") and message in line
    assert printed.err.count("\n") == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "gpu"], "--device gpu: JAX found no GPU, only the platform 'cpu'"),
        (["--implementation", "mosaic_gpu"], "needs a Hopper GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_in_one_line(arguments, message, model, capsys):
    assert main(["--model", model, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


class Endless(io.RawIOBase):
    """What `yes |` gives."""

    def readable(self):
        return True

    def readinto(self, buffer):
        buffer[:] = b"y" * len(buffer)
        return len(buffer)


def test_of_an_endless_stdin_the_model_length_is_read(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    assert main(["--model", model, "--prompt", "-", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "--prompt - read 64 bytes of stdin" in error and "--max-model-len" in error


def test_a_prompt_of_stdin_is_read_to_its_end():
    stdin = io.TextIOWrapper(io.BytesIO(b"y" * 63))
    assert read_prompts(["-", "x"], stdin, 64) == [b"y" * 63, b"x"]


def test_without_jit_nothing_is_served(model, capsys):
    with jax.disable_jit():
        assert main(["--model", model, "--prompt", "x", *SMALL]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "JAX_DISABLE_JIT is set, but jaxattn serves only compiled steps; unset it\n"
    )


@pytest.mark.usefixtures("untraced_bounds")
def test_a_plan_reads_no_stdin(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--model", model, "--plan", "--prompt", "-", *SMALL]) == 0


@pytest.mark.usefixtures("untraced_bounds")
def test_the_plan_has_the_pages_that_the_server_takes(model, capsys):
    """It shrinks no cache unasked, so that both say the same of one that does not fit."""
    assert main(["--model", model, "--plan", "--json", *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget"]["utilization"] == 1 and "x 4 pages x" in str(plan["items"])


@pytest.mark.parametrize(
    "message, said",
    [
        ("max_model_len=1,048,576 is longer", "--max-model-len 1048576 is longer"),
        ("batch 6,250 with 100,000 pages", "--batch 6250 with 100,000 pages"),
        ("prefill_chunk 64 with 4 pages", "--prefill-chunk 64 with 4 pages"),
        ("decode_buckets=(8, 4) must be", "--decode-buckets 8,4 must be"),
        ("prefill_rows=8, but reproducible=True uses", "--prefill-rows 8, but --reproducible uses"),
        ("prefill_tokens=64 is", "--prefill-tokens 64 is"),
        ("mixed_tokens=64 is", "--mixed-tokens 64 is"),
        ("use attention='data' or another", "use --attention data or another"),
        ("gpus=65 is more", "--gpus 65 is more"),
        ("q_lens must contain 1", "--q-len must contain 1"),
        ("num_pages must be\n at most", "--num-pages must be at most"),
        ("--utilization 0.9 or --batch 8", "--utilization 0.9 or --batch 8"),
        ("16 attention heads of a batch", "16 attention heads of a batch"),
        ("its max_position_embeddings=4096", "its max_position_embeddings=4096"),
    ],
)
def test_a_message_names_the_options(message, said):
    assert in_options(message) == said


@pytest.mark.parametrize(
    "tokens, reason, said",
    [
        (3, "length", "3 tokens, cut by --max-tokens 3"),
        (2, "length", "2 tokens, cut by --max-model-len 4"),
        (2, "stop", "2 tokens, stop"),
    ],
)
def test_the_summary_says_which_option_cut_a_text(tokens, reason, said):
    completion = Completion(Request(b"ab", max_tokens=3, id=0), (65,) * tokens, reason)
    assert ending(completion) == said


def test_quiet_still_says_that_it_was_interrupted(model, capsys, monkeypatch):
    monkeypatch.setattr("jaxattn.cli.serve.command.start_engine", lambda *a: (Interrupted(), {}))
    monkeypatch.setattr("jaxattn.cli.serve.command.summary_lines", lambda *a: ["summary"])
    for extra, said in ([], "summary\n"), (["--quiet"], "interrupted\n"):
        assert main(["--model", model, "--prompt", "ab", *extra, *SMALL]) == 130
        lines = capsys.readouterr().err.splitlines(keepends=True)
        assert lines[-1] == said and all(line.startswith("ready ") for line in lines[:-1])


class Interrupted:
    """An engine at Ctrl-C."""

    stats, limits = GenerationStats(), Limits()

    def generate(self, requests, **callbacks):
        raise GenerationInterrupted([Completion(each, (), "interrupted") for each in requests])


def test_quiet_with_json_prints_no_text_on_stderr():
    request = Request(b"a", id=0)
    text_stream, out = stream([request], quiet=True)
    feed(text_stream, request, b"b")
    text_stream.close()
    assert out.getvalue() == ""


def test_the_plan_before_serving_is_three_lines():
    items = (
        PlanItem("weights", 3 * 2**20, ""),
        PlanItem("kv cache", 2**20, ""),
        PlanItem("none", 0, ""),
    )
    lines = list(plan_lines(MemoryPlan(items, MemoryBudget("cpu", 10 * 2**20), "4 rows")))
    assert lines == [
        "memory plan for 4 rows: 4,194,304 bytes in total",
        "  in MiB: weights 3.00, kv cache 1.00",
        "  6.00 MiB of cpu stay free; --plan prints every line with its reason",
    ]
    assert len(list(plan_lines(MemoryPlan(items, None, "4 rows")))) == 3


def test_the_version(capsys):
    for command in (main, plan_main, list_main):
        with pytest.raises(SystemExit) as ended:
            command(["--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"jaxattn {jaxattn.__version__}\n"


def test_empty_stdin_is_an_empty_prompt(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["--model", model, "--prompt", "-"]) == 2
    assert "stdin is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:-10], "model.safetensors is cut off within tensor"),
        (lambda data: data[:-10] + bytes(10), "is damaged: its checksum differs"),
        (lambda data: b"", "model.safetensors is cut off or not a safetensors file"),
    ],
)
def test_a_damaged_checkpoint_is_named(damage, message, model, tmp_path, capsys):
    config, params = native_format.load(model)
    native_format.save(tmp_path, config, params)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert main(["--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_prompt_that_is_too_long_is_refused_before_the_weights_are_read(tmp_path, capsys):
    native_format.save(tmp_path, CONFIG, resized_params(CONFIG, FLOAT32))
    (tmp_path / "model.safetensors").unlink()
    assert main(["--model", str(tmp_path), "--prompt", "y" * 64, *SMALL]) == 2
    assert "prompt 1 has 64 bytes, but the model length is 64" in capsys.readouterr().err
    assert main(["--model", str(tmp_path), "--prompt", "y", *SMALL]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_model_of_other_tokens_than_bytes_is_refused(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, vocab_size=300)
    native_format.save(tmp_path, config, resized_params(config, FLOAT32))
    assert main(["--model", str(tmp_path)]) == 2
    assert "its vocab_size is 300, not 256" in capsys.readouterr().err


@pytest.mark.slow(
    reason="two texts in one line; found by JSON of two prompts, and the README's own commands too"
)
def test_prompts_stream_as_numbered_lines_and_the_plan_and_summary_go_to_stderr(model, capsys):
    arguments = ["--max-tokens", "20", "--max-model-len", "512", "--prefill-chunk", "128"]
    assert main(["--model", model, *arguments]) == 0
    printed = capsys.readouterr()
    lines = printed.out.split("\n")
    assert lines.pop() == "" and all(line.startswith("[") for line in lines)
    numbers = [int(line[1]) for line in lines]
    assert numbers == sorted(numbers)
    for number, prompt in enumerate(PROMPTS, 1):
        own = [line.removeprefix(f"[{number}] ") for line in lines if line[1] == str(number)]
        assert "\n".join(own).startswith(prompt.rstrip())
    for part in (
        "memory plan for 4 rows of up to 512 tokens",
        "kv cache",
        "xla temp",
        "in total",
        "stay free; --plan prints every line with its reason",
        "[6] 20 tokens, cut by --max-tokens 20, first token after",
        "tok/s",
        "planned",
        "measured",
    ):
        assert part in printed.err


def test_json_is_one_object_with_everything_and_text_is_not_on_stdout(model, capsys):
    arguments = ["--prompt", "def f():", "--prompt", "é", "--max-tokens", "50", "--json"]
    arguments += ["--temperature", "0.5", "--seed", "5", *ONE_PAGE]
    assert main(["--model", model, *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    result = json.loads(printed.out)
    first, second = result["requests"]
    assert first["prompt"] == "def f():" and second["prompt"] == "é"
    assert second["prompt_tokens"] == 2
    assert first["finish_reason"] in ("length", "stop")
    assert first["generated_tokens"] <= 50
    assert first["text"] and first["text"][:1] in printed.err
    assert 0 < first["seconds_to_first_token"] <= first["seconds"] <= second["seconds"]
    plan = result["plan"]
    assert plan["total_bytes"] == sum(item["bytes"] for item in plan["items"])
    assert {"weights", "arena", "kv cache", "xla temp"} <= {item["name"] for item in plan["items"]}
    assert all(value > 0 for value in result["measured"].values()) and result["measured"]
    assert set(result["versions"]) == {"python", "jaxattn", "jax", "jaxlib", "flax"}
    assert result["timings"]["decoded_tokens_per_second"] > 0
    compiled = set(result["timings"]["compile_seconds"])
    assert "decode of 1 x 1 tokens" in compiled
    assert any(name.startswith("prefill of 16 tokens beside ") for name in compiled)
    assert len(compiled) <= 15
    assert result["settings"]["seed"] == 5
    assert result["device"]["platform"] == jax.default_backend()
    assert result["implementations"] == {"mla_decode": "xla"}


def test_plan_prints_the_table_and_loads_nothing(model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(native_format, "read_tensors", lambda *a: pytest.fail("read the weights"))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    assert main(["--model", model, "--plan", *SMALL]) == 0
    printed = capsys.readouterr()
    for part in ("weights", "kv cache", "xla temp", "bound", "reserve"):
        assert part in printed.out
    assert {"\u2588", "\u2591"} & set(printed.out)  # a bar, empty beside a machine's memory
    assert main(["--model", model, "--plan", "--json", "--num-pages", "3", *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and "3 pages x 64 tokens" in str(plan["items"])
    assert main(["--model", model, "--plan", "--plot", "/no/such/x.png", *SMALL]) == 2
    assert "x.png" in (error := capsys.readouterr().err) or "matplotlib" in error


@pytest.mark.parametrize("extra", [[], ["--plan"]], ids=["serving", "plan"])
def test_a_cache_that_does_not_fit_prints_the_table_and_what_would_help(
    extra, model, capsys, monkeypatch
):
    untraced = lambda step, *arguments, donated, **_: TempBound(0, arguments[donated])  # noqa: E731
    monkeypatch.setattr(executable_memory, "temp_bound", untraced)
    assert main(["--model", model, "--num-pages", "1000m", "--prompt", "x", *SMALL, *extra]) == 2
    printed = capsys.readouterr()
    assert "kv cache" in printed.out + printed.err and "missing" in printed.out + printed.err
    error = printed.err.strip().splitlines()[-1]
    assert "the item that does not fit is the kv cache" in error
    assert "to make it fit, use at most" in error and "pages" in error


def test_an_absurd_batch_is_refused_with_one_number_and_hardly_a_trace(model, capsys, monkeypatch):
    """A trace of a model takes a second, so what weights and state alone refuse is not traced."""
    traced = []

    def counted(step, *arguments, donated, **_):
        # A model's steps have its state behind its weights; those of rows trace in no time.
        traced.extend([step] if donated == 1 else [])
        return TempBound(0, arguments[donated])

    monkeypatch.setattr(executable_memory, "temp_bound", counted)
    said = []
    for extra in ([], ["--plan"]):
        assert main(["--model", model, "--batch", "100m", "--prompt", "x", *SMALL, *extra]) == 2
        said.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert said[0] == said[1] and "to make it fit, use --batch " in said[0]
    assert len(traced) <= 12  # of two commands


@pytest.mark.slow(
    reason="a wrong summary of a share; found by engine/test_recompilation_guard and "
    "plan/test_plan on shares too"
)
def test_serving_from_a_share_of_the_device_says_what_it_did(model, capsys, monkeypatch):
    for name in ("MEM_FRACTION", "PREALLOCATE"):  # so that what it sets is undone
        monkeypatch.setenv(f"XLA_PYTHON_CLIENT_{name}", "0.5" if name[0] == "M" else "true")
    arguments = ["--prompt", "ab", "--max-tokens", "4", "--utilization", "0.5", "--batch", "2"]
    arguments += ["--strict", "--json", "--max-model-len", "128", "--prefill-chunk", "16"]
    # As many pages as a row needs: a trial beside one row has the same executables.
    arguments += ["--decode-buckets", "1", "--num-pages", "2"]
    assert main(["--model", model, *arguments]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["after_warm_up"] == {}
    assert "after the warm-up: nothing traced, compiled or allocated" in printed.err
    names = {
        "prefill of 16 tokens beside 2 rows",
        "decode of 1 x 1 tokens",
        "decode of 2 x 1 tokens",
    }
    compiled = result["timings"]["compile_seconds"]
    assert {name for name in compiled if name.startswith(("prefill", "decode"))} == names
    assert result["plan"]["reserve_bytes"] > 0
    cache = next(item for item in result["plan"]["items"] if item["name"] == "kv cache")
    assert "x 2 pages x" in cache["why"]


def test_what_was_compiled_is_found_again_in_the_cache_folder_and_quiet_prints_the_text_alone(
    model, capsys, tmp_path
):
    arguments = ["--prompt", "ab", "--max-tokens", "2", "--compile-cache", str(tmp_path / "xla")]
    arguments += ["--quiet", "--num-pages", "3"]  # as no other test: see tests/helpers/executables
    lazy = is_lazy()
    old = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    try:
        use_lazy_steps(lazy, keep=True)  # so that steps that are called are kept
        assert main(["--model", model, *ONE_PAGE, *arguments]) == 0
        assert list((tmp_path / "xla").iterdir())
        printed = capsys.readouterr()
        assert printed.out.startswith("ab") and printed.err == ""
    finally:
        use_lazy_steps(lazy)
        jax.config.update("jax_compilation_cache_dir", old[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", old[1])
        compilation_cache.reset_cache()
    (tmp_path / "file").write_text("")
    arguments = ["--prompt", "ab", "--compile-cache", str(tmp_path / "file" / "x")]
    assert main(["--model", model, *arguments, *SMALL]) == 2
    assert "--compile-cache" in capsys.readouterr().err


def test_a_refused_request_is_told_the_others_finish_and_the_exit_code_is_1(model, capsys):
    arguments = ["--prompt", "a", "--prompt", "b" * 120, "--max-tokens", "20"]
    assert main(["--model", model, *arguments, *ONE_PAGE]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("[1] a")
    assert re.search(r"\[1\] \d+ tokens, (cut by|stop)", printed.err)
    assert "[2] refused: 120 prompt tokens and 20 to generate need 3 pages of 64" in printed.err


@pytest.mark.usefixtures("untraced_bounds")
def test_the_plan_counts_each_parameter_once(capsys):
    assert main(["--plan", "--json"]) == 0
    (weights,) = [
        each for each in json.loads(capsys.readouterr().out)["items"] if each["name"] == "weights"
    ]
    count = weights["why"].partition(" parameters")[0]
    assert f"| parameters | {count}," in (native_format.EMBEDDED / "README.md").read_text()


def test_a_picture_without_a_plan(capsys):
    assert main(["--plot", "x.png", "--prompt", "a"]) == 2
    assert "--plot draws the memory plan; give --plan too" in capsys.readouterr().err


@pytest.mark.slow(
    reason="a handler for one signal only, a text that is lost; found by cli/test_interrupt too"
)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_and_sigterm_print_what_was_generated_and_the_summary(number, model):
    command = [sys.executable, "-m", "jaxattn.serve", "--model", model, "--json"]
    command += ["--prompt", "def f():", "--max-model-len", "4k", "--max-tokens", "4k"]
    command += ["--batch", "1"]
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, env=quickly, **pipes) as process:
        seen = b""
        while b"def f():" not in seen:
            data = process.stderr.read1()
            assert data, seen.decode()
            seen += data
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err.decode()
    (request,) = json.loads(out)["requests"]
    assert request["finish_reason"] == "interrupted"
    assert request["generated_tokens"] > 0 and request["text"]
    assert b"tok/s" in err and b"Traceback" not in err


def stream(requests, **console):
    out = io.StringIO()
    prompts = [Prompt(request.prompt) for request in requests]
    printer = TextPrinter(Console(file=out, **console))
    return TextStream(printer, ByteTokenizer(), requests, prompts), out


def feed(text_stream, request, data):
    for byte in data:
        text_stream.token(request, byte)


def done(request):
    return Completion(request, (), "length")


def test_one_request_flows_exactly_as_it_is():
    request = Request("\tdef é".encode(), id=0)
    text_stream, out = stream([request])
    feed(text_stream, request, "ü(x):\n\treturn ".encode())
    assert out.getvalue() == "\tdef éü(x):\n\treturn "
    feed(text_stream, request, b"x")
    text_stream.finish(done(request))
    assert out.getvalue() == "\tdef éü(x):\n\treturn x\n"


def test_of_several_requests_the_first_that_is_not_done_flows_and_the_others_wait():
    first, second, third = (Request(b"a\nb", id=0), Request(b"c", id=1), Request(b"d", id=2))
    text_stream, out = stream([first, second, third])
    feed(text_stream, first, b"1")
    feed(text_stream, second, b"2\n\n3")
    feed(text_stream, third, b"4\n")
    assert out.getvalue() == "[1] a\n[1] b1"
    text_stream.finish(done(second))
    feed(text_stream, first, b"5\n6")
    assert out.getvalue() == "[1] a\n[1] b15\n[1] 6"
    text_stream.finish(done(first))
    shown = "[1] a\n[1] b15\n[1] 6\n[2] c2\n[2] \n[2] 3\n[3] d4\n"
    assert out.getvalue() == shown
    feed(text_stream, third, b"7")
    assert out.getvalue() == shown + "[3] 7"
    text_stream.finish(done(third))
    assert out.getvalue() == shown + "[3] 7\n"


def test_what_waits_is_printed_after_ctrl_c():
    first, second = Request(b"a", id=0), Request(b"b", id=1)
    text_stream, out = stream([first, second])
    feed(text_stream, second, b"2")
    assert out.getvalue() == ""
    feed(text_stream, first, b"1")
    text_stream.close()
    assert out.getvalue() == "[1] a1\n[2] b2\n"


def test_a_character_appears_when_its_last_byte_does_and_half_of_one_is_replaced():
    request = Request(b"x", id=0)
    text_stream, out = stream([request])
    euro = "€".encode()
    feed(text_stream, request, euro[:2])
    assert out.getvalue() == "x"
    feed(text_stream, request, euro[2:])
    assert out.getvalue() == "x€"
    feed(text_stream, request, b"\xff" + euro[:1])
    text_stream.close()
    assert out.getvalue() == "x€\ufffd\ufffd\n"


def test_a_terminal_gets_color_a_dim_prompt_and_no_control_characters():
    first, second = Request(b"a\n\x07", id=0), Request(b"b", id=1)
    text_stream, out = stream([first, second], force_terminal=True, color_system="standard")
    feed(text_stream, first, b"\x1b[2J\n")
    number, prompt = "\x1b[36m[1] \x1b[0m", "\x1b[2m{}\x1b[0m"
    lines = [number + prompt.format("a") + "\n", number + prompt.format("\ufffd") + "\ufffd[2J\n"]
    assert out.getvalue() == "".join(lines)


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    first, second = Request(b"a", id=0), Request(b"b", id=1)
    text_stream, out = stream([first, second], force_terminal=True, color_system="standard")
    feed(text_stream, first, b"1\n")
    assert out.getvalue() == "[1] \x1b[2ma\x1b[0m1\n"  # dim is no color


def test_a_request_that_never_ran_prints_nothing():
    request = Request(b"x", id=0)
    text_stream, out = stream([request])
    text_stream.finish(done(request))
    text_stream.close()
    assert out.getvalue() == ""


@pytest.mark.gpu
def test_a_hopper_gpu_runs_the_kernels_within_the_plan(tmp_path, capsys):
    config = HybridConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=480,
        num_repeats=2,
        num_attention_heads=2,
        linear_num_value_heads=2,
    )
    native_format.save(tmp_path, config, Hybrid(config).init_params(jax.random.key(0)))
    assert main(["--model", str(tmp_path), "--json", "--max-tokens", "40"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["implementations"].values()) == {"mosaic_gpu"}
    assert result["device"]["platform"] == "gpu"
    assert result["measured"]["device_peak_bytes"] > 0
