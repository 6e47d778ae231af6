"""Chains one a process under torchrun: the same draws as in one process, in one trace, on disk too, and resumed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPT = '''
"""What each process runs: python script.py OUT [die]."""
import sys
import warnings

import pyro
import pyro.distributions as dist
import torch

import pyro_sparse as ps

torch.set_num_threads(1)
warnings.simplefilter("ignore")
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.3)
SCHEDULE = ps.PriorAnnealing(5, 5, 5, 0, 40, learning_rate=1e-3)


def model(x, y=None):
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", 40, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def annealed(num_chains=4, **options):
    return ps.anneal(model, (X, Y), SCHEDULE, 10, num_draws=8, num_chains=num_chains, progress=False, **options)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    runs = [annealed()]
    if sys.argv[2:] == ["die"]:  # the second process stops in the middle of its chains, the first one is through
        from pyro_sparse.inference import sampler, store

        store.SECONDS, store.PATIENCE = 0.0, 0
        look = sampler._Way._look

        def dying(self, step, number, *rest):
            look(self, step, number, *rest)
            if rank == 1 and number == 39:
                raise SystemExit(3)

        sampler._Way._look = dying
        sampler._run = lambda *arguments: sys.exit(0)  # the first process is through, the second is dead
        annealed(out=sys.argv[1], sparse_draws=True)
    runs.append(annealed(out=sys.argv[1], sparse_draws=True, resume=True))
    try:
        annealed(num_chains=3)
    except ValueError as error:
        print(error)
    X = X + rank
    try:
        annealed()
    except ValueError as error:
        print(error)
    for number, run in enumerate(runs):
        torch.save([run.positions, run.trace.load().to_dict(), run.history, ps.mipp(run)], f"{sys.argv[1]}-{rank}-{number}.pt")
'''


def launched(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return subprocess.run([*command, str(folder / "run.zarr"), *arguments], capture_output=True, text=True)


def namespace() -> dict[str, Any]:
    """The script's own names, in this process."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT, names)
    return names


@pytest.mark.filterwarnings("ignore")
def test_chains_are_shared_out_and_gathered_into_one_trace(tmp_path: Path) -> None:
    done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "num_chains must be a multiple of the 2 processes, got 3" in done.stdout
    assert "must be given the same model, data and settings, but data_hash is" in done.stdout
    names = namespace()
    expected = names["annealed"]()
    for rank in (0, 1):
        in_memory, on_disk = (
            torch.load(tmp_path / f"run.zarr-{rank}-{number}.pt", weights_only=False) for number in (0, 1)
        )
        for positions, trace, history, _ in (in_memory, on_disk):
            assert torch.allclose(positions, expected.positions, atol=1e-5)
            assert trace["/posterior"].sizes == {"chain": 4, "draw": 8, "w_dim_0": 3}
            assert history.sizes["chain"] == 4
            assert np.allclose(trace["/sample_stats"]["loss"], expected.trace["sample_stats"]["loss"], atol=1e-4)
        assert np.allclose(in_memory[1]["/posterior"]["w"], expected.trace["posterior"]["w"], atol=1e-5)
        assert np.allclose(in_memory[3]["w"], on_disk[3]["w"], atol=1e-5)  # of moments that two processes wrote
    loaded = names["ps"].load(tmp_path / "run.zarr", names["model"], (names["X"], names["Y"]))
    assert torch.allclose(loaded.positions, expected.positions, atol=1e-5) and loaded.history.sizes["chain"] == 4
    with pytest.raises(ValueError, match="its processes is 2, here it is 1"):
        names["annealed"](out=tmp_path / "run.zarr", sparse_draws=True, resume=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_process_that_dies_is_made_up_for_to_the_same_bits(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert launched(whole).returncode == 0
    assert launched(tmp_path, "die").returncode != 0
    names = namespace()
    partial = names["ps"].load(tmp_path / "run.zarr", names["model"], (names["X"], names["Y"]))
    assert len(partial.positions) == 4 and 1 <= partial.trace["posterior"].sizes["draw"] < 8
    done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    found, expected = (torch.load(f / "run.zarr-1-1.pt", weights_only=False) for f in (tmp_path, whole))
    assert torch.equal(found[0], expected[0])
    for group in ("/posterior", "/sample_stats", "/posterior_mean", "/posterior_inclusion"):
        for name, values in expected[1][group].items():
            assert np.array_equal(found[1][group][name], values), (group, name)
