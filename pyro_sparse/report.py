"""What a fit is worth on rows it has not seen: numbers, files and pictures, and a summary to read at a glance."""

import json
import math
import platform
import shutil
import textwrap
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
from pyro_sparse.estimators import SparseRegressor
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.trace import package_version
from pyro_sparse.tables import Encoding, Table

Array = np.ndarray[Any, Any]

PROB = 0.95
WIDTH = 88  # characters of a line of the summary
INDENT = 10
SETTINGS = "pyro_sparse.json"  # written first: by it a later command knows the folder
FILES = ("structure.json", "predictions.csv", "metrics.json", "summary.txt")
PICTURES = ("schedule.png", "annealing.png", "inclusion.png", "intervals.png", "network.png")


@dataclass(frozen=True)
class Study:
    """A fitted regressor, its predictions of rows it has not seen, and what they are worth.

    Attributes:
        name: of the data.
        train, test: fitted rows and unseen ones; ``test`` may be empty.
        predictions: of the test rows: observed, mean, mean_lower, mean_upper, lower, upper.
        metrics: numbers, ready for JSON.
        notes: what the library warned of on the way.
    """

    name: str
    estimator: SparseRegressor
    train: Table
    test: Table
    predictions: pd.DataFrame
    metrics: dict[str, Any]
    notes: list[str]


def study(name: str, train: Table, test: Table, estimator: SparseRegressor) -> Study:
    """Fits the estimator to some rows and measures it on others."""
    started = time.perf_counter()
    with collected_warnings() as notes:
        estimator.fit(train.inputs, train.target.to_numpy())
        predictions = _predictions(estimator, test)
    seconds = round(time.perf_counter() - started, 1)
    metrics = _metrics(train, test, estimator, predictions) | {"seconds": seconds}
    return Study(name, estimator, train, test, predictions, metrics, notes)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The texts of the warnings raised inside, each once, instead of lines that name files."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        yield notes
    notes += dict.fromkeys(str(warning.message) for warning in caught)


def _predictions(estimator: SparseRegressor, test: Table) -> pd.DataFrame:
    table = pd.DataFrame(columns=["mean", "mean_lower", "mean_upper", "lower", "upper"], dtype=float)
    if len(test.target):
        table = estimator.predict_table(test.inputs, PROB)
    table.insert(0, "observed", test.target)
    return table.rename_axis("row")


def selected_inputs(estimator: SparseRegressor, encoding: Encoding) -> list[str]:
    """Inputs of the table that the network reads; of text, any level."""
    chosen = np.array(encoding.owners, dtype=object)[estimator.get_support()]
    return list(dict.fromkeys(str(name) for name in chosen))


def selected_in_runs(estimator: SparseRegressor, encoding: Encoding) -> dict[str, float]:
    """Share of the runs that select each input; of text, the level that is selected most often."""
    shares: dict[str, float] = {}
    for name, share in zip(encoding.owners, estimator.inclusion_probability_, strict=True):
        shares[str(name)] = max(shares.get(str(name), 0.0), float(share))
    return shares


def _metrics(train: Table, test: Table, estimator: SparseRegressor, predictions: pd.DataFrame) -> dict[str, Any]:
    structure = estimator.structure_
    return {
        "target": train.encoding.target,
        "rows": {
            "read": train.num_read,
            "dropped": train.num_dropped,
            "fitted": len(train.target),
            "held_out": len(test.target),
        },
        "inputs": [column.name for column in train.encoding.columns],
        "left_out": train.left_out,
        "selected": selected_inputs(estimator, train.encoding),
        "runs": len(estimator.supports_),
        "rounds": estimator.num_rounds_,
        "selected_in_runs": selected_in_runs(estimator, train.encoding),
        "weights": {"kept": structure.num_kept, "of": structure.num_weights},
        "converged": estimator.fit_.converged,
        "noise_scale": estimator.noise_scale_,
        "held_out": _held_out(train, test, predictions) if len(test.target) else None,
        "seed": estimator.random_state,
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


def _held_out(train: Table, test: Table, predictions: pd.DataFrame) -> dict[str, Any]:
    y, n = predictions["observed"].to_numpy(), len(predictions)
    lower, upper = predictions["lower"].to_numpy(), predictions["upper"].to_numpy()
    errors = {
        "network": y - predictions["mean"].to_numpy(),
        "least_squares": y - least_squares(train, test.inputs),
        "mean": y - train.target.mean(),
    }
    covered = int(((lower <= y) & (y <= upper)).sum())
    penalty = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    expected = stats.binom.interval(0.95, n, PROB)
    ends = {"network": "", "least_squares": "_least_squares", "mean": "_mean"}
    return {
        **{f"rmse{end}": rmse(errors[name]) for name, end in ends.items()},
        **{f"r2{end}": r2(errors[name], y) for name, end in ends.items()},
        "prob": PROB,
        "covered": covered,
        "coverage": covered / n,
        "covered_if_calibrated": [int(expected[0]), int(expected[1])],
        "mean_width": float((upper - lower).mean()),
        "mean_width_without_inputs": 2 * float(stats.norm.ppf(0.5 + PROB / 2)) * float(train.target.std()),
        "interval_score": float((upper - lower + 2 / (1 - PROB) * penalty).mean()),
        "better_than_mean": standard_errors(errors["mean"], errors["network"]),
        "better_than_least_squares": standard_errors(errors["least_squares"], errors["network"]),
    }


def rmse(errors: Array) -> float:
    return math.sqrt(float(np.square(errors).mean()))


def r2(errors: Array, observed: Array) -> float | None:
    """Share of these rows' variance that is explained, negative for worse than their mean; None where they do not vary."""
    return 1 - float(np.square(errors).mean()) / float(observed.var()) if observed.var() > 0 else None


def standard_errors(others: Array, ours: Array) -> float:
    """By how many standard errors our mean squared error is the smaller one, on the same rows."""
    difference = np.square(others) - np.square(ours)
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return float(difference.mean()) / error if error > 0 else 0.0


def least_squares(train: Table, inputs: pd.DataFrame) -> Array:
    """Predictions of ordinary least squares on all inputs, the shortest solution where they are too many."""
    x = train.inputs.to_numpy()
    scale = np.where(x.std(0) > 0, x.std(0), 1.0)
    centred = (x - x.mean(0)) / scale
    mean = float(train.target.mean())
    weights = np.linalg.lstsq(centred, train.target.to_numpy() - mean, rcond=None)[0]
    fitted: Array = mean + (inputs.to_numpy() - x.mean(0)) / scale @ weights
    return fitted


def summary(study: Study) -> str:
    """The study in words and one small table."""
    metrics, target = study.metrics, study.metrics["target"]
    rows = metrics["rows"]
    lines = [
        f"{study.name}: '{target}' from {len(metrics['inputs'])} inputs, {rows['fitted']:,} rows fitted"
        + (f", {rows['held_out']:,} unseen" if rows["held_out"] else ", none left to measure on"),
        "",
        *(_wrapped(f"{name:<{INDENT}}", text) for name, text in _facts(study).items()),
    ]
    if metrics["held_out"]:
        lines += ["", *_comparison(metrics)]
    shortfalls = _shortfalls(study)
    if shortfalls:
        lines += ["", "Where it falls short", *(_wrapped("  - ", text) for text in shortfalls)]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _facts(study: Study) -> dict[str, str]:
    metrics = study.metrics
    selected, kept = metrics["selected"], metrics["weights"]
    facts = {
        "selected": f"{len(selected)} of {len(metrics['inputs'])} inputs: {', '.join(selected) or 'none'}",
        "network": f"{kept['kept']:,} of {kept['of']:,} weights kept; noise of standard deviation "
        f"{metrics['noise_scale']:.4g}",
    }
    if metrics["left_out"]:
        facts["left out"] = ", ".join(f"'{name}' ({why})" for name, why in metrics["left_out"].items())
    if metrics["rows"]["dropped"]:
        facts["dropped"] = f"{metrics['rows']['dropped']:,} of {metrics['rows']['read']:,} rows, for blanks"
    facts["how sure"] = _certainty(metrics["runs"], metrics["selected_in_runs"])
    return facts


def _certainty(runs: int, shares: dict[str, float]) -> str:
    if runs == 1:
        return "one run says which inputs, not how surely; the intervals take them as given"
    counts: dict[int, list[str]] = {}
    for name, share in shares.items():
        counts.setdefault(round(share * runs), []).append(name)
    said = [f"{', '.join(counts[count])} in {count} of {runs} runs" for count in sorted(counts, reverse=True) if count]
    return f"{'; '.join(said) or f'nothing in any of {runs} runs'}; selected are those of the run that fits best for its size"


def _comparison(metrics: dict[str, Any]) -> list[str]:
    held_out, n = metrics["held_out"], metrics["rows"]["held_out"]
    names = {
        "sparse network": "",
        "least squares on all inputs": "_least_squares",
        "mean of the fitted rows": "_mean",
    }
    low, high = held_out["covered_if_calibrated"]
    return [
        f"{f'On {n:,} unseen rows':<32}    RMSE      R2",
        *(
            f"  {name:<30}{held_out['rmse' + end]:>8.4g}{_two_digits(held_out['r2' + end])}"
            for name, end in names.items()
        ),
        "",
        f"{PROB:.0%} intervals cover {held_out['covered']:,} of {n:,} ({held_out['coverage']:.1%}; "
        f"calibrated ones cover {low:,} to {high:,})",
        f"mean width {held_out['mean_width']:.4g}, where no input is known {held_out['mean_width_without_inputs']:.4g}"
        f"; interval score {held_out['interval_score']:.4g}",
    ]


def _two_digits(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{round(value, 2) + 0.0:>8.2f}"  # + 0.0: no minus zero


def _shortfalls(study: Study) -> list[str]:
    metrics, held_out = study.metrics, study.metrics["held_out"]
    texts = []
    if not metrics["selected"]:
        texts.append("No input was selected: the prediction is the same for every row.")
    if not metrics["converged"]:
        texts.append("The refit has not converged: weights and intervals are not at their maximum.")
    if held_out:
        texts += _unseen_shortfalls(held_out)
    return texts + study.notes


def _unseen_shortfalls(held_out: dict[str, Any]) -> list[str]:
    texts = []
    if held_out["better_than_mean"] < 2:
        texts.append(f"Not clearly better than the mean: by {held_out['better_than_mean']:.1f} standard errors.")
    if held_out["better_than_least_squares"] < 0:
        errors = -held_out["better_than_least_squares"]
        how = "clearly" if errors > 2 else "though no more than chance may do"
        texts.append(f"Least squares on all inputs predicts better, {how}: by {errors:.1f} standard errors.")
    low, high = held_out["covered_if_calibrated"]
    if not low <= held_out["covered"] <= high:
        narrow = "narrow" if held_out["covered"] < low else "wide"
        texts.append(f"The intervals are too {narrow} on these rows.")
    return texts


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or takes over one that an earlier command made, and removes what that command left.

    Raises:
        ValueError: where the folder holds something else.
        OSError: where it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS).is_file():
        raise ValueError(f"{folder} is not empty and was not made by pyro-sparse: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)
    for name in (*FILES, *PICTURES):
        (folder / name).unlink(missing_ok=True)
    for name in ("regressor", "trace.zarr"):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)


def write(study: Study, folder: Path) -> None:
    """Everything about the study, into a folder that :func:`claim` made."""
    study.estimator.save(folder / "regressor")
    study.estimator.run_.trace.to_zarr(folder / "trace.zarr", mode="w", consolidated=False)
    write_json(folder / "structure.json", structure_to_json(study.estimator.structure_))
    write_json(folder / "metrics.json", study.metrics)
    (folder / "summary.txt").write_text(summary(study) + "\n", encoding="utf-8")
    if len(study.predictions):
        study.predictions.to_csv(folder / "predictions.csv")
    for name, figure in pictures(study).items():
        figure.savefig(folder / name)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
    estimator, run = study.estimator, study.estimator.run_
    drawn = {
        "schedule.png": plots.plot_schedule(run.schedule, next(iter(run.priors.values()))),
        "annealing.png": plots.plot_annealing(run),
        "inclusion.png": plots.plot_inclusion(estimator, study.train.encoding.owners),
        "network.png": plots.plot_network(estimator.fit_),
    }
    if len(study.predictions):
        observed, target = study.predictions["observed"], study.train.encoding.target
        drawn["intervals.png"] = plots.plot_intervals(study.predictions, observed, PROB, target)
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
        f"  {PROB:.0%} intervals of the mean cover the true one at {covered:.1%} of the rows: they know that variance, no bias",
    ]
    return Truth(metrics, "\n".join(lines))
