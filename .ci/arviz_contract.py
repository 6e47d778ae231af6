"""What ArviZ must make of written traces: python .ci/arviz_contract.py FOLDER, needs ArviZ of either generation and Zarr.

Each trace in the folder has draws, statistics and the groups that need the model; none needs this package to be read.
"""

import sys
import warnings
from pathlib import Path

import arviz as az
import matplotlib
import numpy as np
import xarray as xr

matplotlib.use("Agg")
FIRST = int(az.__version__.split(".")[0]) < 1  # the generation before DataTree


def check(path: Path) -> None:
    tree = xr.open_datatree(path, engine="zarr").load()
    data = az.InferenceData.from_datatree(tree) if FIRST else tree
    posterior = tree["posterior"].to_dataset()
    chains, draws = posterior.sizes["chain"], posterior.sizes["draw"]
    summary = az.summary(data)
    assert len(summary) == sum(v.size for v in posterior.values()) // (chains * draws), summary
    assert any("[a]" in str(row) or ", a]" in str(row) for row in summary.index) == path.name.startswith("run"), summary
    for statistic in (az.rhat(data), az.ess(data)):
        found = statistic if isinstance(statistic, xr.Dataset) else statistic.to_dataset()
        assert set(found.data_vars) == set(posterior.data_vars), found
        assert all(np.isfinite(value).all() and (value > 0).all() for value in found.values()), found
    loo = az.loo(data)
    elpd = float(loo.elpd_loo if FIRST else loo.elpd)
    log_likelihood = tree["log_likelihood"]["y"]
    # Of a model that fits LOO lies below the density at the draws, by about the number of parameters.
    assert -50 < elpd - float(log_likelihood.mean(("chain", "draw")).sum()) < 0, (elpd, loo)
    az.plot_trace(data, var_names=["sigma"])
    az.plot_forest(data)
    if FIRST:
        az.plot_ppc(data)
    else:
        az.plot_ppc_dist(data)
    print(f"{path.name}: ArviZ {az.__version__} reads {len(summary)} numbers, {chains} chains of {draws} draws")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    traces = sorted(Path(sys.argv[1]).glob("*.zarr"))
    assert traces, "no trace to read"
    for one in traces:
        check(one)
