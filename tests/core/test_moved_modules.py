"""Old module names of the docs import the moved modules themselves, and say where they are."""

import importlib
import sys

import pytest

from jaxattn.core.moved_modules import MOVED, RENAMED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_moved_module_with_a_warning(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old]) and found.__name__ == MOVED[old]
    for old_name, name in RENAMED.get(old, {}).items():
        assert getattr(found, old_name) is getattr(found, name)


def test_names_that_never_were_are_still_not_found():
    with pytest.raises(ModuleNotFoundError, match="jaxattn.engine.never"):
        importlib.import_module("jaxattn.engine.never")
