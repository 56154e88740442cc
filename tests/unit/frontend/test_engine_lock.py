"""One thread at a time, in the order of asking; Ctrl-C waits."""

import signal
import threading
import time

import pytest

from octavo.frontend.engine_lock import EngineLock


@pytest.fixture(autouse=True)
def default_handler():
    """Ctrl-C raises KeyboardInterrupt, whatever other tests of this process have left."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_it_is_reentrant_and_excludes_others():
    lock, inside, most = EngineLock(), [], []

    def work():
        for _ in range(200):
            with lock, lock:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 800
    assert max(most) == 1


def test_turns_come_in_the_order_of_asking():
    lock, order = EngineLock(), []

    def work(number):
        with lock:
            order.append(number)

    threads = []
    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]


def test_an_interrupt_is_raised_at_the_end():
    lock, done = EngineLock(), []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
        with lock:
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is handler
    with lock:
        done.append("usable")
    assert done[-1] == "usable"


def test_it_is_wanted_by_a_thread_and_by_an_interrupt():
    lock = EngineLock()
    thread = threading.Thread(target=lock.__enter__)
    with pytest.raises(KeyboardInterrupt), lock:
        assert not lock.is_wanted
        signal.raise_signal(signal.SIGINT)
        assert lock.is_wanted
    with lock:
        assert not lock.is_wanted
        thread.start()
        while not lock.is_wanted:
            time.sleep(0.001)
    thread.join(10)
    assert not thread.is_alive()


def test_a_second_interrupt_does_not_wait():
    lock, done = EngineLock(), []
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == []


def test_who_is_interrupted_while_waiting_leaves_the_queue():
    lock, has_it, may_go = EngineLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            has_it.set()
            may_go.wait(10)

    def interrupt_twice():
        while not lock._waiting:
            time.sleep(0.001)
        main = threading.main_thread().ident
        for _ in range(2):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)

    threads = [threading.Thread(target=hold), threading.Thread(target=interrupt_twice)]
    threads[0].start()
    has_it.wait(10)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("it was taken")
    may_go.set()
    for thread in threads:
        thread.join(10)
    with lock:
        pass
