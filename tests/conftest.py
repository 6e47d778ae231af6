"""What every test may count on: one thread, an empty parameter store, a seeded generator, no window."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pyro
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()


@pytest.fixture
def optional_import() -> Callable[[str], ModuleType]:
    """The named module; where it is missing, the test is skipped at home and fails in CI."""

    def load(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if os.environ.get("CI"):
                pytest.fail(f"{error}: in CI every optional dependency must be there")
            pytest.skip(str(error))

    return load


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A module of the benchmarks by its name; the folder and what was loaded from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, names = set(sys.modules), {path.stem for path in BENCHMARKS.iterdir()}

    def one(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield one
    for name in set(sys.modules) - before:
        if name.split(".")[0] in names:
            del sys.modules[name]
