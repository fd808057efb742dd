"""The compiler's own modules, for instructions that Pallas has no word for.

JAX promises nothing about them: whatever breaks with a new JAX, breaks in what is imported here.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

__all__ = ["arith", "gpu", "ir", "llvm", "mgpu", "scf", "utils", "vector"]
