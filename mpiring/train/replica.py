"""What one rank holds of the training: its samples and the model. All local.

The file that ``save`` fills is an ``.npz`` for other programs too: every weight and bias
under its name (``linear0.weight``, [inputs, outputs]), ``inputs.mean`` and
``inputs.deviation`` by which samples are standardised, and what training needs to go on
as if it had never stopped: the optimizer's arrays, one element for each parameter
whatever rank had it, its steps, and the epochs done.
"""

from __future__ import annotations

import argparse
import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.data import Dataset
from mpiring.nn.model import MLP
from mpiring.nn.optim import SGD, Adam, Optimizer
from mpiring.nn.sampler import Sampler
from mpiring.train.place import Host, Place


class Replica:
    """Made alike on every rank. Raises ArgumentError if the options do not fit the data."""

    def __init__(
        self,
        dataset: Dataset,
        options: argparse.Namespace,
        *,
        ranks: int = 1,
        rank: int = 0,
        place: Place | None = None,
    ) -> None:
        self.dataset = dataset
        self.place = place or Host()
        self.sampler = Sampler(
            len(dataset.y_train),
            options.batch_size,
            ranks=ranks,
            rank=rank,
            seed=options.seed,
            accumulate=options.accumulate,
        )
        sizes = (dataset.features, *options.hidden, dataset.classes)
        self.model = MLP(
            sizes,
            xp=self.place.xp,
            dtype=options.dtype,
            seed=options.seed,
            allocate=self.place.allocate,
        )
        self._options = options
        self.optimizer_state: Mapping[str, Any] = {}  #: what was loaded of an optimizer
        self.epochs = 0  #: done

    def optimizer(self, count: int) -> Optimizer:
        """A new one, over ``count`` elements: as many as a rank updates."""
        options, place = self._options, self.place
        common: dict[str, Any] = {
            "lr": options.lr,
            "weight_decay": options.weight_decay,
            "xp": place.xp,
            "kernel": place.kernel(options.optimizer),
        }
        if options.optimizer == "adam":
            return Adam(count, options.dtype, **common)
        return SGD(count, options.dtype, momentum=options.momentum, **common)

    def save(self, optimizer_state: Mapping[str, Any]) -> bytes:
        """The content of a file from which ``load`` goes on.

        ``optimizer_state``: of all parameters, as ``Strategy.state`` tells it.
        """
        file = io.BytesIO()
        np.savez(file, **self._state(optimizer_state))
        return file.getvalue()

    def load(self, path: str) -> None:
        """Take over what a like replica has saved. Raises ArgumentError naming the file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                saved = dict(file)
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ArgumentError(f"--resume: {path} cannot be read: {error}") from error
        # An array has an element for each parameter, whoever is to update how many of them.
        optimizer = {
            name: np.empty(self.model.parameters.size if array.ndim else (), array.dtype)
            for name, array in self.optimizer(0).state_dict().items()
        }
        for name, wanted in self._state(optimizer).items():
            given = _kind(saved[name]) if name in saved else "missing"
            if given != _kind(wanted):
                raise ArgumentError(
                    f"--resume: {path} fits other data, --hidden, --dtype or --optimizer: its "
                    f"{name} is {given}; allowed is {_kind(wanted)}"
                )
        for parameter in self.model.parameters:
            parameter.value[...] = self.place.xp.asarray(saved[parameter.name])
        self.optimizer_state = {name: saved[f"optimizer.{name}"] for name in optimizer}
        self.epochs = int(saved["epochs"])

    def _state(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{each.name: self.place.host(each.value) for each in self.model.parameters},
            **{f"optimizer.{name}": array for name, array in optimizer.items()},
            "inputs.mean": np.asarray(self.dataset.mean),
            "inputs.deviation": np.asarray(self.dataset.deviation),
            "epochs": np.asarray(self.epochs),
        }


def _kind(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"
