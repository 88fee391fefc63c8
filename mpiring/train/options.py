"""The command line of the trainer, checked as far as it can be without data or MPI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mpiring.errors import ArgumentError


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="mpirun -n RANKS python -m mpiring.train",
        description="Train a multilayer perceptron on all ranks, gradients exchanged over a ring "
        "while the backward pass is still running.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = p.add_argument_group("data and model")
    data.add_argument(
        "--data", default="digits", metavar="NAME|PATH",
        help="digits (comes with scikit-learn), a folder of IDX files as MNIST ships them, or an "
        ".npz with x_train, y_train, x_test, y_test",
    )  # fmt: skip
    data.add_argument(
        "--hidden", type=_sizes, default=(512, 512), metavar="N,N,...", help="hidden layer sizes"
    )
    data.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float32")
    data.add_argument("--seed", type=_from(0), default=0, help="of weights and shuffling")

    learning = p.add_argument_group("learning")
    learning.add_argument("--epochs", type=_from(1), default=10)
    learning.add_argument(
        "--batch-size", type=_from(1), default=64, help="samples per step over all ranks together"
    )
    learning.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    learning.add_argument(
        "--lr", type=_number(0), default=None,
        help="learning rate, for the mean over the global batch; never rescaled with the number "
        "of ranks (default: 0.05 for sgd, 0.001 for adam)",
    )  # fmt: skip
    learning.add_argument("--momentum", type=_number(0, 1), default=0.9, help="sgd only")
    learning.add_argument("--weight-decay", type=_number(0), default=0.0)

    exchange = p.add_argument_group("gradient exchange")
    exchange.add_argument(
        "--accumulate", type=_from(1), default=1, metavar="K",
        help="cut each rank's part of a batch into K micro-batches, exchange after the last",
    )  # fmt: skip
    exchange.add_argument("--bucket-mb", type=_number(0), default=25.0, help="MiB per bucket")
    exchange.add_argument("--first-bucket-mb", type=_number(0), default=1.0)
    exchange.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True,
        help="exchange behind backward; --no-overlap exchanges after it (the naive mode)",
    )  # fmt: skip
    exchange.add_argument(
        "--progress", choices=("poll", "thread"), default="poll",
        help="what moves messages: polls between layers, or a thread too",
    )  # fmt: skip

    machine = p.add_argument_group("machine and output")
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    machine.add_argument("--json", metavar="FILE", help="write the results as JSON")
    machine.add_argument(
        "--trace", metavar="FILE", help="write a timeline of all ranks for Perfetto"
    )
    return p


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Raises ArgumentError; exits only for ``--help``."""
    options = parser().parse_args(arguments)
    if options.lr is None:
        options.lr = {"sgd": 0.05, "adam": 0.001}[options.optimizer]
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ArgumentError(message)


def _from(low: int) -> Any:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} given; allowed are numbers from {low}")
        return value

    return whole_number


def _number(low: float, below: float = float("inf")) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value < below:
            bound = f" below {below:g}" if below < float("inf") else ", finite"
            raise argparse.ArgumentTypeError(
                f"{text} given; allowed are numbers from {low:g}{bound}"
            )
        return value

    return number


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part.strip())
    if any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text} given; allowed are sizes from 1")
    return sizes
