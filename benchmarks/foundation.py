"""The numbers of the README where the truth is known: selection, error beyond the noise, coverage and width.

    python benchmarks/foundation.py                    all parts, about half an hour on one core
    python benchmarks/foundation.py own_model --seeds 1

Prints one JSON line a run and appends it to benchmarks/results/foundation.jsonl, with versions and hardware.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, append_row

import pyro_sparse as ps
from pyro_sparse.datasets import paper_regression

OUTPUT = RESULTS / "foundation.jsonl"


def on_fresh_points(table: Any, f: np.ndarray, y: np.ndarray) -> Row:
    """What a table of predictions is worth where the regression function f is known."""
    mean = np.asarray(table["mean"])
    inside = (y >= np.asarray(table["lower"])) & (y <= np.asarray(table["upper"]))
    mean_inside = (f >= np.asarray(table["mean_lower"])) & (f <= np.asarray(table["mean_upper"]))
    mean_sd = (np.asarray(table["mean_upper"]) - np.asarray(table["mean_lower"])) / (2 * 1.96)
    return {
        "excess_error": float(np.mean((mean - f) ** 2)),
        "coverage": float(inside.mean()),
        "mean_width": float(np.mean(np.asarray(table["upper"]) - np.asarray(table["lower"]))),
        "coverage_of_f": float(mean_inside.mean()),
        "mean_variance": float(np.mean(mean_sd**2)),
        "bias2_about": float(np.mean((mean - f) ** 2 - mean_sd**2)),
    }


def own_model(seed: int) -> Row:
    """The README's own model on the paper's generator: p = 100, n = 10,000, the response as it is."""
    x, y, _ = (torch.as_tensor(a, dtype=torch.float32) for a in paper_regression(seed, 10_000, 100))
    torch.manual_seed(seed)
    net = ps.SparseNet([100, 20, 10, 1], activation="tanh")

    def model(x, y=None):  # type: ignore[no-untyped-def]
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 10_000, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    run = ps.anneal(model, (x, y), ps.PriorAnnealing(), batch_size=500, seed=seed, progress=False)
    fit = ps.refit(run, ps.select(run))
    x_new, y_new, f_new = paper_regression(seed + 10_000, 100_000, 100)
    table = ps.predict(fit, x_new.astype(np.float32))
    row = {"selected": [i + 1 for i in fit.structure.input_indices], "kept": fit.structure.num_kept}
    return row | {"converged": fit.converged} | on_fresh_points(table, f_new, y_new)


def estimator(seed: int) -> Row:
    """SparseRegressor with its defaults on the same data."""
    x, y, _ = paper_regression(seed, 10_000, 100)
    fitted = ps.SparseRegressor(random_state=seed).fit(x, y)
    x_new, y_new, f_new = paper_regression(seed + 10_000, 100_000, 100)
    row = {
        "selected": [i + 1 for i in fitted.selected_inputs_],
        "kept": [fit.structure.num_kept for fit in fitted.fits_],
    }
    return (
        row
        | {"converged": all(fit.converged for fit in fitted.fits_)}
        | on_fresh_points(fitted.predict_table(x_new), f_new, y_new)
    )


def sparse_truth(seed: int) -> Row:
    """Data from a sparse network: here theorem 2.2 speaks of the regression function itself."""
    rng = np.random.RandomState(seed)
    x, x_new = rng.randn(4_000, 20), rng.randn(20_000, 20)

    def f(x: np.ndarray) -> np.ndarray:
        return 2 * np.tanh(x[:, 0] + x[:, 1]) - 1.5 * np.tanh(1.2 * x[:, 2])

    y, y_new = f(x) + rng.randn(4_000), f(x_new) + rng.randn(20_000)
    fitted = ps.SparseRegressor(hidden=(5,), random_state=seed).fit(x, y)
    row = {
        "selected": [i + 1 for i in fitted.selected_inputs_],
        "kept": [fit.structure.num_kept for fit in fitted.fits_],
    }
    return row | on_fresh_points(fitted.predict_table(x_new), f(x_new), y_new)


PARTS: dict[str, tuple[Callable[[int], Row], int]] = {
    "own_model": (own_model, 3),
    "estimator": (estimator, 3),
    "sparse_truth": (sparse_truth, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them where left out")
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of 1, 2, 3, ...")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.parts or PARTS:
        part, num_seeds = PARTS[name]
        for seed in arguments.seeds or range(1, num_seeds + 1):
            begun = time.process_time()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                row = part(seed)
            row = {"part": name, "seed": seed} | row | {"cpu_seconds": round(time.process_time() - begun, 1)}
            row["warnings"] = sorted({str(w.message) for w in caught})[:3]
            append_row(OUTPUT, row)


if __name__ == "__main__":
    main()
