"""The virtual device: what it refuses, and that the engine's device path gives it no cause.

The mutations at the end are the point of it all: a single dropped completion,
anywhere, is found for every seed, however the scheduler happened to run things.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpiring.device.base import Reduction
from mpiring.device.streams import StreamDevice
from mpiring.engine.execution import Binding, Execution
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import HazardError, StallError
from mpiring.schedule.catalog import Plan, schedule
from mpiring.schedule.chunks import split
from mpiring.schedule.fusing import fused
from mpiring.schedule.ops import Buffer, Schedule
from mpiring.schedule.staging import THROUGH_HOST, Detour, staged
from mpiring.simulation.streams import (
    StreamTransport,
    VirtualDriver,
    VirtualEvent,
    VirtualNode,
    VirtualStream,
)
from mpiring.simulation.world import VirtualTransport, World
from mpiring.task import Task
from mpiring.transport.peer import PeerTransport

SUM = Reduction("sum")


def nothing() -> None:
    pass


@pytest.fixture
def driver() -> VirtualDriver:
    return VirtualDriver(seed=1)


def observe(driver: VirtualDriver, stream: VirtualStream) -> None:
    """Let the host see the end of all that is on ``stream``."""
    event = driver.event()
    driver.record(event, stream)
    while not driver.query(event):
        pass


# -- the scheduler


def test_launching_only_queues(driver: VirtualDriver) -> None:
    array = StreamDevice(driver).empty(4, "f4")
    assert np.isnan(array).all()
    driver.launch(driver.default, "fill", lambda: array.fill(3), writes=[array])
    assert np.isnan(array).all() and driver.busy
    observe(driver, driver.default)
    assert (array == 3).all() and not driver.busy


def test_streams_keep_their_order_and_run_in_any_among_each_other() -> None:
    orders = set()
    for seed in range(40):
        driver = VirtualDriver(seed)
        order: list[str] = []
        one, two = VirtualStream("one"), VirtualStream("two")
        for stream, name in ((one, "a"), (one, "b"), (two, "x")):
            driver.launch(stream, name, functools.partial(order.append, name))
        while driver.step():
            pass
        orders.add("".join(order))
    assert orders == {"abx", "axb", "xab"}


def test_a_stream_that_waits_for_an_event_comes_after_it() -> None:
    for seed in range(20):
        driver = VirtualDriver(seed)
        order: list[str] = []
        one, two, event = VirtualStream("one"), VirtualStream("two"), VirtualEvent()
        array = driver.allocate(4, "f4")
        driver.launch(one, "a", functools.partial(order.append, "a"), writes=[array])
        driver.record(event, one)
        driver.wait(two, event)
        driver.launch(two, "x", functools.partial(order.append, "x"), reads=[array])
        while driver.step():
            pass
        assert order == ["a", "x"]


# -- hazards between kernels


def test_kernels_on_two_streams_without_an_order_are_a_hazard(driver: VirtualDriver) -> None:
    array, other = driver.allocate(8, "f4"), VirtualStream("side")
    driver.launch(driver.default, "produce", nothing, writes=[array])
    with pytest.raises(
        HazardError,
        match=r"kernel use on stream side reads elements 2 to 4 of device memory 1, "
        r"which kernel produce on stream default writes: no stream, event or observed",
    ):
        driver.launch(other, "use", nothing, reads=[array[2:4]])


@pytest.mark.parametrize(
    ("first", "second", "hazard"),
    [("r", "r", False), ("r", "w", True), ("w", "r", True), ("w", "w", True)],
)
def test_only_a_writer_makes_a_conflict(
    driver: VirtualDriver, first: str, second: str, hazard: bool
) -> None:
    array, other = driver.allocate(8, "f4"), VirtualStream("side")
    use = {"r": "reads", "w": "writes"}
    driver.launch(driver.default, "one", nothing, **{use[first]: [array]})
    if hazard:
        with pytest.raises(HazardError):
            driver.launch(other, "two", nothing, **{use[second]: [array]})
    driver.launch(other, "apart", nothing, writes=[driver.allocate(8, "f4")])


def test_an_event_orders_what_came_before_its_record_and_nothing_else(
    driver: VirtualDriver,
) -> None:
    array, other, event = driver.allocate(8, "f4"), VirtualStream("side"), VirtualEvent()
    driver.launch(driver.default, "one", nothing, writes=[array[:4]])
    driver.record(event, driver.default)
    driver.launch(driver.default, "late", nothing, writes=[array[4:]])
    driver.wait(other, event)
    driver.launch(other, "use", nothing, reads=[array[:4]])
    with pytest.raises(HazardError, match="kernel late"):
        driver.launch(other, "use", nothing, reads=[array[4:]])


def test_order_is_handed_on_from_stream_to_stream(driver: VirtualDriver) -> None:
    array = driver.allocate(8, "f4")
    streams = [VirtualStream(str(number)) for number in range(4)]
    driver.launch(streams[0], "one", nothing, writes=[array])
    for before, after in itertools.pairwise(streams):
        event = driver.event()
        driver.record(event, before)
        driver.wait(after, event)
    driver.launch(streams[-1], "use", nothing, writes=[array])


def test_what_the_host_has_observed_orders_all_later_work(driver: VirtualDriver) -> None:
    array, other = driver.allocate(8, "f4"), VirtualStream("side")
    driver.launch(driver.default, "produce", nothing, writes=[array])
    observe(driver, driver.default)
    driver.launch(other, "use", nothing, reads=[array])


# -- hazards with messages and the host


def test_that_a_kernel_happens_to_be_over_is_no_excuse(driver: VirtualDriver) -> None:
    array = driver.allocate(8, "f4")
    driver.launch(driver.default, "produce", lambda: array.fill(1), writes=[array])
    while driver.step():
        pass
    assert (array == 1).all()
    with pytest.raises(
        HazardError,
        match=r"a send to rank 3 reads elements 0 to 8 of device memory 1, which kernel produce on "
        r"stream default writes: the host has observed no event recorded behind that",
    ):
        driver.begin("a send to rank 3", array, writes=False)


def test_an_event_recorded_too_early_does_not_cover(driver: VirtualDriver) -> None:
    array, event = driver.allocate(8, "f4"), driver.event()
    driver.record(event, driver.default)
    driver.launch(driver.default, "produce", nothing, writes=[array])
    while not driver.query(event):
        pass
    with pytest.raises(HazardError):
        driver.host(array)


def test_a_send_may_read_what_kernels_read(driver: VirtualDriver) -> None:
    array = driver.allocate(8, "f4")
    driver.launch(driver.default, "look", nothing, reads=[array])
    driver.begin("a send", array, writes=False)
    driver.launch(driver.default, "look again", nothing, reads=[array])
    with pytest.raises(HazardError, match=r"a receive writes .* kernel look .* reads"):
        driver.begin("a receive", array, writes=True)


def test_messages_are_under_way_until_their_end_is_observed(driver: VirtualDriver) -> None:
    array = driver.allocate(8, "f4")
    incoming = driver.begin("a receive from rank 1", array[:4], writes=True)
    outgoing = driver.begin("a send to rank 1", array[4:], writes=False)
    for access in (
        lambda: driver.launch(driver.default, "use", nothing, reads=[array[:4]]),
        lambda: driver.launch(driver.default, "use", nothing, writes=[array[4:]]),
        lambda: driver.begin("a send", array[:2], writes=False),
        lambda: driver.begin("a receive", array[6:], writes=True),
        lambda: driver.host(array[:1]),
        lambda: driver.host(array[7:], writes=True),
    ):
        with pytest.raises(HazardError, match=r"rank 1 .*: the host has not observed its end"):
            access()
    driver.host(array[4:])
    driver.end(incoming)
    driver.end(outgoing)
    driver.launch(driver.default, "use", nothing, writes=[array])


def test_memory_stays_alive_while_a_kernel_may_touch_it(driver: VirtualDriver) -> None:
    """The same bytes given to somebody else would be a hazard that nobody made."""
    array = driver.allocate(8, "f4")
    driver.launch(driver.default, "produce", nothing, writes=[array])
    del array
    assert len(driver._memory) == 1
    observe(driver, driver.default)
    assert len(driver._memory) == 0


# -- memory of other ranks


def test_another_ranks_memory_is_read_while_it_is_being_sent_and_not_longer() -> None:
    node = VirtualNode()
    owner, visitor = VirtualDriver(1, node), VirtualDriver(2, node)
    array, landing = owner.allocate(8, "f4"), visitor.allocate(4, "f4")
    exported = owner.export(array[2:])
    assert exported is not None and exported[1] == 8
    mapped = visitor.mapped(*exported, 4, "f4")
    copy = visitor.transfer(mapped, landing)
    with pytest.raises(HazardError, match="of another rank, which is in no send that is under way"):
        copy(visitor.default)
    message = owner.begin("a send", array[2:6], writes=False)
    copy(visitor.default)
    with pytest.raises(HazardError, match=r"a send is taken for over, while kernel copy .* of the"):
        owner.end(message)
    message = owner.begin("a send", array, writes=False)
    observe(visitor, visitor.default)
    owner.end(message)


def test_what_was_exported_is_found_by_its_handle_for_good() -> None:
    node = VirtualNode()
    owner, visitor = VirtualDriver(1, node), VirtualDriver(2, node)
    array = owner.allocate(8, "f4")
    array[:] = np.arange(8)
    handle, _ = owner.export(array)
    assert owner.shared(array) and not owner.shared(owner.allocate(8, "f4"))
    del array
    assert visitor.mapped(handle, 4, 2, "f4").tolist() == [1, 2]
    assert owner.export(owner.hidden(8, "f4")) is None


# -- the device's tasks


def test_tasks_do_what_they_say_once_they_are_over(driver: VirtualDriver) -> None:
    device = StreamDevice(driver)
    source, target, host = device.empty(4, "f4"), device.empty(4, "f4"), device.staging(4, "f4")
    source[:], target[:] = [1, 2, 3, 4], 10

    def run(task: Task) -> None:
        assert not task.immediate
        task.start()
        while not task.done():
            pass

    run(device.reduce(source, target, SUM))
    assert target.tolist() == [11, 12, 13, 14]
    run(device.scale(target, 0.5))
    run(device.copy(target, host))
    assert host.tolist() == [5.5, 6, 6.5, 7]
    run(device.copy(host, source))
    assert source.tolist() == host.tolist()


def test_a_reduction_and_its_scaling_follow_each_other_in_one_round(driver: VirtualDriver) -> None:
    device = StreamDevice(driver)
    source, target = device.empty(4, "f4"), device.empty(4, "f4")
    source[:], target[:] = 1, 2
    tasks = [device.reduce(source, target, SUM), device.scale(target, 0.5)]
    for task in tasks:
        task.start()
    while not all(task.done() for task in tasks):
        pass
    assert target.tolist() == [1.5] * 4


# -- whole collectives


class Dropping(VirtualDriver):
    """A device that forgets its record number ``drop``: its event looks long over."""

    def __init__(self, seed: int, node: VirtualNode) -> None:
        super().__init__(seed, node)
        self.records = 0
        self.drop: int | None = None

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        if self.records != self.drop:
            super().record(event, stream)
        self.records += 1


class Impatient(StreamTransport):
    """Messages of which number ``drop`` is taken for over as soon as it is started."""

    def __init__(self, *arguments: Any, drop: int | None) -> None:
        super().__init__(*arguments)
        self.messages = 0
        self.drop = drop

    def send(self, *arguments: Any, **options: Any) -> Task:
        return self._perhaps(super().send(*arguments, **options))

    def recv(self, *arguments: Any, **options: Any) -> Task:
        return self._perhaps(super().recv(*arguments, **options))

    def _perhaps(self, task: Task) -> Task:
        if self.messages == self.drop:
            task.done = lambda: True
        self.messages += 1
        return task


class Case(NamedTuple):
    plan: Plan
    path: str  #: direct, staged, peer; or one in words that detours from the caller's memory
    segment: int | None  #: elements that are cut to, where the path cuts
    starts: int


ALL = frozenset(Buffer)
CALLERS = frozenset({Buffer.DATA})
NONE: frozenset[Buffer] = frozenset()

#: What a path makes of a schedule, and whether the caller's memory can travel as it is.
DETOURS = {
    "staged": THROUGH_HOST,
    "direct, detour": Detour(Buffer.SCRATCH, CALLERS, CALLERS),
    "peer": Detour(Buffer.SCRATCH, NONE, NONE),
    "peer, detour": Detour(Buffer.SCRATCH, CALLERS, NONE),
}


class Rank:
    """A rank of an all-reduce between kernels of the caller's, ``starts`` times over one array."""

    def __init__(self, world: World, node: VirtualNode, rank: int, case: Case, seed: int) -> None:
        self.driver = Dropping(seed, node)
        self.device = StreamDevice(self.driver)
        transport: Any = VirtualTransport(world, rank)
        if case.path.startswith("peer"):
            transport = PeerTransport(transport, transport.duplicate(), self.device)
        self.transport = Impatient(transport, self.driver, drop=None)
        self.rank, self.case = rank, case
        self.results: list[np.ndarray] = []

    def run(self) -> Iterator[None]:
        """The program; yields where it waits."""
        device, driver = self.device, self.driver
        own = planned(self.case, self.rank)
        callers = driver.hidden if "detour" in self.case.path else device.empty
        data = callers(own.count, "f4")
        buffers = {
            Buffer.DATA: data,
            Buffer.SCRATCH: device.scratch(own.extent(Buffer.SCRATCH), "f4"),
            Buffer.HOST: device.staging(own.extent(Buffer.HOST), "f4"),
        }
        binding = Binding(buffers, device, self.transport, 1, SUM)
        execution, engine = Execution(own, binding), ProgressEngine()
        mine = VirtualStream("the caller's")
        for turn in range(self.case.starts):
            values = np.arange(own.count) + self.rank + turn
            driver.launch(mine, "produce", lambda v=values: np.copyto(data, v), writes=[data])
            with driver.use(mine):
                engine.start(execution, [device.record(data)])
            while not execution.finished:
                yield
                engine.poll()
            if execution.error is not None:
                raise execution.error
            # Any stream of the caller's sees the result, and may write over it at once.
            mine = VirtualStream("another of the caller's")
            driver.launch(mine, "consume", lambda: self.results.append(data.copy()), writes=[data])
        while driver.step():
            pass


def all_reduce(size: int, seed: int, case: Case, **drop: tuple[int, int]) -> list[Rank]:
    """Run it in an order that ``seed`` chooses; ``drop`` is records or messages=(rank, number)."""
    world = World(size, seed)
    node = VirtualNode()
    ranks = [Rank(world, node, rank, case, seed * size + rank) for rank in range(size)]
    if "records" in drop:
        rank, ranks[rank].driver.drop = drop["records"]
    if "messages" in drop:
        rank, ranks[rank].transport.drop = drop["messages"]
    # One thread for all: many times faster than World.run, which has one for each rank.
    running = [rank.run() for rank in ranks]
    turns = 0  # in a row, in which there was no message to move
    while running:
        program = world.random.choice(running)
        if next(program, program) is program:
            running.remove(program)
        matched = world._matched()
        for pair in matched:
            if world.random.random() < 0.5:
                world._deliver(pair)
        turns = 0 if matched else turns + 1
        if turns > 50 * size:
            if not any(rank.driver.step() for rank in ranks):
                raise StallError("all ranks wait, and nothing is under way")
            turns = 0
    return ranks


@functools.cache
def planned(case: Case, rank: int) -> Schedule:
    own = schedule(case.plan, rank)
    if case.segment:
        own = staged(own, case.segment, DETOURS[case.path])
    return fused(own) if case.path.startswith("peer") else own


#: (algorithm, elements of the ring's segments, path, elements it cuts to), cheap ones first.
KINDS = [
    ("doubling", None, "direct", None),
    ("doubling", None, "staged", 64),
    ("doubling", None, "peer", 64),
    ("ring", None, "direct", None),
    ("ring", None, "peer", 64),
    ("ring", None, "peer, detour", 64),
    ("ring", None, "staged", 64),
    ("ring", 1, "direct", None),
    ("ring", 1, "peer", 64),
    ("ring", 1, "peer, detour", 64),
    ("doubling", None, "staged", 3),
    ("doubling", None, "peer, detour", 3),
    ("ring", None, "direct, detour", 64),
    ("ring", None, "staged", 1),
    ("ring", None, "peer, detour", 1),
    ("ring", 1, "staged", 64),
]


def case_of(size: int, seed: int) -> Case:
    """Both families, all paths, whole and in segments; on many ranks mostly the cheap."""
    turn, rest = divmod(seed, {2: 1, 4: 5, 8: 20}[size])
    kind = seed % 4 if rest else turn % len(KINDS)
    algorithm, ring, path, segment = KINDS[kind]
    plan = Plan("allreduce", algorithm, split(0, size + seed % 3, size), True, ring)
    return Case(plan, path, segment, 2 if seed % 7 == 1 else 1)


SEEDS = 300


@pytest.mark.timeout(240)  # hundreds of runs, on a machine that may be busy
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_clean_run_raises_no_alarm_and_one_dropped_completion_always_does(size: int) -> None:
    for seed in range(SEEDS):
        case = case_of(size, seed)
        ranks = all_reduce(size, seed, case)
        count = case.plan.chunks[-1][1]
        for rank in ranks:
            assert len(rank.results) == case.starts
            for turn, result in enumerate(rank.results):
                expected = size * (np.arange(count) + turn) + size * (size - 1) / 2
                np.testing.assert_array_equal(result, expected)
        chance = random.Random(seed)
        victim = chance.choice(ranks)
        # A message's memory may be used again only by the next start: two are needed to tell.
        if case.starts == 2:
            drop = {"messages": (victim.rank, chance.randrange(victim.transport.messages))}
        else:
            drop = {"records": (victim.rank, chance.randrange(victim.driver.records))}
        with pytest.raises(found_by(case, **drop)):
            all_reduce(size, seed, case, **drop)


def found_by(case: Case, **drop: tuple[int, int]) -> tuple[type[Exception], ...]:
    """A peer that is not answered may wait for ever, before it could do any harm."""
    stalls = case.path.startswith("peer") and "messages" in drop
    return (HazardError, StallError) if stalls else (HazardError,)


@pytest.mark.parametrize("kind", ["records", "messages"])
@pytest.mark.parametrize("path", list(DETOURS))
def test_every_completion_of_a_pipeline_matters(kind: str, path: str) -> None:
    """Not a sample but all of them, one after the other."""
    plan = Plan("allreduce", "ring", split(0, 7, 3), True, 1)
    case = Case(plan, path, 2, starts=2)
    (first, *_) = all_reduce(3, 0, case)
    number = {"records": first.driver.records, "messages": first.transport.messages}[kind]
    assert number > 12
    for drop in range(number):
        with pytest.raises(found_by(case, **{kind: (0, drop)})):
            all_reduce(3, 0, case, **{kind: (0, drop)})
