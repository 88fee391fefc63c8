"""The command line of ``python -m bench``: parsed alike on every rank, without MPI.

Whatever is wrong with it ends in one ``Stop``, which ``__main__`` prints on rank 0
only: eight ranks don't complain eight times.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bench.case import Benchmark
from bench.values import OPERATIONS

DTYPES = (
    "float32",
    "float64",
    "float16",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class Stop(Exception):
    """The program has to end with ``text`` on stdout (code 0) or stderr."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code


class Parser(argparse.ArgumentParser):
    """A parser that raises Stop where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise Stop(f"{self.prog}: error: {message}\n(see {self.prog} --help)\n", 2)

    def print_help(self, file: Any = None) -> NoReturn:
        raise Stop(self.format_help(), 0)


def size(text: str) -> int:
    """Bytes from ``8``, ``64K``, ``16M``, ``1.5G``, ``64KiB``: units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 8, 64K, 16M or 1G")
    nbytes = float(match[1]) * UNITS[match[2].upper()]
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte")
    return int(nbytes)


def at_least(least: float, number: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type for finite numbers of ``least`` or more."""
    kind = "a whole number" if number is int else "a number"

    def parse(text: str) -> Any:
        try:
            value = number(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} given, {kind} of at least {least} needed")
        return value

    return parse


def parse(
    benchmarks: Mapping[str, Benchmark], arguments: Sequence[str]
) -> tuple[Benchmark, argparse.Namespace]:
    """The benchmark that was asked for, and its options. Raises Stop."""
    parser = Parser(
        prog="python -m bench",
        description="Time collectives beside MPI's own, every result verified.\n"
        "Run it under a launcher: mpirun -n 4 python -m bench allreduce",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(metavar="BENCHMARK", dest="benchmark", required=True)
    for benchmark in benchmarks.values():
        _add(names, benchmark)
    options = parser.parse_args(arguments)
    benchmark = benchmarks[options.benchmark]
    _check(names.choices[options.benchmark], options)
    return benchmark, options


def _add(names: Any, benchmark: Benchmark) -> None:
    listed = "\n".join(f"  {name:<11} {what}" for name, what in benchmark.contenders.items())
    parser = names.add_parser(
        benchmark.name,
        help=benchmark.summary,
        description=f"{benchmark.name}: {benchmark.summary} (bytes).",
        epilog=f"contenders:\n{listed}\n\nexit code: 0, 1 if any element was wrong, 2 for bad "
        "arguments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def contenders(text: str) -> tuple[str, ...]:
        chosen = tuple(name.strip() for name in text.split(","))
        for name in chosen:
            if name not in benchmark.contenders:
                allowed = ", ".join(benchmark.contenders)
                raise argparse.ArgumentTypeError(f"{name!r} is none of {allowed}")
        if len(set(chosen)) < len(chosen):
            raise argparse.ArgumentTypeError(f"{text!r} names a contender twice")
        return chosen

    add = parser.add_argument
    add("--min", type=size, default=8, metavar="SIZE", help="first size S, such as 8 or 64K")
    add("--max", type=size, default=64 * 2**20, metavar="SIZE", help="last size S, such as 64M")
    add(
        "--factor",
        type=at_least(1.1, float),
        default=4.0,
        metavar="F",
        help="each size is F times the one before; the last is --max",
    )
    add(
        "--device",
        choices=benchmark.devices,
        default="cpu",
        help="where arrays live: cpu, NumPy's; cuda, CuPy's on each rank's GPU",
    )
    add("--dtype", choices=DTYPES, default="float32", metavar="DTYPE", help=", ".join(DTYPES))
    operations = ", ".join(OPERATIONS) + ("" if benchmark.reduces else " (no meaning here)")
    add("--op", choices=list(OPERATIONS), default="sum", metavar="OP", help=operations)
    add(
        "--contenders",
        type=contenders,
        default=("ring", "mpi", "mpi-out"),
        metavar="A,B,...",
        help="who takes part, in the order of the columns (see below)",
    )
    add(
        "--in-place",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether ring, persistent and plain work in place",
    )
    add(
        "--repeats",
        type=at_least(1, int),
        metavar="N",
        help="repetitions at each size (default: as many as the budget allows)",
    )
    add(
        "--warmup",
        type=at_least(1, int),
        default=5,
        metavar="N",
        help="repetitions before those that count",
    )
    add(
        "--budget",
        type=at_least(0, float),
        default=30.0,
        metavar="SECONDS",
        help="aim at this much time for all sizes together",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    add("--plot", type=Path, metavar="FILE.png", help="draw bus bandwidth over size (matplotlib)")
    parser.set_defaults(**benchmark.defaults)
    for action in parser._actions:  # say each default in the help, in the notation it is given in
        default = parser.get_default(action.dest)
        if default in (None, argparse.SUPPRESS) or "(default" in (action.help or ""):
            continue
        action.help = f"{action.help} (default: {_written(action.dest, default)})"


def _written(name: str, default: Any) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    if name in ("min", "max"):
        unit = max((u for u in UNITS if default % UNITS[u] == 0), key=UNITS.__getitem__)
        return f"{default // UNITS[unit]}{unit}"
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What no option can tell alone."""
    on_gpu = options.device == "cuda"
    if on_gpu and options.contenders == parser.get_default("contenders"):
        options.contenders = ("ring", "persistent", "by-host")
    wrong = [name for name in options.contenders if name == ("plain" if on_gpu else "by-host")]
    if wrong:
        parser.error(f"--contenders {wrong[0]}: not with --device {options.device}")
    if options.min > options.max:
        parser.error(f"--min ({options.min} bytes) is above --max ({options.max} bytes)")
    if options.op in ("max", "min") and np.dtype(options.dtype).kind == "c":
        parser.error(f"--op {options.op}: complex numbers ({options.dtype}) have no order")


def counts(options: argparse.Namespace, ranks: int, granularity: int) -> list[int]:
    """Element counts for the sizes from --min to --max, both included.

    A size that is no whole number of elements, or no multiple of ``granularity``
    elements, is rounded up; sizes that become equal are taken once.
    """
    itemsize = np.dtype(options.dtype).itemsize * granularity
    sizes, following = [], float(options.min)
    while following < options.max:
        sizes.append(int(following))
        following *= options.factor
    blocks = {-(-nbytes // itemsize): None for nbytes in (*sizes, options.max)}
    return [granularity * number for number in blocks]
