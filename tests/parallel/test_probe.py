"""What collectives take is measured without what other processes take meanwhile."""

from typing import NamedTuple
from unittest import mock

import jax
import pytest

from jaxattn.memory.device import GIB, MIB, DeviceMemory
from jaxattn.parallel import Group, Parallel, probe
from tests.helpers.virtual_devices import on_virtual_devices

TAKEN, OTHERS = 300 * MIB, GIB
WITHIN = [(0, 1, 2, 3), (4, 5, 6, 7)]  # a group's four GPUs, of two processes


class Card:
    """Memory of devices: collectives take some of each, and others more of one."""

    def __init__(self, own: bool):
        self._own, self._read = own, {0: 0, 1: 0}

    def memory(self, device: jax.Device) -> DeviceMemory:
        self._read[device.id] += 1
        late = self._read[device.id] > 1
        taken = late * (TAKEN + OTHERS * (device.id == 0))
        return DeviceMemory("a GPU", 80 * GIB, 70 * GIB - taken, pool=2 * GIB)

    def of_process(self, device: jax.Device) -> int | None:
        late = self._read[device.id] > 1
        return 3 * GIB + late * TAKEN if self._own else None


@pytest.mark.parametrize("own", [True, False], ids=["a process's own is known", "it is not"])
@on_virtual_devices
def test_what_others_take_of_a_gpu_meanwhile_does_not_count(own):
    card, group = Card(own), Group(Parallel(tensor=2), tuple(jax.devices()[:2]))
    with mock.patch.multiple(probe, device_memory=card.memory, process_bytes=card.of_process):
        assert probe.collectives_bytes(group) == TAKEN


@on_virtual_devices
def test_nothing_counts_where_nothing_says_what_is_free():
    assert probe.collectives_bytes(Group(Parallel(tensor=2), tuple(jax.devices()[:2]))) == 0


class Device(NamedTuple):
    id: int
    process_index: int
    device_kind: str = "a GPU"


@pytest.mark.parametrize(
    "layout, processes, sets",
    [
        (dict(data=2, tensor=2, context=2), 1, []),
        (dict(data=2, tensor=2, context=2), 2, [(0, 2), (1, 3)]),
        (dict(tensor=4, context=2), 2, [(0, 2), (1, 3)]),
        (dict(tensor=4), 2, []),
        (dict(data=4), 2, []),
        (dict(data=2, tensor=4, context=4), 4, [(0, 4), (1, 5), (2, 6), (3, 7)] + WITHIN),
    ],
    ids=str,
)
def test_devices_of_several_processes_that_meet_do_so_one_set_after_another(
    layout, processes, sets
):
    parallel = Parallel(**layout)
    local = parallel.gpus // processes
    group = Group(parallel, tuple(Device(i, i // local) for i in range(parallel.gpus)))  # type: ignore[arg-type]
    found = [tuple(device.id for device in each) for each in probe.across(group)]
    assert found == sets
