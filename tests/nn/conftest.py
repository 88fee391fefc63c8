"""Fixtures for the network: the two kinds of array module, and short blocks."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from mpiring.nn import arrays


class OtherModule(ModuleType):
    """NumPy under another identity: takes the paths that are written for devices."""

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)


@pytest.fixture(params=["host", "device"])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    return np if request.param == "host" else OtherModule("other")


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 7 elements, so that small arrays have many, and a short last one."""
    monkeypatch.setattr(arrays, "BLOCK", 7)
    return 7
