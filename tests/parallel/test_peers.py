"""Which GPUs reach each other's memory, by a driver of our own."""

import ctypes
import types

import pytest

from jaxattn.parallel.peer_access import peers_reach


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
@pytest.mark.parametrize("processes, reached", [((0, 0), True), ((0, 1), False)])
def test_devices_of_several_processes_do_not_reach_each_other(
    processes, reached, platform, monkeypatch
):
    """On CPUs too: a table of addresses there would be of one process."""

    def get(number, device):
        number._obj.value = device
        return 0

    def reaches(found, own, other):
        found._obj.value = int(own != other)
        return 0

    cuda = types.SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceCanAccessPeer=reaches
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    gpus = [
        types.SimpleNamespace(platform=platform, process_index=process, local_hardware_id=number)
        for number, process in enumerate(processes)
    ]
    assert peers_reach(gpus) == reached
