"""What rank 0 shows: progress while it lasts, a table at the end, files for programs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpiring.transport.launcher import launched

if TYPE_CHECKING:
    from mpiring.train.loop import Trainer


class Progress(Protocol):
    """Told of every step and epoch."""

    def step(self, samples: int, loss: float) -> None:
        """A step over ``samples`` samples is over; ``loss`` is its mean, over this rank's part."""
        ...

    def epoch(self, done: int, loss: float, skipped: int) -> None:
        """``done`` epochs are over; the mean loss of the last one, and its skipped steps."""
        ...

    def close(self) -> None: ...


class Silent:
    """Every rank but 0."""

    def step(self, samples: int, loss: float) -> None: ...
    def epoch(self, done: int, loss: float, skipped: int) -> None: ...
    def close(self) -> None: ...


class Lines:
    """A line for each epoch, where there is no terminal."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._samples, self._since = 0, time.perf_counter()

    def step(self, samples: int, loss: float) -> None:
        self._samples += samples

    def epoch(self, done: int, loss: float, skipped: int) -> None:
        rate = self._samples / (time.perf_counter() - self._since)
        say(
            f"epoch {done:>{len(str(self._epochs))}}/{self._epochs}   loss {loss:<9.4g} "
            f"{rate:>9,.0f} samples/s"
        )
        if skipped:
            say(_skipped(done, skipped))
        self._samples, self._since = 0, time.perf_counter()

    def close(self) -> None: ...


class Bar:
    """A progress bar with loss and samples/s, by rich.

    The loss shown moves slowly: a step's own, over one rank's few samples, jumps.
    """

    def __init__(self, epochs: int, done: int, samples: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        class Plain(Console):
            # A job that is killed could not bring back a cursor that was hidden.
            def show_cursor(self, show: bool = True) -> bool:
                return False

        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("loss {task.fields[loss]:<8.3g} {task.fields[rate]:>7,.0f} samples/s"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Plain(file=sys.stdout),
        )
        self._seen, self._since = 0, time.perf_counter()
        self._before = done * samples
        self._loss = float("nan")
        self._task = self._progress.add_task(
            self._title(done), total=epochs * samples, loss=self._loss, rate=0.0
        )
        self._progress.start()

    def _title(self, done: int) -> str:
        return f"epoch {min(done + 1, self._epochs)}/{self._epochs}"

    def step(self, samples: int, loss: float) -> None:
        self._seen += samples
        rate = self._seen / (time.perf_counter() - self._since)
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss
        self._progress.update(
            self._task, completed=self._before + self._seen, loss=self._loss, rate=rate
        )

    def epoch(self, done: int, loss: float, skipped: int) -> None:
        if skipped:
            self._progress.console.print(_skipped(done, skipped))
        self._loss = loss
        self._progress.update(self._task, description=self._title(done), loss=loss)

    def close(self) -> None:
        self._progress.stop()


def _skipped(epoch: int, steps: int) -> str:
    return (
        f"epoch {epoch}: {steps} step{'s' * (steps > 1)} skipped on every rank, "
        "inf or nan in the gradient"
    )


def progress(rank: int, epochs: int, done: int, samples: int) -> Progress:
    """What fits the place where rank 0's output ends up.

    Under some launchers that is a pipe though a terminal is at its end, under others a
    terminal though a file is: ``TTY_COMPATIBLE`` (rich's own variable) tells, if set.
    """
    if rank:
        return Silent()
    told = os.environ.get("TTY_COMPATIBLE")
    terminal = told == "1" if told else sys.stdout.isatty() and not launched()
    if terminal and os.environ.get("TERM") != "dumb":
        try:
            return Bar(epochs, done, samples)
        except ImportError:
            pass
    return Lines(epochs)


def say(text: str) -> None:
    """Whole lines, at once: ranks' lines never mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def headline(trainer: Trainer, library: str) -> str:
    """What is trained, on what, and how: before it begins."""
    options, parameters, size = trainer.options, trainer.model.parameters, trainer.comm.size
    strategy = trainer.strategy
    sizes = "-".join(map(str, trainer.model.sizes))
    lines = [
        f"{trainer.dataset.name}: {len(trainer.dataset.y_train):,} samples, MLP {sizes} "
        f"({parameters.size:,} parameters, {options.dtype})",
        f"{_counted(size, 'rank')}, {library}, gradients exchanged "
        f"{'behind' if options.overlap else 'after'} backward",
        f"{options.optimizer}, lr {options.lr:g}; gradients are means over the "
        f"{options.batch_size} samples of all ranks together",
    ]
    if options.strategy == "zero":
        lines.append("each rank updates its part of the weights: ZeRO, stage 1")
    if options.strategy == "server":
        mode = options.server_mode
        if mode == "ssp":
            mode += f", {_counted(options.staleness, 'step')} ahead of the slowest at most"
        workers = _counted(len(strategy.workers), "rank")
        lines.append(f"parameter servers: {options.servers}; workers: {workers}; {mode}")
    if options.slow_rank:
        lines.append("rank {} takes {:g} times as long to compute".format(*options.slow_rank))
    if not strategy.in_step:
        lines.append("each worker's gradient is an update; losses on the way are those of rank 0")
    if trainer.place.name != "NumPy":
        lines.append(f"computed by {trainer.place.name}")
    if options.resume:
        done = trainer.replica.epochs
        lines.append(f"{done} epoch{'s' * (done > 1)} done: {options.resume}")
    return "\n".join(lines) + "\n"


def table(results: dict[str, Any]) -> str:
    """The results for a person: aligned, with units, formulas named."""
    r = results
    skipped, hidden = r["steps_skipped"], r["hidden_percent"]
    rows = [
        ("test accuracy", f"{100 * r['test_accuracy']:.2f} %"),
        ("final loss", f"{r['final_loss']:.4g}", "mean over the last epoch"),
        ("samples per second", f"{r['samples_per_second']:,.0f}"),
        None,
        ("step", f"{r['step_ms']:.2f} ms", f"median over {r['steps']:,} steps"),
        ("  compute", f"{r['compute_ms']:.2f} ms"),
        ("  exposed communication", f"{r['exposed_ms']:.2f} ms", "starting, polling, waiting"),
        ("communication alone", f"{r['comm_ms']:.2f} ms", "the same exchange, nothing computed"),
        (
            "hidden",
            "n/a" if hidden is None else f"{hidden:.0f} %",
            "(t_comm + t_comp - t_both) / min(t_comm, t_comp)",
        ),
        None,
        ("sent per rank and step", size(r["bytes_sent_per_rank_per_step"]), "measured"),
        ("  formula", size(r["bytes_formula"]), _formula(r)),
        *_optimizer_rows(r),
        *_server_rows(r),
        ("replicas identical", "yes" if r["replicas_identical"] else "NO", "bit for bit"),
    ]
    if skipped:
        told = ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else "")
        rows.append(("steps skipped", str(len(skipped)), f"inf or nan in the gradient: {told}"))
    cells = [row for row in rows if row]
    wide = [max(len(row[i]) for row in cells) for i in range(2)]
    lines = [
        f"  {row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2] if len(row) > 2 else ''}".rstrip()
        if row
        else ""
        for row in rows
    ]
    if r["more_ranks_than_cores"]:
        lines += [
            "",
            "  Ranks outnumber cores: times include waiting for one, and what communication",
        ]
        lines += ["  hides behind is the computing of the ranks that it takes a core from."]
    return "\n".join(["", *lines])


def _formula(r: dict[str, Any]) -> str:
    if r["strategy"] == "server":
        return "each key to its server and back, mean over ranks"
    return f"2(n-1)/n S, n = {r['ranks']}"


def _optimizer_rows(r: dict[str, Any]) -> list[Any]:
    """How much of the optimizer's state a rank has, where all ranks are alike."""
    if r["strategy"] == "server":
        return []
    formula = "K, that of all parameters"
    if r["strategy"] == "zero":
        formula = f"K/n, K that of all parameters, n = {r['ranks']}"
    return [
        ("optimizer state per rank", size(r["optimizer_bytes_per_rank"]), "measured, the largest"),
        ("  formula", size(r["optimizer_bytes_formula"]), formula),
    ]


def _server_rows(r: dict[str, Any]) -> list[Any]:
    """What a parameter server adds: its traffic, its updates, and how stale they were."""
    if r["strategy"] != "server":
        return []
    into, out = size(r["server_bytes_in"]), size(r["server_bytes_out"])
    rows = [
        ("busiest server, in and out", size(r["server_bytes"]), f"a step: {into} in, {out} out"),
        ("  formula", size(r["server_bytes_formula"]), _server_formula(r)),
        ("updates per second", f"{r['updates_per_second']:,.1f}", "gradients of a worker applied"),
        ("updates lost", str(r["updates_lost"])),
    ]
    title, groups = "staleness, versions", _grouped(r["staleness_histogram"])
    total, most = sum(groups.values()), max(groups.values(), default=0)
    for versions, count in groups.items():
        bar = "#" * math.ceil(30 * count / most)
        rows.append((f"{title:<20}{versions:>6}", f"{100 * count / total:.1f} %", bar))
        title = ""
    return rows


def _server_formula(r: dict[str, Any]) -> str:
    n, k = len(r["workers"]), len(r["servers"])
    if k == r["ranks"]:
        return f"about 2 x 2(n-1)/n S, n = {n}: shares differ by less than a message"
    if set(r["servers"]) & set(r["workers"]):
        return f"2 x (n-1) S, n = {n}" if k == 1 else f"n = {n} workers, {k} of them servers too"
    return f"2 x n S/{k}, n = {n}" if k > 1 else f"2 x n S, n = {n}"


def _grouped(histogram: dict[int, int], rows: int = 12) -> dict[str, int]:
    """Counts by versions, in at most ``rows`` ranges of equal width."""
    stop = max(histogram, default=-1) + 1
    width = -(-stop // rows) or 1
    return {
        str(start) if width == 1 else f"{start}-{start + width - 1}": sum(
            histogram.get(versions, 0) for versions in range(start, start + width)
        )
        for start in range(0, stop, width)
    }


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def size(nbytes: float) -> str:
    """Bytes for a person: 1.07 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def write(path: str, content: str | bytes) -> None:
    """Write a file whole or not at all; add to what is no file (a pipe, ``/dev/stdout``)."""
    octets = content.encode() if isinstance(content, str) else content
    if path.startswith("/dev/") or (os.path.exists(path) and not os.path.isfile(path)):
        with open(path, "ab") as file:
            file.write(octets)
        return
    target = Path(path).resolve()  # where path is a link, what it leads to is replaced
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(octets)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def as_json(results: dict[str, Any]) -> str:
    """Strict JSON, which knows no nan and no inf: null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in results.items()
    }
    return json.dumps(finite, indent=2, allow_nan=False) + "\n"
