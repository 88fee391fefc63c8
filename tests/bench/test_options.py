"""The command line: sizes, and one clear complaint for each mistake."""

from __future__ import annotations

import argparse

import pytest

from bench.__main__ import BENCHMARKS
from bench.options import Stop, counts, parse, size


def options(*arguments: str) -> argparse.Namespace:
    return parse(BENCHMARKS, arguments)[1]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8", 8),
        ("64B", 64),
        ("1K", 1024),
        ("1k", 1024),
        ("64KiB", 65536),
        ("1.5M", 1572864),
        ("2GB", 2 * 2**30),
        (" 4 MiB ", 4 * 2**20),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-8", "8T", "eight", "0", "0.5", "1e3", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"size|less than"):
        size(text)


def test_defaults() -> None:
    result = options("allreduce")
    assert (result.min, result.max, result.factor) == (8, 64 * 2**20, 4)
    assert (result.dtype, result.op, result.in_place) == ("float32", "sum", True)
    assert result.contenders == ("ring", "mpi", "mpi-out")
    assert result.repeats is None


def test_a_benchmark_may_have_other_defaults() -> None:
    result = options("persistent")
    assert (result.min, result.max) == (1024, 1024)
    assert result.contenders == ("persistent", "plain")
    assert options("persistent", "--max", "1M").max == 2**20


def test_on_a_gpu_mpi_stays_on_the_host_by_default() -> None:
    assert options("allgather", "--device", "cuda").contenders == ("ring", "persistent", "by-host")
    chosen = options("allgather", "--device", "cuda", "--contenders", "ring,mpi-out").contenders
    assert chosen == ("ring", "mpi-out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "BENCHMARK"),
        (["alltoall"], "'alltoall'"),
        (["allreduce", "--min", "x"], "--min: 'x' is no size"),
        (["allreduce", "--min", "2K", "--max", "1K"], r"--min \(2048 bytes\) is above --max"),
        (["allreduce", "--factor", "1"], "--factor: '1' given, a number of at least 1.1"),
        (["allreduce", "--factor", "inf"], "--factor: 'inf' given"),
        (["allreduce", "--repeats", "0"], "--repeats: '0' given, a whole number of at least 1"),
        (["allreduce", "--repeats", "1.5"], "a whole number of at least 1"),
        (["allreduce", "--budget", "nan"], "--budget: 'nan' given"),
        (["allreduce", "--dtype", "float99"], "float99"),
        (["allreduce", "--op", "xor"], "xor"),
        (["allreduce", "--op", "max", "--dtype", "complex64"], "have no order"),
        (["allreduce", "--contenders", "ring,by-host"], "by-host: not with --device cpu"),
        (["allgather", "--device", "cuda", "--contenders", "plain"], "plain: not with --device cu"),
        (["exchange", "--device", "cuda"], "--device: invalid choice: 'cuda'"),
        (["allreduce", "--contenders", "ring,foo"], "'foo' is none of ring, persistent"),
        (["allreduce", "--contenders", ""], "'' is none of"),
        (["allreduce", "--contenders", "mpi,mpi"], "twice"),
        (["allreduce", "--color"], "--color"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(Stop, match=message) as stop:
        parse(BENCHMARKS, arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_names_options_contenders_and_defaults(name: str) -> None:
    with pytest.raises(Stop) as stop:
        parse(BENCHMARKS, [name, "--help"])
    assert stop.value.code == 0
    for contender in BENCHMARKS[name].contenders:
        assert f"\n  {contender} " in stop.value.text
    assert "(default: 4)" in stop.value.text


def test_sizes_go_up_by_the_factor_and_end_at_the_last() -> None:
    chosen = options("allreduce", "--min", "8", "--max", "1000", "--factor", "4")
    assert [4 * count for count in counts(chosen, 2, 1)] == [8, 32, 128, 512, 1000]
    exact = options("allreduce", "--min", "8", "--max", "128", "--factor", "4")
    assert [4 * count for count in counts(exact, 2, 1)] == [8, 32, 128]


def test_sizes_are_rounded_up_to_whole_elements_and_chunks_and_not_repeated() -> None:
    chosen = options("allgather", "--min", "1", "--max", "64", "--factor", "2")
    assert counts(chosen, 3, 3) == [3, 6, 9, 18]
    wide = options("allreduce", "--min", "8", "--max", "8", "--dtype", "complex128")
    assert counts(wide, 3, 1) == [1]
