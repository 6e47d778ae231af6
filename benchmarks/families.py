"""Coverage by simulation for every family of responses, through the estimators.

    python benchmarks/families.py                                   all that is missing, about an hour on one core
    python benchmarks/families.py poisson --truths linear --seeds 1-20
    python benchmarks/families.py --table                           benchmarks/results/families.md

Twenty correlated inputs of which three act; 95 % intervals at 2,000 new rows. ``linear``: a sparse linear truth, 1,000 rows,
100 data sets, ``hidden=()``, one run of 2,000 steps. ``network``: a truth that is a sparse network of three units, 4,000 rows,
5 data sets, ``hidden=(5,)``, otherwise the defaults. Intervals of the mean are computed on the link scale, where covering is
the same; of a class its probability is the mean and the prediction set the new observation's.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from common import RESULTS, Array, Row, append_row, is_done, read_rows, seeds

import pyro_sparse as ps

OUTPUT = RESULTS / "families.jsonl"
NUM_INPUTS, NUM_NEW, ACTING = 20, 2_000, {0, 1, 2}

TRUTHS: dict[str, tuple[Callable[[Array], Array], int, int, dict[str, object]]] = {
    "linear": (
        lambda x: 0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.6 * x[:, 2],
        1_000,
        100,
        {"hidden": (), "steps": 2_000, "num_runs": 1},
    ),
    "network": (lambda x: 2 * np.tanh(x[:, 0] + x[:, 1]) - 1.5 * np.tanh(1.2 * x[:, 2]), 4_000, 5, {"hidden": (5,)}),
}


def _softmax(scores: Array) -> Array:
    shares = np.exp(scores - scores.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


# Means (rows,), or (rows, classes), and responses from the network's output.
def _normal(f: Array, x: Array, rng: np.random.RandomState) -> tuple[Array, Array]:
    return f, f + rng.standard_normal(len(f))


def _heteroscedastic(f: Array, x: Array, rng: np.random.RandomState) -> tuple[Array, Array]:
    return f, f + (0.2 + np.log1p(np.exp(0.5 + x[:, 0]))) * rng.standard_normal(len(f))


def _poisson(f: Array, x: Array, rng: np.random.RandomState) -> tuple[Array, Array]:
    return np.exp(0.5 + 0.5 * f), rng.poisson(np.exp(0.5 + 0.5 * f))


def _bernoulli(f: Array, x: Array, rng: np.random.RandomState) -> tuple[Array, Array]:
    mean = 1 / (1 + np.exp(-0.5 - f))
    return np.stack([1 - mean, mean], 1), (rng.random_sample(len(f)) < mean).astype(int)


def _categorical(f: Array, x: Array, rng: np.random.RandomState) -> tuple[Array, Array]:
    mean = _softmax(np.stack([f, -f, np.zeros_like(f)], 1))
    return mean, (rng.random_sample((len(f), 1)) > mean.cumsum(1)).sum(1)


FAMILIES = {
    "normal": _normal,
    "heteroscedastic": _heteroscedastic,
    "poisson": _poisson,
    "bernoulli": _bernoulli,
    "categorical": _categorical,
}


def draw(truth: str, family: str, num_rows: int, seed: int) -> tuple[Array, Array, Array]:
    """Inputs, means and responses."""
    rng = np.random.RandomState(seed)
    x = (rng.standard_normal((num_rows, 1)) + rng.standard_normal((num_rows, NUM_INPUTS)) * 3**0.5) / 2
    return x, *FAMILIES[family](TRUTHS[truth][0](x), x, rng)


def run(truth: str, family: str, seed: int) -> None:
    """One row, unless the output has it."""
    key = {"truth": truth, "family": family, "seed": seed}
    if is_done(OUTPUT, key):
        return
    _, num_rows, _, options = TRUTHS[truth]
    x, _, y = draw(truth, family, num_rows, seed)
    x_new, mean, y_new = draw(truth, family, NUM_NEW, seed + 10_000)
    begun = time.process_time()
    classes = mean.ndim == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = ps.SparseClassifier if classes else ps.SparseRegressor
        fitted = made(**options, **({} if classes else {"family": family}), random_state=seed).fit(x, y)  # type: ignore[arg-type]
        table = fitted.predict_table(x_new)
    selected = {int(i) for i in fitted.get_support(indices=True)}
    row: Row = {"num_false": len(selected - ACTING), "num_missed": len(ACTING - selected)}
    lower, upper = _ends(table, "lower"), _ends(table, "upper")
    row["coverage_of_mean"] = float(
        ((lower <= mean.reshape(lower.shape)) & (mean.reshape(lower.shape) <= upper)).mean()
    )
    if isinstance(fitted, ps.SparseClassifier):
        members = fitted.predict_set(x_new)
        row |= {
            "coverage": float(members[np.arange(NUM_NEW), y_new].mean()),
            "mean_width": float(members.sum(1).mean()),
        }
    else:
        low, high = table["lower"].to_numpy(), table["upper"].to_numpy()
        row |= {"coverage": float(((low <= y_new) & (y_new <= high)).mean()), "mean_width": float((high - low).mean())}
    row |= {"cpu_seconds": round(time.process_time() - begun, 1)}
    append_row(OUTPUT, key | row | {"warnings": sorted({str(w.message) for w in caught})[:3]})


def _ends(table: pd.DataFrame, end: str) -> Array:
    """One end of the intervals of the mean, (rows, 1), or of the probabilities, (rows, classes)."""
    columns = [f"mean_{end}"] if f"mean_{end}" in table else [c for c in table if str(c).endswith(f")_{end}")]
    return table[columns].to_numpy()


def table(rows: list[Row]) -> str:
    """Means over data sets, and the standard error of the first."""
    lines = [
        "| truth | family | data sets | exact | false | missed | mean covered | (s.e.) | new one covered | width or size |",
        "|" + "---|" * 10,
    ]
    for truth in TRUTHS:
        for family in FAMILIES:
            found = [r for r in rows if (r["truth"], r["family"]) == (truth, family)]
            if not found:
                continue
            exact = sum(not r["num_false"] and not r["num_missed"] for r in found)
            mean = [r["coverage_of_mean"] for r in found]
            error = f"{np.std(mean, ddof=1) / len(mean) ** 0.5:.3f}" if len(mean) > 1 else ""
            false, missed, new, width = (
                np.mean([r[name] for r in found]) for name in ("num_false", "num_missed", "coverage", "mean_width")
            )
            lines.append(
                f"| {truth} | {family} | {len(found)} | {exact} | {false:.2f} | {missed:.2f} | {np.mean(mean):.3f} | {error} | "
                f"{new:.3f} | {width:.3g} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all of them where left out")
    parser.add_argument("--truths", nargs="*", choices=list(TRUTHS), default=list(TRUTHS))
    parser.add_argument("--seeds", type=seeds, help="such as 1-20")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for truth in arguments.truths:
            for seed in arguments.seeds or range(1, TRUTHS[truth][2] + 1):
                for family in arguments.families or FAMILIES:
                    run(truth, family, seed)
    text = table(read_rows(OUTPUT))
    OUTPUT.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
