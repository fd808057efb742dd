"""A case: an op with sizes, dtype and options of a call, and integers if it can run."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.cases.ops import OPS
from scripts.cases.shape_spec import Shapes

NORMED = ("q", "k", "w_uk", "w_uv", "gate_up", "down", "gate", "up")  # scaled, as products sum them
CODE = 0x11  # each byte of a cache of codes


def filled(name: str, shape: Any, draw: Callable[..., np.ndarray]) -> np.ndarray:
    """An array of random floats, of codes, or of zeros for an arena; `layer` is 1.

    Args:
        name: The argument's name, which determines its range of values.
        draw: Draws normal floats of a shape.
    """
    if name == "layer" or name == "arena":
        return np.full(shape.shape, int(name == "layer"), shape.dtype)
    if shape.dtype == np.uint8:
        return np.full(shape.shape, CODE, shape.dtype)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        raise ValueError(f"{name}: a case that is run gives its integers")
    drawn = draw(*shape.shape)
    if name == "g":
        drawn = -abs(drawn)
    elif name == "k_scale":
        drawn = abs(drawn)
    elif name == "beta":
        drawn = 1 / (1 + np.exp(-drawn))
    elif name in NORMED:
        drawn = drawn / 8
    return drawn.astype(shape.dtype)


def fill(given: Shapes, values: Mapping[str, Any], draw: Callable[..., np.ndarray]) -> Shapes:
    """Arrays for shapes: those in `values`, and random ones for the others."""
    return {
        name: np.asarray(values[name], shape.dtype)
        if name in values
        else jax.tree.map(partial(filled, name, draw=draw), shape)
        for name, shape in given.items()
    }


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A call of an op.

    Attributes:
        op: The op's name in OPS.
        sizes: The sizes that determine the shapes of its arrays.
        dtype: The dtype of floats.
        options: The op's arguments other than arrays.
        values: The values of integer arrays; None if the case is lowered but cannot run.
        bare: Whether to lower the op itself, without a function that calls it by name.
    """

    op: str
    sizes: Mapping[str, Any]
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] | None = None
    bare: bool = False

    def shapes(self) -> Shapes:
        """The shapes of the arrays, by name."""
        return OPS[self.op].shapes(self.dtype, self.sizes)

    def arrays(self, seed: int = 0) -> Shapes:
        """Random arrays to run the case with, by name, in host memory."""
        rng = np.random.default_rng(seed)
        return fill(self.shapes(), self.values or {}, lambda *sizes: rng.normal(size=sizes))

    def function(self, implementation: str) -> Callable[..., Any]:
        """The function to compile, which takes the arrays by position."""
        call, options = OPS[self.op].call, dict(self.options)
        if not OPS[self.op].kernel:
            options["implementation"] = implementation
        if self.bare:
            return partial(call, **options)
        names = tuple(self.shapes())

        def op(*args: Any) -> Any:
            return call(**dict(zip(names, args, strict=True)), **options)

        return op

    def launch(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of the kernel, and its shapes."""
        return self.function("mosaic_gpu"), tuple(self.shapes().values())
