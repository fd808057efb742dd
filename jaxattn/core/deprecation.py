"""Deprecated keywords and names, which work for one more minor version."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class KeywordGroup(NamedTuple):
    """An argument that replaces older keywords.

    Attributes:
        make: Class of the argument.
        fields: Maps older keywords to fields of the class.
    """

    make: type
    fields: Mapping[str, str]


def with_older_keywords[**P, R](
    **groups: KeywordGroup,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that each group's older keywords work, with a DeprecationWarning.

    The decorator builds a group if one of its older keywords is not None.

    Raises:
        TypeError: Raised later, by a call that passes a group together with one of its older
            keywords, or omits a keyword that the group needs.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = dict(kwargs)
            for name, group in groups.items():
                older = [keyword for keyword in group.fields if given.get(keyword) is not None]
                values = {group.fields[keyword]: given[keyword] for keyword in older}
                for keyword in group.fields:
                    given.pop(keyword, None)
                if not older:
                    continue
                op, wanted = function.__name__, f"{name}={group.make.__name__}(...)"
                if given.get(name) is not None:
                    raise TypeError(
                        f"{op}: {', '.join(older)} cannot be combined with {name}=; give only "
                        f"{wanted}"
                    )
                warnings.warn(
                    f"{op}: instead of {', '.join(older)}, give {wanted}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                given[name] = group.make(**values)
            return function(*args, **given)

        return called

    return decorate


def renamed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` that maps older names to new ones and warns."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return get


def warn_renamed(old: str, new: str) -> None:
    """Warns, at the caller's line, that a public name has been renamed."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
