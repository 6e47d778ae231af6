"""SparseRegressor and SparseClassifier: anneal, select, refit and predict in scikit-learn's conventions."""

import itertools
import json
import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
import xarray as xr
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_sparse.inference.prediction import predict
from pyro_sparse.inference.refit import Fit, refit
from pyro_sparse.inference.sampler import NonFiniteError, Run, anneal
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.selection import select
from pyro_sparse.models.defaults import default_prior
from pyro_sparse.models.layers import SparseNet, sparsify
from pyro_sparse.models.regression import normal_regression

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Found:
    """What one run of all rounds came to: the columns its last round chose among, and the refit."""

    columns: Array
    run: Run
    fit: Fit
    rounds: int

    @property
    def selected(self) -> Array:
        return np.asarray(self.columns[self.fit.structure.reads.numpy()])

    def criterion(self, num_inputs: int) -> float:
        """Extended BIC in nats: runs may keep different inputs, so their losses alone do not compare."""
        num_data, chosen = self.fit.response.spec.num_data, len(self.selected)
        choices = math.log(math.comb(num_inputs, chosen))
        return num_data * self.fit.loss + 0.5 * math.log(num_data) * self.fit.structure.num_kept + choices


class SparseEstimator(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """What the two estimators share: inputs, rounds of annealing, runs from several seeds, the chosen fit, its file."""

    def __init__(
        self,
        hidden: tuple[int, ...] = (20, 10),
        activation: str = "tanh",
        schedule: PriorAnnealing | None = None,
        batch_size: int | None = None,
        rounds: int | None = None,
        num_runs: int = 1,
        random_state: Any = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.schedule = schedule
        self.batch_size = batch_size
        self.rounds = rounds
        self.num_runs = num_runs
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def _fit(self, X: Array, y: Tensor, names: list[str] | None) -> Self:
        """Runs, rounds and refits; the run with the best criterion is kept."""
        for name, value in (("num_runs", self.num_runs), ("rounds", self.rounds)):
            if value is not None and not value >= 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        names = [f"x{column}" for column in range(self.n_features_in_)] if names is None else names
        self._standardise(X)
        state = check_random_state(self.random_state)
        found = [self._one_run(X, y, int(state.randint(2**31)), names, run) for run in range(self.num_runs)]
        self.supports_ = np.array([np.isin(np.arange(self.n_features_in_), one.selected) for one in found])
        self._keep(min(found, key=lambda one: one.criterion(self.n_features_in_)))
        return self

    def _one_run(self, X: Array, y: Tensor, seed: int, names: list[str], number: int) -> _Found:
        """Anneals on all inputs, then on those that survived, until none is dropped.

        The first round chooses inputs, so a weight is dear; the others choose weights among inputs that matter.
        """
        columns = np.arange(self.n_features_in_)
        for round_number in itertools.count(1):
            label = f"run {number + 1} of {self.num_runs}, round {round_number}"
            data = (self._inputs(X, columns), y)
            run = self._annealed(data, seed, [names[column] for column in columns], round_number == 1, label)
            structure = select(run)
            survivors = columns[structure.reads.numpy()]
            settled = len(survivors) == len(columns) and round_number > 1
            if settled or not len(survivors) or round_number == self.rounds:
                break
            columns = survivors
        return _Found(columns, run, refit(run, structure.with_biases()), round_number)

    def _annealed(
        self, data: tuple[Tensor, Tensor], seed: int, names: list[str], select_inputs: bool, label: str
    ) -> Run:
        """The run; where the default learning rate proves too large for the data (strongly correlated inputs), a smaller."""
        num_data = len(data[0])
        schedule = default_schedule(num_data) if self.schedule is None else self.schedule
        for attempts_left in (3, 2, 1, 0):
            try:
                return anneal(
                    self._model(num_data, len(names), seed, select_inputs),
                    data,
                    schedule,
                    _batch_size(num_data) if self.batch_size is None else self.batch_size,
                    num_draws=min(100, schedule.length(schedule.last_phase)),
                    seed=seed,
                    input_names=names,
                    progress=label if self.progress else False,
                )
            except NonFiniteError as error:
                if self.schedule is not None or not attempts_left:
                    raise
                slower = schedule.learning_rate / 3
                warnings.warn(f"{error}; starting again with learning_rate {slower:.2g}", stacklevel=5)
                schedule = replace(schedule, learning_rate=slower)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _keep(self, found: _Found) -> None:
        self.columns_, self.num_rounds_ = found.columns, found.rounds
        self.run_, self.structure_, self.fit_ = found.run, found.fit.structure, found.fit

    @property
    def inclusion_probability_(self) -> Array:
        """(n_features,) share of the runs that select each input."""
        return np.asarray(self.supports_.mean(0))

    @property
    def selected_inputs_(self) -> list[str] | list[int]:
        """Names of the selected inputs for a data frame, else their columns counted from 0."""
        chosen = self.get_support(indices=True)
        names = getattr(self, "feature_names_in_", None)
        return [int(i) for i in chosen] if names is None else [str(names[i]) for i in chosen]

    def _get_support_mask(self) -> Array:
        check_is_fitted(self)
        support = np.zeros(self.n_features_in_, dtype=bool)
        support[self.columns_[self.structure_.reads.numpy()]] = True
        return support

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what prediction needs to a folder, without pickle."""
        check_is_fitted(self)
        self.fit_.save(path)
        settings = {
            "estimator": type(self).__name__,
            "hidden": list(self.hidden),
            "activation": self.activation,
            "num_rows": self.fit_.response.spec.num_data,
            "names": [str(c) for c in getattr(self, "feature_names_in_", [])] or None,
            "columns": self.columns_.tolist(),
            "supports": self.supports_.tolist(),
            "num_rounds": self.num_rounds_,
            "x_mean": self.x_mean_.tolist(),
            "x_scale": self.x_scale_.tolist(),
        } | self._own_settings()
        (Path(path) / "estimator.json").write_text(json.dumps(settings, indent=2))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A saved estimator, ready to predict; it executes nothing that it reads."""
        settings = json.loads((Path(path) / "estimator.json").read_text())
        if settings["estimator"] != cls.__name__:
            raise ValueError(f"{path} must hold a {cls.__name__}, got a {settings['estimator']}")
        new = cls(hidden=tuple(settings["hidden"]), activation=settings["activation"])
        new.x_mean_, new.x_scale_ = np.array(settings["x_mean"]), np.array(settings["x_scale"])
        new.columns_, new.supports_ = np.array(settings["columns"], dtype=int), np.array(settings["supports"])
        new.num_rounds_, new.n_features_in_ = settings["num_rounds"], len(new.x_mean_)
        if settings["names"]:
            new.feature_names_in_ = np.array(settings["names"], dtype=object)
        new._set_own(settings)
        example = (torch.zeros(1, len(new.columns_)), new._example_response())
        new.fit_ = Fit.load(path, new._model(settings["num_rows"], len(new.columns_), 0, True), example)
        new.structure_ = new.fit_.structure
        return new

    def _predicted(self, X: Any, prob: float) -> tuple[xr.Dataset, Any]:
        """The table of predictions of standardised inputs, and the index of their rows."""
        check_is_fitted(self)
        index = X.index if hasattr(X, "columns") else None
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return predict(self.fit_, self._inputs(X, self.columns_), prob), index

    def _model(self, num_data: int, num_inputs: int, seed: int, select_inputs: bool) -> Any:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            net = SparseNet([num_inputs, *self.hidden, self._num_outputs()], self.activation)
        prior = default_prior(net, num_data, select_inputs)
        net = sparsify(net.module, prior).to(self.device)
        return self._around(net, num_data)

    def _standardise(self, X: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.x_mean_, self.x_scale_ = X.mean(0), X.std(0)
        # A column that varies only by rounding is constant.
        constant = self.x_scale_ <= 1e-10 * np.abs(self.x_mean_)
        self.x_scale_ = np.where(constant, 1.0, self.x_scale_)
        _check_scale("X", self.x_scale_)

    def _inputs(self, X: Array, columns: Array) -> Tensor:
        return self._tensor((X[:, columns] - self.x_mean_[columns]) / self.x_scale_[columns])

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=self.device)


class SparseRegressor(RegressorMixin, SparseEstimator):  # type: ignore[misc]
    """Regression by a sparse Bayesian network: the few inputs that matter, and intervals that hold.

    Inputs and response are standardised; the noise scale is learned; the prior is derived from the network and the number
    of rows (``default_prior``). Annealing is repeated on the inputs that survived it. The biases of live units are refitted
    even where they were pruned (``Structure.with_biases``), since the data were centred at sample means. A constant column
    is never selected.

    Args:
        hidden: widths of the hidden layers.
        activation: between the layers, as in :class:`SparseNet`.
        schedule: a :class:`PriorAnnealing`; where left out, its defaults with learning rate 4e-3 sqrt(10,000 / rows) within
            [4e-3, 1e-2].
        batch_size: rows a step; a twentieth of the rows within [50, 500] where left out (half of them under 100 rows).
        rounds: annealing rounds at most, >= 1; as many as it takes until no input is dropped where left out.
        num_runs: independent runs from different seeds, each of all rounds. The one with the best extended BIC is kept;
            ``inclusion_probability_`` says how often each input is selected.
        random_state: an integer, a RandomState or None, as everywhere in scikit-learn.
        device: that PyTorch computes on.
        progress: whether to show a bar.

    Attributes:
        selected_inputs_: names of the selected inputs for a data frame, else their columns counted from 0.
        inclusion_probability_: (n_features,) share of the runs that select each input.
        supports_: (num_runs, n_features) booleans, the inputs that each run selects.
        columns_: the columns that the last round chose among; the networks of ``run_`` and ``fit_`` read these.
        run_, structure_, fit_: what the verbs returned in the last round, in standardised units.
        noise_scale_: standard deviation of the noise, in units of the response.
    """

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
        self.y_mean_, self.y_scale_ = float(y.mean()), float(y.std())
        _check_scale("y", np.array([self.y_scale_]))
        return self._fit(X, self._tensor((y - self.y_mean_) / self.y_scale_), names)

    def predict(self, X: Any) -> Array:
        """The mean of the response, (rows,)."""
        return self.predict_table(X)["mean"].to_numpy()

    def predict_interval(self, X: Any, prob: float = 0.95) -> Array:
        """Interval of a new observation at each row, (rows, 2)."""
        return self.predict_table(X, prob)[["lower", "upper"]].to_numpy()

    def predict_table(self, X: Any, prob: float = 0.95) -> pd.DataFrame:
        """Columns ``mean``, ``mean_lower``, ``mean_upper``, ``lower``, ``upper``, in units of the response; see ``predict``."""
        dataset, index = self._predicted(X, prob)
        table = dataset.to_dataframe()
        if index is not None:
            table.index = index
        return table * self.y_scale_ + self.y_mean_

    @property
    def noise_scale_(self) -> float:
        """Standard deviation of the noise, in units of the response."""
        return float(self.fit_.noise_variance**0.5 * self.y_scale_)

    def _num_outputs(self) -> int:
        return 1

    def _around(self, net: SparseNet, num_data: int) -> Any:
        return normal_regression(net, num_data)

    def _own_settings(self) -> dict[str, Any]:
        return {"y_mean": self.y_mean_, "y_scale": self.y_scale_}

    def _set_own(self, settings: dict[str, Any]) -> None:
        self.y_mean_, self.y_scale_ = settings["y_mean"], settings["y_scale"]

    def _example_response(self) -> Tensor:
        return torch.zeros(1)


def _check_scale(name: str, scale: Array) -> None:
    if not np.isfinite(scale).all():
        columns = np.flatnonzero(~np.isfinite(scale)).tolist()
        raise ValueError(f"{name} must have a finite variance, got values too large in columns {columns}")


def _frame_columns(X: Any) -> list[str] | None:
    columns = getattr(X, "columns", None)
    return None if columns is None or not all(isinstance(c, str) for c in columns) else list(columns)


def _batch_size(num_data: int) -> int:
    # Minibatch noise helps the annealing along: half of the rows at once left small problems with nothing kept.
    return max(1, num_data // 2) if num_data < 100 else min(500, max(50, num_data // 20))


def default_schedule(num_data: int) -> PriorAnnealing:
    """The schedule of :class:`SparseRegressor` for a number of rows.

    It does not train without the prior: with 2,000 inputs the weights would overfit and leave the spike for ever.
    """
    rate = min(1e-2, 4e-3 * max(1.0, (10_000 / num_data) ** 0.5))
    return PriorAnnealing(0, 5_000, 5_000, 1_000, learning_rate=rate)
