"""One engine of a tiny model for all tests here, and servers that say what they are told."""

import contextlib
import dataclasses
import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import RECURRENT, params_of
from tests.helpers.lazy_steps import use_lazy_steps
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import HIDDEN, LIMITS, ScriptedEngine, Told


class Kept:
    """An engine that goes on when a server ends."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert not self.engine.busy


@contextlib.contextmanager
def kept_in(folder):
    """Executables are kept in a folder, and found there."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def letters_of(params):
    """Parameters of a model that writes small letters: the logits of all other bytes are 0."""
    head = params["lm_head"]["weight"]
    letters = np.isin(np.arange(head.shape[1]), np.arange(ord("a"), ord("z") + 1))
    head[...] = head[...] * (7 * letters).astype(head.dtype)
    return params


@pytest.fixture(scope="session")
def engine(request, tmp_path_factory):
    """A step is compiled when a test calls it, unless all tests run. Where several processes run
    the tests, one compiles it for those that come later."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "executables"
    model, params = Hybrid(RECURRENT), letters_of(params_of(RECURRENT, 3))
    cpu = jax.default_backend() == "cpu"
    use_lazy_steps(cpu and not request.config.getoption("--slow"), keep=True)
    with kept_in(folder):
        made = Engine(model, params, dataclasses.replace(LIMITS, checkpoints=2))
    with made as engine:
        engine.start()
        use_lazy_steps(False)
        yield engine


PROMPTS = ("def add(", "import ", "class Stack:\n", "x")


@pytest.fixture(scope="session")
def generated(engine):
    """Prompt -> what the engine continues it with, 12 bytes, before it has a server."""
    done = engine.generate([Request(prompt.encode(), max_tokens=12) for prompt in PROMPTS])
    return {each.request.prompt.decode(): bytes(each.tokens).decode() for each in done}


@pytest.fixture(scope="module")
def real(engine, generated):
    """A server on the engine."""
    size = engine.model.hidden_shape.shape[0]
    with live(served(lambda: Kept(engine), hidden_size=size)) as server:
        yield server


@pytest.fixture(scope="module")
def scripted():
    """A server whose model repeats the prompt."""
    with live(served(ScriptedEngine, hidden_size=HIDDEN)) as server:
        yield server


@pytest.fixture(scope="module")
def told():
    return Told()


@pytest.fixture(scope="module")
def told_server(told):
    """A server whose model says what `told` is told."""
    with live(served(lambda: ScriptedEngine(told))) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test no request, row, page or slot is in use."""
    yield
    for name in {"real", "scripted"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        assert server.quiet()
        scheduler = server.service.worker.engine.scheduler
        assert scheduler.pages.in_use == scheduler.slots.in_use == 0
