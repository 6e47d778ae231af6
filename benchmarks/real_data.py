"""SparseRegressor with its defaults on real data, beside trees and the lasso on the same splits.

    PYRO_SPARSE_DATA=... python benchmarks/real_data.py                    all sets, about an hour on one core
    PYRO_SPARSE_DATA=... python benchmarks/real_data.py concrete --splits 0-4 --methods ours
    python benchmarks/real_data.py --table                                 benchmarks/results/real_data.md

The folder holds regression/*.csv and regression/uci_splits.npz, the usual test masks of the UCI sets. Diabetes comes with
scikit-learn and eye200 is small: they are cross-validated in five and ten folds. Run again, it goes on where it stopped.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import RESULTS, Array, Row, append_row, interval_metrics, is_done, mean_square, read_rows, seeds
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LassoCV
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import pyro_sparse as ps

OUTPUT = RESULTS / "real_data.jsonl"
NUM_SPLITS = {"concrete": 5, "energy": 5, "kin8nm": 5, "power_plant": 5, "diabetes": 5, "eye200": 10}


def load(name: str, split: int) -> tuple[Array, Array, Array]:
    """Inputs, response and which rows are tested."""
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        return x, y, fold(len(y), split, name)
    folder = Path(os.environ["PYRO_SPARSE_DATA"]) / "regression"
    table = pd.read_csv(folder / f"{name}.csv").to_numpy(dtype=float)
    x, y = table[:, :-1], table[:, -1]
    if name == "eye200":
        return x, y, fold(len(y), split, name)
    return x, y, np.load(folder / "uci_splits.npz")[f"{name}_test"][split]


def fold(num_rows: int, split: int, name: str) -> Array:
    """The test rows of one fold of a fixed partition."""
    test = list(KFold(NUM_SPLITS[name], shuffle=True, random_state=1).split(np.zeros(num_rows)))[split][1]
    return np.isin(np.arange(num_rows), test)


def ours(x: Array, y: Array, x_new: Array, y_new: Array, seed: int) -> Row:
    """Defaults throughout."""
    fitted = ps.SparseRegressor(random_state=seed).fit(x, y)
    table = fitted.predict_table(x_new)
    row = {
        "rmse": mean_square(table["mean"].to_numpy() - y_new) ** 0.5,
        "num_selected": int(fitted.get_support().sum()),
    }
    row |= {
        "rounds": fitted.num_rounds_,
        "kept": [fit.structure.num_kept for fit in fitted.fits_],
        "converged": all(fit.converged for fit in fitted.fits_),
    }
    return row | interval_metrics(y_new, table["lower"].to_numpy(), table["upper"].to_numpy())


def trees(x: Array, y: Array, x_new: Array, y_new: Array, seed: int) -> Row:
    """scikit-learn's gradient boosting with its defaults."""
    fitted = HistGradientBoostingRegressor(random_state=seed).fit(x, y)
    return {"rmse": mean_square(fitted.predict(x_new) - y_new) ** 0.5}


def lasso(x: Array, y: Array, x_new: Array, y_new: Array, seed: int) -> Row:
    """The lasso on standardised inputs, its penalty by cross-validation."""
    fitted = make_pipeline(StandardScaler(), LassoCV(random_state=seed)).fit(x, y)
    return {
        "rmse": mean_square(fitted.predict(x_new) - y_new) ** 0.5,
        "num_selected": int((fitted[-1].coef_ != 0).sum()),
    }


def mean(x: Array, y: Array, x_new: Array, y_new: Array, seed: int) -> Row:
    """The mean of the fitted rows."""
    return {"rmse": mean_square(y.mean() - y_new) ** 0.5}


METHODS: dict[str, Callable[[Array, Array, Array, Array, int], Row]] = {
    function.__name__: function for function in (ours, trees, lasso, mean)
}


def run(name: str, split: int, method: str) -> None:
    """One row, unless the output has it."""
    key = {"set": name, "split": split, "method": method}
    if is_done(OUTPUT, key):
        return
    x, y, test = load(name, split)
    begun = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = METHODS[method](x[~test], y[~test], x[test], y[test], split)
    row = key | {"rows_tested": int(test.sum())} | row | {"cpu_seconds": round(time.process_time() - begun, 1)}
    append_row(OUTPUT, row | {"warnings": sorted({str(w.message) for w in caught})[:3]}, "scikit-learn")


def table(rows: list[Row]) -> str:
    """Means over splits; over folds of small sets the error is pooled."""
    lines = [
        "| set | method | splits | RMSE | coverage | mean width | inputs | CPU seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, num_splits in NUM_SPLITS.items():
        for method in METHODS:
            found = [row for row in rows if row["set"] == name and row["method"] == method]
            if not found:
                continue
            weights = [row["rows_tested"] for row in found]
            pooled = name in ("diabetes", "eye200")
            rmse = (
                np.average(np.square([r["rmse"] for r in found]), weights=weights) ** 0.5
                if pooled
                else _mean(found, "rmse")
            )
            cells = [f"{rmse:.4g}", *(_cell(found, *c) for c in COLUMNS)]
            lines.append(f"| {name} | {method} | {len(found)} of {num_splits} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLUMNS = (("coverage", ".3f"), ("mean_width", ".4g"), ("num_selected", ".1f"), ("cpu_seconds", ".0f"))


def _mean(rows: list[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _cell(rows: list[Row], name: str, style: str) -> str:
    return format(_mean(rows, name), style) if name in rows[0] else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*NUM_SPLITS, []], help="all of them where left out")
    parser.add_argument("--splits", type=seeds, help="such as 0-4")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for name in arguments.sets or NUM_SPLITS:
            for split in arguments.splits or range(NUM_SPLITS[name]):
                for method in arguments.methods:
                    run(name, split, method)
    text = table(read_rows(OUTPUT))
    OUTPUT.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
