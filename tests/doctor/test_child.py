"""Children that may die: what the parent learns of each way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpiring.transport import child

_BEGIN = "import os, signal, sys, time; from mpiring.transport import child; child.begin(); "


def run(code: str, limit: float = 30.0, **options: object) -> child.Ending:
    environ = child.importable(os.environ)
    command = [sys.executable, "-c", _BEGIN + code]
    return child.run(command, environ=environ, limit=limit, **options)


def test_reports_are_told_from_what_libraries_print() -> None:
    ending = run(
        "print('noise'); child.report(size=4); print('[0] ', end=''); child.report(size=8)"
    )
    assert ending.code == 0
    assert [said["size"] for said in ending.reports] == [4, 8]
    assert ending.find("size") == 8
    assert ending.find("other") is None
    assert ending.text == "noise\n[0]"


def test_what_was_said_before_a_crash_counts() -> None:
    ending = run("child.report(trying=64); os.kill(os.getpid(), signal.SIGSEGV)")
    assert ending.crashed
    assert ending.find("trying") == 64
    assert ending.words == "memory fault"


@pytest.mark.parametrize("code", [139, 135])
def test_a_launcher_tells_of_a_crash_by_its_exit_code(code: int) -> None:
    assert run(f"os._exit({code})").crashed


@pytest.mark.parametrize("code", [0, 1, 15])
def test_other_codes_are_no_crash(code: int) -> None:
    ending = run(f"os._exit({code})")
    assert ending.code == code
    assert not ending.crashed


def test_a_child_that_hangs_is_ended_and_the_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.1)
    said: list[str] = []
    ending = run("child.report(pid=os.getpid()); time.sleep(600)", 1.5, say=said.append, doing="w")
    assert ending.timed_out
    assert said == ["w", "given up after 1.5 s"]
    assert not alive(ending.find("pid"))


def test_a_quick_child_is_not_announced() -> None:
    said: list[str] = []
    run("pass", say=said.append, doing="waiting")
    assert said == []


def test_a_child_that_ignores_the_polite_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE", 0.1)
    deaf = "signal.signal(15, signal.SIG_IGN); signal.alarm(0); "
    ending = run(deaf + "child.report(pid=os.getpid()); time.sleep(600)", 1.5)
    assert ending.timed_out
    assert not alive(ending.find("pid"))


def test_a_child_without_parent_ends_by_itself() -> None:
    environ = child.importable({**os.environ, child.LIMIT: "1"})
    orphan = subprocess.Popen([sys.executable, "-c", _BEGIN + "time.sleep(600)"], env=environ)
    assert orphan.wait(30) == -signal.SIGALRM


def test_a_child_leaves_no_core_file() -> None:
    code = "import resource; child.report(limit=resource.getrlimit(resource.RLIMIT_CORE)[0])"
    assert run(code).find("limit") == 0


def test_a_command_that_does_not_exist() -> None:
    ending = child.run(["/no/such/command"], environ={}, limit=5)
    assert ending.code == 127
    assert "/no/such/command" in ending.text


def test_an_interrupted_parent_takes_its_child_along(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    grandchild = (
        f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); "
        "time.sleep(600)"
    )
    code = (
        "import os, sys; from mpiring.transport import child; "
        f"child.run([sys.executable, '-c', {grandchild!r}], environ=os.environ, limit=500)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=child.importable(os.environ), stderr=subprocess.DEVNULL
    )
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    parent.send_signal(signal.SIGINT)
    parent.wait(30)
    assert not alive(int(told.read_text()))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
