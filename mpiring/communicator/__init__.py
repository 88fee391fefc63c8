"""The library's face: mpi4py's method names over schedules."""

from mpiring.communicator.communicator import Communicator
from mpiring.communicator.operations import MEAN, SUM

__all__ = ["MEAN", "SUM", "Communicator"]
