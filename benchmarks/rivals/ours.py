"""BNN_anneal: SparseRegressor as it comes."""

from dataclasses import replace

import numpy as np
from common import PROB, Array, Data, Fitted
from rivals.networks import name_of

import pyro_sparse as ps
from pyro_sparse.estimators import default_schedule

PHASES = ("train_steps", "power_steps", "spike_steps", "cool_steps")


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """Its defaults; ``effort`` below 1 shortens the schedule."""
    schedule = None if effort == 1 else shortened(default_schedule(len(data.train.y)), effort)
    model = ps.SparseRegressor(schedule=schedule, random_state=seed).fit(data.train.x, data.train.y)
    note = f"defaults, {model.structure_.num_kept} weights kept, refit converged: {model.fit_.converged}"

    def interval(x: Array) -> tuple[Array, Array]:
        lower, upper = model.predict_interval(x, PROB).T
        return lower, upper

    network = name_of([data.train.x.shape[1], *model.hidden, 1])
    return Fitted(model.predict, np.flatnonzero(model.get_support()), interval, network, note)


def shortened(schedule: ps.PriorAnnealing, effort: float) -> ps.PriorAnnealing:
    """The schedule with every phase that it has multiplied by ``effort``."""
    return replace(schedule, **{phase: int(np.ceil(getattr(schedule, phase) * effort)) for phase in PHASES})
