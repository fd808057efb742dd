"""What collectives take is measured without what other processes take meanwhile."""

import threading
from typing import Any, NamedTuple
from unittest import mock

import jax
import pytest

from jaxattn.memory.device import GIB, MIB, DeviceMemory
from jaxattn.parallel import Group, Parallel, probe
from tests.helpers.virtual_devices import on_virtual_devices

TAKEN, OTHERS = 300 * MIB, GIB


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
    platform: str = "gpu"
    device_kind: str = "a GPU"


def group_of(layout: dict, processes: int, platform: str = "gpu") -> Group:
    parallel = Parallel(**layout)
    local = parallel.gpus // processes
    devices: Any = tuple(Device(i, i // local, platform) for i in range(parallel.gpus))
    return Group(parallel, devices)


@pytest.mark.parametrize(
    "layout, processes, sets",
    [
        (dict(data=2, tensor=2, context=2), 2, r"GPUs \(0, 2\), \(1, 3\) of several"),
        (dict(tensor=4, context=2), 2, r"GPUs \(0, 2\), \(1, 3\) of several"),
        (dict(data=2, tensor=4), 4, r"GPUs \(0, 4\), \(1, 5\) of several"),
    ],
    ids=str,
)
def test_sets_of_gpus_of_several_processes_beside_one_another_are_refused(layout, processes, sets):
    with pytest.raises(probe.CollectiveError, match=sets) as refused:
        probe.check_processes(group_of(layout, processes))
    gpus = Parallel(**layout).gpus
    assert f"--tensor {gpus} with --context 1 or {gpus}" in str(refused.value)
    probe.check_processes(group_of(layout, processes, platform="cpu"))


@pytest.mark.parametrize(
    "layout, processes",
    [
        (dict(tensor=4), 2),
        (dict(tensor=4, context=4), 2),
        (dict(data=4, expert=4), 2),
        (dict(data=2, tensor=2, context=2), 4),
        (dict(tensor=2, context=2), 2),
    ],
    ids=str,
)
def test_all_gpus_and_processes_of_one_gpu_are_not(layout, processes):
    probe.check_processes(group_of(layout, processes))


def test_processes_that_do_not_meet_are_an_error_after_a_time():
    group, wait = group_of(dict(tensor=4), 2), threading.Event()
    with mock.patch.object(probe, "_meet", lambda group: wait.wait(60)):
        with pytest.raises(probe.CollectiveError, match="did not meet in 0 s; NCCL_DEBUG=INFO"):
            probe._meet_in_time(group, 0.05)
    wait.set()
    with mock.patch.object(probe, "_meet", side_effect=probe.CollectiveError("no")):
        with pytest.raises(probe.CollectiveError, match="no"):
            probe._meet_in_time(group)
    with mock.patch.object(probe, "_meet"):
        probe._meet_in_time(group)
