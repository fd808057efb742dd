"""Equal kernels of several programs have one hash, so that each is compiled once."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.engine.compilation.step_export import DecodeStepExporter
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.kernels.hopper.build.kernel_hash import unify_kernels
from jaxattn.kernels.hopper.build.parallel_compilation import kernels_of

SHAPE = jax.ShapeDtypeStruct((128,), jnp.float32)
FOR_GPU = dict(lowering_platforms=("cuda",))


def launch(body):
    return plgpu.kernel(body, out_type=SHAPE, grid=(1,), grid_names=("i",))


def copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def lowered(program):
    return jax.jit(program).trace(SHAPE).lower(**FOR_GPU)


def hashes(texts):
    return [{kernel["kernel_hash"] for kernel in kernels_of(text)} for text in texts]


def exported():
    """A program that an exported step is part of, as rounds have their decode step."""
    exporter = DecodeStepExporter(lambda entry: (lambda x: launch(copy)(x) + 3, (SHAPE,)), "gpu")
    call = exporter(ModelStep("decode", 1, 1))
    assert call is not None
    return lowered(lambda x: call(x) * 2)


def test_the_same_kernel_of_three_programs_is_one():
    texts = [lowered(lambda x: launch(copy)(x) + 1), lowered(lambda x: launch(copy)(x) + 2)]
    texts.append(exported())
    # A counter of the process is in each, up to JAX 0.11.
    assert len(set.union(*hashes(texts))) == (3 if jax.__version_info__ < (0, 12) else 1)
    for text in texts:
        unify_kernels(text)
    [one], *others = hashes(texts)
    assert others == [{one}, {one}]
    modules = {kernel["module"] for text in texts for kernel in kernels_of(text)}
    assert len(modules) == 1


def test_kernels_that_differ_stay_different_and_a_second_call_changes_nothing():
    text = lowered(lambda x: launch(copy)(x) + launch(double)(x))
    unify_kernels(text)
    [found] = hashes([text])
    assert len(found) == 2
    unify_kernels(text)
    assert hashes([text]) == [found]


@pytest.mark.parametrize("before", [False, True])
def test_the_setting_that_exports_for_older_versions_stays_as_it_was(before):
    given = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", before)
    try:
        exported()
        assert jax.config.jax_export_ignore_forward_compatibility == before
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", given)
