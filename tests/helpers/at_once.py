"""A call that is compiled as one: its operations one by one take far longer to compile."""

from collections.abc import Callable
from typing import Any

import jax


def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a call gives. Its arguments are constants, so that checks of what is known run."""
    return jax.jit(lambda: function(*arguments, **options))()
