"""BNN_anneal: SparseRegressor as it comes."""

import numpy as np
from common import PROB, Array, Data, Fitted
from rivals.networks import name_of

import pyro_sparse as ps


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """Its defaults; ``effort`` below 1 shortens the schedule."""
    model = ps.SparseRegressor(steps=int(10_000 * effort), random_state=seed).fit(data.train.x, data.train.y)
    kept = ", ".join(str(fit.structure.num_kept) for fit in model.fits_)
    note = f"defaults, {kept} weights kept, refits converged: {all(fit.converged for fit in model.fits_)}"

    def interval(x: Array) -> tuple[Array, Array]:
        lower, upper = model.predict_interval(x, PROB).T
        return lower, upper

    network = name_of([data.train.x.shape[1], *model.hidden_, 1])
    return Fitted(model.predict, np.flatnonzero(model.get_support()), interval, network, note)
