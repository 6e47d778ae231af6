"""Smoke test of an installed copy: python .ci/smoke.py FOLDER, where FOLDER is what pip installed into."""

import importlib
import pkgutil
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyro_sparse as ps

installed = Path(sys.argv[1]).resolve()
modules = [module.name for module in pkgutil.walk_packages(ps.__path__, "pyro_sparse.")]
for name in ["pyro_sparse", *modules]:
    file = Path(str(importlib.import_module(name).__file__)).resolve()
    if not file.is_relative_to(installed):
        raise SystemExit(f"{name} was imported from {file}, not from the wheel")
if not (installed / "pyro_sparse" / "py.typed").is_file():
    raise SystemExit("the wheel lacks py.typed: its types would be ignored")

torch.manual_seed(0)
x = torch.randn(64, 3)
y = x[:, 0] + 0.1 * torch.randn(64)
net = ps.SparseNet([3, 4, 1], activation="tanh")


def model(x, y=None):
    mean = net(x).squeeze(-1)
    with pyro.plate("data", 64, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


schedule = ps.PriorAnnealing(train_steps=20, power_steps=20, spike_steps=20, cool_steps=20, learning_rate=1e-3)
run = ps.anneal(model, (x, y), schedule, batch_size=32, num_draws=4, seed=0)
fit = ps.refit(run, ps.select(run))
table = ps.predict(fit, x[:5])
if not bool((table["lower"] <= table["upper"]).all()):
    raise SystemExit(f"the wheel predicts intervals upside down:\n{table}")
print(f"The wheel works: {len(modules)} modules imported; anneal, select, refit and predict ran.")
