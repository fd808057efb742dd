"""The suite's settings hold whatever pytest plugins a machine has."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As pytest-benchmark does beside xdist: a warning when it is set up, which is an error here.
PLUGIN = """
import warnings
def pytest_configure(config):
    warnings.warn("Benchmarks are automatically disabled because xdist plugin is active.")
"""


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-c", ROOT / "pyproject.toml"]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", folder / "test_one.py"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(folder: Path, name: str) -> None:
    """A plugin of that name, as pip leaves one."""
    (folder / "loud_plugin.py").write_text(PLUGIN)
    told = folder / "loud_plugin-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-plugin\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(f"[pytest11]\n{name} = loud_plugin\n")


def test_pytest_benchmark_does_not_break_the_suite(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    installed(tmp_path, "benchmark")
    ran = run(tmp_path)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_another_plugin_that_warns_does_break_it(tmp_path):
    """So the one above is told from a plugin that was never loaded."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    installed(tmp_path, "loud")
    assert run(tmp_path).returncode != 0
