"""The command line of the trainer, checked as far as it can be without data or MPI."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from mpiring.errors import ArgumentError
from mpiring.parallel.protocol import MODES, lead_of
from mpiring.transport.launcher import launched


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="mpirun -n RANKS python -m mpiring.train",
        usage="%(prog)s [options]",
        description="Train a multilayer perceptron on all ranks, gradients exchanged over a ring, "
        "or by parameter servers, while the backward pass is still running.",
        formatter_class=_Help,
    )
    data = p.add_argument_group("data and model")
    data.add_argument(
        "--data", default="digits", metavar="NAME|PATH",
        help="digits (comes with scikit-learn), a folder of IDX files as MNIST ships them, or an "
        ".npz with x_train, y_train, x_test, y_test",
    )  # fmt: skip
    data.add_argument(
        "--hidden", type=_sizes, default="512,512", metavar="N,N,...",
        help="hidden layer sizes, or none",
    )  # fmt: skip
    data.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float32")
    data.add_argument(
        "--seed", type=_whole_number(0), default=0, metavar="N", help="of weights and shuffling"
    )

    learning = p.add_argument_group("learning")
    learning.add_argument(
        "--epochs", type=_whole_number(1), default=20, metavar="N",
        help="in all, those before a resume included",
    )  # fmt: skip
    learning.add_argument(
        "--batch-size", type=_whole_number(1), default=128, metavar="N",
        help="samples per step over all ranks together; an epoch's last step takes what is left",
    )  # fmt: skip
    learning.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    learning.add_argument(
        "--lr", type=_number(0), metavar="X",
        help="learning rate, for the mean over the global batch; never rescaled with the number "
        "of ranks (default: 0.05 for sgd, 0.001 for adam)",
    )  # fmt: skip
    learning.add_argument(
        "--momentum", type=_number(0, 1), default=0.9, metavar="X", help="sgd only"
    )
    learning.add_argument(
        "--weight-decay", type=_number(0), default=1e-4, metavar="X", help="an L2 penalty"
    )

    exchange = p.add_argument_group("gradient exchange")
    exchange.add_argument(
        "--strategy", choices=("ring", "zero", "server"), default="ring",
        help="ring: all-reduce, every rank updates all weights; zero: reduce-scatter, every rank "
        "updates its part with 1/n of the optimizer's state, all-gather; server: parameter servers",
    )  # fmt: skip
    exchange.add_argument(
        "--accumulate", type=_whole_number(1), default=1, metavar="K",
        help="cut each rank's part of a batch into K micro-batches (fewer where it has fewer "
        "samples) and exchange once, after the last; nothing is carried over to the next step",
    )  # fmt: skip
    exchange.add_argument(
        "--bucket-mb", type=_number(0), default=None, metavar="MIB",
        help="gradients that travel together; at least one does (default: 25, but no more than "
        "a quarter of all, so that something is on its way while backward goes on)",
    )  # fmt: skip
    exchange.add_argument(
        "--first-bucket-mb", type=_number(0), default=None, metavar="MIB",
        help="the same for the first bucket of a step, so that the exchange begins early "
        "(default: 1, or a quarter of all)",
    )  # fmt: skip
    exchange.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True,
        help="exchange behind backward, or after it (the naive mode)",
    )  # fmt: skip
    exchange.add_argument(
        "--progress", choices=("poll", "thread"), default="poll",
        help="what moves messages: polls between layers, or a thread too",
    )  # fmt: skip

    server = p.add_argument_group("parameter servers", "with --strategy server")
    server.add_argument(
        "--server-mode", choices=MODES,
        help="sync: an update takes the gradients of all workers; async: each worker's at once; "
        "ssp: so too, but nobody runs further ahead than --staleness (default: sync)",
    )  # fmt: skip
    server.add_argument(
        "--staleness", type=_whole_number(0), metavar="S",
        help="ssp only: steps that a worker may be ahead of the slowest",
    )  # fmt: skip
    server.add_argument(
        "--servers", metavar="K|colocated",
        help="the last K ranks serve and do nothing else; colocated: every rank trains and serves; "
        "colocated:K: every rank trains, the first K serve too (default: colocated)",
    )  # fmt: skip
    server.add_argument(
        "--record", metavar="FILE", help="write in which order the servers applied what came"
    )
    server.add_argument(
        "--replay", metavar="FILE",
        help="apply it in that order again: the same bits, all other options being the same",
    )  # fmt: skip

    testing = p.add_argument_group("testing")
    testing.add_argument(
        "--slow-rank", type=_slow_rank, metavar="R:FACTOR",
        help="rank R takes FACTOR times as long to compute: it sleeps and polls after each layer, "
        "as if a slower device did the work",
    )  # fmt: skip

    machine = p.add_argument_group("machine and files")
    machine.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: cuda where every rank has a GPU and CuPy",
    )  # fmt: skip
    machine.add_argument(
        "--gpu", default="auto", metavar="auto|N",
        help="which of a node's GPUs; auto: by turns, ranks share them where there are fewer",
    )  # fmt: skip
    machine.add_argument(
        "--log-every", type=_whole_number(1), metavar="N",
        help="steps after which the loss is read, which on a GPU waits for it (default: 1, on a "
        "GPU 50)",
    )  # fmt: skip
    machine.add_argument("--json", metavar="FILE", help="write the results as JSON")
    machine.add_argument(
        "--trace", metavar="FILE", help="write a timeline of all ranks for ui.perfetto.dev"
    )
    machine.add_argument(
        "--save", metavar="FILE",
        help="write weights and optimizer (.npz) after each epoch, with servers after the last; "
        "whole or not at all",
    )  # fmt: skip
    machine.add_argument(
        "--resume", metavar="FILE", help="go on from what --save wrote; only rank 0 reads it"
    )
    return p


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Raises ArgumentError; exits only for ``--help``."""
    options = parser().parse_args(arguments)
    if options.lr is None:
        options.lr = {"sgd": 0.05, "adam": 0.001}[options.optimizer]
    _settle_servers(options)
    return options


def _settle_servers(options: argparse.Namespace) -> None:
    defaults = {
        "server_mode": "sync",
        "staleness": None,
        "servers": "colocated",
        "record": None,
        "replay": None,
    }
    for name, default in defaults.items():
        given = getattr(options, name)
        option = "--" + name.replace("_", "-")
        if given is None:
            setattr(options, name, default)
        elif options.strategy != "server":
            raise ArgumentError(f"{option}: {given} given; allowed with --strategy server only")
        elif name in ("record", "replay") and options.server_mode == "sync":
            raise ArgumentError(
                f"{option}: {given} given, but sync has the same result in every order; allowed "
                "with --server-mode async and ssp"
            )
    lead_of(options.server_mode, options.staleness)


def check_writable(name: str, path: str | None) -> None:
    """ArgumentError unless a file can be written there."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    wrong = None
    if os.path.isdir(path) or not path:
        wrong = "it is a folder" if path else "it is empty"
    elif not os.path.isdir(folder):
        wrong = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        wrong = f"{folder} cannot be written to"
    if wrong:
        raise ArgumentError(f"--{name}: {path!r} given, but {wrong}; allowed is a file to write")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ArgumentError(message)

    def print_help(self, file: Any = None) -> None:
        launch = launched()
        if launch is None or launch.rank == 0:  # once, not from every rank
            super().print_help(file)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults where there are any to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or not action.option_strings:
            return action.help
        return super()._get_help_string(action)


def _whole_number(low: int) -> Any:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise _wrong(text, f"whole numbers from {low}")
        return value

    return read


def _number(low: float, below: float = float("inf")) -> Any:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < below:
            bound = f", below {below:g}" if below < float("inf") else ""
            raise _wrong(text, f"finite numbers from {low:g}{bound}")
        return value

    return read


def _sizes(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise _wrong(text, "whole numbers from 1 with commas between them, or none")
    return sizes


def _slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        return _whole_number(0)(rank), _number(1)(factor)
    except argparse.ArgumentTypeError:
        raise _wrong(text, "a rank, a colon and a factor from 1, as in 3:5") from None


def _wrong(text: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} given; allowed are {allowed}")
