#!/usr/bin/env bash
# Builds the sdist and the wheel, checks their metadata for an index, and uses the wheel outside the checkout:
# its import, its commands, an example, a test.
#
#     bash scripts/wheel.sh            # installs the wheel's dependencies, which takes minutes
#     bash scripts/wheel.sh PYTHON     # uses the dependencies in PYTHON's environment
#
# The Python needs `build`, `hatchling` and `twine` from the extra `release`; PYTHON also needs pytest from the
# extra `test`.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

"$python" -m build --no-isolation --outdir "$work/dist" "$root" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$python" -m twine check --strict "$work"/dist/*

# Each module of the checkout and each file of the server's page is in the wheel, except the baselines: a pattern
# of .gitignore hides files from the builder even where git has them.
(cd "$root" && git ls-files 'jaxattn/*.py' 'jaxattn/server/page/*' | grep -v '^jaxattn/bench/baselines/' | sort) >"$work/there.txt"
"$python" -m zipfile -l "$work"/dist/*.whl | awk '{print $1}' | grep -e '\.py$' -e '^jaxattn/server/page/' | sort >"$work/packed.txt"
diff "$work/there.txt" "$work/packed.txt" || { echo "the wheel has other modules than git" >&2; exit 1; }

"$python" -m venv "$work/venv"
if [ $# -gt 0 ]; then
    # The environment's own packages come first, so the wheel hides a jaxattn that PYTHON has.
    shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$shared" >"$own/shared.pth"
    "$work/venv/bin/python" -m pip install -q --no-deps --force-reinstall "$work"/dist/*.whl
else
    "$work/venv/bin/python" -m pip install -q "$(echo "$work"/dist/*.whl)[test]"
fi

mkdir "$work/elsewhere"
cp "$root/examples/kernel.py" "$root/tests/core/test_dispatch.py" "$work/elsewhere"
cd "$work/elsewhere"
bin=$work/venv/bin
"$bin/python" -c '
import pathlib, sys, jaxattn
from importlib.metadata import entry_points, version
from jaxattn.models import load
from jaxattn.models.checkpoint import EMBEDDED
place = pathlib.Path(jaxattn.__file__)
assert place.is_relative_to(sys.prefix), f"{place} is not the wheel in {sys.prefix}"
assert version("jaxattn") == jaxattn.__version__, version("jaxattn")
commands = {each.name: each.load() for each in entry_points(group="console_scripts") if each.name.startswith("jaxattn-")}
assert all(map(callable, commands.values())) and len(commands) >= 3, commands
load(EMBEDDED)
print("jaxattn", jaxattn.__version__, "from the wheel, with", *sorted(commands))'
"$bin/jaxattn-serve" --plan >plan.txt && head -1 plan.txt
"$bin/python" kernel.py
# The baselines of the bench stay in the repository; what it times without them runs.
code=0
"$bin/jaxattn-bench" mla --small 2>bench.txt || code=$?
if [ "$code" != 2 ] || ! grep -e --no-peers bench.txt; then
    cat bench.txt
    echo "without baselines, jaxattn-bench exited with $code; expected 2 and an error that names --no-peers" >&2
    exit 1
fi
"$bin/jaxattn-bench" mla --small --no-peers --only 2,16,256,1 >/dev/null
"$bin/python" -m pytest -q -p no:cacheprovider test_dispatch.py
