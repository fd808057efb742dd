"""One process of an engine over two: python -m tests.parallel.processes RANK COORDINATOR LEADER

Process 0 leads, prints its completions as JSON, and closes. Process 1 follows.
"""

import dataclasses
import json
import sys

import jax
import numpy as np

from jaxattn import Engine, Parallel
from jaxattn.engine import hosts
from jaxattn.models import Hybrid
from tests.parallel.test_engine import CONFIG, LIMITS, requests


def main(rank: int, coordinator: str, leader: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(coordinator, 2, rank, heartbeat_timeout_seconds=10)

    model = Hybrid(CONFIG)
    params = jax.tree.map(np.asarray, model.init_params(jax.random.key(1)))
    engine = Engine(
        model,
        params,
        dataclasses.replace(LIMITS, decode_buckets=()),
        implementation="xla",
        parallel=Parallel(tensor=4, context=2),
        strict=True,
    )
    if rank == 0:
        engine.lead(hosts.lead(leader, 2, timeout=60))
        tokens = [each.tokens for each in engine.generate(requests())]
        engine.close()
        print(json.dumps(tokens), flush=True)
    else:
        engine.follow(hosts.follow(leader, timeout=60))
        print("followed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
