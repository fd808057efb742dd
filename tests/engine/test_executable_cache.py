"""Executables that are kept for the next process: the same, and never those of anything else."""

import contextlib
import dataclasses
import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxattn
from jaxattn import Engine, Request
from jaxattn.engine.compilation import compiler, executable_cache
from jaxattn.engine.compilation.executable_cache import (
    ExecutableCache,
    UnstableReprError,
    facts_of_machine,
    stable_repr,
)
from jaxattn.models import Hybrid
from jaxattn.models.catalog import model_resolver
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.registry import FAMILIES, read_model
from tests.helpers.engine_cases import SMALLEST, TWO, params_of

BUILT = [
    name
    for name in model_resolver.NAMES
    if model_resolver.shipped_config(name)["model_type"] in FAMILIES
]
LIMITS = TWO  # with steps that other files compile too


@pytest.fixture(scope="module")
def executable():
    return jax.jit(lambda x: x * 2 + 1).lower(jnp.arange(4.0)).compile()


SOURCE_HASH = executable_cache.source_hash
HASHED_ONCE = functools.cache(SOURCE_HASH)


@pytest.fixture(autouse=True)
def hashed_once(monkeypatch):
    """Reading the whole package takes 60 ms, which most tests would do several times."""
    monkeypatch.setattr(executable_cache, "source_hash", HASHED_ONCE)


@pytest.fixture
def folder(tmp_path, executable):
    """A folder with one executable, "a step"."""
    opened(tmp_path).store("a step", executable)
    assert opened(tmp_path).load("a step") is not None
    return tmp_path


def opened(folder, decides=(SMALLEST, 3)):
    return ExecutableCache(folder, jax.devices()[0], decides)


def test_what_was_kept_computes_the_same(folder):
    found = opened(folder).load("a step")(jnp.arange(4.0))
    assert found.tolist() == [1, 3, 5, 7]


def test_what_jaxs_cache_gave_is_kept_only_where_it_stays_whole(tmp_path):
    """XLA for the CPU writes it down without its functions: the next process would have failed."""
    cached = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in cached]
    x = jnp.arange(99.0)
    try:
        for name, value in zip(cached, (str(tmp_path / "of JAX"), 0.0), strict=True):
            jax.config.update(name, value)
        for name in ("first", "again"):
            lowered = jax.jit(lambda x: jnp.sin(x).sum() + 1).lower(x)
            assert opened(tmp_path).compiled(name, lowered)(x).shape == ()
        found = [opened(tmp_path).load(name) for name in ("first", "again")]
        assert found[0] is not None and found[0](x).shape == ()
        assert found[1] is None or found[1](x).block_until_ready().shape == ()
    finally:
        for name, value in zip(cached, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_an_engine_of_kept_steps_traces_nothing_and_generates_the_same(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        params, requests = params_of(SMALLEST), [Request(b"abc" * 7, max_tokens=9), Request(b"x")]

        def generated():
            with Engine(Hybrid(SMALLEST), params, LIMITS, strict=True) as engine:
                done = engine.generate(requests)
                return [each.tokens for each in done], engine.plan.items, engine.implementations

        first = generated()
        names = len(list((tmp_path / "steps").iterdir()))

        def traced(*arguments):
            raise AssertionError("a step was traced")

        monkeypatch.setattr(compiler, "jitted_step", traced)
        assert generated() == first
        assert len(list((tmp_path / "steps").iterdir())) == names >= 9
        with pytest.raises(AssertionError, match="was traced"):
            limits = dataclasses.replace(LIMITS, batch=3)
            Engine(Hybrid(SMALLEST), params, limits)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    "decides",
    [(SMALLEST, 4), (SMALLEST, 3.0), (SMALLEST, "3"), (SMALLEST,),
     (dataclasses.replace(SMALLEST, hidden_size=32), 3)],
    ids=["number", "float", "text", "less", "config"],
)  # fmt: skip
def test_nothing_else_is_taken_for_it(folder, decides):
    assert opened(folder, decides).load("a step") is None
    assert opened(folder).load("another step") is None


@pytest.mark.parametrize("what", ["source_hash", "processor"])
def test_a_change_of_source_or_processor_is_another_executable(folder, monkeypatch, what):
    monkeypatch.setattr(executable_cache, what, lambda: "another")
    assert opened(folder).load("a step") is None


def test_a_change_of_a_kernel_is_another_executable(folder, monkeypatch):
    """The hash covers the whole package, however deep the file lies that computes it."""
    kernel = Path(jaxattn.__file__).parent / "kernels" / "mla" / "append.py"
    read = Path.read_bytes
    assert kernel.is_file()
    monkeypatch.setattr(executable_cache, "source_hash", SOURCE_HASH)
    assert opened(folder).load("a step") is not None
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == kernel))
    assert opened(folder).load("a step") is None


def test_a_change_of_settings_is_another_executable(folder):
    with jax.default_matmul_precision("highest"):
        assert opened(folder).load("a step") is None
    device = jax.devices()[0]
    plain, flagged = (
        list(facts_of_machine(device, environment)) for environment in ({}, {"XLA_FLAGS": "--x"})
    )
    assert "XLA_FLAGS=--x" in flagged and "XLA_FLAGS=--x" not in plain


def test_the_source_s_hash_sees_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(executable_cache, "source_hash", SOURCE_HASH)
    for text in ("1", "2"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / "a.py").write_text(text)
        first = executable_cache.source_hash(tmp_path)
        (tmp_path / "b.py").write_text(text)
        assert executable_cache.source_hash(tmp_path) != first
        (tmp_path / "b.py").unlink()
        assert executable_cache.source_hash(tmp_path) == first
    (tmp_path / "deep" / "a.py").rename(tmp_path / "deep" / "c.py")
    assert executable_cache.source_hash(tmp_path) != first


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x"])
def test_a_damaged_file_is_none(folder, damage):
    [file] = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert opened(folder).load("a step") is None
    file.write_bytes(os.urandom(1000))
    assert opened(folder).load("a step") is None


def test_a_file_of_another_user_is_not_read(folder, monkeypatch):
    [file] = folder.iterdir()
    stranger = os.stat_result((0o600, 0, 0, 1, os.getuid() + 1, *[0] * 5))
    monkeypatch.setattr(type(file), "stat", lambda *_, **__: stranger)
    assert opened(folder).load("a step") is None


def test_a_file_that_cannot_be_touched_is_used_all_the_same(folder, monkeypatch):
    def fails(*arguments):
        raise PermissionError("not the owner")

    monkeypatch.setattr(os, "utime", fails)
    assert opened(folder).load("a step") is not None


def test_other_sizes_than_before_are_none(folder, monkeypatch):
    monkeypatch.setattr(executable_cache, "sizes_of", lambda executable: (1, 2, 3, 4, 5))
    assert opened(folder).load("a step") is None


def test_what_nothing_used_for_long_is_deleted(folder, executable):
    [old] = folder.iterdir()
    long_ago = time.time() - executable_cache.KEPT_SECONDS - 10
    os.utime(old, (long_ago, long_ago))
    opened(folder).load("a step")  # it is used
    opened(folder).store("another", executable)
    assert old in folder.iterdir()
    os.utime(old, (long_ago, long_ago))
    opened(folder).store("another", executable)
    assert old not in folder.iterdir()


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path, executable):
    (tmp_path / "file").touch()
    store = opened(tmp_path / "file" / "folder")
    store.store("a step", executable)
    assert store.load("a step") is None


@pytest.mark.parametrize(
    "error, raises", [(OSError("no space left"), False), (KeyboardInterrupt(), True)]
)
def test_a_write_that_fails_leaves_no_file(folder, executable, monkeypatch, error, raises):
    def fails(*arguments):
        raise error

    before = list(folder.iterdir())
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
        opened(folder).store("another", executable)
    assert list(folder.iterdir()) == before


def test_what_a_killed_process_left_is_deleted_when_it_is_old(folder, executable):
    left, fresh = (
        folder / f"old{executable_cache.UNFINISHED}",
        folder / f"fresh{executable_cache.UNFINISHED}",
    )
    for file in (left, fresh):
        file.touch()
    long_ago = time.time() - executable_cache.KEPT_SECONDS - 10
    os.utime(left, (long_ago, long_ago))
    opened(folder).store("another", executable)
    assert fresh.exists() and not left.exists()


def test_every_published_model_can_be_kept():
    """Models that are equal share executables, as those of two releases of one shape do."""
    models = [
        read_model(ConfigFields(model_resolver.shipped_config(each), each)).model for each in BUILT
    ]
    texts = [stable_repr(model) for model in models]
    for one, text in zip(models, texts, strict=True):
        assert [other == one for other in models] == [other == text for other in texts]
    # DeepSeek-V3 is as DeepSeek-R1, Qwen3.6-35B-A3B as 3.5, Qwen3.8-27B as Qwen3.6-27B.
    assert len(set(texts)) == len(BUILT) - 3


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, len, np.ones(1), type("Foreign", (), {})(), int, Hybrid],
    ids=["object", "set", "function", "array", "foreign", "builtin class", "class"],
)
def test_what_cannot_be_written_down_is_refused(value):
    with pytest.raises(UnstableReprError):
        stable_repr((1, value))


def test_a_class_of_another_package_is_refused():
    @dataclasses.dataclass
    class Mine:
        x: int = 1

    with pytest.raises(UnstableReprError, match="belongs to another package"):
        stable_repr(Mine())
