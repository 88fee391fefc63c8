"""Memory comes back, is lent again, and never to two at once."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import weakref

import numpy as np
import pytest

from mpiring.device.pool import SLAB, Lease, Pool
from mpiring.device.streams import StreamDevice
from mpiring.errors import DeviceError, HazardError
from mpiring.simulation.streams import VirtualDriver, VirtualMemory


class Memory:
    """Allocations that are counted, and can run out."""

    def __init__(self, room: float = float("inf")) -> None:
        self.room = room
        self.allocations: list[int] = []
        self.settled = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        if sum(self.allocations) + nbytes > self.room:
            raise DeviceError("full")
        self.allocations.append(nbytes)
        return np.empty(nbytes, np.uint8)

    def settle(self) -> None:
        self.settled += 1


def extent(lease: Lease) -> tuple[int, int]:
    start = lease.piece.memory.ctypes.data + lease.piece.start
    return start, start + lease.piece.nbytes


def test_no_two_leases_overlap_and_what_is_kept_stays_bounded() -> None:
    memory = Memory()
    pool = Pool(memory.allocate, memory.settle)
    chance = random.Random(1)
    held: list[Lease] = []
    for _ in range(3000):
        if len(held) == 8:
            held.pop(chance.randrange(8))
        nbytes = int(2 ** chance.uniform(0, 23))
        held.append(pool.take(nbytes, private=True))
        extents = sorted(map(extent, held))
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(extents))
        assert extent(held[-1])[1] - extent(held[-1])[0] >= nbytes
    early = len(memory.allocations)
    for _ in range(3000):
        held.pop(chance.randrange(8))
        held.append(pool.take(int(2 ** chance.uniform(0, 23)), private=True))
    assert sum(memory.allocations) < 8 * 8 * (1 << 23)
    assert len(memory.allocations) - early < early / 2
    assert memory.settled == 0


def test_what_a_caller_had_is_settled_before_it_is_lent_again() -> None:
    memory = Memory()
    pool = Pool(memory.allocate, memory.settle)
    pool.take(100, private=False)
    pool.take(100, private=True)
    assert memory.settled == 1
    pool.take(100, private=True)
    assert (memory.settled, len(memory.allocations)) == (1, 1)


def test_what_is_long_goes_back_unless_others_have_mapped_it() -> None:
    memory = Memory()
    mapped: list[np.ndarray] = []
    pool = Pool(
        memory.allocate, memory.settle, lambda each: any(each is one for one in mapped), 4 * SLAB
    )
    pool.take(5 * SLAB, private=True)
    lease = pool.take(5 * SLAB, private=True)
    assert len(memory.allocations) == 2
    mapped.append(lease.piece.memory)
    del lease
    assert pool.take(5 * SLAB, private=True).piece.memory is mapped[0]
    assert len(memory.allocations) == 2


def test_what_nobody_uses_makes_room() -> None:
    memory = Memory(room=10 * SLAB)
    pool = Pool(memory.allocate, memory.settle)

    lease = pool.take(8 * SLAB, private=True)
    with pytest.raises(DeviceError):
        pool.take(3 * SLAB, private=True)
    weakref.finalize(lease.piece.memory, memory.allocations.remove, 8 * SLAB)
    del lease
    gc.collect()
    assert pool.take(3 * SLAB, private=True).piece.nbytes == 3 * SLAB


def test_views_keep_the_lease() -> None:
    device = StreamDevice(VirtualDriver())
    array = device.scratch(1000, "f4")
    view = array[10:20].view("u1")[4:]
    address = array.ctypes.data
    del array
    assert device.scratch(1000, "f4").ctypes.data != address
    del view
    assert address in [device.scratch(1000, "f4").ctypes.data for _ in range(2)]


def test_memory_that_is_lent_while_a_kernel_is_at_it_is_a_hazard() -> None:
    driver = VirtualDriver()
    device = StreamDevice(driver)

    def drop_in_use(array: np.ndarray) -> None:
        # A kernel of the caller's keeps nothing alive.
        memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
        target = np.frombuffer(memory, "f4").view(VirtualMemory)
        driver.launch(driver.default, "busy", lambda: target.fill(1), writes=[target])

    drop_in_use(device.empty(100, "f4"))
    device.scratch(100, "f4")
    drop_in_use(device.scratch(100, "f4"))
    with pytest.raises(HazardError, match="kernel busy"):
        device.scratch(100, "f4")
