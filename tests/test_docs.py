"""The README shows the code that runs."""

import re
import runpy
from pathlib import Path

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


def test_the_readmes_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"
