"""What every test may count on: one thread, an empty parameter store, a seeded generator, no window."""

import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pyro
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")


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
