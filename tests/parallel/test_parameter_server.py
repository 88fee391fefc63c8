"""The parameter server with its messages, arrays and optimizers, on virtual ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, MismatchError, MpiringError, StallError
from mpiring.nn.optim import SGD, Adam
from mpiring.parallel.parameter_server import ParameterServer, Summary
from mpiring.parallel.placement import roles
from mpiring.parallel.protocol import staleness_bound
from mpiring.simulation.world import VirtualTransport, World

MODES = [("sync", None), ("async", None), ("ssp", 0), ("ssp", 2)]
#: Small messages, so that an array travels as several.
SMALL: dict[str, Any] = {"smallest": 64, "largest": 128}

#: Sizes that nothing divides, one below a message, two dtypes.
SHAPES = {"weight": ((7, 11), "f4"), "bias": ((1,), "f8"), "table": ((50,), "f8")}


def arrays() -> dict[str, np.ndarray]:
    return {name: np.full(shape, 5, dtype) for name, (shape, dtype) in SHAPES.items()}


class Plain:
    """Learning rate 1."""

    def __init__(self, count: int, dtype: Any) -> None: ...

    def step(self, values: np.ndarray, gradients: np.ndarray) -> None:
        values -= gradients


Program = Callable[[ParameterServer, dict[str, np.ndarray], Callable[[], None]], Any]


def run(
    ranks: int,
    program: Program,
    *,
    seed: int = 0,
    optimizer: Any = Plain,
    **options: Any,
) -> list[tuple[Any, dict[str, np.ndarray], Summary]]:
    """``program(server, parameters, pause)`` on every worker; what it returned (or raised), and
    the final parameters, of each rank; the summary. ``pause`` lets the others run."""
    world = World(ranks, seed)

    def rank(transport: VirtualTransport, engine: ProgressEngine) -> Any:
        comm = Communicator(transport, engine=engine)
        parameters = arrays()
        result = None
        try:
            with ParameterServer(
                comm, parameters, optimizer=optimizer, **{**SMALL, **options}
            ) as server:
                if server.is_worker:
                    pause = partial(world.pause, transport.rank)
                    result = program(server, parameters, pause)
        except ZeroDivisionError as error:
            result = error
        return result, parameters, server.summary()

    return world.run(rank)


def pushes(steps: Sequence[int], value: float = 1.0) -> Program:
    """Each worker takes its number of steps, pushing ``value`` in an order of its own."""

    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        order = random.Random(server.rank)
        for _ in range(steps[server.rank]):
            for name in order.sample(list(parameters), len(parameters)):
                server.push(name, np.full_like(parameters[name], value))
                pause()
            server.step()

    return program


def places(ranks: int) -> Iterator[int | str]:
    yield from ("colocated", "colocated:1", f"colocated:{ranks}")
    yield from range(1, min(4, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_every_push_counts_once(mode: str, staleness: int | None, ranks: int) -> None:
    """Rate 1, everybody pushes ones: the start minus the steps of all, whoever ends when."""
    for number, servers in enumerate(places(ranks)):
        seed = 100 * ranks + number
        steps = random.Random(seed).choices((0, 1, 2, 4), k=ranks)
        results = run(
            ranks, pushes(steps), seed=seed, mode=mode, staleness=staleness, servers=servers
        )
        workers = roles(ranks, servers).workers
        total = sum(steps[worker] for worker in workers)
        summary = results[0][2]
        assert summary.steps == {worker: steps[worker] for worker in workers}
        assert summary.updates_lost == 0
        assert max(summary.staleness, default=0) <= staleness_bound(mode, len(workers), staleness)
        for worker in workers:
            for array in results[worker][1].values():
                np.testing.assert_array_equal(array, 5 - total)


@pytest.mark.parametrize(("mode", "staleness"), MODES)
@pytest.mark.parametrize("servers", ["colocated", "colocated:1", "colocated:3", 1, 2])
def test_bytes_are_those_of_the_formula(
    servers: int | str, mode: str, staleness: int | None
) -> None:
    seen = []

    def program(server: ParameterServer, *rest: Any) -> None:
        seen.append(server.traffic())
        pushes([3] * 4)(server, *rest)

    summary = run(4, program, mode=mode, staleness=staleness, servers=servers)[0][2]
    for rank, link in seen[0].items():
        assert summary.bytes_in[rank] == 3 * link.into
        assert summary.bytes_out[rank] == 3 * link.out
    # At the end every worker is sent what is not its own once more.
    nbytes = sum(array.nbytes for array in arrays().values())
    apart = {"colocated": 3, "colocated:1": 3, "colocated:3": 3, 1: 3, 2: 2}[servers]
    assert summary.final_bytes == apart * nbytes


def gradient(worker: int, step: int, name: str, values: np.ndarray) -> np.ndarray:
    """Depends on everything, so that a wrong version or order shows in its bits."""
    return np.sin(values * (1 + worker) + step + len(name)).astype(values.dtype)


def learn(steps: int) -> Program:
    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        for step in range(steps):
            for name, values in parameters.items():
                server.push(name, gradient(server.rank, step, name, values))
                pause()
            server.step()

    return program


@pytest.mark.parametrize("servers", ["colocated", "colocated:2", 2])
@pytest.mark.parametrize(
    "optimizer", [partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01), partial(Adam, lr=0.1)]
)
def test_sync_is_the_sum_in_the_order_of_workers(servers: int | str, optimizer: Any) -> None:
    """To the bit what one process computes that adds in this order."""
    workers = roles(5, servers).workers
    expected = arrays()
    optimizers = {name: optimizer(array.size, "f4") for name, array in expected.items()}
    for step in range(3):
        for name, values in expected.items():
            total = gradient(workers[0], step, name, values)
            for worker in workers[1:]:
                total += gradient(worker, step, name, values)
            optimizers[name].step(values.reshape(-1), total.reshape(-1))
    for seed in range(6):
        results = run(
            5,
            learn(3),
            seed=seed,
            servers=servers,
            optimizer=lambda count, dtype: optimizer(count, "f4"),
        )
        for worker in workers:
            for name, array in results[worker][1].items():
                np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(("mode", "staleness"), [("async", None), ("ssp", 1)])
@pytest.mark.parametrize("servers", ["colocated:2", 2])
def test_a_replayed_run_has_the_same_bits(
    tmp_path: Path, servers: int | str, mode: str, staleness: int | None
) -> None:
    log = tmp_path / "log"
    options: dict[str, Any] = {"mode": mode, "staleness": staleness, "servers": servers}
    first = run(4, learn(4), seed=1, record=log, **options)[0][1]
    apart = []
    for seed in range(2, 6):
        again = run(4, learn(4), seed=seed, replay=log, **options)[0][1]
        free = run(4, learn(4), seed=seed, **options)[0][1]
        for name, array in first.items():
            np.testing.assert_array_equal(array, again[name])
            apart.append(bool((array != free[name]).any()))
    assert any(apart)  # without the log the delays do make a difference
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_run_that_is_another_one_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(3, pushes([2, 2, 2]), mode="async", servers=1, record=log)
    with pytest.raises(MismatchError, match="departs from its log"):
        run(3, pushes([2, 1, 2]), mode="async", servers=1, replay=log)
    refuse("recorded with 1 servers; here are 2", mode="async", servers=2, replay=log, ranks=4)
    refuse("worker 1 at step 0; the workers are", mode="async", servers=1, replay=log, ranks=2)
    log.write_text("something else")
    refuse("not a log of arrivals", mode="async", servers=1, replay=log)
    refuse("rank 0: .*No such file", mode="async", servers=1, replay=tmp_path / "none")
    refuse("sync has the same result", record=log)


# -- a straggler


def race(mode: str, staleness: int | None, seed: int) -> int:
    """Steps of a rank that pauses 25 times as often, when the first of the others has taken 12."""
    taken = [0, 0, 0]
    seen: list[int] = []

    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        while not seen:
            for name, values in parameters.items():
                for _ in range(25 if server.rank == 2 else 1):
                    pause()
                server.push(name, values)
            server.step()
            taken[server.rank] += 1
            if taken[server.rank] == 12:
                seen.append(taken[2])

    run(4, program, seed=seed, mode=mode, staleness=staleness, servers=1)
    return seen[0]


@pytest.mark.parametrize("seed", range(2))
def test_a_straggler_holds_up_sync_and_not_async(seed: int) -> None:
    """How far it has come when the others have taken 12 steps tells how much they waited."""
    slow = {mode: race(*mode, seed) for mode in MODES}
    assert slow["sync", None] >= 11 and slow["ssp", 0] >= 11
    assert 9 <= slow["ssp", 2] < 11
    assert slow["async", None] <= 4


def test_an_answer_that_nobody_takes_yet_holds_up_no_worker_of_its_server() -> None:
    """Rank 1 computes on for long after its pushes; rank 0, server and worker, does not wait."""
    taken = [0]

    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        for _ in range(1 if server.rank else 5):
            for name, values in parameters.items():
                server.push(name, np.ones_like(values))
            for _ in range(20_000 if server.rank else 50):
                if taken[0] == 5:
                    break
                pause()
            server.step()
            taken[0] += server.rank == 0
            assert server.rank == 0 or taken[0] == 5

    run(2, program, mode="async", servers="colocated:1")


# -- ends


@pytest.mark.parametrize(("mode", "staleness"), MODES)
@pytest.mark.parametrize("servers", ["colocated", "colocated:1", 2])
@pytest.mark.parametrize("after", range(4))
def test_a_worker_that_raises_holds_nobody_up(
    servers: int | str, mode: str, staleness: int | None, after: int
) -> None:
    """It gives up after ``after`` of three pushes of its third step; the others take six."""

    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        for step in range(6):
            for number, (name, values) in enumerate(parameters.items()):
                if server.rank == 0 and step == 2 and number == after:
                    raise ZeroDivisionError
                server.push(name, np.ones_like(values))
                pause()
            if server.rank == 0 and step == 2:
                raise ZeroDivisionError
            server.step()

    for seed in range(3):
        results = run(4, program, seed=seed, mode=mode, staleness=staleness, servers=servers)
        workers = roles(4, servers).workers
        assert isinstance(results[0][0], ZeroDivisionError)
        assert results[0][2].updates_lost == 0
        assert results[0][2].steps == {
            worker: 6 if worker else 2 + (after == 3) for worker in workers
        }
        whole = 6 * (len(workers) - 1) + 2
        for worker in workers[1:]:
            for array in results[worker][1].values():
                # Of the third step of rank 0, a server took what came whole.
                assert set((5 - array).reshape(-1)) <= {whole, whole + 1}


def test_a_step_left_open_is_told_and_the_others_end() -> None:
    def program(server: ParameterServer, parameters: dict[str, Any], pause: Any) -> None:
        if server.rank == 0:
            server.push("bias", parameters["bias"])
            with pytest.raises(ArgumentError, match="in the middle of a step"):
                server.close()
        else:
            pushes([0, 3, 3])(server, parameters, pause)

    assert run(3, program, mode="async")[1][2].steps == {0: 0, 1: 3, 2: 3}


def test_alone() -> None:
    results = run(1, pushes([3]), mode="ssp", staleness=1)
    assert results[0][2].bytes_in == {0: 0}
    for array in results[0][1].values():
        np.testing.assert_array_equal(array, 2)


# -- what a worker sees


def test_parameters_stay_as_they_are_until_they_may_change() -> None:
    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        for name, values in parameters.items():
            server.push(name, np.ones_like(values))
        for _ in range(300):  # long enough for every answer to come
            pause()
            server._engine.poll()
        assert all((array == 5).all() for array in parameters.values())
        server.pull("weight")
        server.pull("weight")
        for _ in range(300):
            pause()
            server._engine.poll()
        assert (parameters["weight"] == 3).all() and (parameters["table"] == 5).all()
        server.step()
        assert all((array == 3).all() for array in parameters.values())

    run(2, program)
    run(3, program, servers=1)


def test_the_newest_parameters_between_two_steps() -> None:
    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> float:
        if server.rank == 0:
            pushes([4, 0])(server, parameters, pause)
        else:
            while (parameters["weight"] != 1).any():
                pause()
                server.refresh()
                # One version of everything that one server holds.
                assert len({float(array.reshape(-1)[0]) for array in parameters.values()}) == 1

    results = run(3, program, mode="async", servers=1)
    assert results[0][2].steps == {0: 4, 1: 0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_are_only_read(mode: str) -> None:
    def program(server: ParameterServer, parameters: dict[str, np.ndarray], pause: Any) -> None:
        gradients = {name: np.full_like(array, 3) for name, array in parameters.items()}
        for _ in range(3):
            for name, array in gradients.items():
                server.push(name, array)
            server.step()
            assert all((array == 3).all() for array in gradients.values())

    for seed in range(4):
        run(3, program, seed=seed, mode=mode)


def test_what_rank_0_has_is_where_all_begin() -> None:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> Any:
        comm = Communicator(transport, engine=engine)
        mine = np.full(40, 7.0 + transport.rank)
        with ParameterServer(comm, [mine], optimizer=Plain) as server:
            began = mine.copy()
            server.push(0, np.ones(40))
            server.step()
        return began, mine

    for began, ended in World(3).run(rank):
        np.testing.assert_array_equal(began, 7)
        np.testing.assert_array_equal(ended, 4)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_update_that_may_not_be_made_is_skipped_and_counted(mode: str) -> None:
    def program(
        server: ParameterServer, parameters: dict[str, np.ndarray], pause: Callable[[], None]
    ) -> None:
        for step in range(3):
            for name, values in parameters.items():
                bad = step == 1 and server.rank == 1 and name == "bias"
                server.push(name, np.full_like(values, np.nan if bad else 1))
            server.step()

    results = run(3, program, mode=mode, accept=lambda array: bool(np.isfinite(array).all()))
    for _, parameters, summary in results:
        np.testing.assert_array_equal(parameters["weight"], 5 - 9)
        # In sync the sum is not to be used, otherwise what one worker pushed.
        np.testing.assert_array_equal(parameters["bias"], 5 - (6 if mode == "sync" else 8))
        assert summary.skipped.total() == 1
        assert summary.updates_lost == 0
        assert mode != "sync" or summary.skipped == {2: 1}


# -- misuse


def refuse(message: str, *, ranks: int = 3, **options: Any) -> None:
    """Every rank is told the same, and nothing hangs."""

    def rank(transport: VirtualTransport, engine: ProgressEngine) -> str:
        comm = Communicator(transport, engine=engine)
        with pytest.raises(MpiringError, match=message) as caught:
            ParameterServer(comm, **{"parameters": arrays(), "optimizer": Plain, **options})
        return str(caught.value)

    assert len(set(World(ranks).run(rank))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lazy"}, "'lazy'; allowed are sync, async, ssp"),
        ({"mode": "ssp"}, "staleness is None"),
        ({"servers": 3}, "leaves no worker among 3 ranks"),
        ({"servers": 0}, "servers is 0"),
        ({"servers": "somewhere"}, "servers is 'somewhere'"),
        ({"parameters": []}, "parameters: none given"),
        ({"parameters": [np.zeros((4, 4)).T[1:]]}, r"parameters\[0\]: the array is not C-contig"),
        ({"parameters": {"a": np.array(["text"])}}, r"parameters\['a'\]: .*dtype"),
        ({"smallest": 0}, "smallest is 0"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    refuse(message, **options)


def test_one_rank_alone_cannot_have_a_dedicated_server() -> None:
    refuse("leaves no worker among 1 rank: start more ranks", ranks=1, servers=1)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("parameters", {"a": np.zeros(4, "f4")}),
        ("mode", "async"),
        ("servers", "colocated:2"),
        ("smallest", 32),
    ],
)
def test_ranks_that_differ_are_told_alike(name: str, theirs: Any) -> None:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> str:
        comm = Communicator(transport, engine=engine)
        options = {"parameters": {"a": np.zeros(8, "f2")}, "optimizer": Plain}
        if transport.rank == 2:
            options[name] = theirs
        with pytest.raises(MismatchError, match="rank 2: ") as caught:
            ParameterServer(comm, **options)
        return str(caught.value)

    assert len(set(World(3).run(rank))) == 1


def test_one_rank_alone_may_be_wrong() -> None:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> str:
        comm = Communicator(transport, engine=engine)
        mine = np.zeros(8) if transport.rank else np.zeros(16)[::2]
        with pytest.raises(ArgumentError, match=r"rank 0: parameters\[0\]: .*contiguous") as caught:
            ParameterServer(comm, [mine], optimizer=Plain)
        return str(caught.value)

    assert len(set(World(3).run(rank))) == 1


def test_what_a_worker_does_wrong_is_told() -> None:
    def program(server: ParameterServer, parameters: dict[str, np.ndarray], pause: Any) -> None:
        weight = parameters["weight"]
        for key in ("weights", 0, ["list"]):
            with pytest.raises((ArgumentError, TypeError)):
                server.push(key, weight)
        for wrong in (weight.astype("f8"), weight[1:], np.zeros(76, "f4")):
            with pytest.raises(ArgumentError, match="for parameter 'weight', which has 77 x float"):
                server.push("weight", wrong)
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            server.push("weight", weight.T)
        with pytest.raises(ArgumentError, match="'weight' has not been pushed"):
            server.pull("weight")
        server.push("weight", weight)
        with pytest.raises(MismatchError, match="pushed before"):
            server.push("weight", weight)
        with pytest.raises(ArgumentError, match=r"never pushed in this step: \['bias', 'table'\]"):
            server.step()
        with pytest.raises(MismatchError, match="cannot pull"):
            server.refresh()
        server.push("bias", parameters["bias"])
        server.push("table", parameters["table"])
        server.step()
        with pytest.raises(ArgumentError, match="there is one after close"):
            server.summary()
        server.close()
        server.close()
        with pytest.raises(ArgumentError, match="push: the parameter server is closed"):
            server.push("weight", weight)

    run(2, program)


def test_a_server_does_not_push() -> None:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        with ParameterServer(comm, arrays(), optimizer=Plain, servers=1) as server:
            assert server.is_server == (transport.rank == 1)
            assert server.is_worker == (transport.rank == 0)
            if not server.is_worker:
                for call in (server.step, server.refresh, lambda: server.push("bias", 0)):
                    with pytest.raises(ArgumentError, match=r"rank 1 serves only.*ranks \[0\]"):
                        call()

    World(2).run(rank)


def test_an_optimizer_that_raises_is_not_hidden() -> None:
    class Broken(Plain):
        def step(self, values: np.ndarray, gradients: np.ndarray) -> None:
            raise ZeroDivisionError("in the optimizer")

    def rank(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        with ParameterServer(comm, [np.zeros(4)], optimizer=Broken, servers=1) as server:
            if server.is_worker:
                server.push(0, np.ones(4))
                server.step()

    with pytest.raises(ZeroDivisionError, match="in the optimizer"):
        World(2).run(rank)


def test_a_wait_that_does_not_end_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIRING_TIMEOUT", "1e-9")

    def program(server: ParameterServer, parameters: dict[str, np.ndarray], pause: Any) -> None:
        for _ in itertools.count():
            pause()

    with pytest.raises(
        StallError,
        match=r"rank 2 waits for the end of the other workers.*furthest behind are ranks \[0, 1\]",
    ):
        run(3, program, servers=1)
