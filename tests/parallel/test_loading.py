"""Loading over several devices: each has exactly its share, and is sent no block of others'."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxattn.models import divided, load
from jaxattn.models.loading import sharded_weight_loader
from jaxattn.models.sharding.axis_sharding import own
from jaxattn.parallel import DeviceGroup, Parallel
from tests.helpers.virtual_devices import on_virtual_devices

FOLDERS = Path(__file__).parents[1] / "data" / "tiny_checkpoints"

LAYOUTS = {
    "deepseek_v3": Parallel(tensor=2),
    "deepseek_v3_fp8": Parallel(data=2, expert=2),
    "qwen3_5_moe": Parallel(tensor=4, context=2),
    "qwen3_next_fp8": Parallel(tensor=2, expert=2),
    "youtu": Parallel(tensor=2, context=2),
}


SLOW = {"deepseek_v3", "qwen3_next_fp8"}
slow = pytest.mark.slow(reason="a tensor that is cut elsewhere; found by the other folders too")
each_folder = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * (name in SLOW)) for name in LAYOUTS]
)


@each_folder
@on_virtual_devices
def test_each_device_has_its_cut_of_every_parameter(name):
    parallel = LAYOUTS[name]
    model, whole = load(FOLDERS / name)
    local = divided(model, parallel)
    sent = []
    place = sharded_weight_loader._place
    sharded_weight_loader._place = lambda *given, **options: (
        sent.append(given[0]) or place(*given, **options)
    )
    try:
        _, over = load(FOLDERS / name, parallel=parallel)
    finally:
        sharded_weight_loader._place = place
    group = DeviceGroup(parallel, tuple(jax.devices()[: parallel.gpus]))
    found = [dict(nnx.to_flat_state(each)) for each in group.split(over)]
    for key, leaf in nnx.to_flat_state(whole):
        cuts = local.cuts_of(key)
        for gpu, share in enumerate(found):
            expected = own(np.asarray(leaf[...]), cuts, parallel, gpu)
            np.testing.assert_array_equal(
                np.asarray(share[key][...]).view(np.uint8), expected.view(np.uint8), str((key, gpu))
            )
    assert sent, "nothing was placed piece by piece"
