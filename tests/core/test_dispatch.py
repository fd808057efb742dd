"""Which implementation runs, and what is said where a GPU's kernel does not."""

import warnings

import jax
import pytest

from jaxattn.core import dispatch as module
from jaxattn.core.dispatch import Refusal, dispatch, dispatch_kernel, dispatch_xla
from jaxattn.kernels.hopper.build import interpreter as hopper


def refuse():
    raise Refusal("op: the kernel needs D=576, got D=20")


CANDIDATES = {"mosaic_gpu": refuse, "mosaic_gpu_interpret": refuse, "xla": lambda: "xla's"}


@pytest.mark.parametrize("backend, warned", [("gpu", True), ("cpu", False)])
def test_a_gpu_that_runs_xla_instead_says_why_at_the_callers_line(backend, warned, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    # This file is then the caller; CPython 3.12 skips no file whose whole name is given.
    monkeypatch.setattr(module, "PACKAGE", module.__file__[:-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert dispatch("op", None, CANDIDATES) == "xla's"
        assert dispatch("op", "xla", CANDIDATES) == "xla's"  # who names it knows
        assert dispatch("op", None, {"xla": CANDIDATES["xla"]}) == "xla's"  # there is no kernel
    assert len(caught) == warned
    for each in caught:
        assert "op: 'xla' runs instead of the GPU's kernel: op: the kernel needs D=576" in str(
            each.message
        )
        assert each.filename == __file__


@pytest.mark.parametrize(
    "implementation, ran",
    [(None, False), ("mosaic_gpu", False), ("mosaic_gpu_interpret", True), ("xla", "xla")],
)
def test_the_interpreter_runs_the_kernel_only_by_name(implementation, ran):
    found = dispatch_kernel("op", implementation, lambda interpret: interpret, lambda: "xla")
    assert found is ran


def test_a_named_one_that_refuses_and_one_that_is_not_there():
    with pytest.raises(Refusal, match="got D=20; use implementation='xla'$"):
        dispatch("op", "mosaic_gpu", CANDIDATES)
    with pytest.raises(ValueError, match="unknown implementation='triton'; choose one of"):
        dispatch("op", "triton", CANDIDATES)
    with pytest.raises(ExceptionGroup, match="no implementation accepts"):
        dispatch("op", None, {"mosaic_gpu": refuse})


def test_an_error_from_inside_jax_is_no_refusal():
    def fails():
        raise NotImplementedError("Unsupported lowering: cumsum")

    for implementation in (None, "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match="^Unsupported lowering: cumsum$") as caught:
            dispatch("op", implementation, {"mosaic_gpu": fails, "xla": lambda: "xla's"})
        assert not isinstance(caught.value, Refusal)


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_gpu_interpret"])
def test_an_op_without_a_kernel_refuses_one_by_name(name):
    with pytest.raises(Refusal, match="op has no .* kernel; use implementation='xla'"):
        dispatch_xla("op", name, lambda: "xla's")
    assert dispatch_xla("op", None, lambda: "xla's") == "xla's"
    with pytest.raises(ValueError, match="unknown implementation='triton'"):
        dispatch_xla("op", "triton", lambda: "xla's")


@pytest.mark.parametrize(
    "variables, cores, threads",
    [
        ({"PJRT_NPROC": "3"}, 64, 3),
        ({"NPROC": "2"}, 64, 2),
        ({}, 2, 2),
        ({}, 8, None),
        ({"PJRT_NPROC": "16"}, 2, None),
        ({"PJRT_NPROC": "16", "NPROC": "2"}, 2, None),
    ],
)
def test_the_interpreter_with_few_host_threads_warns_once(variables, cores, threads, monkeypatch):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hopper.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    hopper._warn_of_few_threads.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hopper.interpret_mode(False) is False
        assert not caught
        assert hopper.interpret_mode(True) and hopper.interpret_mode(True)
    assert len(caught) == (threads is not None)
    for each in caught:
        assert f"XLA's pool has only {threads}; set the environment variable PJRT_NPROC=16" in str(
            each.message
        )
        assert each.filename == __file__
