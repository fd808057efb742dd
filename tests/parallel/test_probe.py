"""What collectives take is measured without what other processes take meanwhile."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import pytest

from jaxattn.engine.startup import engine_build
from jaxattn.memory.device_memory import GIB, MIB, DeviceMemory
from jaxattn.parallel import DeviceGroup, Parallel, nccl_memory
from jaxattn.parallel.nccl_comm_split_flag import OFF, VARIABLE
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
    card, group = Card(own), DeviceGroup(Parallel(tensor=2), tuple(jax.devices()[:2]))
    with mock.patch.multiple(nccl_memory, device_memory=card.memory, process_bytes=card.of_process):
        assert nccl_memory.collectives_bytes(group) == TAKEN


@on_virtual_devices
def test_nothing_counts_where_nothing_says_what_is_free():
    assert (
        nccl_memory.collectives_bytes(DeviceGroup(Parallel(tensor=2), tuple(jax.devices()[:2])))
        == 0
    )


class Device(NamedTuple):
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "a GPU"


def group_of(layout: dict, processes: int, platform: str = "gpu") -> DeviceGroup:
    parallel = Parallel(**layout)
    local = parallel.gpus // processes
    devices: Any = tuple(Device(i, i // local, platform) for i in range(parallel.gpus))
    return DeviceGroup(parallel, devices)


def test_each_layout_is_looked_at_once_and_what_all_took_counts():
    """Of two threads neither finds that the other's collectives took nothing more."""
    devices, ran = tuple(Device(i, 0) for i in range(4)), list[str]()

    def measured(group: DeviceGroup) -> int:
        ran.append(group.parallel.flags)
        time.sleep(0.05)
        return TAKEN if len(ran) == 1 else 0  # NCCL keeps what it has

    def taken(layout: Parallel) -> int:
        return engine_build.collectives_of(mock.Mock(parallel=layout), devices)

    whole, context = Parallel(tensor=4), Parallel(tensor=4, context=2)
    with (
        mock.patch.object(engine_build, "collectives_bytes", measured),
        mock.patch.dict(engine_build.PROCESS_STATE.collectives, clear=True),
        ThreadPoolExecutor(4) as pool,
    ):
        assert list(pool.map(taken, [whole] * 4)) == [TAKEN] * 4
        assert taken(context) == TAKEN and ran == [whole.flags, context.flags]


@pytest.mark.parametrize(
    "layout, processes",
    [
        (dict(data=2, tensor=2, context=2), 2),
        (dict(tensor=4), 2),
        (dict(data=2, tensor=4), 8),
        (dict(tensor=2), 2),
    ],
    ids=str,
)
def test_gpus_of_several_processes_are_refused_where_communicators_are_split(layout, processes):
    group = group_of(layout, processes)
    with pytest.raises(
        nccl_memory.CollectiveError, match=f"GPUs of {processes} processes"
    ) as refused:
        nccl_memory.check_processes(group, {})
    assert f'{VARIABLE}="{OFF}" in its environment' in str(refused.value)
    nccl_memory.check_processes(group, {VARIABLE: f"--xla_dump_to=/tmp {OFF}"})
    nccl_memory.check_processes(group_of(layout, processes, platform="cpu"), {})
    nccl_memory.check_processes(group_of(layout, 1), {})


# Axes of four devices of which {0, 2} and {1, 3} meet, or {0, 1} and {2, 3}.
ACROSS, WITHIN = ("stride_2",), ("stride_1",)
ALL = (*ACROSS, *WITHIN)


@pytest.mark.parametrize(
    "layout, processes, programs",
    [
        (dict(data=2, tensor=2, context=2), 1, [{ALL}]),
        (dict(tensor=4), 2, [{("stride_1",)}]),
        (dict(data=4, expert=4), 2, [{("stride_1",)}]),
        (dict(data=2, tensor=2), 2, [{ALL}, {ACROSS}, {WITHIN}, {ALL, ACROSS, WITHIN}]),
        (dict(tensor=4, context=2), 2, [{ALL}, {ACROSS}, {WITHIN}, {ALL, ACROSS, WITHIN}]),
    ],
    ids=["one process", "tensor", "expert", "data and tensor", "context"],
)
@on_virtual_devices
def test_gpus_of_several_processes_meet_in_each_of_their_sets_and_then_in_all(
    layout, processes, programs
):
    group = DeviceGroup(Parallel(**layout), tuple(jax.devices()[:4]))
    usual, found = DeviceGroup.make, list[set[tuple[str, ...]]]()

    def make(self: DeviceGroup, program: Any, specs: Any) -> Any:
        text = jax.jit(self.step(program, (), specs)).lower().as_text()
        meetings = [line for line in text.splitlines() if " replica_groups = " in line]
        assert len(meetings) % 4 == 0  # of each kind one
        found.append({tuple(re.findall(r'axis_ref<name = "(\w+)"', line)) for line in meetings})
        return usual(self, program, specs)

    with (
        mock.patch.object(DeviceGroup, "make", make),
        mock.patch.object(nccl_memory, "_processes", lambda _: processes),
    ):
        nccl_memory._run_collectives(group)
    assert found == programs


def test_processes_that_do_not_meet_are_an_error_after_a_time():
    group, wait = group_of(dict(tensor=4), 2), threading.Event()
    with mock.patch.object(nccl_memory, "_run_collectives", lambda *_: wait.wait(60)):
        with pytest.raises(
            nccl_memory.CollectiveError, match="did not connect within 0 s; XLA_FLAGS must"
        ):
            nccl_memory._run_collectives_with_timeout(group, 0.05)
    wait.set()
    with mock.patch.object(
        nccl_memory, "_run_collectives", side_effect=nccl_memory.CollectiveError("no")
    ):
        with pytest.raises(nccl_memory.CollectiveError, match="no"):
            nccl_memory._run_collectives_with_timeout(group)
    with mock.patch.object(nccl_memory, "_run_collectives"):
        nccl_memory._run_collectives_with_timeout(group)


def test_each_set_has_that_time_of_its_own():
    """Four programs of 0.1 s end where each has 0.25 s; a fifth that waits is an error."""
    group, wait = group_of(dict(tensor=4, context=2), 2), threading.Event()

    def meet(_: DeviceGroup, ended: Any, waits: bool = False) -> None:
        for _ in range(4):
            time.sleep(0.1)
            ended()
        if waits:
            wait.wait(60)

    with mock.patch.object(nccl_memory, "_run_collectives", meet):
        nccl_memory._run_collectives_with_timeout(group, 0.25)
    with mock.patch.object(nccl_memory, "_run_collectives", partial(meet, waits=True)):
        with pytest.raises(nccl_memory.CollectiveError, match="did not connect"):
            nccl_memory._run_collectives_with_timeout(group, 0.25)
    wait.set()
