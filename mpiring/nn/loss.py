"""Softmax cross-entropy as a sum, so that ranks with unequal batches add up rightly.

The loss to minimise is the mean over the samples of the *global* batch. A mean
of local means weighs the samples of a small local batch more than others. So
each rank sums over its own samples and divides by the global count: the sum of
these gradients over the ranks, and over micro-batches, is the gradient of the
mean, however the batch was split, and a rank without samples contributes zero.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import Array, working_dtype


def softmax_cross_entropy(
    logits: Array, labels: Array, denominator: int, xp: ModuleType = np
) -> tuple[Array, Array]:
    """The *sum* over the local samples of ``-log softmax(logits)[label]``, and the gradient
    of that sum divided by ``denominator``.

    ``logits`` is [samples, classes], ``labels`` [samples] of integers; both may be
    empty. ``denominator`` is the number of samples in the global batch. Returns a
    zero-dimensional array (float32, or float64 for float64 logits; reading it waits
    for the device) and an array like ``logits``. The largest logit of each sample is
    subtracted first, so no exponential overflows.
    """
    if denominator < 1:
        raise ArgumentError(
            f"denominator: {denominator} given; allowed is the number of samples in the global "
            "batch, at least 1"
        )
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ArgumentError(
            f"labels: shape {labels.shape} given for logits of shape {logits.shape}; "
            "allowed are [samples] and [samples, classes]"
        )
    shifted = logits.astype(working_dtype(logits.dtype))
    shifted -= shifted.max(axis=1, keepdims=True)
    samples = xp.arange(len(labels))
    chosen = shifted[samples, labels]
    gradient = xp.exp(shifted, out=shifted)
    totals = gradient.sum(axis=1, keepdims=True)
    loss = (xp.log(totals[:, 0]) - chosen).sum()
    gradient /= totals
    gradient[samples, labels] -= 1
    gradient /= denominator
    return loss, gradient.astype(logits.dtype, copy=False)
