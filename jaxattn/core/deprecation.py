"""Keywords and names of an older version, which work for one more minor version."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class KeywordGroup(NamedTuple):
    """An argument that stands for keywords of an older version.

    Attributes:
        make: its class.
        fields: older keyword -> field of the class.
    """

    make: type
    fields: Mapping[str, str]


def with_older_keywords[**P, R](
    **groups: KeywordGroup,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the older keywords of each named group still work, with a DeprecationWarning.

    A group is made where one of its older keywords is not None.

    Raises:
        TypeError: later, of a call that has a group and one of its older keywords, or not all
            keywords that the group needs.
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
    """A module's `__getattr__`: its older names are the new ones, with a DeprecationWarning."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return get


def warn_renamed(old: str, new: str) -> None:
    """Warns, at the line of whoever asked for it, that a public name has another name now."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
