"""Which GPUs reach each other's memory, by a driver of our own."""

import ctypes
import types

import pytest

from jaxattn.parallel.peers import peers_reach


@pytest.mark.parametrize("processes, reached", [((0, 0), True), ((0, 1), False)])
def test_gpus_of_several_processes_do_not_reach_each_other(processes, reached, monkeypatch):
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
        types.SimpleNamespace(platform="gpu", process_index=process, local_hardware_id=number)
        for number, process in enumerate(processes)
    ]
    assert peers_reach(gpus) == reached
