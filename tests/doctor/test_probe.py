"""The probe: what it makes of each way in which a path can go, and what it remembers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpiring.transport import child, cudriver, launcher, probe
from mpiring.transport.probe import Outcome, Report, Result
from tests.launch import Installation, launch, require

GOOD = {size: 1e-6 * size for size in (4, 1024)}
REPORT = Report(
    "",
    "a host",
    "2020-01-02T03:04:05+00:00",
    {"host": Result(Outcome.RIGHT, "", GOOD), "direct": Result(Outcome.CRASHED, "at 4 B")},
    True,
)


# --- a launcher that tells what it is made to tell ------------------------------------------


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Probe with a stand-in for mpirun: a line of Python for each path, the last argument."""
    monkeypatch.setattr(probe, "_without_gpu", lambda environ: "")

    def run(limit: float = 30.0, **lines: str) -> Report:
        script = tmp_path / "mpirun"
        text = "\n".join(
            f"if sys.argv[-1] == {path!r}:\n    {line}" for path, line in lines.items()
        )
        script.write_text(
            f"#!{sys.executable}\n"
            "import os, sys, time\n"
            "from mpiring.transport.child import report\n"
            f"{text}\n"
            f"if sys.argv[-1] not in {list(lines)}:\n"
            "    report(size=4, right=True, seconds=1)"
        )
        script.chmod(0o755)
        return probe.probe("a library", [str(script)], limit=limit)

    return run


def test_all_paths_right(scripted: Callable[..., Report]) -> None:
    report = scripted(staged="report(access=True); report(size=4, right=True, seconds=2.5)")
    assert list(report.paths) == list(probe.PATHS)
    assert all(result.works for result in report.paths.values())
    assert report.paths["staged"].seconds == {4: 2.5}
    assert report.access is True
    assert report.settled


@pytest.mark.parametrize(
    ("line", "outcome", "detail"),
    [
        ("report(trying=65536); os.kill(os.getpid(), 11)", Outcome.CRASHED, "at 64 KiB"),
        ("os._exit(139)", Outcome.CRASHED, "before the first message"),
        ("report(size=4, right=False, seconds=1)", Outcome.WRONG, "4 B"),
        ("report(failed='cuInit: no'); os._exit(3)", Outcome.FAILED, "cuInit: no"),
        ("print('all is lost'); os._exit(9)", Outcome.FAILED, "all is lost"),
        ("pass", Outcome.FAILED, "exit code 0"),
        ("report(absent='no second rank')", Outcome.ABSENT, "no second rank"),
    ],
)
def test_a_path_that_does_not_work_is_told_apart(
    scripted: Callable[..., Report], line: str, outcome: Outcome, detail: str
) -> None:
    report = scripted(direct=line)
    direct = report.paths["direct"]
    assert direct.outcome is outcome
    assert detail in direct.detail
    assert not report.works("direct")
    assert report.works("peer"), "the next path is tried all the same"


def test_a_path_that_hangs(scripted: Callable[..., Report]) -> None:
    report = scripted(2.0, direct="report(trying=4); time.sleep(600)")
    assert report.paths["direct"].outcome is Outcome.SILENT
    assert "at 4 B" in report.paths["direct"].detail
    assert not report.settled, "it may have been the machine's bad day"


def test_a_right_answer_before_a_crash_is_not_enough(scripted: Callable[..., Report]) -> None:
    report = scripted(
        direct="report(size=4, right=True, seconds=1); report(trying=1024); os._exit(139)"
    )
    assert report.paths["direct"].outcome is Outcome.CRASHED
    assert report.paths["direct"].seconds == {4: 1}


def test_without_the_host_path_nothing_else_is_tried(scripted: Callable[..., Report]) -> None:
    report = scripted(host="os._exit(1)")
    assert report.paths["host"].outcome is Outcome.FAILED
    assert report.paths["direct"].outcome is Outcome.ABSENT
    assert not report.settled


def test_no_launcher() -> None:
    report = probe.probe("a library", [])
    assert report.paths["host"].outcome is Outcome.FAILED
    assert "mpirun" in report.paths["host"].detail


def test_shared_memory_of_a_crashed_job_is_removed(
    scripted: Callable[..., Report], tmp_path: Path
) -> None:
    left, kept = tmp_path / "left", tmp_path / "kept"
    left.touch()
    kept.touch()
    scripted(
        staged=f"report(shared=[{str(kept)!r}]); report(size=4, right=True, seconds=1)",
        direct=f"report(shared=[{str(left)!r}]); os._exit(139)",
    )
    assert not left.exists()
    assert kept.exists(), "a job that ended well has tidied up by itself"


def test_children_may_use_all_cores_and_we_stay_bound(scripted: Callable[..., Report]) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        report = scripted(host="report(size=len(os.sched_getaffinity(0)), right=True, seconds=1)")
        assert list(report.paths["host"].seconds) == [len(mine)]
        assert os.sched_getaffinity(0) == {min(mine)}
    finally:
        os.sched_setaffinity(0, mine)


def test_the_fastest_device_path_by_its_largest_message() -> None:
    staged = Result(Outcome.RIGHT, "", {4: 1.0, 1024: 9.0})
    peer = Result(Outcome.RIGHT, "", {4: 5.0, 1024: 2.0})
    wrong = Result(Outcome.WRONG, "", {4: 0.1, 1024: 0.1})
    host = Result(Outcome.RIGHT, "", {4: 0.1, 1024: 0.1})
    paths = {"host": host, "staged": staged, "direct": wrong, "peer": peer}
    assert dataclasses.replace(REPORT, paths=paths).fastest() == "peer"
    assert dataclasses.replace(REPORT, paths={"host": host, "direct": wrong}).fastest() is None


# --- what is remembered ---------------------------------------------------------------------


def known(environ: Mapping[str, str], library: str = "a library") -> Report:
    return dataclasses.replace(REPORT, fingerprint=probe.fingerprint(library, environ))


def test_kept_and_found_again(home: dict[str, str]) -> None:
    assert probe.cached_probe("a library", environ=home) is None
    assert probe.keep(known(home), environ=home) is None
    assert probe.cached_probe("a library", environ=home) == known(home)


def test_another_library_or_setting_is_another_answer(home: dict[str, str]) -> None:
    probe.keep(known(home), environ=home)
    assert probe.cached_probe("another library", environ=home) is None
    changed = {**home, "I_MPI_OFFLOAD": "1"}
    assert probe.cached_probe("a library", environ=changed) is None
    in_a_job = {**home, "PMI_RANK": "0", "PMI_SIZE": "2"}
    assert probe.cached_probe("a library", environ=in_a_job) == known(home)


def test_another_driver_or_gpu_is_another_answer(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = probe.fingerprint("a library", home)
    monkeypatch.setattr(cudriver, "version", lambda: (99, 9))
    after = probe.fingerprint("a library", home)
    monkeypatch.setattr(cudriver, "installed", lambda: ["0000:99:00.0"])
    assert len({before, after, probe.fingerprint("a library", home)}) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 0}', '{"format": 1}', "\xff", None]
)
def test_a_spoiled_file_is_as_good_as_none(home: dict[str, str], text: str | None) -> None:
    report = known(home)
    probe.keep(report, environ=home)
    (file,) = Path(home["XDG_CACHE_HOME"], "mpiring").iterdir()
    if text is None:  # whole, but with an outcome nobody knows
        text = file.read_text().replace('"crashed"', '"exploded"')
    file.write_bytes(text.encode("latin-1"))
    assert probe.cached_probe("a library", environ=home) is None
    assert probe.keep(report, environ=home) is None
    assert probe.cached_probe("a library", environ=home) == report


def test_an_answer_of_another_fingerprint_is_not_taken(home: dict[str, str]) -> None:
    report = known(home)
    probe.keep(report, environ=home)
    (file,) = Path(home["XDG_CACHE_HOME"], "mpiring").iterdir()
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "fingerprint": "copied"}))
    assert probe.cached_probe("a library", environ=home) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    environ = {"XDG_CACHE_HOME": str(blocked)}
    assert "file" in (probe.keep(known(environ), environ=environ) or "")
    assert probe.cached_probe("a library", environ=environ) is None


def test_a_write_that_fails_leaves_the_old_answer_and_nothing_else(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = known(home)
    probe.keep(report, environ=home)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in (probe.keep(report, environ=home) or "")
    assert len(list(Path(home["XDG_CACHE_HOME"], "mpiring").iterdir())) == 1
    assert probe.cached_probe("a library", environ=home) == report


def test_where_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    ours = Path("/home/someone/.cache/mpiring")
    assert probe.cache_folder({}) == ours
    assert probe.cache_folder({"XDG_CACHE_HOME": "relative"}) == ours
    assert probe.cache_folder({"XDG_CACHE_HOME": "/var/c"}) == Path("/var/c/mpiring")


def test_readable_sizes() -> None:
    sizes = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    assert [probe.readable(size) for size in sizes] == ["4 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB"]


# --- real jobs ------------------------------------------------------------------------------

_PROGRAM = """
import json, sys
from mpiring.transport import launcher, probe
report = probe.probe("a library", launcher.mpiexec())
paths = {n: [r.outcome.value, r.detail, len(r.seconds)] for n, r in report.paths.items()}
print(json.dumps([paths, report.access]))
"""


def real(mpi: Installation, fake: Path, mode: str) -> tuple[dict[str, list[Any]], bool | None]:
    """Probe from inside a job, as the doctor does, with a driver that behaves like ``mode``."""
    env = {"LD_LIBRARY_PATH": str(fake), "FAKE_CUDA": mode}
    ended = launch(1, ["-c", _PROGRAM], mpi=mpi, env=env, timeout=110).check()
    return json.loads(ended.stdout)


def test_device_memory_that_mpi_must_not_touch(mpi: Installation, fake_cuda: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    paths, access = real(mpi, fake_cuda, "unaware")
    assert paths["host"][0] == paths["staged"][0] == paths["peer"][0] == "right"
    assert paths["direct"][:2] == ["crashed", "memory fault at 4 B"]
    assert access is True
    mine = [name for name in set(os.listdir("/dev/shm")) - before if "mpiring-fake" in name]
    assert mine == []


@pytest.mark.parametrize(
    ("mode", "direct", "peer"),
    [
        ("aware", "right", "right"),
        ("wrong", "wrong data", "wrong data"),
        ("noipc", "crashed", "failed"),
    ],
)
def test_device_memory_of_other_kinds(fake_cuda: Path, mode: str, direct: str, peer: str) -> None:
    paths, _ = real(require(), fake_cuda, mode)
    assert [paths[name][0] for name in probe.PATHS] == ["right", "right", direct, peer]
    if mode == "noipc":
        assert paths["peer"][1] == "cuIpcGetMemHandle: operation not supported"


@pytest.mark.parametrize(
    ("mode", "why"),
    [("aware", ""), ("none", cudriver.NO_GPU), ("broken", "cuInit: unknown error")],
)
def test_why_there_is_no_device_path(
    fake_cuda: Path, mode: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudriver, "version", lambda: (13, 1))  # this process has no such driver
    environ = {**os.environ, "LD_LIBRARY_PATH": str(fake_cuda), "FAKE_CUDA": mode}
    assert probe._without_gpu(environ) == why


def test_the_driver_lists_its_gpus(fake_cuda: Path) -> None:
    environ = child.importable({**os.environ, "LD_LIBRARY_PATH": str(fake_cuda)})
    ending = child.run(child.python(cudriver.__name__), environ=environ, limit=30)
    first, second = (cudriver.Gpu(**gpu) for gpu in ending.find("gpus"))
    assert (first.index, first.name, first.memory) == (0, "Imaginary GPU", 8 << 30)
    assert first.uuid == "11111111-1111-1111-1111-111111111111"
    assert second.index == 1


def test_importing_the_probe_starts_nothing() -> None:
    code = (
        "import sys; from mpiring.transport import probe; "
        "sys.exit(any(m.split('.')[0] in ('mpi4py', 'numpy', 'cupy') for m in sys.modules))"
    )
    environ = child.importable(launcher.clean())
    assert child.run([sys.executable, "-c", code], environ=environ, limit=30).code == 0
