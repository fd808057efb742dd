"""Calls in a thread of their own: their order, their errors, and how the thread ends."""

import gc
import threading
import time

import pytest

from jaxattn.engine.process import PROCESS
from jaxattn.engine.seal import Seal
from jaxattn.engine.sender import Sender


def sleeping(log, name):
    def call():
        time.sleep(0.01)
        log.append(name)
        return name

    return call


def failing(error):
    def call():
        raise error

    return call


def test_calls_are_made_in_order_by_another_thread_and_nobody_waits_for_them():
    sender, log = Sender(Seal()), []
    sent = [sender.send(sleeping(log, name)) for name in range(3)]
    assert len(log) < 3
    assert [each.result() for each in sent] == log == [0, 1, 2]
    assert sender.send(threading.get_ident).result() != threading.get_ident()


def test_what_comes_after_waits_for_all_calls():
    sender, log = Sender(Seal()), []
    for name in range(3):
        sender.send(sleeping(log, name))
    sender.wait()
    assert log == [0, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_behind_a_call_that_fails_none_is_made_until_it_is_forgiven(error):
    sender, log = Sender(Seal()), []
    sent = sender.send(failing(error)), sender.send(sleeping(log, "behind"))
    for each in sent:
        with pytest.raises(type(error)):
            each.result()
    assert sender.unsettled and not log
    with pytest.raises(type(error)):
        sender.check()
    sender.forgive()
    sender.check()
    assert not sender.unsettled
    assert sender.send(sleeping(log, "again")).result() == "again" and log == ["again"]


def test_an_interrupt_between_the_count_and_the_call_makes_nobody_wait_for_ever():
    sender, log = Sender(Seal()), []
    sender.send(sleeping(log, "sent"))
    sender._given += 1  # the call itself never came
    sender.wait()
    assert log == ["sent"] and sender._given == 1


def test_the_thread_ends_with_its_owner_and_keeps_nothing():
    class Owner:
        pass

    owner = Owner()
    sender = Sender(Seal())
    sender.send(lambda: owner and 1).result()
    [thread] = [each for each in threading.enumerate() if each is sender._thread]
    sender.wait()
    gone = threading.Event()
    threading.Thread(target=lambda: thread.join(10) or gone.set()).start()
    del sender, owner
    gc.collect()
    assert gone.wait(10) and not thread.is_alive()


def test_what_the_thread_compiles_is_its_engines():
    seal = Seal()
    assert Sender(seal).send(lambda: PROCESS.seal).result() is seal
    assert PROCESS.seal is None
