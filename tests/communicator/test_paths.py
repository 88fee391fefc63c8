"""The choice of how device arrays travel: from what ranks say, never from what an MPI says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from mpiring.communicator import paths
from mpiring.communicator.paths import Standing, choose
from mpiring.errors import ArgumentError, DeviceError
from mpiring.transport import probe
from mpiring.transport.probe import Outcome, Report, Result

RIGHT = Result(Outcome.RIGHT, "", {4: 1e-6, 1 << 24: 1e-3})
FASTER = Result(Outcome.RIGHT, "", {4: 1e-6, 1 << 24: 1e-4})
CRASHED = Result(Outcome.CRASHED, "memory fault at 4 B")
ABSENT = Result(Outcome.ABSENT, "no GPU")


def everyone(
    monkeypatch: pytest.MonkeyPatch,
    wish: str,
    results: Mapping[str, Result] | None,
    hosts: tuple[str, ...] = ("a", "a"),
) -> list[Standing]:
    report = results and Report("key", "a", "today", results)
    monkeypatch.setattr(paths, "_gpu_possible", lambda: True)
    monkeypatch.setattr(probe, "cached_probe", lambda library: report)
    return [paths.stand(wish, rank, host, "MPI 1.0") for rank, host in enumerate(hosts)]


def test_auto_is_staged_until_a_probe_has_seen_better(monkeypatch: pytest.MonkeyPatch) -> None:
    for results, path in (
        (None, "staged"),
        ({"staged": RIGHT, "direct": CRASHED, "peer": CRASHED}, "staged"),
        ({"staged": RIGHT, "direct": FASTER, "peer": CRASHED}, "direct"),
        ({"staged": RIGHT, "direct": CRASHED, "peer": FASTER}, "peer"),
        ({"staged": FASTER, "direct": RIGHT, "peer": RIGHT}, "staged"),
        ({"host": RIGHT, "staged": ABSENT, "direct": ABSENT, "peer": ABSENT}, "staged"),
    ):
        assert choose(everyone(monkeypatch, "auto", results)).path == path


def test_a_probe_says_nothing_about_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"staged": RIGHT, "direct": FASTER, "peer": FASTER}
    choice = choose(everyone(monkeypatch, "auto", results, ("a", "b")))
    assert choice.path == "staged" and "2 hosts" in choice.why
    assert choose(everyone(monkeypatch, "direct", results, ("a", "b"))).path == "direct"
    with pytest.raises(DeviceError, match="'peer' given, but ranks are on 2 hosts"):
        choose(everyone(monkeypatch, "peer", results, ("a", "b")))


def test_what_a_probe_saw_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"staged": RIGHT, "direct": CRASHED, "peer": RIGHT}
    with pytest.raises(
        DeviceError,
        match=r"'direct' given, but it does not work here. A probe found: crashed memory fault at "
        "4 B; allowed are auto, staged, peer",
    ):
        choose(everyone(monkeypatch, "direct", results))
    assert choose(everyone(monkeypatch, "peer", results)).path == "peer"
    assert choose(everyone(monkeypatch, "direct", None)).path == "direct"  # nobody knows better


def test_the_program_is_heard_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIRING_GPU_PATH", "peer")
    assert paths.wish(None) == "peer" and paths.wish("staged") == "staged"
    with pytest.raises(ArgumentError, match="gpu_path: 'fast' given; allowed are auto, staged"):
        paths.wish("fast")
    monkeypatch.setenv("MPIRING_GPU_PATH", "pear")
    with pytest.raises(ArgumentError, match="MPIRING_GPU_PATH: 'pear' given"):
        paths.wish(None)
    monkeypatch.setenv("MPIRING_GPU_PATH", "")
    assert paths.wish(None) == "auto"


def test_where_there_can_be_no_gpu_nobody_looks_for_a_probe(tmp_path: object) -> None:
    text = (
        "import sys; from mpiring.communicator import paths;"
        f"paths._CONTROL = {str(tmp_path)!r} + '/nvidiactl';"
        "paths.stand('auto', 0, 'a', 'MPI 1.0');"
        "assert 'mpiring.transport.probe' not in sys.modules;"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
