"""Traces, lowers and compiles a kernel once, however many launches it has.

Three layers of one kind launch one kernel on the same shapes. Python traces and lowers on one
thread at a time, and Mosaic compiles one kernel at a time in a process. Each launch creates a new
body, which JAX takes for another kernel. Within

    with share_launches():
        jax.jit(step).lower(...)

launches are the same kernel if their bodies have the same code and close over the same values. All
of them call one function, which JAX traces once for each set of shapes. Constants of modules and
classes must not change within the context, because the key does not contain them.

Outside of the context each launch is a kernel of its own. So no kernel outlives a change of a
module's constants.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from jaxattn.kernels.hopper.device import cache_ptxas_version

type Shared = dict[object, Callable[..., Any]]

PLAIN = (str, int, bool, bytes, type(None))
_shared: ContextVar[Shared | None] = ContextVar("share_launches", default=None)
_launched: ContextVar[Callable[..., Any]] = ContextVar("launched")


@dataclasses.dataclass(frozen=True, eq=False)
class IdentityKey:
    """A key that is equal to no other object's. It keeps the object alive, and so the object's id
    unique."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@contextlib.contextmanager
def share_launches(shared: Shared | None = None) -> Iterator[None]:
    """A context in which a kernel that this thread launches several times is traced once.

    Args:
        shared: The kernels so far, if several threads share them.
    """
    cache_ptxas_version()
    token = _shared.set({} if shared is None else shared)
    try:
        yield
    finally:
        _shared.reset(token)


def trace_once(name: str, kernel: Callable[..., Any], *decides: object) -> Callable[..., Any]:
    """Returns the kernel, or an earlier one that is the same.

    Args:
        name: The name of the function that launches it.
        decides: Everything that determines what the kernel does, except its operands' shapes.
    """
    shared = _shared.get()
    if shared is None:
        return kernel
    try:
        key = name, cache_key(decides)
    except TypeError:
        return kernel
    if key not in shared:

        def run(*given: Any) -> Any:
            return _launched.get()(*given)

        run.__name__ = run.__qualname__ = name
        shared.setdefault(key, jax.jit(run))  # another thread may have added it meanwhile
    same = shared[key]

    def launched(*given: Any) -> Any:
        # JAX traces again for other shapes. The values that the first body closes over may have
        # changed by then.
        token = _launched.set(kernel)
        try:
            return same(*given)
        finally:
            _launched.reset(token)

    return launched


def cache_key(value: object, around: tuple[int, ...] = ()) -> object:
    """Returns a value as a key. Equal keys mean values that do the same.

    Args:
        around: The ids of the values that contain this one.

    Raises:
        TypeError: The value has no key: it is an array, or contains itself.
    """
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, float | complex | np.generic):
        return type(value), str(getattr(value, "dtype", "")), repr(value)  # 0.0 and -0.0 are equal
    if id(value) in around:
        raise TypeError(f"{type(value).__name__} contains itself")
    part = functools.partial(cache_key, around=(*around, id(value)))
    if isinstance(value, types.FunctionType):
        try:
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        except ValueError as error:
            raise TypeError(
                "the function closes over a variable that is not yet assigned"
            ) from error
        every = cells, value.__defaults__, value.__kwdefaults__, value.__dict__
        return value.__code__, IdentityKey(value.__globals__), tuple(map(part, every))
    if isinstance(value, types.MethodType):
        return types.MethodType, part(value.__func__), part(value.__self__)
    if isinstance(value, functools.partial):
        return functools.partial, part(value.func), part(value.args), part(value.keywords)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(part, value))
    if isinstance(value, Mapping):
        return type(value), tuple((part(key), part(each)) for key, each in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value), tuple(part(getattr(value, field.name)) for field in fields)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(part, value))
    hash(value)
    if isinstance(value, type) or type(value).__hash__ is not object.__hash__:
        return type(value), value
    return (
        type(value),
        IdentityKey(value),
        part(getattr(value, "__dict__", None)),
    )  # which may change
