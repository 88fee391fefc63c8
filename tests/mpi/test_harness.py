"""The harness itself: what goes wrong on one rank is seen, named, and ends in time."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.launch import NAMES, ROOT, Completed, Installation, Job, find, launch


def run_cases(tmp_path: Path, mpi: Installation, text: str, *options: str) -> Completed:
    """Three ranks run the test file ``text``."""
    file = tmp_path / "test_bad.py"
    head = "import pytest\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nrank = comm.rank\n"
    file.write_text(head + textwrap.dedent(text))
    where = ["-c", f"{ROOT}/setup.cfg", f"--rootdir={tmp_path}", str(file)]
    argv = ["-m", "tests.mpi.runner", *where, "--color=no", *options]
    return launch(3, argv, mpi=mpi)


def test_a_wrong_result_on_one_rank_fails_that_test_only(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        def test_wrong():
            print("heard on", rank)
            assert rank != 1, "on purpose"

        def test_right():
            assert comm.allreduce(1) == comm.size
        """,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "test_bad.py::test_wrong" in done.stdout
    assert "rank 1 of 3: AssertionError: on purpose" in done.stdout
    assert "heard on 1" in done.stdout and "heard on 0" not in done.stdout


def test_what_all_ranks_fail_alike_is_shown_once(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(tmp_path, mpi, "def test_wrong():\n    assert comm.size == 4")
    assert done.returncode == 1
    assert done.stdout.count("where 3 = ") == 1
    assert "rank 0, 1, 2 of 3: assert 3 == 4" in done.stdout


def test_an_exception_on_one_rank_ends_the_others_wait(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        def test_raises():
            if rank == 2:
                raise ValueError("on purpose")
            comm.Barrier()
        """,
        "--mpi-grace=0.5",
    )
    assert done.returncode != 0
    assert "rank 2 of 3: " in done.stderr and "test_bad.py::test_raises failed" in done.stderr
    assert "ValueError: on purpose" in done.stderr


def test_a_hang_names_the_test_and_where_the_ranks_are(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        def waits_for_nothing():
            comm.recv(source=MPI.ANY_SOURCE)

        @pytest.mark.timeout(1)
        def test_hangs():
            waits_for_nothing()
        """,
    )
    assert done.returncode != 0
    assert "test_bad.py::test_hangs is not over after 1 s" in done.stderr
    assert "waits_for_nothing" in done.stderr


def test_a_process_that_dies_ends_the_job(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        def test_dies():
            import os, signal
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Barrier()
        """,
    )
    assert done.returncode != 0


def test_a_test_is_skipped_by_all_ranks_or_by_none(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        @pytest.mark.skipif(rank == 1, reason="on purpose")
        def test_skipped_by_one():
            comm.Barrier()

        @pytest.mark.skipif(comm.size == 3, reason="on purpose")
        def test_skipped_by_all():
            raise AssertionError
        """,
    )
    assert done.returncode == 1
    assert "1 skipped, 1 error" in done.stdout
    assert "skipped on ranks [1] only" in done.stdout


def test_ranks_that_collect_other_tests_are_refused(tmp_path: Path, mpi: Installation) -> None:
    done = run_cases(
        tmp_path,
        mpi,
        """
        @pytest.mark.parametrize("value", [rank])
        def test_value(value):
            pass
        """,
    )
    assert done.returncode != 0
    assert "collected other tests" in done.stderr


def test_a_launch_that_hangs_fails_and_leaves_no_process(mpi: Installation) -> None:
    with Job(2, ["-c", "import time; print('here', flush=True); time.sleep(600)"], mpi=mpi) as job:
        job.wait_for("here")
        assert len(job.processes()) >= 3  # the launcher and two ranks
        with pytest.raises(pytest.fail.Exception, match=r"not over after 0\.1 s(?s:.*)here"):
            job.finish(timeout=0.1)
        assert not job.processes()


def test_a_process_left_behind_is_found_and_ended(
    mpi: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.launch.LINGER", 0.5)
    # Apart from its parent in every way, but for the environment.
    leave = """
from subprocess import DEVNULL, Popen
Popen(["sleep", "600"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
"""
    with Job(1, ["-c", leave], mpi=mpi) as job:
        with pytest.raises(pytest.fail.Exception, match=r"left behind:\n +\d+ sleep 600"):
            job.finish()
        assert not job.processes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_every_rank(
    mpi: Installation, number: signal.Signals
) -> None:
    program = "from mpi4py import MPI; import time; print('here', flush=True); time.sleep(600)"
    with Job(2, ["-c", program], mpi=mpi) as job:
        job.wait_for("here")
        job.send(number, group=number is signal.SIGINT)
        assert job.finish().returncode != 0


@pytest.mark.parametrize("name", NAMES)
def test_an_installation_that_is_named_must_be_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MPIRING_{name.upper()}", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no Python with"):
        find(name)
