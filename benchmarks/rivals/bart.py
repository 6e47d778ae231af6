"""Bayesian additive regression trees: 50 trees by stochtree, its grow-from-root start, then MCMC."""

import numpy as np
from common import PROB, Array, Data, Fitted

NUM_TREES, NUM_START, NUM_BURN_IN, NUM_DRAWS = 50, 10, 200, 1_000


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """An input is selected where trees of at least half of the draws split on it."""
    from stochtree import BARTModel

    model = BARTModel()
    model.sample(
        X_train=data.train.x,
        y_train=data.train.y,
        num_gfr=NUM_START,
        num_burnin=max(1, int(NUM_BURN_IN * effort)),
        num_mcmc=max(2, int(NUM_DRAWS * effort)),
        general_params={"random_seed": seed, "num_threads": 1},
        mean_forest_params={"num_trees": NUM_TREES},
    )
    forests, num_inputs = model.forest_container_mean, data.train.x.shape[1]
    counts = [forests.get_forest_split_counts(draw, num_inputs) > 0 for draw in range(forests.num_samples())]
    share = np.mean(counts, axis=0)  # of the draws whose trees split on an input

    def draws(x: Array) -> Array:
        return np.asarray(model.predict(x, terms="y_hat"))

    def interval(x: Array) -> tuple[Array, Array]:
        means = draws(x)
        noise = np.random.RandomState(seed).standard_normal(means.shape) * np.sqrt(model.global_var_samples)
        lower, upper = np.quantile(means + noise, [0.5 * (1 - PROB), 0.5 * (1 + PROB)], axis=1)
        return lower, upper

    note = f"{NUM_TREES} trees, {NUM_START} forests grown from the root; selected: split on in half of the draws "
    note += f"({share.sum():.0f} in a draw); intervals: posterior predictive"
    return Fitted(lambda x: draws(x).mean(1), np.flatnonzero(share >= 0.5), interval, note=note)
