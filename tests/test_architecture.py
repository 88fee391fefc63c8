"""What import-linter cannot say about imports; its contracts are in setup.cfg."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import ROOT

PACKAGE = ROOT / "mpiring"

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)

#: The only modules that cannot even be imported without MPI, or without CuPy.
NEEDY = {"mpiring.transport.mpi", "mpiring.device.cuda"}

#: What a base installation does not bring.
EXTRAS = ("cupy", "matplotlib", "ml_dtypes", "pytest", "rich", "sklearn")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python that finds the package, and no MPI library for mpi4py to load."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/nonexistent"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd="/"
    )


def imported(path: Path) -> Iterator[str]:
    """The top-level names that a file imports, at any depth inside it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = python("-c", "import mpiring, sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "mpiring" in loaded
    assert not loaded & {"numpy", "mpi4py", *EXTRAS}


def test_the_lower_layers_import_only_the_standard_library() -> None:
    lower = [*(PACKAGE / "schedule").rglob("*.py")]
    lower += [PACKAGE / f"{name}.py" for name in ("errors", "task", "trace")]
    for path in lower:
        foreign = set(imported(path)) - sys.stdlib_module_names - {"mpiring"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_every_other_module_imports_with_no_mpi_and_no_extra() -> None:
    script = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # None there: an import of it fails
for name in {[name for name in MODULES if name not in NEEDY]}:
    importlib.import_module(name)
print("mpi4py.MPI" in sys.modules)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"


@pytest.mark.parametrize("command", ["train", "doctor", "explain"])
def test_help_needs_no_mpi_and_no_extra(command: str) -> None:
    script = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({EXTRAS}))
sys.argv = ["{command}", "--help"]
runpy.run_module("mpiring.{command}", run_name="__main__")
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout and "--help" in done.stdout
