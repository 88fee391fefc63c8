"""What rank 0 shows: progress while it lasts, a table at the end, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol


class Progress(Protocol):
    """Told of every step and epoch."""

    def step(self, samples: int, loss: float) -> None: ...
    def epoch(self, number: int, loss: float) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Every rank but 0."""

    def step(self, samples: int, loss: float) -> None: ...
    def epoch(self, number: int, loss: float) -> None: ...
    def close(self) -> None: ...


class Lines:
    """A line for each epoch, where there is no terminal."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._samples, self._since = 0, time.perf_counter()

    def step(self, samples: int, loss: float) -> None:
        self._samples += samples

    def epoch(self, number: int, loss: float) -> None:
        seconds = time.perf_counter() - self._since
        say(
            f"epoch {number + 1:>{len(str(self._epochs))}}/{self._epochs}   loss {loss:<9.4g} "
            f"{self._samples / seconds:>9,.0f} samples/s"
        )
        self._samples, self._since = 0, time.perf_counter()

    def close(self) -> None: ...


class Bar:
    """A progress bar with loss and samples/s, by rich."""

    def __init__(self, epochs: int, samples: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn

        self._epochs, self._samples = epochs, samples
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:<9.4g} {task.fields[rate]:>9,.0f} samples/s"),
            TimeElapsedColumn(),
            console=Console(file=sys.stdout),
        )
        self._done, self._since = 0, time.perf_counter()
        self._task = self._progress.add_task(
            self._title(0), total=epochs * samples, loss=float("nan"), rate=0.0
        )
        self._progress.start()

    def _title(self, number: int) -> str:
        return f"epoch {min(number + 1, self._epochs)}/{self._epochs}"

    def step(self, samples: int, loss: float) -> None:
        self._done += samples
        rate = self._done / (time.perf_counter() - self._since)
        self._progress.update(self._task, completed=self._done, loss=loss, rate=rate)

    def epoch(self, number: int, loss: float) -> None:
        self._progress.update(self._task, description=self._title(number + 1), loss=loss)

    def close(self) -> None:
        self._progress.stop()


def progress(rank: int, epochs: int, samples: int) -> Progress:
    """What fits the place where rank 0's output ends up.

    Under a launcher that is a pipe, so ``TTY_COMPATIBLE=1`` (rich's own variable)
    tells that a terminal is at its end.
    """
    if rank:
        return Silent()
    terminal = sys.stdout.isatty() or os.environ.get("TTY_COMPATIBLE") == "1"
    if terminal and os.environ.get("TERM") != "dumb":
        try:
            return Bar(epochs, samples)
        except ImportError:
            pass
    return Lines(epochs)


def say(text: str = "") -> None:
    """One whole line, at once: ranks' lines never mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(results: dict[str, Any]) -> str:
    """The results for a person: aligned, with units, formulas named."""
    r = results
    n = r["ranks"]
    hidden = r["hidden_percent"]
    skipped = r["steps_skipped"]
    rows = [
        ("test accuracy", f"{100 * r['test_accuracy']:.2f} %"),
        ("final loss", f"{r['final_loss']:.4g}"),
        ("samples per second", f"{r['samples_per_second']:,.0f}"),
        None,
        ("step", f"{r['step_ms']:.2f} ms", "compute + exposed communication"),
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
        ("  formula", size(r["bytes_formula"]), f"2(n-1)/n S, n = {n}"),
        ("replicas identical", "yes" if r["replicas_identical"] else "NO"),
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
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Bytes for a person: 1.07 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def write(path: str, text: str) -> None:
    """Write a file whole or not at all."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def as_json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=2) + "\n"
