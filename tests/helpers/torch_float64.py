"""transformers' models in float64, even where their code casts to float32."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def in_float64(model: Any, run: Callable[[Any], Any]) -> Any:
    """Runs `run` on the model with float64 parameters, and with each float32 of its code widened.

    Raises:
        AssertionError: a module returned another floating-point dtype.
    """
    wide, others = copy.deepcopy(model).double(), []

    def watch(module: Any, _: Any, output: Any) -> None:
        if torch.is_tensor(output) and output.is_floating_point():
            others.extend([type(module).__name__] * (output.dtype != torch.float64))

    for module in wide.modules():
        module.register_forward_hook(watch)
        if hasattr(module, "config"):  # grouped products of experts do not support float64
            module.config._experts_implementation = "eager"
    with _widened():
        found = run(wide)
    assert not others, f"not in float64: {sorted(set(others))}"
    return found


@contextmanager
def _widened() -> Iterator[None]:
    def taking(function: Any) -> Any:
        def wide(*args: Any, **named: Any) -> Any:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            named = {k: torch.float64 if x is torch.float32 else x for k, x in named.items()}
            return function(*args, **named)

        return wide

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch.Tensor, "to", taking(torch.Tensor.to)),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.object(torch.nn.functional, "softmax", taking(torch.nn.functional.softmax)),
            mock.patch.object(torch, "softmax", taking(torch.softmax)),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
