"""The files of deploy/: what they name is there."""

import json
import re
from pathlib import Path

import pytest

from jaxattn.cli.options.serve_options import parser
from jaxattn.server.app import GET
from jaxattn.server.runtime.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPTIONS = {option for action in parser()._actions for option in action.option_strings}


def test_the_dashboard_s_series_are_there():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"(?:vllm|jaxattn):\w+", text)}
    known = set(re.findall(r"^# TYPE (\S+) ", ServerMetrics("m").text().decode(), re.MULTILINE))
    # Without an engine there are no lines of a plan.
    missing = {re.sub("_bucket$", "", name) for name in names} - known - {"jaxattn:plan_bytes"}
    assert len(names) > 10 and not missing


@pytest.mark.parametrize("file", ["Dockerfile", "kubernetes.yaml"])
def test_options_and_paths_are_the_server_s(file):
    text = (DEPLOY / file).read_text()
    given = {name for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert given - {"--no-cache-dir", "--create-home", "--uid"} <= OPTIONS
    assert set(re.findall(r"path: (/\w+), port", text)) <= set(GET)


def test_a_pod_has_time_to_drain():
    text = (DEPLOY / "kubernetes.yaml").read_text()
    [grace] = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    [drain] = re.findall(r"--drain-timeout=(\d+)", text)
    [sleep] = re.findall(r'\[sleep, "(\d+)"\]', text)
    # What is cut at the end has 5 s to be told, connections 5 to close, the step in flight 5.
    assert int(grace) >= int(drain) + int(sleep) + 20


def test_the_docs_have_every_option_path_and_metric():
    text = (ROOT / "docs" / "server.md").read_text()
    server = {
        option
        for group in parser()._action_groups
        if group.title == "server"
        for action in group._group_actions
        for option in action.option_strings
    }
    assert server and all(f"`{option}" in text for option in server)
    for path in GET:
        assert path.partition("{")[0] in text
    for name in re.findall(
        r"^# TYPE (\S+) (?!gauge)", ServerMetrics("m").text().decode(), re.MULTILINE
    ):
        if not name.endswith("_created"):
            assert f"`{name}" in text, name
