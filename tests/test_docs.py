"""The README shows the code that runs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import pyro_sparse as ps

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readmes_own_model_is_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    example = (ROOT / "examples" / "own_model.py").read_text()
    code = example.split('"""\n', 1)[1].strip()  # without its docstring
    assert code in [block.strip() for block in blocks]


def test_the_readmes_own_model_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tenth of its rows and a hundredth of its steps."""
    short = ps.PriorAnnealing(20, 40, 100, 100)
    monkeypatch.setattr(ps, "PriorAnnealing", lambda: short)
    monkeypatch.setattr(ps, "anneal", lambda *args, anneal=ps.anneal, **kwargs: anneal(*args, **kwargs, progress=False))
    monkeypatch.setattr(ps, "select", lambda run, select=ps.select: select(run, 1 - 1e-9))  # few weights
    monkeypatch.setattr(ps, "refit", lambda *args, refit=ps.refit: refit(*args, max_iterations=5))
    state = torch.get_rng_state()
    found = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    torch.set_rng_state(state)
    printed = capsys.readouterr().out
    assert "weights kept" in printed and "mean_lower" in printed
    assert found["run"].spec.num_data == 10_000 and found["run"].schedule is short


def test_the_readmes_network_for_images_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On made-up images, of a smaller network and a few steps."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "resnet" in b)
    short = ps.PriorAnnealing(2, 2, 2, 2, 4, learning_rate=1e-3)

    def images(root: str, train: bool = True, download: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        size = 50_000 if train else 20
        return torch.zeros(size, 3, 32, 32, dtype=torch.uint8), torch.arange(size) % 10

    def refit(run: ps.Run, found: ps.Structure, refit: Any = ps.refit) -> ps.Fit:
        fit: ps.Fit = refit(run, found, schedule=ps.PriorAnnealing(2, 0, 0, 0), progress=False)
        return fit

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("pyro_sparse.datasets.cifar10", images)
    monkeypatch.setattr(ps, "resnet", lambda depth, resnet=ps.resnet: resnet(8, width=4))
    monkeypatch.setattr(ps.PriorAnnealing, "images", lambda **_: short)
    quick = {"progress": False, "num_draws": 2}
    monkeypatch.setattr(ps, "anneal", lambda *args, anneal=ps.anneal, **own: anneal(*args, **own | quick))
    monkeypatch.setattr(ps, "refit", refit)
    found: dict[str, Any] = {}
    exec(block, found)
    assert "channels" in capsys.readouterr().out
    assert found["probs"].shape == (20, 10) and found["small"](found["new_images"]).shape == (20, 10)


def test_the_readmes_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"
