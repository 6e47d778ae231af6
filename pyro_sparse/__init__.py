"""Sparse Bayesian deep learning on Pyro: anneal, select, refit, predict."""

from typing import Any

from pyro_sparse.inference.kernel import SGHMC
from pyro_sparse.inference.prediction import predict
from pyro_sparse.inference.refit import Fit, refit
from pyro_sparse.inference.sampler import NonFiniteError, Run, anneal
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.selection import mipp, select
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.trace import package_version, to_arviz
from pyro_sparse.models.annealed import annealed
from pyro_sparse.models.defaults import default_prior
from pyro_sparse.models.layers import SparseLinear, SparseModule, SparseNet, sparsify
from pyro_sparse.models.regression import normal_regression
from pyro_sparse.models.spike_slab import SpikeSlab

__version__ = package_version()

__all__ = [
    "SGHMC",
    "Controls",
    "Fit",
    "NonFiniteError",
    "PriorAnnealing",
    "Run",
    "SparseLinear",
    "SparseModule",
    "SparseNet",
    "SparseRegressor",
    "SpikeSlab",
    "Structure",
    "anneal",
    "annealed",
    "default_prior",
    "mipp",
    "normal_regression",
    "predict",
    "refit",
    "select",
    "sparsify",
    "to_arviz",
]


def __getattr__(name: str) -> Any:
    # scikit-learn and pandas are loaded only by those who use the estimator.
    if name == "SparseRegressor":
        from pyro_sparse.estimators import SparseRegressor

        return SparseRegressor
    raise AttributeError(f"module 'pyro_sparse' has no attribute '{name}'")
