"""The compiler's own modules, for instructions that Pallas has no operation for.

JAX makes no promises about them: incompatibilities with a new JAX appear in the imports here.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

__all__ = ["arith", "gpu", "ir", "llvm", "mgpu", "scf", "utils", "vector"]
