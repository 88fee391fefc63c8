"""Gradients grouped into buckets: flat runs of memory that are exchanged together.

A message has a fixed cost, so many small gradients travel as one; and an exchange
should begin early, so they do not wait for all of them. Buckets follow the order
in which backward produces gradients. The first is small, since nothing can be
hidden behind what is computed before it is full.

Nothing is copied: gradients that lie side by side in one array *are* a bucket.
A gradient that lies elsewhere, or has another dtype, begins a new one. The same
holds for the values that the gradients belong to, where these are exchanged too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from mpiring.errors import ArgumentError

MIB = 1 << 20
#: Bytes; the values that torch's DistributedDataParallel made common.
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB


@dataclass(frozen=True, slots=True)
class Bucket:
    """``gradient`` is one-dimensional; ``members`` are positions in the ready order.

    ``value`` is the same run of the values, where ``layout`` was given them.
    """

    index: int
    gradient: Any
    members: tuple[int, ...]
    value: Any = None


def layout(
    gradients: Sequence[Any],
    bucket_bytes: int = BUCKET,
    first_bucket_bytes: int = FIRST_BUCKET,
    values: Sequence[Any] | None = None,
) -> list[Bucket]:
    """Group gradients, given in the order in which they become ready.

    A bucket is closed before the gradient that would make it larger than the
    limit; one gradient above the limit is a bucket by itself. Where ``values`` are
    given, one of its size for each gradient, a bucket is a run of these as well.
    Raises ArgumentError for arrays that are not C-contiguous, or that share memory:
    what they share would be summed, or updated, twice.
    """
    for name, limit in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if limit < 1:
            raise ArgumentError(f"{name}: {limit} given; allowed are bytes from 1")
    columns = [gradients] if values is None else [gradients, values]
    for name, arrays in zip(("gradients", "values"), columns):
        for position, array in enumerate(arrays):
            if not array.flags.c_contiguous:
                raise ArgumentError(f"{name}: number {position} is not C-contiguous")
        _check_apart(name, arrays)
    sizes = [[array.size for array in arrays] for arrays in columns]
    if sizes[0] != sizes[-1]:
        raise ArgumentError(
            f"values: sizes {sizes[1]} given; allowed are the gradients' {sizes[0]}"
        )
    buckets: list[Bucket] = []
    run: list[int] = []

    def close() -> None:
        if run:
            first, last = run[0], run[-1]
            flat, *more = (_joined(arrays[first], arrays[last]) for arrays in columns)
            buckets.append(Bucket(len(buckets), flat, tuple(run), *more))
            run.clear()

    held = 0
    for position, gradient in enumerate(gradients):
        limit = bucket_bytes if buckets else first_bucket_bytes
        adjoin = run and all(_adjoin(arrays[run[-1]], arrays[position]) for arrays in columns)
        if held + gradient.nbytes > limit or not adjoin:
            close()
        held = gradient.nbytes + (held if run else 0)
        run.append(position)
    close()
    return buckets


def _check_apart(name: str, arrays: Sequence[Any]) -> None:
    extents = sorted(
        (_address(array), _address(array) + array.nbytes, position)
        for position, array in enumerate(arrays)
        if array.nbytes
    )
    for (_, stop, one), (start, _, other) in pairwise(extents):
        if start < stop:
            raise ArgumentError(f"{name}: numbers {one} and {other} share memory")


class HasGradient(Protocol):
    """What is needed of a parameter: an array of any shape, C-contiguous."""

    @property
    def gradient(self) -> Any: ...


class HasValue(HasGradient, Protocol):
    """A parameter whose value is known too: as many elements, C-contiguous."""

    @property
    def value(self) -> Any: ...


class Filling:
    """How far the buckets of a step have been filled. ``parameters`` in the ready order."""

    def __init__(self, parameters: Sequence[HasGradient], buckets: Sequence[Bucket]) -> None:
        self._positions = {id(parameter): i for i, parameter in enumerate(parameters)}
        if len(self._positions) != len(parameters):
            raise ArgumentError("parameters: one of them is given twice")
        self._parameters = list(parameters)  # ids stay theirs as long as they are alive
        self._buckets = buckets
        self._home = [bucket for bucket in buckets for _ in bucket.members]
        self.paused = False  #: gradients only accumulate for now
        self.reset()

    def reset(self) -> None:
        """A new step begins."""
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._seen = [False] * len(self._home)

    def ready(self, parameter: HasGradient) -> Bucket | None:
        """Note a gradient; the bucket that is full by it."""
        position = self._positions.get(id(parameter))
        if position is None or self._seen[position]:
            raise ArgumentError(
                "parameter: "
                + ("not one of those given" if position is None else "ready twice in one step")
            )
        self._seen[position] = True
        bucket = self._home[position]
        self._missing[bucket.index] -= 1
        return bucket if self.full(bucket.index) else None

    def full(self, index: int) -> bool:
        return not self._missing[index]

    def check(self, who: str) -> None:
        """Raise ArgumentError unless every gradient is ready."""
        if not all(self._seen):
            missing = [i for i, seen in enumerate(self._seen) if not seen]
            raise ArgumentError(
                f"{who}: gradients {missing} of {len(self._seen)} never became ready; "
                "call ready for every parameter in every step"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``ready`` does nothing: gradients accumulate, and are exchanged later."""
        if any(self._seen):
            raise ArgumentError("no_sync: entered in the middle of a step; finish it first")
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


def describe(buckets: Sequence[Bucket]) -> str:
    """The layout in words, equal on ranks whose buckets fit together."""
    return ", ".join(
        f"{bucket.gradient.size} x {bucket.gradient.dtype} of gradients {bucket.members[0]}"
        + (f"-{bucket.members[-1]}" if len(bucket.members) > 1 else "")
        for bucket in buckets
    )


def _address(array: Any) -> int:
    if hasattr(array, "__cuda_array_interface__"):
        return array.__cuda_array_interface__["data"][0]
    return array.__array_interface__["data"][0]


def _root(array: Any) -> Any:
    """The largest array that this one is a run of. Its dtype may be another: NumPy lets a view of
    a view depend on the array at the bottom, which may hold bytes. Not one that lies in another
    order, since flattening that would make a copy."""
    while hasattr(base := array.base, "dtype") and base.flags.c_contiguous:
        array = base
    return array


def _adjoin(before: Any, after: Any) -> bool:
    return (
        before.dtype == after.dtype
        and _root(before) is _root(after)
        and _address(before) + before.nbytes == _address(after)
    )


def _joined(first: Any, last: Any) -> Any:
    """The flat view from the start of one gradient to the end of another."""
    octets = _root(first).reshape(-1).view("u1")
    start = _address(first) - _address(octets)
    stop = _address(last) + last.nbytes - _address(octets)
    return octets[start:stop].view(first.dtype)
