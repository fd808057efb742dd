"""An adapter without the library that it adapts to names the extra that installs it."""

import importlib.util
import sys

import pytest


def test_without_tunix_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxattn.integrations.tunix")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'jaxattn\[tunix\]'"):
        import jaxattn.integrations.tunix  # noqa: F401
