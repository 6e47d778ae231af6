"""Sparse Bayesian deep learning on Pyro: anneal, select, refit, predict."""

from pyro_sparse.inference.sampler import NonFiniteError, Run, anneal
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.trace import to_arviz
from pyro_sparse.models.annealed import annealed
from pyro_sparse.models.defaults import default_prior
from pyro_sparse.models.layers import SparseLinear, SparseModule, SparseNet, sparsify
from pyro_sparse.models.spike_slab import SpikeSlab
from pyro_sparse.inference.prediction import predict
from pyro_sparse.inference.refit import Fit, refit
from pyro_sparse.inference.selection import mipp, select
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.kernel import SGHMC
from pyro_sparse.models.regression import normal_regression
