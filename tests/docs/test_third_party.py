"""Every dependency has its license in THIRD_PARTY.md; the version stands in one place."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

import jaxattn

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMES = sorted(
    {
        re.match(r"[\w-]+", requirement)[0].lower()
        for requirement in [*PROJECT["dependencies"], *sum(EXTRAS.values(), [])]
    }
    - {"jaxattn"}
)
# What a license may be called in a package's metadata, by what THIRD_PARTY.md calls it.
WORDS = {"Apache-2.0": "apache", "MIT": "mit", "BSD": "bsd", "MPL-2.0": "mozilla|mpl"}


def license(name: str) -> str | None:
    """What THIRD_PARTY.md says of a package."""
    for line in (ROOT / "THIRD_PARTY.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name in re.split(r", ", cells[0].lower().replace("_", "-")):
            return cells[-1]
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_dependency_has_its_license_listed(name):
    listed = license(name.replace("_", "-"))
    assert listed, f"THIRD_PARTY.md has no line for {name}"
    try:
        stated = metadata(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    own = " ".join(
        [
            *(stated.get_all("License-Expression") or []),
            *(stated.get_all("License") or []),
            *(each for each in stated.get_all("Classifier") or [] if each.startswith("License")),
        ]
    ).lower()
    for word, pattern in WORDS.items():
        if listed.startswith(word) and own:
            assert re.search(pattern, own), f"{name}: {listed} here, {own[:200]} in its metadata"


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", jaxattn.__version__)


def test_every_command_is_there_and_has_a_version(capsys):
    import importlib

    assert {"jaxattn-serve", "jaxattn-plan", "jaxattn-bench"} <= set(PROJECT["scripts"])
    for command, place in PROJECT["scripts"].items():
        module, _, function = place.partition(":")
        with pytest.raises(SystemExit) as end:
            getattr(importlib.import_module(module), function)(["--version"])
        assert end.value.code == 0, command
        assert jaxattn.__version__ in capsys.readouterr().out
