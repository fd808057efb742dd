"""A GPU whose peer never sends: the launch ends the program with an error, in place of waiting.

An error on a GPU is the end of a process's work there, so a process of its own runs it.
"""

import re
import subprocess
import sys

import jax
import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]

TURNS = 2**20
ALONE = f"""
import time
import jax, jax.numpy as jnp
from jaxattn.kernels.collectives import peer_transfer
from jaxattn.parallel import DeviceGroup, Parallel, rank
from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer, with_addresses
from jaxattn.ops.collectives.peer_exchange import peer_exchange

peer_transfer.MOST_TURNS = {TURNS}
group = DeviceGroup(Parallel(tensor=2), tuple(jax.devices()[:2]))
axes, own = group.parallel.axes("all"), group.each

def make():  # the GPUs take their calls for different ones
    made = SymmetricBuffer.empty(2, 4, 512)
    counts = made.counts + 2 * rank(group.parallel, "tensor")
    return SymmetricBuffer(made.inbox, counts, made.addresses)

box = group.make(make, own)
box = with_addresses(box)
part = jnp.zeros((2, 4, 1, 1, 512), jnp.bfloat16)

def step(part, box):
    return peer_exchange(part[0], box, axes=axes, implementation="mosaic_gpu")

run = jax.jit(group.step(step, (own, own), (own, own)), donate_argnums=1).lower(part, box).compile()
jax.block_until_ready((part, box))
begin = time.perf_counter()
try:
    jax.block_until_ready(run(part, box))
    print("it came back")
except jax.errors.JaxRuntimeError as error:
    print(f"ended after {{time.perf_counter() - begin:.3f}} s: {{error}}", flush=True)
import os
os._exit(0)
"""


def test_a_launch_whose_peer_is_silent_ends_with_an_error():
    run = [sys.executable, "-c", ALONE]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    print(done.stdout, done.stderr[-2000:])
    found = re.search(r"ended after ([\d.]+) s: .*(launch|trap|instruction|CUDA)", done.stdout)
    aborted = "CUDA_ERROR" in done.stderr and done.returncode
    assert found or aborted, "it came back, or said nothing of the GPU"
    if found:
        print(f"{float(found[1]) / TURNS * 1e6:.2f} us for each look")
