"""Checks of a process that has just started: one process for all tests that need one.

Importing takes JAX two seconds of CPU time. Each part is a piece of a program. The parts run one
after another, so the first sees the effect of imports, and the last starts JAX's backend. A part
that fails prints its traceback.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxattn.parallel.nccl_comm_split_flag import NAME, VARIABLE

ROOT = Path(__file__).parents[2]
OF_EXTRA = ("starlette", "uvicorn", "prometheus_client", "orjson", "llguidance")
PARTS = {
    "imported with the package": """
import sys, jaxattn
print('jax' in sys.modules)
from jaxattn import mla, RopeConfig
looked_for = 'jax', 'flax', 'jaxattn.engine', 'jaxattn.models'
print(*[name for name in looked_for if name in sys.modules])
""",
    "imported of the extra": f"""
import sys, jaxattn, jaxattn.cli.serve.command, jaxattn.bench.__main__
print(*[name for name in {OF_EXTRA} if name in sys.modules])
print(*[name for name in sys.modules if name.startswith('jaxattn.server')])
""",
    "garbage collector": """
import gc
from jaxattn.engine.runtime import gc_pause
before = len(gc.get_objects())
gc_pause.freeze_gc_heap()
print(before > 10_000, len(gc.get_objects()) < 1_000, gc.isenabled())
""",
    "device of bench offline": """
import jax
from jaxattn.bench.harness import run_metadata
from jaxattn.bench.offline import command
command.parse(['DeepSeek-V2-Lite'], 'bench').choice.folder().__enter__()
run_metadata.begin('offline', 'bench', [], device=False)
print(jax._src.xla_bridge.backends_are_initialized())
""",
    "flags of XLA": f"""
import glob, os
import jax, jaxattn.cli.startup.multihost
from jaxattn.parallel.nccl_comm_split_flag import disable_comm_split
loops = "--xla_gpu_enable_command_buffer=+WHILE"
os.environ["{VARIABLE}"] = f"{NAME}=true --xla_dump_to=dumped {{loops}}"
disable_comm_split(os.environ)
jax.jit(lambda x: x + 1)(1.0)
for file in glob.glob("dumped/*.debug_options"):
    print(open(file).read())
""",
}
RUN = """
import contextlib, io, json, sys, traceback
found = {}
for name, code in json.load(sys.stdin).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(code, {})
        except BaseException:
            print(traceback.format_exc())
    found[name] = said.getvalue()
print(json.dumps(found))
"""


@functools.cache
def _found() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            input=json.dumps(PARTS),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
    return json.loads(done.stdout)


def said_by_a_fresh_process(part: str) -> str:
    """The text that a part of `PARTS` printed."""
    return _found()[part]
