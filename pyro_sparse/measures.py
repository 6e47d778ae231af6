"""What predictions of unseen rows are worth, by the family of the response, beside models that need no trust.

The measures of a family are a table: a row a model, the network first, a column a measure. ``better_by`` is by how many
standard errors the network's loss is the smaller one on the same rows: the squared error, the Poisson deviance or the log
loss.
"""

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

from pyro_sparse.inference.family import prediction_sets
from pyro_sparse.tables import Table

Array = np.ndarray[Any, Any]

PROB = 0.95
NETWORK = "sparse model"
BASELINES = {"classes": "class frequencies"}
BASELINE = "mean of the fitted rows"
# Column of the summary's table, by measure.
HEADINGS = {
    "rmse": "RMSE",
    "r2": "R2",
    "deviance": "deviance",
    "accuracy": "accuracy",
    "log_loss": "log loss",
    "brier": "Brier",
}


def baseline(family: str) -> str:
    """Name of the model that knows no input."""
    return BASELINES.get(family, BASELINE)


def measured(family: str, train: Table, test: Table, predictions: pd.DataFrame, seed: int | None) -> dict[str, Any]:
    """Measures of the network and its rivals, and of the intervals (sets) that contain 95 %, ready for JSON.

    Args:
        family: of the response, as in ``Response.family``.
        train, test: the rows that were fitted and those that were not, at least one.
        predictions: of the test rows: ``observed``, ``mean``, ``lower``, ``upper``; of classes ``P(c)`` and ``set``.
        seed: of the boosted trees.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rivals
        if family == "classes":
            return _of_classes(train, test, predictions)
        y = predictions["observed"].to_numpy()
        numbers = (
            _of_counts(train, test, predictions) if family == "poisson" else _of_numbers(train, test, predictions, seed)
        )
    return numbers | _of_intervals(y, predictions, train, counts=family == "poisson")


def _of_numbers(train: Table, test: Table, predictions: pd.DataFrame, seed: int | None) -> dict[str, Any]:
    y = predictions["observed"].to_numpy()
    means = {
        NETWORK: predictions["mean"].to_numpy(),
        "least squares on all inputs": least_squares(train, test.inputs),
        "boosted trees": _boosted_trees(train, test.inputs, seed),
        BASELINE: np.full(len(y), train.target.mean()),
    }
    scores = {name: {"rmse": rmse(y - mean), "r2": r2(y - mean, y)} for name, mean in means.items()}
    return _compared(scores, {name: np.square(y - mean) for name, mean in means.items()})


def _of_counts(train: Table, test: Table, predictions: pd.DataFrame) -> dict[str, Any]:
    y = predictions["observed"].to_numpy()
    means = {
        NETWORK: predictions["mean"].to_numpy(),
        "Poisson regression on all inputs": _poisson_regression(train, test.inputs),
        BASELINE: np.full(len(y), train.target.mean()),
    }
    losses = {name: deviances(y, mean) for name, mean in means.items()}
    scores = {name: {"rmse": rmse(y - mean), "deviance": float(losses[name].mean())} for name, mean in means.items()}
    return _compared(scores, losses)


def _of_classes(train: Table, test: Table, predictions: pd.DataFrame) -> dict[str, Any]:
    classes = np.unique(train.target.to_numpy())
    y = predictions["observed"].to_numpy()
    network = predictions[[f"P({label})" for label in classes]].to_numpy(dtype=float)
    frequencies = np.array([(train.target == label).mean() for label in classes])
    probabilities = {
        NETWORK: network,
        "logistic regression on all inputs": _logistic_regression(train, test.inputs),
        BASELINES["classes"]: np.tile(frequencies, (len(y), 1)),
    }
    hit = y[:, None] == classes  # a class that the fit has not seen is hit by none
    losses = {name: log_losses(hit, p) for name, p in probabilities.items()}
    scores = {
        name: {
            "accuracy": float(hit[np.arange(len(y)), p.argmax(1)].mean()),
            "log_loss": float(losses[name].mean()),
            "brier": float(np.square(p - hit).sum(1).mean()),
        }
        for name, p in probabilities.items()
    }
    return _compared(scores, losses) | _of_sets(hit, network, frequencies)


def _of_sets(hit: Array, probabilities: Array, frequencies: Array) -> dict[str, Any]:
    """Of the prediction sets: how many contain the class, how many would if the probabilities were true."""
    members = in_sets(probabilities)
    n, covered = len(hit), int((members & hit).any(1).sum())
    misses = stats.poisson.interval(0.95, max(float((1 - (members * probabilities).sum(1)).sum()), 0.0))
    return {
        "prob": PROB,
        "covered": covered,
        "coverage": covered / n,
        "covered_if_calibrated": [max(n - int(misses[1]), 0), n - max(int(misses[0]), 0)],
        "mean_set_size": float(members.sum(1).mean()),
        "set_size_without_inputs": int(in_sets(frequencies[None]).sum()),
    }


def in_sets(probabilities: Array) -> Array:
    """(rows, classes) booleans: the smallest sets of classes whose probabilities sum to 95 % or more."""
    members: Array = prediction_sets(torch.from_numpy(probabilities), PROB).numpy()
    return members


def _of_intervals(y: Array, predictions: pd.DataFrame, train: Table, counts: bool) -> dict[str, Any]:
    n, lower, upper = len(y), predictions["lower"].to_numpy(), predictions["upper"].to_numpy()
    covered = int(((lower <= y) & (y <= upper)).sum())
    penalty = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    expected = stats.binom.interval(0.95, n, PROB)
    low, high = np.quantile(train.target, [0.5 - PROB / 2, 0.5 + PROB / 2])
    width = high - low if counts else 2 * stats.norm.ppf(0.5 + PROB / 2) * train.target.std()
    return {
        "prob": PROB,
        "covered": covered,
        "coverage": covered / n,
        # Whole numbers at both ends contain more than 95 % of a count's probability.
        "covered_if_calibrated": [int(expected[0]), n if counts else int(expected[1])],
        "mean_width": float((upper - lower).mean()),
        "mean_width_without_inputs": float(width),
        "interval_score": float((upper - lower + 2 / (1 - PROB) * penalty).mean()),
    }


def _compared(scores: dict[str, dict[str, Any]], losses: dict[str, Array]) -> dict[str, Any]:
    ours = losses[NETWORK]
    better = {name: {"better_by": standard_errors(theirs, ours)} for name, theirs in losses.items() if name != NETWORK}
    return {"models": {name: scores[name] | better.get(name, {}) for name in scores}}


def rmse(errors: Array) -> float:
    return math.sqrt(float(np.square(errors).mean()))


def r2(errors: Array, observed: Array) -> float | None:
    """Share of these rows' variance that is explained, negative for worse than their mean; None where they do not vary."""
    return 1 - float(np.square(errors).mean()) / float(observed.var()) if observed.var() > 0 else None


def deviances(observed: Array, mean: Array) -> Array:
    """Poisson deviance of each row, 2 (y log(y / mean) - y + mean)."""
    from scipy.special import xlogy

    mean = np.maximum(mean, 1e-9)
    deviance: Array = 2 * (xlogy(observed, observed / mean) - observed + mean)
    return deviance


def log_losses(hit: Array, probabilities: Array) -> Array:
    """-log of the probability of the observed class, at most 36 nats, as in scikit-learn."""
    loss: Array = -np.log(np.maximum((hit * probabilities).sum(1), np.finfo(float).eps))
    return loss


def standard_errors(others: Array, ours: Array) -> float:
    """By how many standard errors our mean loss is the smaller one, on the same rows."""
    difference = others - ours
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    rounding = 1e-9 * float(np.abs(others).mean() + np.abs(ours).mean())  # of rows that all differ by as much
    return float(difference.mean()) / error if error > rounding else 0.0


def least_squares(train: Table, inputs: pd.DataFrame) -> Array:
    """Predictions of ordinary least squares on all inputs, the shortest solution where they are too many."""
    from sklearn.linear_model import LinearRegression

    return np.asarray(_linear(LinearRegression(), train).predict(inputs.to_numpy()))


def _boosted_trees(train: Table, inputs: pd.DataFrame, seed: int | None) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(random_state=seed).fit(train.inputs.to_numpy(), train.target.to_numpy())
    return np.asarray(trees.predict(inputs.to_numpy()))


def _poisson_regression(train: Table, inputs: pd.DataFrame) -> Array:
    from sklearn.linear_model import PoissonRegressor

    # The penalty that scikit-learn's logistic regression has: a standard normal prior of each coefficient.
    model = _linear(PoissonRegressor(alpha=1 / len(train.target), max_iter=1000), train)
    return np.asarray(model.predict(inputs.to_numpy()))


def _logistic_regression(train: Table, inputs: pd.DataFrame) -> Array:
    from sklearn.linear_model import LogisticRegression

    return np.asarray(_linear(LogisticRegression(max_iter=1000), train).predict_proba(inputs.to_numpy()))


def _linear(model: Any, train: Table) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model).fit(train.inputs.to_numpy(), train.target.to_numpy())
