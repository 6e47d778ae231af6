"""Posterior draws in ArviZ: sparse regression coefficients under their posterior, four chains; half a minute."""

import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import pyro_sparse as ps

torch.manual_seed(0)
names = ["age", "dose", "height", "weight", "noise 1", "noise 2"]
x = torch.randn(300, len(names))
y = 1.0 + 1.5 * x[:, 1] - 0.8 * x[:, 3] + 0.7 * torch.randn(300)
prior = ps.SpikeSlab(slab_prob=0.3, spike_scale=0.1, slab_scale=1.0, initial_spike_scale=0.3)


def model(x, y=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    slope = pyro.sample("slope", prior.expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(intercept + x @ slope, sigma), obs=y)


# Ends with a sampling phase at temperature 1, so that the draws are a posterior; all 300 rows at every step.
schedule = ps.PriorAnnealing(200, 300, 500, cool_steps=0, sample_steps=10_000, learning_rate=1e-2)
run = ps.anneal(model, (x, y), schedule, num_draws=500, num_chains=4, input_names=names)
print(ps.mipp(run)["input"].to_series().round(2))
draws = ps.to_arviz(run)
print(az.summary(draws))
az.plot_forest(draws, var_names=["slope"])
plt.savefig("slopes.png", dpi=120, bbox_inches="tight")
