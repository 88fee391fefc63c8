"""What binding once saves: a small all-reduce, persistent against plain Isend/Irecv.

At 1 KiB hardly anything but overhead is left: both rings send the same messages,
and the plain one makes its requests anew each time.
"""

from __future__ import annotations

from dataclasses import replace

from bench import allreduce

BENCHMARK = replace(
    allreduce.BENCHMARK,
    name="persistent",
    summary="a 1 KiB all-reduce, bound once, against the ring in plain Isend/Irecv",
    yardsticks=("plain",),
    devices=("cpu",),
    defaults={"min": 1024, "max": 1024, "contenders": ("persistent", "plain")},
)
