"""Reductions by any of their names: MPI.SUM, a user-made MPI.Op, "sum", MEAN."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from mpiring.device.base import Reduction
from mpiring.device.host import check_reduction
from mpiring.errors import ArgumentError, DtypeError

SUM = Reduction("sum")
#: The average over ranks: of floating-point numbers; float16 and bfloat16 never overflow in it.
MEAN = Reduction("mean")

_NAMES = (
    *("sum", "prod", "max", "min", "land", "band", "lor", "bor", "lxor", "bxor"),
    *("maxloc", "minloc"),
)


class Operation(NamedTuple):
    """What is applied to each pair of elements, and whether the result is divided by n."""

    reduction: Reduction
    mean: bool = False

    @property
    def name(self) -> str:
        return "mean" if self.mean else self.reduction.name


def resolve(op: Any) -> Operation:
    """The operation that ``op`` names. ArgumentError if none, or if it cannot go round a ring."""
    if isinstance(op, Reduction):
        return Operation(SUM, mean=True) if op == MEAN else Operation(op)
    if isinstance(op, str):
        if op == "mean":
            return Operation(SUM, mean=True)
        if op in _NAMES:
            return Operation(Reduction(op))
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        return Operation(_from_mpi(mpi, op))
    raise ArgumentError(
        f"op: {op!r} is no reduction; allowed are an mpi4py Op such as MPI.SUM, "
        f"mpiring.MEAN, or a name: {', '.join(_NAMES)}, mean"
    )


def _from_mpi(mpi: Any, op: Any) -> Reduction:
    for name in _NAMES:
        if op == getattr(mpi, name.upper()):
            return Reduction(name)
    for name in ("OP_NULL", "REPLACE", "NO_OP"):
        if op == getattr(mpi, name):
            raise ArgumentError(f"op: MPI.{name} is no reduction of all ranks")
    if not op.Is_commutative():
        raise ArgumentError(
            "op: not commutative; a ring adds each chunk in another order of ranks. "
            "Call the mpi4py communicator's own method for it"
        )
    return Reduction("user", _local(mpi, op))


def _local(mpi: Any, op: Any) -> Any:
    def apply(src: np.ndarray, dst: np.ndarray) -> None:
        op.Reduce_local(src, dst)

    return apply


def check(op: Operation, dtype: np.dtype) -> None:
    """DtypeError where the operation, as named by the caller, cannot take ``dtype``."""
    if op.mean and not (dtype.kind in "fc" or dtype.name == "bfloat16"):
        raise DtypeError(f"op: the mean of {dtype} is not {dtype}; it takes floating-point numbers")
    if op.name in ("maxloc", "minloc") and len(dtype.names or ()) != 2:
        raise DtypeError(
            f"op: {op.name} is not defined for dtype {dtype}; it takes (value, index) pairs"
        )
    if op.reduction.function is not None:
        _check_user(dtype)
    else:
        check_reduction(op.reduction, dtype)


def _check_user(dtype: np.dtype) -> None:
    """A user-made MPI.Op sees MPI datatypes: DtypeError where MPI has none."""
    from mpi4py.util import dtlib

    try:
        dtlib.from_numpy_dtype(dtype)
    except (ValueError, KeyError, TypeError):
        raise DtypeError(
            f"op: a user-made MPI.Op needs a dtype that MPI knows, not {dtype}"
        ) from None


def is_half(dtype: np.dtype) -> bool:
    """16 bits: a sum over ranks may overflow where the mean does not."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")
