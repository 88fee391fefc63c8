"""Fakes for the doctor's tests: a CUDA driver without a GPU, and MPI packages that misbehave."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 whose device memory is shared memory: see its source."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the CUDA driver")
    folder = tmp_path_factory.mktemp("cuda")
    source, library = HERE / "fake_libcuda.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-lrt"], check=True)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Variables that give a test a cache folder of its own."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


_MPI = """
import os, signal, time
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
def get_vendor(): return ("MPICH", (1, 2, 3))
def Get_version(): return (3, 1)
def Get_library_version(): return "a stand-in"
def Init_thread(level):
    {init}
"""


@pytest.fixture
def fake_mpi4py(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Make an mpi4py whose ``Init_thread`` runs the line given; returns variables that choose it.

    An empty line: an mpi4py that cannot be imported.
    """

    def make(init: str) -> dict[str, str]:
        package = tmp_path / "fakes" / "mpi4py"
        package.mkdir(parents=True)
        if init:
            text = "__version__ = '4.0'\nclass rc:\n    initialize = True\n"
        else:
            text = "raise ModuleNotFoundError(\"No module named 'mpi4py'\")\n"
        (package / "__init__.py").write_text(text)
        (package / "MPI.py").write_text(_MPI.format(init=init))
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "fakes"), str(HERE.parents[1])])}

    return make
