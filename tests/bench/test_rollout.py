"""`bench rollout`: updates, scores and exact mode of a model that a CPU runs in no time."""

import json

import numpy as np
import pytest

from jaxattn.bench.__main__ import main
from jaxattn.bench.offline import rollout
from jaxattn.engine.requests.outputs import Completion, FinishReason, Logprobs
from jaxattn.engine.requests.request import Request

pytestmark = pytest.mark.lazy_steps


def test_all_measures(tmp_path, capsys):
    file = tmp_path / "rollout.json"
    assert main(["rollout", "--small", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows = {row["what"]: row for row in result["rows"]}
    [update] = [row for what, row in rows.items() if what.startswith("update of")]
    [copy] = [row for what, row in rows.items() if what.startswith("copy of")]
    for row in result["rows"]:
        if row["of"]:
            assert row["relative"] == pytest.approx(row["value"] / rows[row["of"]]["value"])
    assert update["of"] == copy["what"]
    score, read = rows["score"], rows["texts as prompts"]
    assert (
        score["of"] == read["what"] and 0 < score["value"] and 0 < read["value"] < 1e5
    )  # prompts that are read, not refused
    for what in ("greedy", "log-probabilities"):
        assert rows[f"exact mode, {what}"]["of"] == f"default limits, {what}"
    assert rows["log-probabilities that differ, of 24"]["value"] == 0
    assert "exact mode, greedy" in capsys.readouterr().out


def test_a_bit_that_differs_is_counted():
    last = np.float32(-2.0)

    class Replayed:
        def score(self, texts, starts):
            assert (texts, starts) == ([[1, 2, 3, 4]], [2])
            told = float(np.nextafter(last, np.float32(0)))
            return [[None, Logprobs(-3.0), Logprobs(-1.0), Logprobs(told)]]

    logprobs = Logprobs(-1.0), Logprobs(float(last))
    done = [Completion(Request((1, 2)), (3, 4), FinishReason.LENGTH, logprobs=logprobs)]
    *_, row = rollout.replay_rows(Replayed(), done, 1.0, repeats=1)
    assert row["what"] == "log-probabilities that differ, of 2" and row["value"] == 1


@pytest.mark.parametrize(
    "given, said",
    [
        (["--small", "--repeats", "0"], "--repeats must be positive; got 0"),
        (["--small", "--text", "600"], "small supports 512 tokens; got 601"),
        ([], "give a MODEL, or --small"),
        (["no-such-model"], "unknown model 'no-such-model'"),
    ],
)
def test_options_that_do_not_fit(given, said, capsys):
    with pytest.raises(SystemExit):
        main(["rollout", *given])
    assert said in capsys.readouterr().err
