"""What one rank holds of the training: its samples, the model, the optimizer. All local.

The file that ``save`` fills is an ``.npz`` for other programs too: every weight and bias
under its name (``linear0.weight``, [inputs, outputs]), ``inputs.mean`` and
``inputs.deviation`` by which samples are standardised, and what training needs to go on
as if it had never stopped: the optimizer's arrays and steps, and the epochs done.
"""

from __future__ import annotations

import argparse
import io
import zipfile
import zlib
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
        self.optimizer = _optimizer(self.model.parameters.size, options, self.place)
        self.epochs = 0  #: done

    def save(self) -> bytes:
        """The content of a file from which ``load`` goes on."""
        file = io.BytesIO()
        np.savez(file, **{name: self.place.host(array) for name, array in self._state().items()})
        return file.getvalue()

    def load(self, path: str) -> None:
        """Take over what a like replica has saved. Raises ArgumentError naming the file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                saved = dict(file)
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ArgumentError(f"--resume: {path} cannot be read: {error}") from error
        for name, wanted in self._state().items():
            given = _kind(saved[name]) if name in saved else "missing"
            if given != _kind(wanted):
                raise ArgumentError(
                    f"--resume: {path} fits other data, --hidden, --dtype or --optimizer: its "
                    f"{name} is {given}; allowed is {_kind(wanted)}"
                )
        for parameter in self.model.parameters:
            parameter.value[...] = self.place.xp.asarray(saved[parameter.name])
        self.optimizer.load_state_dict(
            {name: saved[f"optimizer.{name}"] for name in self.optimizer.state_dict()}
        )
        self.epochs = int(saved["epochs"])

    def _state(self) -> dict[str, Any]:
        return {
            **{parameter.name: parameter.value for parameter in self.model.parameters},
            **{f"optimizer.{name}": x for name, x in self.optimizer.state_dict().items()},
            "inputs.mean": np.asarray(self.dataset.mean),
            "inputs.deviation": np.asarray(self.dataset.deviation),
            "epochs": np.asarray(self.epochs),
        }


def _kind(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _optimizer(count: int, options: argparse.Namespace, place: Place) -> Optimizer:
    common: dict[str, Any] = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "xp": place.xp,
        "kernel": place.kernel(options.optimizer),
    }
    if options.optimizer == "adam":
        return Adam(count, options.dtype, **common)
    return SGD(count, options.dtype, momentum=options.momentum, **common)
