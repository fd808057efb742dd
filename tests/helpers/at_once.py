"""Calls compiled as one program, because compiling their operations one by one takes far longer."""

from collections.abc import Callable
from typing import Any

import jax


def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a call. Arguments are constants, so checks of concrete values run."""
    return jax.jit(lambda: function(*arguments, **options))()
