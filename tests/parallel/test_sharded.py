"""Sharded sums and updates on virtual ranks, and on virtual devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, MismatchError
from mpiring.nn.optim import SGD
from mpiring.parallel.reducer import Reducer
from mpiring.parallel.sharded import ShardedReducer
from mpiring.schedule.chunks import split
from mpiring.simulation.streams import VirtualStream
from mpiring.simulation.world import VirtualTransport, World
from mpiring.trace import Instrument
from tests.communicator.virtual import DeviceCommunicator, run
from tests.parallel.test_reducer import views

#: Buckets of 7 and 1, 300, and 2 and 64 elements, in the limits below; one may be of one element.
SIZES = [7, 1, 300, 2, 64]
LIMITS = {"bucket_bytes": 1100, "first_bucket_bytes": 32}
ONE_EACH = {"bucket_bytes": 1, "first_bucket_bytes": 1}


def parameters_of(values: list[Any], gradients: list[Any]) -> list[SimpleNamespace]:
    return [SimpleNamespace(value=v, gradient=g) for v, g in zip(values, gradients)]


def own(sharded: ShardedReducer, rank: int, size: int, whole: np.ndarray) -> np.ndarray:
    """A rank's chunks of an array in the order of parameters."""
    parts, start = [], 0
    for bucket in sharded.buckets:
        stop = start + bucket.gradient.size
        parts.append(whole[slice(*split(start, stop, size)[rank])])
        start = stop
    return np.concatenate(parts)


def descend(values: Any, gradients: Any, start: int) -> None:
    values -= gradients


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("limits", [LIMITS, ONE_EACH], ids=["several", "one each"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_rank_updates_its_chunks_by_the_sums(
    size: int, limits: dict[str, int], overlap: bool, shuffle: bool
) -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> tuple[np.ndarray, int]:
        comm, rank = Communicator(transport, engine=engine), transport.rank
        (flat, gradients), (values, parts) = views(SIZES), views(SIZES)
        parameters = parameters_of(parts, gradients)
        sharded = ShardedReducer(comm, parameters, overlap=overlap, **limits)
        values[:] = 1000
        for step in range(2):
            mine = (np.arange(flat.size) * (rank + 1) + step).astype("f4")
            total = np.arange(flat.size) * size * (size + 1) / 2 + size * step
            flat[:] = mine
            order = list(parameters)
            if shuffle:
                random.Random(rank).shuffle(order)
            with sharded.no_sync():
                for parameter in order:
                    sharded.ready(parameter)
            for parameter in order:
                sharded.ready(parameter)
            sharded.finish()
            np.testing.assert_array_equal(sharded.gradients, own(sharded, rank, size, total))
            np.testing.assert_array_equal(flat, mine)
            sharded.update(descend)
        assert sharded.total == flat.size
        return values, sharded.count

    for seed in range(3):
        results = World(size, seed).run(program)
        expected = 1000 - np.arange(374) * size * (size + 1) - size
        for values, _ in results:
            np.testing.assert_array_equal(values, expected)
        counts = [count for _, count in results]
        assert sum(counts) == 374
        buckets = 3 if limits is LIMITS else len(SIZES)
        assert max(counts) - min(counts) <= buckets


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_the_bits_are_those_of_the_ring(size: int, dtype: str) -> None:
    """SGD with momentum and weight decay, over all-reduced gradients and over shards."""

    def program(transport: VirtualTransport, engine: ProgressEngine) -> list[np.ndarray]:
        comm = Communicator(transport, engine=engine, algorithm="ring", segment=64)
        results = []
        for kind in (Reducer, ShardedReducer):
            draw = np.random.default_rng(transport.rank)
            (flat, gradients), (values, parts) = views(SIZES, dtype), views(SIZES, dtype)
            values[:] = np.random.default_rng(7).normal(size=values.size)
            parameters = parameters_of(parts, gradients)
            reducer = kind(comm, parameters, **LIMITS)
            count = reducer.count if isinstance(reducer, ShardedReducer) else flat.size
            optimizer = SGD(count, dtype, lr=0.1, momentum=0.9, weight_decay=0.01)
            for _ in range(3):
                flat[:] = draw.normal(size=flat.size)
                for parameter in parameters:
                    reducer.ready(parameter)
                reducer.finish()
                optimizer.steps += 1
                if isinstance(reducer, ShardedReducer):
                    reducer.update(optimizer.update)
                else:
                    optimizer.update(values, flat)
            results.append(values)
        return results

    for ring, sharded in World(size, 1).run(program):
        np.testing.assert_array_equal(sharded.view("u1"), ring.view("u1"))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("limits", [LIMITS, ONE_EACH], ids=["several", "one each"])
def test_shards_come_from_a_whole_and_become_one(size: int, limits: dict[str, int]) -> None:
    whole = np.random.default_rng(0).normal(size=sum(SIZES))

    def program(transport: VirtualTransport, engine: ProgressEngine) -> np.ndarray:
        comm = Communicator(transport, engine=engine)
        parameters = parameters_of(views(SIZES)[1], views(SIZES)[1])
        sharded = ShardedReducer(comm, parameters, **limits)
        shard = np.zeros(sharded.count)
        sharded.share_out(whole if transport.rank == 0 else None, shard)
        np.testing.assert_array_equal(shard, own(sharded, transport.rank, size, whole))
        again = np.zeros(sharded.total)
        for place, part in sharded.wholes(shard):
            again[place] = part
        return again

    for again in World(size).run(program):
        np.testing.assert_array_equal(again, whole)


class Watch(Instrument):
    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, label: str, key: int) -> None:
        self.events.append(label.partition("_init")[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_what_runs_behind_what(overlap: bool) -> None:
    """Sums behind backward, the gather of a bucket behind the update of the next."""

    def program(transport: VirtualTransport, engine: ProgressEngine) -> list[str]:
        comm = Communicator(transport, engine=engine)
        parameters = parameters_of(views([40, 50])[1], views([40, 50])[1])
        sharded = ShardedReducer(comm, parameters, overlap=overlap, **ONE_EACH)
        watch = Watch()
        engine.instruments.append(watch)
        for parameter in parameters:
            watch.events.append("ready")
            sharded.ready(parameter)
        sharded.finish()
        sharded.update(lambda values, gradients, start: watch.events.append(f"update {start}"))
        return watch.events

    behind = ["ready", "Reduce_scatter", "ready", "Reduce_scatter"]
    after = ["ready", "ready", "Reduce_scatter", "Reduce_scatter"]
    updates = ["update 0", "Allgatherv", "update 20", "Allgatherv"]
    for events in World(2).run(program):
        assert events == (behind if overlap else after) + updates


def test_time_that_updates_take_is_not_that_of_the_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("mpiring.parallel.sharded.time.perf_counter", lambda: now[0])

    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        parameters = parameters_of(views([40, 50])[1], views([40, 50])[1])
        sharded = ShardedReducer(comm, parameters, **ONE_EACH)
        for parameter in parameters:
            sharded.ready(parameter)
        sharded.finish()

        def work(values: Any, gradients: Any, start: int) -> None:
            now[0] += 1

        sharded.update(work)
        assert now == [2] and sharded.polling_seconds == sharded.waiting_seconds == 0

    World(1).run(program)


def test_layouts_that_differ_are_one_error_on_every_rank() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> str:
        comm = Communicator(transport, engine=engine)
        sizes = [4, 4 + (transport.rank == 2)]
        with pytest.raises(MismatchError) as caught:
            ShardedReducer(comm, parameters_of(views(sizes)[1], views(sizes)[1]))
        return str(caught.value)

    messages = World(3).run(program)
    assert len(set(messages)) == 1
    assert "rank 2: 9 x float32" in messages[0]


def test_gradients_of_several_dtypes_and_none_at_all_are_refused() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        mixed = [views([3])[1][0], views([3], "f8")[1][0]]
        with pytest.raises(ArgumentError, match="gradients of float32, float64 given; allowed is"):
            ShardedReducer(comm, parameters_of(mixed, mixed))
        with pytest.raises(ArgumentError, match=r"gradients of no dtype given; .* at least one"):
            ShardedReducer(comm, [])

    World(2).run(program)


def test_freed_collectives_start_no_more() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        sharded = ShardedReducer(comm, parameters_of(views([4])[1], views([4])[1]))
        sharded.free()
        with pytest.raises(ArgumentError, match=r"Start: .* freed"):
            sharded.update(descend)

    World(1).run(program)


# -- on a device: every access is covered by a completion that the host has observed


def trained(ranks: int, path: str, seed: int) -> list[np.ndarray]:
    """Three steps by kernels on streams of their own, each gradient the rank plus 1."""

    def program(comm: DeviceCommunicator) -> np.ndarray:
        driver, device, size = comm.device.driver, comm.device, 40 + 7
        values, gradients = device.empty(size, "f4"), device.empty(size, "f4")
        parameters = parameters_of([values[:40], values[40:]], [gradients[:40], gradients[40:]])

        def launch(name: str, work: Callable[[], Any], reads: Any, writes: Any) -> None:
            driver.launch(driver.producer(writes[0]), name, work, reads=reads, writes=writes)

        def update(mine: Any, sums: Any, start: int) -> None:
            launch("update", lambda: np.subtract(mine, sums, mine), [sums], [mine])

        launch("fill", lambda: values.fill(100), [], [values])
        driver.settle()
        sharded = ShardedReducer(comm, parameters, **ONE_EACH)
        for _ in range(3):
            with driver.use(VirtualStream("step")):
                activations = device.empty(size, "f4")
                launch(
                    "forward", lambda to=activations: np.copyto(to, values), [values], [activations]
                )
                for parameter in parameters:
                    launch(
                        "backward",
                        lambda to=parameter.gradient: to.fill(comm.rank + 1),
                        [activations],
                        [parameter.gradient],
                    )
                    sharded.ready(parameter)
                sharded.finish()
                sharded.update(update)
        driver.settle()
        return np.array(values)

    return run(ranks, program, seed, gpu_path=path)


@pytest.mark.parametrize("path", ["staged", "direct", "peer"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_is_read_while_it_is_written(ranks: int, path: str) -> None:
    for seed in range(3):
        for values in trained(ranks, path, seed):
            np.testing.assert_array_equal(values, 100 - 3 * ranks * (ranks + 1) / 2)
