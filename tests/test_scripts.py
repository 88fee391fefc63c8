"""scripts/train and its set-up, over stand-ins for Python, pip and mpirun.

The stand-in is one shell script under all three names. It writes down how it was
called; asked for an environment it makes a folder with itself inside; asked to
install it does as ``$PIP`` says. So what is tested is when the set-up runs, what
it asks for, and how the run is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

STAND_IN = r"""#!/bin/bash
shopt -s extglob
name=$(basename "$0")
case "$name $*" in
    *" -m venv "* | *" -m virtualenv "*)
        echo "$2" >>"$LOG"
        mkdir -p "${@: -1}/bin"
        cp "$0" "${@: -1}/bin/python"
        cp "$0" "${@: -1}/bin/mpirun" ;;
    *" -m pip "*) echo "pip ${@: -1}" >>"$LOG"; eval "${PIP:-}" ;;
    *"sys.version_info[:2]"*) echo 3.11 ;;
    *" -c "*) case "$*" in *import\ ${LACKS:-nothing}*) exit 1 ;; esac ;;
    *) echo "$name $* [$OMP_NUM_THREADS $OPENBLAS_NUM_THREADS]" >>"$LOG" ;;
esac
"""


class Checkout:
    """A copy of what the scripts need, beside a stand-in Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.root.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        self.log = folder / "log"
        self.python = folder / "python3"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def train(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Call the script, from a folder that is not the checkout's."""
        self.log.write_text("")
        inherited = {
            name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
        }
        return subprocess.run(
            [str(self.root / "scripts" / "train"), *arguments],
            cwd="/",
            env={**inherited, "PYTHON": str(self.python), "LOG": str(self.log), **env},
            capture_output=True,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def steps(self) -> list[str]:
        return [call.partition(" ")[0] for call in self.calls]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_call_sets_up_and_the_second_goes_straight_to_the_run(
    checkout: Checkout,
) -> None:
    done = checkout.train("--epochs", "3", "a b")
    assert done.returncode == 0, done.stderr
    assert checkout.calls[:2] == ["venv", "pip .[mpich,train]"]
    run = checkout.calls[2]
    assert run.startswith("mpirun -n 8 python -m mpiring.train --epochs 3 a b [")
    assert done.stderr.count("\n") == 2  # a line for each step

    done = checkout.train("--epochs", "3", "a b")
    assert checkout.calls == [run]
    assert done.stderr == ""


def test_a_changed_configuration_is_installed_into_the_same_environment(
    checkout: Checkout,
) -> None:
    checkout.train()
    with (checkout.root / "setup.cfg").open("a") as file:
        file.write("\n# changed\n")
    checkout.train()
    assert checkout.steps == ["pip", "mpirun"]
    checkout.train()
    assert checkout.steps == ["mpirun"]


def test_a_checkout_that_moved_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.train()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.train()
    assert checkout.steps == ["venv", "pip", "mpirun"]


def test_an_environment_that_no_longer_works_is_made_anew(checkout: Checkout) -> None:
    checkout.train()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    checkout.train()
    assert checkout.steps == ["venv", "pip", "mpirun"]


def test_extras_add_up(checkout: Checkout) -> None:
    checkout.train()
    more = 'source "$1/scripts/environment.sh"; ensure .venv train test'
    env = {**os.environ, "LOG": str(checkout.log)}
    subprocess.run(["bash", "-euc", more, "bash", str(checkout.root)], env=env, check=True)
    assert checkout.calls[-1] == "pip .[mpich,train,test]"
    checkout.train()
    assert checkout.steps == ["mpirun"]


def test_what_pip_says_is_shown_when_it_fails_and_tried_again(checkout: Checkout) -> None:
    done = checkout.train(PIP="echo no such package; exit 1")
    assert done.returncode != 0
    assert "no such package" in done.stderr
    assert checkout.steps == ["venv", "pip"]
    assert checkout.train().returncode == 0
    assert checkout.steps[-2:] == ["pip", "mpirun"]


def test_virtualenv_stands_in_for_venv(checkout: Checkout) -> None:
    assert checkout.train(LACKS="ensurepip").returncode == 0
    assert checkout.steps == ["virtualenv", "pip", "mpirun"]


def test_a_python_that_makes_no_environments_says_what_to_install(checkout: Checkout) -> None:
    done = checkout.train(LACKS="@(ensurepip|virtualenv)")
    assert done.returncode != 0
    assert "apt install python3.11-venv" in done.stderr
    assert checkout.calls == []


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "2 3", "1.5"])
def test_a_number_of_ranks_that_is_none_is_refused(checkout: Checkout, ranks: str) -> None:
    done = checkout.train(RANKS=ranks)
    assert done.returncode != 0
    assert f"RANKS must be a whole number from 1 up, not '{ranks}'" in done.stderr
    assert checkout.calls == []


def test_help_is_printed_once(checkout: Checkout) -> None:
    checkout.train("--epochs", "3", "--help")
    assert checkout.calls[-1].startswith("python -m mpiring.train --help")


def test_ranks_share_the_cores(checkout: Checkout) -> None:
    cores = len(os.sched_getaffinity(0))
    checkout.train(RANKS="1")
    assert checkout.calls[-1].endswith(f"-n 1 python -m mpiring.train [{cores} {cores}]")
    checkout.train(RANKS=str(2 * cores))
    assert checkout.calls[-1].endswith("[1 1]")
    checkout.train(OMP_NUM_THREADS="3")
    assert checkout.calls[-1].endswith("[3 3]")
    checkout.train(OMP_NUM_THREADS="3", OPENBLAS_NUM_THREADS="5")
    assert checkout.calls[-1].endswith("[3 5]")
