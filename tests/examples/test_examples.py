"""Each program of examples/ runs, and what it prints is true."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from jaxattn import models
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED
from tests.helpers.engine_cases import SMALLEST, params_of

pytestmark = pytest.mark.lazy_steps

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*(?:e-\d+)?", text)]


def test_no_example_is_without_a_test_and_a_line_in_the_readme():
    tested = set(re.findall(r'main_of\("(\w+)"\)', Path(__file__).read_text()))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(tested)


def test_a_kernel_is_near_the_softmax_and_its_padding_row_is_zero(capsys):
    main_of("kernel")()
    _, near, padding = capsys.readouterr().out.splitlines()
    [_, error] = numbers(near)
    assert 0 < error < 2e-2
    assert padding == "the padding row is 0, and its log-sum-exp -inf"


def test_a_flax_model_decodes_what_it_says_of_whole_texts(capsys):
    main_of("flax_model")()
    [_, _, error] = numbers(capsys.readouterr().out)
    assert 0 < error < 2e-2


def test_the_engine_serves_a_request_that_came_later(capsys, monkeypatch):
    """With a model that compiles in less time; the README's example has the embedded one."""
    small = Hybrid(SMALLEST), params_of(SMALLEST)
    monkeypatch.setattr(models, "load", lambda folder: small if folder == EMBEDDED else None)
    main_of("serve")()
    planned, *done, rounds = capsys.readouterr().out.splitlines()
    assert numbers(planned.replace(",", ""))[0] > 1e5
    assert sorted(line[:3] for line in done) == ["[1]", "[2]", "[3]"]
    assert rounds.endswith("rounds for three requests in two rows")


@pytest.mark.slow(
    reason="a script that does not run; its parts are those of pretraining, which runs, and of "
    "models/test_packed_training"
)
def test_finetuning_lowers_the_loss(capsys):
    pytest.importorskip("optax")
    main_of("finetune")(["--steps", "12"])
    first, *_, last = re.findall(r": (\S+) nats per byte", capsys.readouterr().out)
    assert float(last) < 0.4 * float(first)


@pytest.mark.slow(reason="its parts are tested in tests/integrations/test_tunix.py")
@pytest.mark.filterwarnings("ignore")  # of Tunix and what it imports
def test_grpo_gives_each_step_a_reward_and_a_plot(tmp_path, capsys):
    pytest.importorskip("tunix")
    plot = [] if importlib.util.find_spec("matplotlib") is None else ["--plot"]
    path = tmp_path / "grpo.png"
    small = ["--steps", "2", "--rows", "1", "--samples", "4"]
    log = main_of("grpo")([*small, *plot, *[str(path)] * len(plot)])
    assert len(log.means) == 2 and all(0 <= mean <= 1 for mean in log.means)
    assert "prompts that were held out: reward" in capsys.readouterr().out
    assert path.exists() == bool(plot)


def test_pretraining_resumes_to_the_same_losses(tmp_path, capsys):
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    main = main_of("pretrain")
    common = ["--decay", "6", "--every", "1", "--rows", "2", "--tokens", "32", "--rate", "0.01"]
    checkpoint = ["--checkpoint", str(tmp_path / "run")]

    trainer = main([*common, "--steps", "6"])
    whole = losses_of(capsys)
    trainer.state = trainer.new_state()
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    common_text = ["--data", str(text), "--eval-every", "1"]
    main([*common, *common_text, "--steps", "2"], trainer)
    held_out = re.findall(r"held-out text (\S+) nats per byte", capsys.readouterr().out)
    assert len(held_out) == 2 and held_out[0] != held_out[1]
    trainer.state = trainer.new_state()
    main([*common, *checkpoint, "--steps", "3"], trainer)
    trainer.state = trainer.new_state()
    main([*common, *checkpoint, "--steps", "6", "--log", str(tmp_path / "log")], trainer)
    parts = losses_of(capsys)
    assert parts == whole and len(whole) == 6
    assert whole[5] < whole[0]
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def losses_of(capsys):
    """By step; the last is printed twice."""
    found = re.findall(r"step +(\d+): (\S+) nats per byte", capsys.readouterr().out)
    return {int(step): loss for step, loss in found}


def test_a_text_that_is_too_short_is_refused(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(SystemExit, match="2"):
        main_of("finetune")(["--data", str(short)])
    assert "9 bytes are too few, give at least 100" in capsys.readouterr().err
