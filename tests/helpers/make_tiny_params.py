"""Writes tests/data/tiny_params.npz: the parameters of `init_params` for the engine's tests.

JAX_PLATFORMS=cpu python -m tests.helpers.make_tiny_params

The script uses the tests' XLA options, because other options change the last bits of some numbers.
"""

import jax
import numpy as np

from jaxattn.models.embedded.hybrid_model import Hybrid
from tests import conftest as conftest  # sets XLA's options
from tests.helpers.engine_cases import FILE, KEPT


def main() -> None:
    found = {}
    for place, (config, seed) in enumerate(KEPT):
        drawn = Hybrid(config).init_params(jax.random.key(seed))
        for number, leaf in enumerate(jax.tree.leaves(drawn)):
            # NumPy's files do not support bfloat16.
            found[f"{place}.{number}"] = np.asarray(leaf).view(f"u{leaf.dtype.itemsize}")
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
