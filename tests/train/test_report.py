"""What is shown, where; and files that are whole or not there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mpiring.train import report

RESULTS: dict[str, Any] = {
    "ranks": 4,
    "strategy": "ring",
    "steps": 69,
    "test_accuracy": 0.97463,
    "final_loss": 0.001495,
    "samples_per_second": 12345.6,
    "step_ms": 20.0,
    "compute_ms": 15.0,
    "exposed_ms": 5.0,
    "comm_ms": 10.0,
    "hidden_percent": 50.0,
    "bytes_sent_per_rank_per_step": 1806396.0,
    "bytes_formula": 1806396.0,
    "optimizer_bytes_per_rank": 1204264,
    "optimizer_bytes_formula": 1204264.0,
    "replicas_identical": True,
    "steps_skipped": [],
    "more_ranks_than_cores": False,
}


def test_the_table_is_aligned_and_names_its_formulas() -> None:
    rows = [line for line in report.table(RESULTS).splitlines() if line]
    ends, notes = set(), set()
    for row in rows:
        _, value, *note = re.split(" {2,}", row.strip())
        ends.add(row.index(value) + len(value))
        notes |= {row.index(text) for text in note}
    assert len(ends) == len(notes) == 1
    text = "\n".join(rows)
    assert re.search(r"hidden +50 %  \(t_comm \+ t_comp - t_both\) / min\(t_comm, t_comp\)", text)
    assert re.search(r"sent per rank and step +1\.72 MiB", text)
    assert re.search(r"formula +1\.72 MiB  2\(n-1\)/n S, n = 4", text)
    assert re.search(r"optimizer state per rank +1\.15 MiB  measured, the largest", text)
    assert re.search(r"formula +1\.15 MiB  K, that of all parameters$", text, re.MULTILINE)
    assert re.search(r"test accuracy +97\.46 %", text)
    assert "skipped" not in text and "outnumber" not in text


def test_the_table_of_a_sharded_optimizer() -> None:
    shares = {"optimizer_bytes_per_rank": 301068, "optimizer_bytes_formula": 301066.0}
    text = report.table(RESULTS | {"strategy": "zero"} | shares)
    assert re.search(r"formula +1\.72 MiB  2\(n-1\)/n S, n = 4", text)
    assert re.search(r"optimizer state per rank +294\.01 KiB  measured, the largest", text)
    assert re.search(r"formula +294\.01 KiB  K/n, K that of all parameters, n = 4", text)


def test_the_table_tells_what_is_not_as_it_should_be() -> None:
    text = report.table(
        RESULTS
        | {
            "hidden_percent": None,
            "replicas_identical": False,
            "steps_skipped": list(range(3, 23)),
            "more_ranks_than_cores": True,
        }
    )
    assert re.search(r"hidden +n/a", text)
    assert re.search(r"replicas identical +NO", text)
    assert re.search(r"steps skipped +20  .*: 3, 4, 5, 6, 7, 8, 9, 10, \.\.\.", text)
    assert "Ranks outnumber cores" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert report.size(nbytes) == text


def test_json_has_no_nan() -> None:
    spoilt = RESULTS | {"final_loss": float("nan"), "hidden_percent": None, "step_ms": float("inf")}

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(report.as_json(spoilt), parse_constant=refuse)
    assert read["final_loss"] is None and read["step_ms"] is None
    assert read == spoilt | {"final_loss": None, "step_ms": None}


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    report.write(str(path), "first")
    report.write(str(path), b"second")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("place", "broken"), [(Path, "write_bytes"), (os, "replace")])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, broken: str
) -> None:
    path = tmp_path / "out"
    report.write(str(path), "old")

    def full(beside: Path, *arguments: Any) -> None:
        beside.touch()  # some of it is there already
        raise OSError("no space left")

    monkeypatch.setattr(
        *((Path, "write_bytes") if broken == "write_bytes" else (os, "replace")), full
    )
    with pytest.raises(OSError, match="no space left"):
        report.write(str(path), "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    report.write(str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"

    reader, writer = os.pipe()
    report.write(f"/dev/fd/{writer}", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    os.close(writer)

    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    report.write(str(tmp_path / "fifo"), "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return monkeypatch


def shown(kind: report.Progress) -> str:
    return type(kind).__name__


def test_where_a_bar_is_shown(terminal: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert shown(report.progress(0, 3, 0, 10)) == "Lines"  # pytest's captured output
    assert shown(report.progress(1, 3, 0, 10)) == "Silent"
    terminal.setattr("sys.stdout.isatty", lambda: True)
    for tell in (
        lambda: terminal.setenv("TERM", "dumb"),
        lambda: terminal.setenv("TTY_COMPATIBLE", "0"),
        # Open MPI gives its ranks a terminal even where mpirun's output goes into a file.
        lambda: [terminal.setenv(f"OMPI_COMM_WORLD_{x}", "0") for x in ("RANK", "SIZE")],
    ):
        with terminal.context() as patch:
            tell()
            assert shown(report.progress(0, 3, 0, 10)) == "Lines"
            patch.undo()
        terminal.setenv("TERM", "xterm")
        terminal.delenv("TTY_COMPATIBLE", raising=False)
    terminal.setenv("TTY_COMPATIBLE", "1")
    bar = report.progress(0, 3, 0, 10)
    bar.close()
    assert shown(bar) == "Bar"


def play(progress: report.Progress) -> None:
    """Two epochs of two steps of five samples; in the second a step is skipped."""
    for epoch in (1, 2):
        progress.step(5, 0.5)
        progress.step(5, 0.25)
        progress.epoch(epoch, 0.125 / epoch, epoch - 1)
    progress.close()


def test_a_bar(terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    terminal.setenv("TTY_COMPATIBLE", "1")
    play(report.progress(0, 2, 0, 10))
    text = capsys.readouterr().out
    assert "\x1b[?25l" not in text, "a job that is killed cannot show the cursor again"
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    last = [line for line in lines if line.strip()][-1]
    assert last.startswith("epoch 2/2 ") and "100%" in last and "loss 0.0625" in last
    assert max(map(len, lines)) <= 100
    assert any("epoch 2: 1 step skipped on every rank, inf or nan" in line for line in lines)


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    play(report.Lines(12))
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r" +[\d,]+ samples/s", "", line) for line in lines] == [
        "epoch  1/12   loss 0.125",
        "epoch  2/12   loss 0.0625",
        "epoch 2: 1 step skipped on every rank, inf or nan in the gradient",
    ]


def test_a_resumed_bar_begins_where_training_does(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    terminal.setenv("TTY_COMPATIBLE", "1")
    bar = report.progress(0, 4, 2, 10)
    bar.step(5, 0.5)
    bar.close()
    text = capsys.readouterr().out
    assert "epoch 3/4" in text and " 62%" in text
