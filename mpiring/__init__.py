"""mpiring: ring collectives, a parameter server and overlapped training over MPI, in Python.

Importing the package loads neither MPI nor CuPy; the names below do when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Communicator": "mpiring.communicator",
    "MEAN": "mpiring.communicator",
    "ParameterServer": "mpiring.parallel.parameter_server",
    "Request": "mpiring.engine.request",
}

__all__ = ["Communicator", "MEAN", "ParameterServer", "Request", "poll"]


def poll() -> bool:
    """Move every collective under way in this process; whether anything moved. Never blocks."""
    return import_module("mpiring.engine.progress").default_engine().poll()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpiring' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
