"""Benchmarks: how long a collective takes beside MPI's own, and whether it is right.

    mpirun -n 4 python -m bench allreduce --min 8 --max 64M --factor 4

Every benchmark is a small file over the types of ``case``. What they share:

* All contenders run in one launch, taking turns, since times of two launches
  can't be compared on a shared machine; ratios within one launch can.
* A repetition starts behind a barrier, and costs what its slowest rank needs.
  The figure printed is the median over repetitions.
* Every repetition is verified after its clock has stopped, element by element,
  against values that no other mixture of contributions would give (``values``).
* Pure parts (``bandwidth``, ``values``, ``options``, ``report``, the statistics
  of ``measure``) import no MPI and are tested without it.
"""
