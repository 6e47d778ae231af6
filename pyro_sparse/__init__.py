"""Sparse Bayesian deep learning on Pyro: anneal, select, refit, predict."""

import importlib
from typing import TYPE_CHECKING, Any

# Each public name and the module it is loaded from when it is first asked for: PyTorch takes seconds to load, and
# `pyro-sparse --help` does without it. Type checkers read the imports below instead.
_HOME = {
    "SGHMC": "inference.kernel",
    "Controls": "inference.schedule",
    "Diagnosis": "inference.diagnostics",
    "Fit": "inference.refit",
    "ImageAugmentation": "models.images",
    "NonFiniteError": "inference.step",
    "Normalize": "models.images",
    "PriorAnnealing": "inference.schedule",
    "Run": "inference.run",
    "SparseClassifier": "estimators",
    "SparseConv2d": "models.layers",
    "SparseLinear": "models.layers",
    "SparseModule": "models.layers",
    "SparseNet": "models.layers",
    "SparseRegressor": "estimators",
    "SpikeSlab": "models.spike_slab",
    "Structure": "inference.structure",
    "anneal": "inference.sampler",
    "load": "inference.run",
    "annealed": "models.annealed",
    "brier": "inference.calibration",
    "default_prior": "models.defaults",
    "diagnose": "inference.diagnostics",
    "ece": "inference.calibration",
    "js_distance": "inference.calibration",
    "matched": "inference.matching",
    "mipp": "inference.selection",
    "nll": "inference.calibration",
    "normal_regression": "models.glm",
    "partial_dependence": "inference.effects",
    "predict": "inference.prediction",
    "refit": "inference.refit",
    "regression_model": "models.glm",
    "resnet": "models.resnet",
    "select": "inference.selection",
    "sparsify": "models.layers",
    "to_arviz": "inference.conversion",
}
__all__ = list(_HOME)

if TYPE_CHECKING:
    from pyro_sparse.estimators import SparseClassifier as SparseClassifier
    from pyro_sparse.estimators import SparseRegressor as SparseRegressor
    from pyro_sparse.inference.calibration import brier as brier
    from pyro_sparse.inference.calibration import ece as ece
    from pyro_sparse.inference.calibration import js_distance as js_distance
    from pyro_sparse.inference.calibration import nll as nll
    from pyro_sparse.inference.conversion import to_arviz as to_arviz
    from pyro_sparse.inference.diagnostics import Diagnosis as Diagnosis
    from pyro_sparse.inference.diagnostics import diagnose as diagnose
    from pyro_sparse.inference.effects import partial_dependence as partial_dependence
    from pyro_sparse.inference.kernel import SGHMC as SGHMC
    from pyro_sparse.inference.matching import matched as matched
    from pyro_sparse.inference.prediction import predict as predict
    from pyro_sparse.inference.refit import Fit as Fit
    from pyro_sparse.inference.refit import refit as refit
    from pyro_sparse.inference.run import Run as Run
    from pyro_sparse.inference.run import load as load
    from pyro_sparse.inference.sampler import anneal as anneal
    from pyro_sparse.inference.schedule import Controls as Controls
    from pyro_sparse.inference.schedule import PriorAnnealing as PriorAnnealing
    from pyro_sparse.inference.selection import mipp as mipp
    from pyro_sparse.inference.selection import select as select
    from pyro_sparse.inference.step import NonFiniteError as NonFiniteError
    from pyro_sparse.inference.structure import Structure as Structure
    from pyro_sparse.models.annealed import annealed as annealed
    from pyro_sparse.models.defaults import default_prior as default_prior
    from pyro_sparse.models.glm import normal_regression as normal_regression
    from pyro_sparse.models.glm import regression_model as regression_model
    from pyro_sparse.models.images import ImageAugmentation as ImageAugmentation
    from pyro_sparse.models.images import Normalize as Normalize
    from pyro_sparse.models.layers import SparseConv2d as SparseConv2d
    from pyro_sparse.models.layers import SparseLinear as SparseLinear
    from pyro_sparse.models.layers import SparseModule as SparseModule
    from pyro_sparse.models.layers import SparseNet as SparseNet
    from pyro_sparse.models.layers import sparsify as sparsify
    from pyro_sparse.models.resnet import resnet as resnet
    from pyro_sparse.models.spike_slab import SpikeSlab as SpikeSlab

    __version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from pyro_sparse.inference.trace import package_version

        value: Any = package_version()
    elif name in _HOME:
        value = getattr(importlib.import_module(f"pyro_sparse.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'pyro_sparse' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
