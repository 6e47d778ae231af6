"""A Pyro model of one's own: 100 inputs, of which 5 matter (the paper's generator); about a minute and a half."""

import pyro
import pyro.distributions as dist
import torch

import pyro_sparse as ps
from pyro_sparse.datasets import paper_regression

x, y, _ = (torch.as_tensor(a).float() for a in paper_regression(seed=1, num_rows=10_000, num_inputs=100))
torch.manual_seed(1)
net = ps.SparseNet([100, 20, 10, 1], activation="tanh")


def model(x, y=None):
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    mean = net(x).squeeze(-1)
    with pyro.plate("data", 10_000, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(mean, sigma), obs=y)


run = ps.anneal(model, (x, y), ps.PriorAnnealing(), batch_size=500)  # Algorithm 1 of the paper
fit = ps.refit(run, ps.select(run))  # maximum likelihood on the weights kept
print(fit)  # what was kept, which inputs it reads, how the refit ended
print(ps.predict(fit, x[:5], prob=0.95).to_dataframe())  # mean, its interval, that of a new observation
