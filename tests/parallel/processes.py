"""One process of an engine over two: python -m tests.parallel.processes RANK COORDINATOR WHAT

Process 0 leads, prints its completions as JSON, and closes; the other follows. WHAT is what
goes wrong in process 1: nothing, version, checkpoint, memory, killed or stuck; or "groups": nothing
is, and each process has a data group. On GPUs the engine is one with kernels, on CPUs a small one.
There a process says that it has too little memory; on GPUs it has.
"""

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import time

import jax
import numpy as np

from jaxattn import Engine, Parallel
from jaxattn.cli.startup.multihost import DistributedConfig, joined
from jaxattn.engine.distributed import driver
from jaxattn.memory.plan import PlanError
from jaxattn.models import Hybrid
from tests.parallel import gpus_engine
from tests.parallel.test_engine import CONFIG, LIMITS, requests

STUCK = 5.0  # seconds
SLOW = 120.0  # that a step may take on a machine with other work
# Of four devices. Two pairs of them meet in each, one of each process.
SPREAD, GROUPS = Parallel(tensor=4, context=2), Parallel(data=2, tensor=2, context=2)
LONG = 180.0  # on GPUs a process that is there after so long says where it is


def main(rank: int, coordinator: str, what: str) -> None:
    if on_cpu := os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")
        jax.config.update("jax_disable_most_optimizations", True)
    else:
        faulthandler.dump_traceback_later(LONG)
    wrong = what if rank == 1 else "nothing"
    limits = {"step_timeout": STUCK if what == "stuck" else SLOW, "link_timeout": SLOW}
    with joined(DistributedConfig(rank, 2, coordinator), **limits) as crew:
        assert crew is not None
        facts = {"jaxattn": "1.0", "checkpoint": "5f3c"}
        facts |= {"version": {"jaxattn": "0.9"}, "checkpoint": {"checkpoint": "aaaa"}}.get(
            wrong, {}
        )
        if wrong in ("version", "checkpoint"):
            say_when()
        crew.agree(facts)
        if wrong == "memory" and on_cpu:
            raise PlanError("the plan takes 90 GB, and 80 GB are free")
        with (small if on_cpu else embedded)(of_groups=what == "groups") as made:
            if rank == 0:
                made.lead(crew)
                took = {item.name: item.nbytes for item in made.plan.items}.get("collectives", 0)
                print(f"collectives took {took / 2**20:.0f} MiB of each device")
                print("leads", flush=True)
                asked = requests() if on_cpu else gpus_engine.requests()
                tokens = [list(each.tokens) for each in made.generate(asked)]
                print(json.dumps(tokens), flush=True)
                return
            if wrong in ("killed", "stuck"):
                assert callable(driver.prefill_step)  # which the loop calls for a leader's step
                driver.prefill_step = Fails(wrong)
            made.follow(crew)
            print("followed", flush=True)


def say_when() -> None:
    print(f"wrong from now on: {time.time()}", flush=True)


def small(*, of_groups: bool = False) -> Engine:
    model = Hybrid(CONFIG)
    params = jax.tree.map(np.asarray, model.init_params(jax.random.key(1)))
    return Engine(
        model,
        params,
        dataclasses.replace(LIMITS, decode_buckets=()),
        implementation="xla",
        parallel=GROUPS if of_groups else SPREAD,
        strict=True,
    )


def embedded(*, of_groups: bool = False) -> Engine:
    """All GPUs of both processes in one group, or in two: the embedded model's two heads over two,
    or eight heads over more."""
    gpus = jax.device_count()
    model = gpus_engine.embedded() if gpus == 2 else gpus_engine.eight_heads()
    data = 2 if of_groups else 1
    parallel = Parallel(data=data, tensor=gpus // data, context=gpus // data)
    return gpus_engine.engine(model, parallel)


class Fails:
    """In place of a step's name: the process ends, or waits for ever, where the leader sent one."""

    def __init__(self, how: str):
        self._how = how

    def __call__(self, *_: object) -> None:
        say_when()
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
