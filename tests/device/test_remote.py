"""Memory of other processes, read by the kernel. (A process may read itself this way too.)"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from mpiring.device import remote
from mpiring.device.base import Reduction
from mpiring.device.host import window
from mpiring.device.remote import RemoteHostDevice
from mpiring.errors import TransportError, Unread
from mpiring.task import Task

OTHER = """
import sys
import numpy as np
words = np.arange(1000, dtype="f8")
print(words.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device() -> RemoteHostDevice:
    device = RemoteHostDevice()
    there = np.array([7.0])
    try:
        device.copy(device.mapped(*device.export(there), 1, "f8"), np.empty(1)).start()
    except TransportError as error:
        pytest.skip(f"not allowed here: {error}")
    return device


@pytest.fixture
def other() -> Iterator[tuple[int, int]]:
    """Another process, and where it has 0.0, 1.0, ... 999.0."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())


def handle(pid: int) -> bytes:
    return remote._HANDLE.pack(pid)


def test_another_process(device: RemoteHostDevice, other: tuple[int, int]) -> None:
    pid, address = other
    source = device.mapped(handle(pid), address, 1000, "f8")
    into = np.full(1000, -1.0)
    device.copy(source.part(10, 20), into[:10]).start()
    assert into[:11].tolist() == [*map(float, range(10, 20)), -1.0]
    run(device.combine(source.part(990, 1000), None, into[:10], Reduction("sum"), None))
    assert into[:11].tolist() == [*(1000.0 + 2 * i for i in range(10)), -1.0]


def run(tasks: list[Task]) -> None:
    for task in tasks:
        task.start()
        assert task.done()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_block_by_block(
    device: RemoteHostDevice, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Blocks of 8 elements, and of no more than 24 bytes for one call of the kernel."""
    monkeypatch.setattr(remote, "BLOCK", 64)
    monkeypatch.setattr(remote, "_LIMIT", 24)
    there, here = np.arange(count, dtype="f8"), np.full(count, 100.0)
    source = device.mapped(*device.export(there), count, "f8")
    tasks = device.combine(source, None, here, Reduction("sum"), None)
    run(tasks)
    assert here.tolist() == [100.0 + i for i in range(count)]
    there += 1  # a task reads what is there when it is started
    run(tasks)
    assert here.tolist() == [101.0 + 2 * i for i in range(count)]
    own = np.full(count, 3.0)
    run(device.combine(source, own, here, Reduction("prod"), 0.5))
    assert here.tolist() == [1.5 * (1 + i) for i in range(count)] and (own == 3).all()
    device.copy(source, here).start()
    assert here.tolist() == there.tolist()


def test_the_order_of_operands(device: RemoteHostDevice) -> None:
    def take(src: np.ndarray, dst: np.ndarray) -> None:
        dst *= 10
        dst += src

    op = Reduction("user", take, commutative=False)
    there, here = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    source = device.mapped(*device.export(there), 2, "f8")
    run(device.combine(source, None, here, op, None))
    assert here.tolist() == [31.0, 42.0]
    run(device.combine(source, np.array([5.0, 6.0]), here, op, None))
    assert here.tolist() == [15.0, 26.0]


def test_how_far_it_came_is_told(device: RemoteHostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK", 64)
    there, here = np.arange(20.0), np.zeros(20)
    source = device.mapped(*device.export(there), 20, "f8")
    tasks = device.combine(source, None, here, Reduction("sum"), None)
    readv, calls = remote._readv, itertools.count()
    monkeypatch.setattr(remote, "_readv", lambda *given: -1 if next(calls) == 2 else readv(*given))
    with pytest.raises(Unread) as caught:
        run(tasks)
    assert caught.value.done == 16
    assert here.tolist() == [*range(16), 0, 0, 0, 0]


def test_a_process_that_is_gone(device: RemoteHostDevice) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                             stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    source = device.mapped(handle(int(process.stdout)), 4096, 1, "u1")
    with pytest.raises(TransportError, match=r"of process \d+ cannot be read: No such proc"):
        device.copy(source, np.empty(1, "u1")).start()


def test_memory_that_the_kernel_does_not_copy(device: RemoteHostDevice) -> None:
    """As that of a driver: here the kernel's own page of the clock, which is mapped like it."""
    with open("/proc/self/maps") as maps:
        starts = [int(line.split("-")[0], 16) for line in maps if "[vvar" in line]
    if not starts:
        pytest.skip("this kernel has no such page")
    clock = window(np.ndarray, starts[0], 8, np.uint8)
    with pytest.raises(Unread, match=f"of process {os.getpid()} cannot be read: Bad addr"):
        device.copy(device.mapped(*device.export(clock), 8, "u1"), np.empty(8, "u1")).start()
