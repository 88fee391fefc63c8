"""Every error that mpiring raises on purpose, one class per kind of mistake.

Each also derives from the built-in exception that a caller would expect, so
``except ValueError`` keeps working in code that has never heard of mpiring.
"""

from __future__ import annotations


class MpiringError(Exception):
    """Base of all errors raised on purpose."""


class ArgumentError(MpiringError, ValueError):
    """An argument has a value, size or layout that is not allowed."""


class DtypeError(MpiringError, TypeError):
    """A dtype, or an operation on that dtype, is not supported."""


class MismatchError(MpiringError, ValueError):
    """Ranks called the same collective with arguments that do not fit together."""


class ScheduleError(MpiringError, AssertionError):
    """A schedule failed its proof: unmatched, deadlocked, aliased or wrong."""


class TransportError(MpiringError, RuntimeError):
    """Bytes did not arrive as agreed."""


class Unread(TransportError):
    """Another rank's memory could not be read, but for the first ``done`` elements."""

    done = 0


class StallError(MpiringError, TimeoutError):
    """A wait ended because nothing moved for longer than the limit set."""


class HazardError(MpiringError, RuntimeError):
    """The virtual device saw an access that no observed completion covers."""


class DeviceError(MpiringError, RuntimeError):
    """A device is missing, or cannot do what was asked."""


class LaunchError(MpiringError, RuntimeError):
    """The launcher and the MPI library do not fit, or MPI is not installed."""
