"""SparseRegressor and SparseClassifier: anneal, select, refit and predict in scikit-learn's conventions."""

import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
import xarray as xr
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.feature_selection import SelectorMixin
from sklearn.linear_model import orthogonal_mp
from sklearn.utils import check_random_state
from sklearn.utils.extmath import randomized_svd
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pyro_sparse.inference.effects import partial_dependence
from pyro_sparse.inference.family import Normal
from pyro_sparse.inference.prediction import predict
from pyro_sparse.inference.refit import Fit, refit, warn_of_varying_noise
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.sampler import anneal
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.selection import select
from pyro_sparse.inference.step import NonFiniteError
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.defaults import default_prior
from pyro_sparse.models.glm import regression_model
from pyro_sparse.models.layers import SparseModule, SparseNet, sparsify
from pyro_sparse.models.spike_slab import SpikeSlab

Array = np.ndarray[Any, Any]


DEFAULT_HIDDEN = (20, 10)
FLOOR = 0.1  # of the noise scale while a network is annealed and refitted, in standard deviations of the response
MANY_ROWS = 5_000  # from which on one run chooses inputs as surely as several


@dataclass(frozen=True)
class _Data:
    """Standardised inputs, their names, and the response."""

    X: Array
    y: Tensor
    names: list[str]


@dataclass(frozen=True)
class _Candidate:
    """Networks of one shape: the inputs that each run chooses, the columns that most do, and fits on those."""

    hidden: tuple[int, ...]
    supports: Array
    columns: Array
    runs: list[Run]
    fits: list[Fit]
    rounds: int

    @property
    def criteria(self) -> list[float]:
        """Extended BIC in nats of each network: they may keep different inputs, so their losses alone do not compare."""
        return [self._criterion(fit) for fit in self.fits]

    def _criterion(self, fit: Fit) -> float:
        num_data, structure = fit.response.spec.num_data, fit.structure
        chosen, num_inputs = int(structure.reads.sum()), self.supports.shape[1]
        complexity = _complexity(num_data, structure.num_kept, chosen, num_inputs)
        if not isinstance(fit.family, Normal):
            return num_data * fit.loss + complexity
        residuals = fit.response.observed(fit.values) - fit.evaluate(fit.family.link, fit.data)[:, 0]
        mean_square, freedom = float(residuals.square().mean()), num_data - structure.num_kept
        if not self.hidden:
            return _normal_criterion(num_data, freedom, mean_square) + complexity
        return num_data * fit.loss - _gain_below_the_floor(freedom, mean_square) + complexity


class SparseEstimator(SelectorMixin, BaseEstimator):
    """What the two estimators share: runs that choose inputs, networks on those that are averaged, and their file."""

    def __init__(
        self,
        hidden: tuple[int, ...] | None = None,
        activation: str = "tanh",
        steps: int = 10_000,
        schedule: PriorAnnealing | None = None,
        batch_size: int | None = None,
        rounds: int | None = None,
        num_runs: int | None = None,
        num_networks: int = 3,
        random_state: Any = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.steps = steps
        self.schedule = schedule
        self.batch_size = batch_size
        self.rounds = rounds
        self.num_runs = num_runs
        self.num_networks = num_networks
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def _fit(self, X: Array, y: Tensor, names: list[str] | None) -> Self:
        """Networks of the shape asked for; where none was, a linear model if that is the better one."""
        self._standardise(X)
        names = [f"x{column}" for column in range(X.shape[1])] if names is None else names
        num_runs = (3 if len(X) < MANY_ROWS else 1) if self.num_runs is None else self.num_runs
        data = _Data((X - self.x_mean_) / self.x_scale_, y, names)
        seed = int(check_random_state(self.random_state).randint(2**31))
        hidden = DEFAULT_HIDDEN if self.hidden is None else tuple(self.hidden)
        found = self._networks(data, hidden, seed, num_runs) if hidden else self._linear(data, seed, num_runs)
        if self.hidden is None:
            linear = self._linear(data, seed, num_runs)
            found = linear if linear.criteria[0] < np.mean(found.criteria) else found
        self._keep(found)
        self._warn_of_intervals(data)
        return self

    def _warn_of_intervals(self, data: _Data) -> None:
        """Of what the intervals of the fits do not know, at once instead of where they are first asked for."""
        fits = [fit for fit in self.fits_ if not fit.by_batches]
        for fit in fits:
            fit.information  # noqa: B018  # warns, and is kept
        if fits and isinstance(self.fit_.family, Normal) and data.X.shape[1] < len(data.X) // 10:
            # The noise may depend on inputs that say nothing of the mean, which no network reads.
            mean = self.fit_.evaluate(self.fit_.family.link, self.fit_.data)[:, :1]
            regressors = torch.cat([mean, torch.as_tensor(data.X).to(mean)], 1)
            residuals = self.fit_.response.observed(self.fit_.values) - mean[:, 0]
            warn_of_varying_noise(*self.fit_.family.varying_noise(residuals, regressors))

    def _check(self) -> None:
        """Raises a ValueError for an argument that would fail only after long work."""
        for name, least, optional in (
            ("num_runs", 1, True),
            ("num_networks", 1, False),
            ("rounds", 1, True),
            ("steps", 100, False),
            ("batch_size", 1, True),
        ):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        widths = () if self.hidden is None else self.hidden
        if not isinstance(widths, (tuple, list)) or not all(isinstance(w, Integral) and w > 0 for w in widths):
            raise ValueError(f"hidden must be a tuple of whole numbers >= 1, such as (20, 10), got {self.hidden!r}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(f"device must be one that PyTorch can use here, got {self.device!r}") from error
        if not (self.schedule is None or isinstance(self.schedule, PriorAnnealing)):
            raise ValueError(f"schedule must be a PriorAnnealing, got {self.schedule!r}")

    def _networks(self, data: _Data, hidden: tuple[int, ...], seed: int, num_runs: int) -> _Candidate:
        """Runs vote on inputs, round after round, until none is dropped; then networks choose weights among what is left."""
        columns, supports = np.arange(len(data.names)), np.ones((num_runs, len(data.names)), dtype=bool)
        for rounds in itertools.count(1):
            label = f"round {rounds}" + f", {num_runs} runs" * (num_runs > 1)
            run = self._annealed(data, columns, hidden, seed, True, num_runs, label)
            structures = [select(run.chain(chain)) for chain in range(num_runs)]
            supports[:, columns] = [structure.reads.numpy() for structure in structures]
            among, columns = columns, np.flatnonzero(supports.mean(0) > 0.5)
            if not len(columns):  # runs that choose different ones of nearly equal inputs: the best of them
                columns = among[select(run).reads.numpy()]
            if not len(columns):
                fit = refit(run.chain(0), structures[0].without_inputs().with_biases())
                return _Candidate(hidden, supports, among, [run.chain(0)], [fit], rounds)
            if len(columns) == len(among) or rounds == self.rounds:
                break
        label = f"{self.num_networks} networks" if self.num_networks > 1 else "network"
        run = self._annealed(data, columns, hidden, seed, False, self.num_networks, label)
        runs = [run.chain(chain) for chain in range(self.num_networks)]
        fits = [refit(run, select(run).with_biases()) for run in runs]
        return _Candidate(hidden, supports, columns, runs, fits, rounds + 1)

    def _linear(self, data: _Data, seed: int, num_runs: int) -> _Candidate:
        """An input has one weight an output: one annealing chooses both, and runs vote on each weight.

        Runs start from forward selection: the wide spike would spread a signal over equal inputs until none is kept. Where
        they choose different ones none may have a majority: the vote has to beat each run, and each run its start.
        """
        columns = np.arange(len(data.names))
        start = _forward_selection(data.X, self._working_response(data.y.cpu().numpy()))
        run = self._annealed(data, columns, (), seed, True, num_runs, "linear model", start)
        runs = [run.chain(chain) for chain in range(num_runs)]
        structures = [select(one) for one in runs]
        supports = np.array([structure.reads.numpy() for structure in structures])
        voted = torch.stack([_weight(one.masks) for one in structures]).double().mean(0) > 0.5
        others = [_keeping(structures[0], mask) for mask in (voted, torch.as_tensor(start != 0))]
        candidates = _distinct([*structures, *others], [*runs, runs[0], runs[0]])
        fits = [(one, refit(one, kept.with_biases())) for kept, one in candidates]
        found = [_Candidate((), supports, columns, [one], [fit], 1) for one, fit in fits]
        return min(found, key=lambda one: one.criteria[0])

    def _annealed(
        self,
        data: _Data,
        columns: Array,
        hidden: tuple[int, ...],
        seed: int,
        choosing: bool,
        num_chains: int,
        label: str,
        linear_start: Array | None = None,
    ) -> Run:
        """Where the default learning rate proves too large for the data (strongly correlated inputs), with a smaller one."""
        inputs, num_data = self._tensor(data.X[:, columns]), len(data.y)
        schedule = self.schedule
        if schedule is None:
            schedule = self._default_schedule(num_data, choosing and num_chains > 1)
            if not hidden:
                schedule = _linear_schedule(schedule, data.X[:, columns])
        model = self._model(num_data, len(columns), hidden, seed, choosing, linear_start)
        for attempts_left in (3, 2, 1, 0):
            try:
                return anneal(
                    model,
                    (inputs, data.y),
                    schedule,
                    int(self.batch_size or _batch_size(num_data, bool(hidden))),
                    num_draws=min(100, schedule.length(schedule.last_phase)),
                    num_chains=num_chains,
                    seed=seed,
                    input_names=[data.names[column] for column in columns],
                    progress=label if self.progress else False,
                )
            except NonFiniteError:
                if self.schedule is not None or not attempts_left:
                    raise
                slower = schedule.learning_rate / 3
                rate = schedule.learning_rate
                warn(f"the run diverged at learning_rate {rate:.2g}, as it may: starting again with {slower:.2g}")
                schedule = replace(schedule, learning_rate=slower)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _keep(self, found: _Candidate) -> None:
        best = int(np.argmin(found.criteria))
        self.hidden_, self.supports_, self.columns_ = found.hidden, found.supports, found.columns
        self.num_rounds_, self.fits_ = found.rounds, found.fits
        self.run_, self.fit_ = found.runs[best], found.fits[best]
        self.structure_ = self.fit_.structure

    @property
    def inclusion_probability_(self) -> Array:
        """(n_features,) share of the runs that choose each input."""
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
        for fit in self.fits_:
            support[self.columns_[fit.structure.reads.numpy()]] = True
        return support

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what prediction needs to a folder, without pickle."""
        check_is_fitted(self)
        best = next(number for number, fit in enumerate(self.fits_) if fit is self.fit_)
        parameters = self.get_params(deep=False)
        parameters["schedule"] = None if self.schedule is None else asdict(self.schedule)
        if not isinstance(self.random_state, (Integral, type(None))):
            parameters["random_state"] = None  # a generator's state is not kept
        settings = {
            "estimator": type(self).__name__,
            "parameters": parameters,
            "hidden": list(self.hidden_),
            "num_rows": self.fit_.response.spec.num_data,
            "names": [str(c) for c in getattr(self, "feature_names_in_", [])] or None,
            "columns": self.columns_.tolist(),
            "supports": self.supports_.tolist(),
            "num_rounds": self.num_rounds_,
            "num_networks": len(self.fits_),
            "best": best,
            "x_mean": self.x_mean_.tolist(),
            "x_scale": [scale if math.isfinite(scale) else None for scale in self.x_scale_.tolist()],
            "x_min": self.x_min_.tolist(),
            "x_max": self.x_max_.tolist(),
        } | self._own_settings()
        text = json.dumps(settings, indent=2, default=_plain)  # what cannot be written fails before anything is touched
        old = [folder.parent for folder in Path(path).glob("network*/fit.json")]  # of an earlier save
        for folder in old:
            shutil.rmtree(folder)
        (Path(path) / "estimator.json").unlink(missing_ok=True)  # never beside networks that it does not describe
        for number, fit in enumerate(self.fits_):
            fit.save(Path(path) / f"network{number}")
        (Path(path) / "estimator.json").write_text(text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A saved estimator, ready to predict on the CPU; it executes nothing that it reads."""
        if not (Path(path) / "estimator.json").exists():
            raise FileNotFoundError(f"path must be a folder that save has written, got {path}")
        settings = json.loads((Path(path) / "estimator.json").read_text())
        if settings["estimator"] != cls.__name__:
            raise ValueError(f"{path} must hold a {cls.__name__}, got a {settings['estimator']}")
        parameters = settings["parameters"]
        if parameters["hidden"] is not None:
            parameters["hidden"] = tuple(parameters["hidden"])
        if parameters["schedule"] is not None:
            parameters["schedule"] = PriorAnnealing.from_dict(parameters["schedule"])
        new = cls(**parameters | {"device": "cpu"})
        new.x_mean_ = np.array(settings["x_mean"])
        new.x_scale_ = np.array([math.inf if scale is None else scale for scale in settings["x_scale"]])
        new.x_min_, new.x_max_ = np.array(settings["x_min"]), np.array(settings["x_max"])
        new.columns_, new.supports_ = np.array(settings["columns"], dtype=int), np.array(settings["supports"])
        new.hidden_, new.num_rounds_, new.n_features_in_ = (
            tuple(settings["hidden"]),
            settings["num_rounds"],
            len(new.x_mean_),
        )
        if settings["names"]:
            new.feature_names_in_ = np.array(settings["names"], dtype=object)
        new._set_own(settings)
        example = (torch.zeros(1, len(new.columns_)), new._example_response())
        model = new._model(settings["num_rows"], len(new.columns_), new.hidden_, 0, True)
        new.fits_ = [
            Fit.load(Path(path) / f"network{number}", model, example) for number in range(settings["num_networks"])
        ]
        new.fit_ = new.fits_[settings["best"]]
        new.structure_ = new.fit_.structure
        return new

    def effects(
        self,
        X: Any,
        prob: float = 0.95,
        num_points: int = 20,
        num_rows: int = 2_000,
        groups: Mapping[str, Sequence[str | int]] | None = None,
    ) -> pd.DataFrame:
        """Direction and shape of what each selected input does: its partial dependence, with intervals.

        Args:
            X: (rows, inputs) over which the response is averaged, the training rows say; at most ``num_rows`` of them.
            prob: probability content of the intervals, in (0, 1).
            num_points: values of each input, evenly spaced between its quantiles of 5 and 95 %; all where it has few.
            num_rows: evenly spaced rows that are used; all where X has no more.
            groups: by name, inputs that are coded by several columns of 0 and 1, at most one of them 1 in a row, as one-hot
                text is. Such an input has one effect, whose values are its selected columns, and "any other" for none.

        Returns:
            Columns ``input``, ``value``, ``mean``, ``mean_lower``, ``mean_upper``, and ``difference``,
            ``difference_lower``, ``difference_upper`` from the mean at the first value of the input, in units of inputs and
            response; for a classifier the means are probabilities, and ``class`` says of which.
        """
        check_is_fitted(self)
        for argument, least in (("num_points", 2), ("num_rows", 1)):
            value = {"num_points": num_points, "num_rows": num_rows}[argument]
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{argument} must be a whole number >= {least}, got {value!r}")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        rows = self._inputs(X[np.unique(np.linspace(0, len(X) - 1, num_rows).astype(int))], self.columns_)
        tables = [pd.DataFrame(columns=["input", "value", *_EFFECT])]
        for name, columns in self._effect_inputs(X, groups or {}).items():
            if isinstance(columns, int):
                labels = values = _grid(X[:, columns], num_points)
            else:
                values = _levels(X[:, columns])
                labels = np.array([_level(row, self._names_of(columns)) for row in values], dtype=object)
            place = np.searchsorted(self.columns_, columns).tolist()
            scaled = (values - self.x_mean_[columns]) / self.x_scale_[columns]
            dependence = partial_dependence(self.fits_, rows, place, scaled, prob)
            tables += self._effect_tables({"input": name, "value": labels}, dependence)
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def _names_of(self, columns: Sequence[int]) -> list[Any]:
        names = getattr(self, "feature_names_in_", np.arange(self.n_features_in_))
        return [names[column] for column in columns]

    def _effect_inputs(self, X: Array, groups: Mapping[str, Sequence[str | int]]) -> dict[Any, int | list[int]]:
        """The column of each selected input, the selected ones of each group, in order."""
        place = {name: column for column, name in enumerate(self._names_of(range(self.n_features_in_)))}
        if not isinstance(groups, Mapping):
            raise TypeError(f"groups must map names to columns, got {type(groups).__name__}")
        owner: dict[int, str] = {}
        for group, members in groups.items():
            if group in place and place[group] not in [place.get(member) for member in members]:
                raise ValueError(f"groups must have names that no other column has, got {group!r}")
            for member in members:
                if member not in place or place[member] in owner:
                    how = "known columns" if member not in place else "each column once"
                    raise ValueError(f"groups must list {how}, got {member!r} in {group!r}")
                owner[place[member]] = group
            coded = X[:, [place[member] for member in members]]
            if not (np.isin(coded, (0, 1)).all() and (coded.sum(1) <= 1).all()):
                raise ValueError(
                    f"groups must list columns of 0 and 1, at most one of them 1 in a row, got others in {group!r}"
                )
        inputs: dict[Any, int | list[int]] = {}
        for name, column in zip(self.selected_inputs_, self.get_support(indices=True).tolist(), strict=True):
            if column not in owner:
                inputs[name] = column
                continue
            members_of = inputs.setdefault(owner[column], [])
            assert isinstance(members_of, list)
            members_of.append(column)
        return inputs

    def _effect_tables(self, labels: dict[str, Any], dependence: xr.Dataset) -> list[pd.DataFrame]:
        raise NotImplementedError

    def _predicted(self, X: Any, prob: float) -> tuple[xr.Dataset, Any]:
        """The table of predictions of standardised inputs, and the index of their rows."""
        check_is_fitted(self)
        index = X.index if hasattr(X, "columns") else None
        X = validate_data(self, X, reset=False, dtype=np.float64)
        self._warn_of_far_rows(X, np.arange(len(X)) if index is None else index)
        return predict(self.fits_, self._inputs(X, self.columns_), prob), index

    def _warn_of_far_rows(self, X: Array, index: Any) -> None:
        """Of rows that are further from the fitted ones than half of the range of these, in a selected input."""
        middle = (self.x_min_ + self.x_max_) / 2
        far = self.get_support() & (np.abs(X - middle) > self.x_max_ - self.x_min_)
        if far.any():
            row, column = np.argwhere(far)[0]
            (name,) = self._names_of([column])
            warn(
                f"{int(far.any(1).sum())} of {len(X)} rows lie far outside of the fitted ones, the first is row {index[row]}, "
                f"where {name} is {X[row, column]:.4g} and was {self.x_min_[column]:.4g} to {self.x_max_[column]:.4g}: no "
                "interval knows what happens there"
            )

    def _model(
        self,
        num_data: int,
        num_inputs: int,
        hidden: tuple[int, ...],
        seed: int,
        select_inputs: bool,
        linear_start: Array | None = None,
    ) -> Any:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)  # the CPU's, which alone is restored
            net = SparseNet([num_inputs, *hidden, self._num_outputs()], self.activation).module
        prior = default_prior(net, num_data, select_inputs)
        if linear_start is not None:
            prior = {name: _narrow(law, num_data) for name, law in prior.items()}
            with torch.no_grad():
                next(net.parameters()).copy_(self._tensor(linear_start))
        return self._response_model(sparsify(net, prior).to(self.device), num_data)

    def _default_schedule(self, num_data: int, voting: bool) -> PriorAnnealing:
        return default_schedule(num_data, int(self.steps) * 3 // 5 if voting else int(self.steps))

    def _num_outputs(self) -> int:
        raise NotImplementedError

    def _response_model(self, net: SparseModule, num_data: int) -> Any:
        raise NotImplementedError

    def _working_response(self, y: Array) -> Array:
        """(rows, outputs): the response linearised at its mean, on the scale of the network's outputs."""
        raise NotImplementedError

    def _own_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set_own(self, settings: dict[str, Any]) -> None:
        raise NotImplementedError

    def _example_response(self) -> Tensor:
        return torch.zeros(1)

    def _standardise(self, X: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.x_mean_, self.x_scale_ = X.mean(0), X.std(0)
        self.x_min_, self.x_max_ = X.min(0), X.max(0)
        # A column that varies only by rounding is constant.
        _check_scale("X", self.x_scale_)
        constant = self.x_scale_ <= 1e-13 * np.abs(self.x_mean_)
        self.x_scale_ = np.where(constant | (self.x_scale_ == 0), np.inf, self.x_scale_)  # which makes it 0 throughout

    def _inputs(self, X: Array, columns: Array) -> Tensor:
        inputs = self._tensor((X[:, columns] - self.x_mean_[columns]) / self.x_scale_[columns])
        too_large = ~inputs.isfinite().cpu()
        if too_large.any():
            row, place = too_large.nonzero()[0].tolist()
            (name,) = self._names_of([columns[place]])
            raise ValueError(
                f"X must hold numbers that single precision can hold, got {X[row, columns[place]]:g} of '{name}' in row {row}"
            )
        return inputs

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=self.device)


class SparseRegressor(RegressorMixin, SparseEstimator):
    """Regression by a sparse Bayesian network: the few inputs that matter, and intervals that hold.

    Inputs and response are standardised; the noise scale is learned; the prior is derived from the network and the number
    of rows (``default_prior``). First inputs are chosen: several runs anneal, what most of them keep is kept (the median
    probability model), and so on until no input is dropped. Then networks that read these choose weights and are refitted;
    predictions average them. The biases of live units are refitted even where they were pruned
    (``Structure.with_biases``), since the data were centred at sample means. A constant column is never selected.

    Args:
        family: law of the response around its mean: "normal" with one scale of the noise for all rows, "heteroscedastic",
            a normal law whose scale is a second output of the network, or "poisson" for counts, by their log rate.
        hidden: widths of the hidden layers; () is a linear model. Left out, (20, 10), or a linear model where that has the
            better extended BIC.
        activation: between the layers, as in :class:`SparseNet`.
        steps: of one annealing, >= 100; of those that choose inputs three fifths where several runs vote.
        schedule: a :class:`PriorAnnealing` for all of them instead; its learning rate is otherwise 4e-3 sqrt(10,000 / rows)
            within [4e-3, 1e-2].
        batch_size: rows a step; a twentieth of the rows within [50, 500] where left out (half of them under 100 rows), of a
            linear model 500.
        rounds: of choosing, at most, >= 1. Left out, as many as it takes until no input is dropped.
        num_runs: independent runs that choose inputs, >= 1; ``inclusion_probability_`` says how often each is chosen. Left
            out, 3 for fewer than 5,000 rows, else 1.
        num_networks: networks that are averaged, >= 1; of a linear model there is one.
        random_state: an integer, a RandomState or None, as everywhere in scikit-learn.
        device: that PyTorch computes on.
        progress: whether to show a bar.

    Attributes:
        selected_inputs_: names of the selected inputs for a data frame, else their columns counted from 0.
        inclusion_probability_: (n_features,) share of the runs that choose each input.
        supports_: (num_runs, n_features) booleans, the inputs that each run chose in the last round that had them.
        hidden_: widths of the hidden layers.
        columns_: the columns that the networks choose weights among; those of ``run_`` and ``fits_`` read these.
        num_rounds_: annealings one after another, the last one included.
        fits_: the refits that predictions average, in standardised units.
        run_, structure_, fit_: run, structure and refit of the network with the best extended BIC.
        noise_scale_: standard deviation of the noise in units of the response; None but for the normal family.
    """

    def __init__(
        self,
        family: str = "normal",
        hidden: tuple[int, ...] | None = None,
        activation: str = "tanh",
        steps: int = 10_000,
        schedule: PriorAnnealing | None = None,
        batch_size: int | None = None,
        rounds: int | None = None,
        num_runs: int | None = None,
        num_networks: int = 3,
        random_state: Any = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> None:
        super().__init__(
            hidden,
            activation,
            steps,
            schedule,
            batch_size,
            rounds,
            num_runs,
            num_networks,
            random_state,
            device,
            progress,
        )
        self.family = family

    def fit(self, X: Any, y: Any) -> Self:
        """Anneals, selects and refits.

        Args:
            X: (rows, inputs) numbers; a data frame gives its column names.
            y: (rows,) numbers, not all the same; counts for the Poisson family.

        Raises:
            ValueError: naming what is wrong with X or y.
        """
        self._check()
        names = _frame_columns(X)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        if y.dtype.kind not in "biuf":
            raise ValueError(f"y must hold numbers, got '{y[0]}'; for classes there is SparseClassifier")
        y = y.astype(np.float64)
        if not np.ptp(y) > 0:
            raise ValueError(f"y must not be constant, got {y[0]:g} in all of {len(y)} rows")
        if self.family not in _OUTPUTS:
            raise ValueError(f"family must be one of {', '.join(_OUTPUTS)}, got {self.family!r}")
        if self.family == "poisson":
            wrong = y[(y < 0) | (y % 1 != 0)]
            if len(wrong):
                raise ValueError(f"y must hold counts 0, 1, 2, ... for the poisson family, got {wrong[0]:g}")
            self.y_mean_, self.y_scale_, self.y_rate_ = 0.0, 1.0, float(y.mean())
        else:
            self.y_mean_, self.y_scale_, self.y_rate_ = float(y.mean()), float(y.std()), 1.0
        _check_scale("y", np.array([self.y_scale_]))
        if not self.y_scale_ > 0:
            raise ValueError(
                f"y must vary by more than double precision can square, got values up to {np.abs(y).max():g}"
            )
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

    def _effect_tables(self, labels: dict[str, Any], dependence: xr.Dataset) -> list[pd.DataFrame]:
        values = {name: dependence[name].values * self.y_scale_ for name in _EFFECT}
        return [pd.DataFrame(labels | {n: v + self.y_mean_ if n.startswith("mean") else v for n, v in values.items()})]

    @property
    def noise_scale_(self) -> float | None:
        """Standard deviation of the noise in units of the response; None but for the normal family."""
        if self.family != "normal":
            return None
        return float(np.mean([fit.noise_variance for fit in self.fits_]) ** 0.5 * self.y_scale_)

    def _num_outputs(self) -> int:
        return _OUTPUTS[self.family]

    def _response_model(self, net: SparseModule, num_data: int) -> Any:
        return regression_model(net, num_data, self.family, FLOOR, math.log(self.y_rate_))

    def _working_response(self, y: Array) -> Array:
        if self.family == "poisson":
            return y[:, None] / self.y_rate_ - 1
        return np.stack([y, np.zeros_like(y)][: self._num_outputs()], 1)

    def _default_schedule(self, num_data: int, voting: bool) -> PriorAnnealing:
        schedule = super()._default_schedule(num_data, voting)
        # The curvature of the Poisson likelihood in the log rate is the rate.
        return replace(schedule, learning_rate=schedule.learning_rate / max(1.0, self.y_rate_))

    def _own_settings(self) -> dict[str, Any]:
        return {"family": self.family} | {name: getattr(self, f"y_{name}_") for name in ("mean", "scale", "rate")}

    def _set_own(self, settings: dict[str, Any]) -> None:
        self.family = settings["family"]
        for name in ("mean", "scale", "rate"):
            setattr(self, f"y_{name}_", settings[name])


class SparseClassifier(ClassifierMixin, SparseEstimator):
    """Classification by a sparse Bayesian network: the few inputs that matter, and probabilities with intervals.

    With two classes the network has one output, their log-odds; with more, one a class. Inputs are standardised, the prior
    is derived and rounds are repeated as in :class:`SparseRegressor`, which explains all arguments and attributes.

    Attributes:
        classes_: (num_classes,) labels, sorted.
        class_share_: (num_classes,) of the rows.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Anneals, selects and refits.

        Args:
            X: (rows, inputs) numbers; a data frame gives its column names.
            y: (rows,) labels of at least two classes.

        Raises:
            ValueError: naming what is wrong with X or y.
        """
        self._check()
        names = _frame_columns(X)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least two classes, got only {self.classes_[0]} in all {len(y)} rows")
        self.class_share_ = np.bincount(codes) / len(codes)
        binary = len(self.classes_) == 2
        return self._fit(X, self._tensor(codes) if binary else torch.as_tensor(codes, device=self.device), names)

    def predict(self, X: Any) -> Array:
        """The most probable class, (rows,)."""
        probability = self.predict_proba(X)
        return np.asarray(self.classes_[probability.argmax(1)])

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (rows, num_classes)."""
        return self._by_class(self._predicted(X, 0.5)[0])[0]

    def predict_set(self, X: Any, prob: float = 0.95) -> Array:
        """The smallest set of classes whose probabilities sum to ``prob`` at each row, (rows, num_classes) booleans."""
        return np.asarray(self._predicted(X, prob)[0]["in_set"].values)

    def predict_table(self, X: Any, prob: float = 0.95) -> pd.DataFrame:
        """For each class c the columns ``P(c)``, ``P(c)_lower``, ``P(c)_upper``, and ``set``, the prediction set as text."""
        dataset, index = self._predicted(X, prob)
        columns: dict[str, Array] = {}
        for name, values in zip(("", "_lower", "_upper"), self._by_class(dataset), strict=True):
            columns |= {f"P({label}){name}": values[:, k] for k, label in enumerate(self.classes_)}
        order = [f"P({label}){name}" for label in self.classes_ for name in ("", "_lower", "_upper")]
        table = pd.DataFrame(columns, index=index)[order]
        members = dataset["in_set"].values
        return table.assign(set=[" ".join(map(str, self.classes_[row])) for row in members])

    def _effect_tables(self, labels: dict[str, Any], dependence: xr.Dataset) -> list[pd.DataFrame]:
        values = [*self._by_class(dependence), *self._by_class(dependence, "difference", 0.0)]
        columns = dict(zip(_EFFECT, values, strict=True))
        classes = enumerate(self.classes_)
        return [pd.DataFrame(labels | {n: v[:, k] for n, v in columns.items()} | {"class": c}) for k, c in classes]

    def _by_class(self, dataset: xr.Dataset, name: str = "mean", total: float = 1.0) -> tuple[Array, Array, Array]:
        """Probability, lower and upper end, (rows, num_classes) each; or of other numbers whose classes sum to ``total``."""
        mean, lower, upper = (dataset[name + end].values for end in ("", "_lower", "_upper"))
        if mean.ndim == 2:
            return mean, lower, upper
        pair = [np.stack([total - other, own], 1) for own, other in ((mean, mean), (lower, upper), (upper, lower))]
        return pair[0], pair[1], pair[2]

    def _num_outputs(self) -> int:
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    def _response_model(self, net: SparseModule, num_data: int) -> Any:
        # Where no input helps the probabilities are the shares: without the offset the slab would pull rare classes up.
        score = np.log(self.class_share_)
        if len(self.classes_) == 2:
            return regression_model(net, num_data, "bernoulli", offset=float(score[1] - score[0]))
        return regression_model(net, num_data, "categorical", offset=score.tolist())

    def _working_response(self, y: Array) -> Array:
        share = self.class_share_
        member: Array = y[:, None] == np.arange(len(share))
        return (member[:, 1:] - share[1]) / (share[0] * share[1]) if len(share) == 2 else member / share - 1

    def _own_settings(self) -> dict[str, Any]:
        timed = self.classes_.dtype.kind in "mM"  # dates and spans, which JSON does not know
        classes = self.classes_.astype(np.int64) if timed else self.classes_
        kind = {"dtype": str(self.classes_.dtype), "class_share": self.class_share_.tolist()}
        return {"classes": classes.tolist()} | kind

    def _set_own(self, settings: dict[str, Any]) -> None:
        self.classes_ = np.array(settings["classes"], dtype=settings["dtype"])
        self.class_share_ = np.array(settings["class_share"])

    def _example_response(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float32 if len(self.classes_) == 2 else torch.int64)


_EFFECT = [name + end for name in ("mean", "difference") for end in ("", "_lower", "_upper")]
ANY_OTHER = "any other"  # level of a coded input
_OUTPUTS = {"normal": 1, "heteroscedastic": 2, "poisson": 1}  # of the network, by family of the regressor


def _plain(value: Any) -> Any:
    """What JSON knows in place of a number of NumPy or a device."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _grid(values: Array, num_points: int) -> Array:
    """All values of an input that has few, else evenly spaced ones over its central 90 %."""
    different = np.unique(values)
    if len(different) <= 5:
        return different
    low, high = np.quantile(values, [0.05, 0.95])
    return np.linspace(low, high, num_points) if high > low else different[[0, -1]]


def _levels(coded: Array) -> Array:
    """The different rows of columns of 0 and 1: those with a 1 in the order of the columns, the one without last."""
    return np.unique(coded, axis=0)[::-1]


def _level(row: Array, names: list[Any]) -> Any:
    return names[int(row.argmax())] if row.any() else ANY_OTHER


def _check_scale(name: str, scale: Array) -> None:
    if not np.isfinite(scale).all():
        columns = np.flatnonzero(~np.isfinite(scale)).tolist()
        raise ValueError(f"{name} must have a finite variance, got values too large in columns {columns}")


def _frame_columns(X: Any) -> list[str] | None:
    """The names of a data frame's columns.

    Raises:
        ValueError: of a column of text, which the networks cannot read.
    """
    columns = getattr(X, "columns", None)
    if isinstance(X, pd.DataFrame):
        for name, column in X.select_dtypes(exclude=["number", "bool"]).items():
            text = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
            if len(text):
                raise ValueError(
                    f"X must hold numbers, got '{text.iloc[0]}' in column '{name}': code text by columns of 0 and 1, as "
                    "pandas.get_dummies does"
                )
    return None if columns is None or not all(isinstance(c, str) for c in columns) else list(columns)


def _batch_size(num_data: int, nonlinear: bool) -> int:
    # Minibatch noise helps networks along: with half of the rows at once small problems ended with nothing kept. A linear
    # model starts where it belongs, and the noise of small batches would only let in inputs that do nothing.
    if not nonlinear:
        return min(500, num_data)
    return max(1, num_data // 2) if num_data < 100 else min(500, max(50, num_data // 20))


def _weight(masks: Mapping[str, Tensor]) -> Tensor:
    """The mask of a linear model's weight, (outputs, inputs)."""
    (weight,) = (mask for mask in masks.values() if mask.dim() == 2)
    return weight


def _keeping(structure: Structure, mask: Tensor) -> Structure:
    """The structure of a linear model with another mask of its weight."""
    masks = {name: mask.to(old.device) if old.dim() == 2 else old for name, old in structure.masks.items()}
    return replace(structure, masks=masks, reads=mask.any(0).to(structure.reads.device))


def _distinct(structures: list[Structure], runs: list[Run]) -> list[tuple[Structure, Run]]:
    """Each set of kept weights once, in order, with the first run that has it."""
    found: dict[tuple[bool, ...], tuple[Structure, Run]] = {}
    for structure, run in zip(structures, runs, strict=True):
        kept = tuple(torch.cat([mask.flatten() for mask in structure.masks.values()]).tolist())
        found.setdefault(kept, (structure, run))
    return list(found.values())


def _complexity(num_data: int, num_kept: int, num_chosen: int, num_inputs: int) -> float:
    """What extended BIC adds to the loss of all rows, in nats."""
    return 0.5 * math.log(num_data) * num_kept + math.log(math.comb(num_inputs, num_chosen))


def _normal_criterion(num_data: int, freedom: int, mean_square: float) -> float:
    """The loss of all rows in nats at the best noise scale, and half its logarithm for each coefficient the less.

    With the half of log n in ``_complexity`` a coefficient then costs log(n / mean_square) / 2, as in the evidence under a
    slab of the response's scale. With half of log n alone a third of as many rows, fitted to noise, would win where inputs
    are many more. The mean square is in units of the response's variance.
    """
    return 0.5 * max(freedom, 0) * math.log(max(mean_square, np.finfo(float).tiny)) + 0.5 * num_data * (
        1 + math.log(2 * math.pi)
    )


def _gain_below_the_floor(freedom: int, mean_square: float) -> float:
    """What the best noise scale gains in nats on the floor that a network's scale has, counted for the rows left to spare.

    A linear model is scored at its best scale, and would win wherever both fit better than the floor. For all rows, networks
    that fit noise exactly would.
    """
    share = max(mean_square / FLOOR**2, np.finfo(float).tiny)
    return 0.5 * max(freedom, 0) * (share - 1 - math.log(share)) if share < 1 else 0.0


def _forward_selection(X: Array, responses: Array) -> Array:
    """(responses, inputs) least-squares coefficients on the orthogonal matching pursuit that has the best extended BIC."""
    (num_data, num_inputs), steps = X.shape, min(X.shape[1], len(X) // 3, 100)
    coefficients = np.zeros((responses.shape[1], num_inputs))
    for row, response in zip(coefficients, responses.T, strict=True):
        if steps == 0 or not np.ptp(response) > 0:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may end early, on inputs that depend on each other
            path = orthogonal_mp(X, response, n_nonzero_coefs=steps, return_path=True).reshape(num_inputs, -1)
        path = np.pad(path, ((0, 0), (1, 0)))  # no input at first
        squares = np.square(response[:, None] - X @ path).mean(0)
        criteria = [
            _normal_criterion(num_data, num_data - 1 - k, square / squares[0]) + _complexity(num_data, k, k, num_inputs)
            for k, square in enumerate(squares)
        ]
        row[:] = path[:, int(np.argmin(criteria))]
    return coefficients


def _narrow(law: SpikeSlab, num_data: int) -> SpikeSlab:
    """The law with a spike of half a standard error at first: a wide one would take in again what the start has chosen."""
    initial = torch.clamp(law.initial_spike_scale, max=0.5 / math.sqrt(num_data)).maximum(law.spike_scale)
    return SpikeSlab(law.slab_prob, law.spike_scale, law.slab_scale, initial)


def _linear_schedule(schedule: PriorAnnealing, X: Array) -> PriorAnnealing:
    """The prior is there from the start: without it more inputs than rows fit the noise, which no later step undoes.

    The learning rate is at most a quarter of the inverse of the largest curvature: stable where the noise has a 15th of the
    variance or more.
    """
    _, (largest,), _ = randomized_svd(X, 1, random_state=0)
    rate = min(schedule.learning_rate, 0.25 * len(X) / max(float(largest) ** 2, 1e-12))
    steps = schedule.train_steps + schedule.power_steps + schedule.spike_steps
    return replace(schedule, learning_rate=rate, train_steps=0, power_steps=0, spike_steps=steps)


def default_schedule(num_data: int, steps: int = 10_000) -> PriorAnnealing:
    """The schedule of the estimators for a number of rows."""
    train, power, spike = steps // 20, steps // 5, steps // 2
    rate = min(1e-2, 4e-3 * max(1.0, (10_000 / num_data) ** 0.5))
    return PriorAnnealing(train, power, spike, steps - train - power - spike, learning_rate=rate)
