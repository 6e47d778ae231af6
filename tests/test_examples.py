"""The examples of image networks, on images of noise."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pyro_sparse.datasets
from pyro_sparse.datasets import cifar10

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:minibatch noise adds")
@pytest.mark.filterwarnings("ignore:.*are kept instead of")
def test_cifar_trains_averages_scores_draws_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    generator = torch.Generator().manual_seed(0)

    def images(root: Path, train: bool = True, download: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        rows = 300 if train else 60
        shape = (rows, 3, 32, 32)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator), torch.arange(rows) % 10

    assert images.__annotations__.keys() == cifar10.__annotations__.keys()
    for name in ("cifar10", "svhn"):
        monkeypatch.setattr(pyro_sparse.datasets, name, images)
    example, out = loaded("cifar"), tmp_path / "run"
    settings = {"depth": 8, "width": 2, "epochs": 12, "keep": 0.3}
    example.main(tmp_path, out, **settings)
    first, text = json.loads((out / "scores.json").read_text()), capsys.readouterr().out
    assert {"average of sparse draws", "one sparse network", "kept"} == first.keys()
    assert 0.1 < first["kept"] < 0.6 and "JS distance to SVHN" in text and "layer3.0.conv2.weight" in text
    for name in ("annealing", "reliability", "entropies"):
        assert (out / f"{name}.png").stat().st_size > 10_000
    weights = torch.load(out / "network.pt", weights_only=True)
    zeros = sum(int((weights[name] == 0).sum()) for name in weights if name.endswith("conv2.weight"))
    assert zeros > 0
    generator.manual_seed(0)
    example.main(tmp_path, out, **settings)  # goes on: all is there
    assert json.loads((out / "scores.json").read_text()) == first
