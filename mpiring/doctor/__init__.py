"""``python -m mpiring.doctor``: what this machine's MPI and GPUs can do, on one page.

Four parts, each knowing only the one before it:

* ``worker`` looks at one process and its MPI, and may die of it: it is a child of the doctor;
* ``facts`` holds what was seen, as plain records;
* ``verdict`` turns facts into findings, each with what mends it: a pure function;
* ``page`` sets facts and findings out for people.

The doctor's own process starts neither MPI nor CUDA. So a library that aborts, a
launcher that does not fit or a driver that crashes is something to report.
"""
