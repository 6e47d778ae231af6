"""What a fit is worth on rows it has not seen: numbers, files and pictures, and a summary to read at a glance."""

import json
import platform
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import torch
from scipy import stats

from pyro_sparse import plots
from pyro_sparse.estimators import ANY_OTHER, SparseClassifier, SparseRegressor
from pyro_sparse.folders import ESTIMATOR, TRACE, write_json
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.trace import package_version
from pyro_sparse.measures import PROB, measured
from pyro_sparse.summary import directions, summary
from pyro_sparse.tables import Encoding, Table

ALIKE = 0.9  # correlation from which on one input may stand for another

Array = np.ndarray[Any, Any]
Estimator = SparseRegressor | SparseClassifier


@dataclass(frozen=True)
class Study:
    """A fitted estimator, its predictions of rows it has not seen, and what they are worth.

    Attributes:
        name: of the data.
        train, test: fitted rows and unseen ones; ``test`` may be empty.
        predictions: of the test rows: observed, and the columns of :func:`predicted`.
        effects: along each selected input, from ``effects`` of the estimator on the fitted rows.
        metrics: numbers, ready for JSON.
        notes: what the library warned of on the way.
    """

    name: str
    estimator: Estimator
    train: Table
    test: Table
    predictions: pd.DataFrame
    effects: pd.DataFrame
    metrics: dict[str, Any]
    notes: list[str]

    @property
    def summary(self) -> str:
        """The study in words and one small table."""
        return summary(self.name, self.metrics, self.notes)


def study(name: str, train: Table, test: Table, estimator: Estimator) -> Study:
    """Fits the estimator to some rows and measures it on others."""
    started = time.perf_counter()
    with collected_warnings() as notes:
        estimator.fit(train.inputs, train.target.to_numpy())
        predictions = _predictions(estimator, test)
    seconds = round(time.perf_counter() - started, 1)
    with collected_warnings():  # the same as above, of other rows
        effects = with_levels(estimator.effects(train.inputs, PROB, groups=train.encoding.groups), train.encoding)
    metrics = _metrics(train, test, estimator, predictions, effects) | {"seconds": seconds}
    return Study(name, estimator, train, test, predictions, effects, metrics, notes)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The texts of the warnings raised inside, instead of lines that name files; of those alike but for numbers the first."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        yield notes
    first: dict[str, str] = {}
    for warning in caught:
        first.setdefault(re.sub(r"[0-9.]+", "", str(warning.message)), str(warning.message))
    notes += first.values()


def predicted(estimator: Estimator, inputs: pd.DataFrame, prob: float) -> pd.DataFrame:
    """The estimator's table of predictions by row of the file; of classes with the most probable one first."""
    table = estimator.predict_table(inputs, prob)
    if isinstance(estimator, SparseClassifier):
        probabilities = table[[f"P({label})" for label in estimator.classes_]].to_numpy()
        table.insert(0, "predicted", estimator.classes_[probabilities.argmax(1)])
    return table.rename_axis("row")


def load(path: Path) -> Estimator:
    """A saved estimator of either class, ready to predict."""
    name = json.loads((path / "estimator.json").read_text(encoding="utf-8"))["estimator"]
    kinds: dict[str, type[Estimator]] = {kind.__name__: kind for kind in (SparseRegressor, SparseClassifier)}
    if name not in kinds:
        raise ValueError(f"{path} must hold a {' or a '.join(kinds)}, got a {name}")
    return kinds[name].load(path)


def _predictions(estimator: Estimator, test: Table) -> pd.DataFrame:
    if not len(test.target):
        return pd.DataFrame({"observed": test.target}).rename_axis("row")
    table = predicted(estimator, test.inputs, PROB)
    table.insert(0, "observed", test.target)
    return table


def with_levels(effects: pd.DataFrame, encoding: Encoding) -> pd.DataFrame:
    """The effects with the levels of text in place of the columns that code them."""
    effects = effects.copy()
    for column in encoding.columns:
        own = effects["input"] == column.name
        if column.levels is None or not own.any():
            continue
        level = dict(zip(column.encoded_names, column.coded_levels, strict=True))
        others = [one for one in column.levels if one not in {level.get(value) for value in effects.loc[own, "value"]}]
        level[ANY_OTHER] = " or ".join(others) if len(others) <= 3 else ANY_OTHER
        effects.loc[own, "value"] = effects.loc[own, "value"].map(level)
    return effects


def selected_inputs(estimator: Estimator, encoding: Encoding) -> list[str]:
    """Inputs of the table that the network reads; of text, any level."""
    chosen = np.array(encoding.owners, dtype=object)[estimator.get_support()]
    return list(dict.fromkeys(str(name) for name in chosen))


def selected_in_runs(estimator: Estimator, encoding: Encoding) -> dict[str, float]:
    """Share of the runs that select each input; of text, any level."""
    owners = np.array(encoding.owners, dtype=object)
    return {str(name): float(estimator.supports_[:, owners == name].any(1).mean()) for name in dict.fromkeys(owners)}


def alike(inputs: pd.DataFrame, support: Array, encoding: Encoding) -> list[dict[str, Any]]:
    """Inputs left out and the selected one that each goes with, the closest first, at correlations of ``ALIKE`` or more.

    The data hardly tell which of the two acts.
    """
    owners = np.array(encoding.owners, dtype=object)
    out = ~np.isin(owners, owners[support])
    centred = (inputs - inputs.mean()).to_numpy(dtype=float)
    lengths = np.linalg.norm(centred, axis=0)
    scaled = np.divide(centred, lengths, out=np.zeros_like(centred), where=lengths > 0)
    pairs = pd.DataFrame(
        {
            "input": np.repeat(owners[out], support.sum()),
            "selected": np.tile(owners[support], out.sum()),
            "correlation": (scaled[:, out].T @ scaled[:, support]).ravel(),
        }
    )
    closest = pairs.sort_values("correlation", key=abs, ascending=False, kind="stable").drop_duplicates("input")
    near = closest[closest["correlation"].abs() >= ALIKE]
    return [dict(zip(near.columns, row, strict=True)) for row in near.itertuples(index=False, name=None)]


def _metrics(
    train: Table, test: Table, estimator: Estimator, predictions: pd.DataFrame, effects: pd.DataFrame
) -> dict[str, Any]:
    structure, family, seed = estimator.structure_, train.response.family, estimator.random_state
    labels = train.target.value_counts().sort_index() if family == "classes" else None
    return {
        "target": train.encoding.target,
        "family": family,
        "classes": None if labels is None else {str(label): int(count) for label, count in labels.items()},
        "rows": {
            "read": train.num_read,
            "dropped": train.num_dropped,
            "most_blanks": train.most_blanks,
            "fitted": len(train.target),
            "held_out": len(test.target),
        },
        "inputs": [column.name for column in train.encoding.columns],
        "left_out": train.left_out,
        "selected": selected_inputs(estimator, train.encoding),
        "effects": directions(effects),
        "runs": len(estimator.supports_),
        "rounds": estimator.num_rounds_,
        "selected_in_runs": selected_in_runs(estimator, train.encoding),
        "alike": alike(train.inputs, estimator.get_support(), train.encoding),
        "hidden": list(estimator.hidden_),
        "weights": {"kept": [fit.structure.num_kept for fit in estimator.fits_], "of": structure.num_weights},
        "converged": all(fit.converged for fit in estimator.fits_),
        "noise_scale": estimator.noise_scale_ if isinstance(estimator, SparseRegressor) else None,
        "held_out": measured(family, train, test, predictions, seed) if len(test.target) else None,
        "seed": seed,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {
        "pyro_sparse": package_version(),
        "pyro": pyro.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write(study: Study, folder: Path) -> None:
    """Everything about the study, into a folder that is there."""
    study.estimator.save(folder / ESTIMATOR)
    study.estimator.run_.trace.to_zarr(folder / TRACE, mode="w", consolidated=False)
    write_json(folder / "structure.json", structure_to_json(study.estimator.structure_))
    write_json(folder / "metrics.json", study.metrics)
    (folder / "summary.txt").write_text(study.summary + "\n", encoding="utf-8")
    study.effects.to_csv(folder / "effects.csv", index=False)
    if len(study.predictions):
        study.predictions.to_csv(folder / "predictions.csv")
    for name, figure in pictures(study).items():
        figure.savefig(folder / name)


def structure_to_json(structure: Structure) -> dict[str, Any]:
    """Which weights are kept, by their places in each site, and their values before the refit."""
    sites = {}
    for name, mask in structure.masks.items():
        values = structure.values[name].detach().cpu().double()[mask.cpu()]
        sites[name] = {"shape": list(mask.shape), "kept": mask.nonzero().tolist(), "values": values.tolist()}
    names = structure.input_names
    return {
        "num_kept": structure.num_kept,
        "num_weights": structure.num_weights,
        "inputs": list(range(len(structure.reads))) if names is None else list(names),
        "selected_inputs": structure.selected_inputs,
        "input_probability": structure.input_probability.tolist(),
        "num_chains": structure.num_chains,
        "weights": sites,
    }


def pictures(study: Study) -> dict[str, Any]:
    """The figures by file name."""
    estimator, run, target = study.estimator, study.estimator.run_, study.train.encoding.target
    drawn = {
        "schedule.png": plots.plot_schedule(run.schedule, next(iter(run.priors.values()))),
        "annealing.png": plots.plot_annealing(run),
        "inclusion.png": plots.plot_inclusion(estimator, study.train.encoding.owners),
        "effects.png": plots.plot_effects(study.effects, study.train.inputs, target),
        "network.png": plots.plot_network(estimator),
    }
    if len(study.predictions):
        observed = study.predictions["observed"]
        if isinstance(estimator, SparseClassifier):
            probabilities = study.predictions[[f"P({label})" for label in estimator.classes_]]
            drawn["calibration.png"] = plots.plot_calibration(probabilities, observed, estimator.classes_)
        else:
            drawn["intervals.png"] = plots.plot_intervals(study.predictions, observed, PROB, target)
    networks = len(estimator.fits_)
    for name in ("annealing.png", "network.png"):
        figure = drawn[name]
        if networks > 1 and figure is not None:
            figure.suptitle(f"one of the {networks} networks that are averaged, which may differ", fontsize=9)
    return {name: figure for name, figure in drawn.items() if figure is not None}


@dataclass(frozen=True)
class Truth:
    """A study beside the truth that simulated data have."""

    metrics: dict[str, Any]
    text: str


def truth(study: Study, inputs: list[str], f: Array) -> Truth:
    """Compares what was selected with the ``inputs`` that act, and the prediction with ``f``, the mean of each test row."""
    table, selected = study.predictions, study.metrics["selected"]
    false = [name for name in selected if name not in inputs]
    missed = [name for name in inputs if name not in selected]
    excess = float(np.square(table["mean"].to_numpy() - f).mean())
    width = (table["mean_upper"] - table["mean_lower"]).to_numpy()
    variance = float(np.square(width / 2 / stats.norm.ppf(0.5 + PROB / 2)).mean())
    covered = float(((table["mean_lower"].to_numpy() <= f) & (f <= table["mean_upper"].to_numpy())).mean())
    metrics = {
        "true_inputs": inputs,
        "false_inputs": false,
        "missed_inputs": missed,
        "excess_error": excess,
        "variance": variance,
        "coverage_of_the_true_mean": covered,
    }
    verdict = "exactly these" if not false and not missed else f"{len(missed)} missed, {len(false)} false"
    lines = [
        "The truth",
        f"  inputs that act: {', '.join(inputs)}; selected: {verdict}",
        f"  excess error of the mean: {excess:.3f}, where the noise has variance 1; variance of the weights: {variance:.3f}",
        f"  {PROB:.0%} intervals of the mean cover the true one at {covered:.1%} of the rows:",
        "  they know that variance, no bias",
    ]
    return Truth(metrics, "\n".join(lines))
