"""SparseRegressor: anneal, select, refit and predict in scikit-learn's conventions."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_sparse.inference.prediction import predict
from pyro_sparse.inference.refit import Fit, refit
from pyro_sparse.inference.sampler import NonFiniteError, Run, anneal
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.selection import select
from pyro_sparse.models.layers import SparseNet
from pyro_sparse.models.regression import normal_regression

Array = np.ndarray[Any, Any]


class SparseRegressor(SelectorMixin, RegressorMixin, BaseEstimator):
    """Regression by a sparse Bayesian network: the few inputs that matter, and intervals that hold.

    Inputs and response are standardised; the noise scale is learned; the prior is derived from the network and the number
    of rows (``default_prior``). The biases of live units are refitted even where they were pruned
    (``Structure.with_biases``), since the data were centred at sample means. A constant column is never selected.

    Args:
        hidden: widths of the hidden layers.
        activation: between the layers, as in :class:`SparseNet`.
        schedule: a :class:`PriorAnnealing`; where left out, its defaults with learning rate 4e-3 sqrt(10,000 / rows) within
            [4e-3, 1e-2].
        batch_size: rows a step; a twentieth of the rows within [50, 500] where left out (half of them under 100 rows).
        num_chains: independent annealing runs; with several, ``inclusion_probability_`` says how often each input is selected.
        random_state: an integer, a RandomState or None, as everywhere in scikit-learn.
        device: that PyTorch computes on.
        progress: whether to show a bar.

    Attributes:
        selected_inputs_: names of the selected inputs for a data frame, else their columns counted from 0.
        inclusion_probability_: (n_features,) share of the runs that select each input.
        run_, structure_, fit_: what the verbs returned, in standardised units.
        noise_scale_: standard deviation of the noise, in units of the response.
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (20, 10),
        activation: str = "tanh",
        schedule: PriorAnnealing | None = None,
        batch_size: int | None = None,
        num_chains: int = 1,
        random_state: Any = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.schedule = schedule
        self.batch_size = batch_size
        self.num_chains = num_chains
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def fit(self, X: Any, y: Any) -> Self:
        """Anneals, selects and refits.

        Args:
            X: (rows, inputs) numbers; a data frame gives its column names.
            y: (rows,) numbers, not all the same.

        Raises:
            ValueError: naming what is wrong with X or y.
        """
        names = _frame_columns(X)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        if not np.ptp(y) > 0:
            raise ValueError(f"y must not be constant, got {y[0]:g} in all of {len(y)} rows")
        self._standardise(X, y)
        seed = int(check_random_state(self.random_state).randint(2**31))
        data = (self._inputs(X), self._tensor((y - self.y_mean_) / self.y_scale_))
        run = self._annealed(self._model(len(y), seed), data, seed, names)
        self.run_, self.structure_ = run, select(run).with_biases()
        self._set_fit(refit(run, self.structure_))
        return self

    def _annealed(self, model: Any, data: tuple[Tensor, Tensor], seed: int, names: list[str] | None) -> Run:
        """The run; where the default learning rate proves too large for the data (strongly correlated inputs), a smaller."""
        num_data = len(data[0])
        schedule = default_schedule(num_data) if self.schedule is None else self.schedule
        for attempts_left in (3, 2, 1, 0):
            try:
                return anneal(
                    model,
                    data,
                    schedule,
                    _batch_size(num_data) if self.batch_size is None else self.batch_size,
                    num_draws=min(100, schedule.length(schedule.last_phase)),
                    num_chains=self.num_chains,
                    seed=seed,
                    input_names=names,
                    progress=self.progress,
                )
            except NonFiniteError as error:
                if self.schedule is not None or not attempts_left:
                    raise
                slower = schedule.learning_rate / 3
                warnings.warn(f"{error}; starting again with learning_rate {slower:.2g}", stacklevel=3)
                schedule = replace(schedule, learning_rate=slower)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def predict(self, X: Any) -> Array:
        """The mean of the response, (rows,)."""
        return self.predict_table(X)["mean"].to_numpy()

    def predict_interval(self, X: Any, prob: float = 0.95) -> Array:
        """Interval of a new observation at each row, (rows, 2)."""
        return self.predict_table(X, prob)[["lower", "upper"]].to_numpy()

    def predict_table(self, X: Any, prob: float = 0.95) -> pd.DataFrame:
        """Columns ``mean``, ``mean_lower``, ``mean_upper``, ``lower``, ``upper``, in units of the response; see ``predict``."""
        check_is_fitted(self)
        index = X.index if hasattr(X, "columns") else None
        X = validate_data(self, X, reset=False, dtype=np.float64)
        table = predict(self.fit_, self._inputs(X), prob).to_dataframe()
        if index is not None:
            table.index = index
        return table * self.y_scale_ + self.y_mean_

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what prediction needs to a folder, without pickle."""
        check_is_fitted(self)
        self.fit_.save(path)
        settings = {
            "hidden": list(self.hidden),
            "activation": self.activation,
            "num_rows": self.fit_.response.spec.num_data,
            "columns": [str(c) for c in getattr(self, "feature_names_in_", [])] or None,
            "x_mean": self.x_mean_.tolist(),
            "x_scale": self.x_scale_.tolist(),
            "y_mean": self.y_mean_,
            "y_scale": self.y_scale_,
        }
        (Path(path) / "regressor.json").write_text(json.dumps(settings, indent=2))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A saved regressor, ready to predict; it executes nothing that it reads."""
        settings = json.loads((Path(path) / "regressor.json").read_text())
        new = cls(hidden=tuple(settings["hidden"]), activation=settings["activation"])
        new.x_mean_, new.x_scale_ = np.array(settings["x_mean"]), np.array(settings["x_scale"])
        new.y_mean_, new.y_scale_ = settings["y_mean"], settings["y_scale"]
        new.n_features_in_ = len(new.x_mean_)
        if settings["columns"]:
            new.feature_names_in_ = np.array(settings["columns"], dtype=object)
        example = (torch.zeros(1, new.n_features_in_), torch.zeros(1))
        fit = Fit.load(path, new._model(settings["num_rows"], 0), example)
        new.structure_ = fit.structure
        new._set_fit(fit)
        return new

    def _set_fit(self, fit: Fit) -> None:
        self.fit_ = fit
        self.selected_inputs_ = fit.structure.selected_inputs
        self.inclusion_probability_ = fit.structure.input_probability.numpy()
        self.noise_scale_ = fit.noise_variance**0.5 * self.y_scale_

    def _model(self, num_data: int, seed: int) -> Any:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            net = SparseNet([self.n_features_in_, *self.hidden, 1], self.activation).to(self.device)
        return normal_regression(net, num_data)

    def _standardise(self, X: Array, y: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.x_mean_, self.x_scale_ = X.mean(0), X.std(0)
        # A column that varies only by rounding is constant.
        constant = self.x_scale_ <= 1e-10 * np.abs(self.x_mean_)
        self.x_scale_ = np.where(constant, 1.0, self.x_scale_)
        self.y_mean_, self.y_scale_ = float(y.mean()), float(y.std())
        for name, scale in (("X", self.x_scale_), ("y", np.array([self.y_scale_]))):
            if not np.isfinite(scale).all():
                columns = np.flatnonzero(~np.isfinite(scale)).tolist()
                raise ValueError(f"{name} must have a finite variance, got values too large in columns {columns}")

    def _inputs(self, X: Array) -> Tensor:
        return self._tensor((X - self.x_mean_) / self.x_scale_)

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=self.device)

    def _get_support_mask(self) -> Array:
        check_is_fitted(self)
        return self.structure_.reads.numpy()


def _frame_columns(X: Any) -> list[str] | None:
    columns = getattr(X, "columns", None)
    return None if columns is None or not all(isinstance(c, str) for c in columns) else list(columns)


def _batch_size(num_data: int) -> int:
    # Minibatch noise helps the annealing along: half of the rows at once left small problems with nothing kept.
    return max(1, num_data // 2) if num_data < 100 else min(500, max(50, num_data // 20))


def default_schedule(num_data: int) -> PriorAnnealing:
    """The schedule of :class:`SparseRegressor` for a number of rows."""
    return PriorAnnealing(learning_rate=min(1e-2, 4e-3 * max(1.0, (10_000 / num_data) ** 0.5)))
