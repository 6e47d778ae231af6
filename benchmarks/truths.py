"""Where the intervals hold and where not: simulated truths of other kinds, from 200 to 10,000 rows.

    python benchmarks/truths.py                                  all that is missing, about two hours on one core
    python benchmarks/truths.py step --rows 1000 --seeds 1-3
    python benchmarks/truths.py --table                          benchmarks/results/truths.md

Twenty correlated inputs, of which at most four act. Measured on 5,000 new rows: whether exactly those are selected, the
coverage of new observations and of the true mean (95 %), width, and the error beside that of the noise.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from common import RESULTS, Array, Row, append_row, interval_metrics, is_done, mean_square, read_rows, seeds

import pyro_sparse as ps

OUTPUT = RESULTS / "truths.jsonl"
NUM_INPUTS, NUM_NEW = 20, 5_000
SIZES = (200, 1_000, 10_000)

# Mean by inputs (rows, 20), all of a standard deviation near 2; the inputs that act.
TRUTHS: dict[str, tuple[Callable[[Array], Array], set[int]]] = {
    "linear": (lambda x: 1.5 * x[:, 0] - x[:, 1] + 0.7 * x[:, 2], {0, 1, 2}),
    "additive": (lambda x: 2 * np.sin(2 * x[:, 0]) + x[:, 1] ** 2 + x[:, 2], {0, 1, 2}),
    "interaction": (lambda x: 1.5 * x[:, 0] * x[:, 1] + x[:, 2], {0, 1, 2}),
    "step": (lambda x: 3.0 * (x[:, 0] > 0) + 2.0 * (x[:, 1] > 0.5), {0, 1}),
    "network": (lambda x: 2 * np.tanh(x[:, 0] + x[:, 1]) - 2 * np.tanh(1.2 * x[:, 2]), {0, 1, 2}),
    "heteroscedastic": (lambda x: 1.5 * x[:, 0] + x[:, 1], {0, 1}),
    "nothing": (lambda x: np.zeros(len(x)), set()),
}


def draw(truth: str, num_rows: int, seed: int) -> tuple[Array, Array, Array]:
    """Inputs, responses and their means; noise of standard deviation 1, or exp(0.6 x_0) where it varies."""
    rng = np.random.RandomState(seed)
    x = (rng.standard_normal((num_rows, 1)) + rng.standard_normal((num_rows, NUM_INPUTS)) * 3**0.5) / 2
    f = TRUTHS[truth][0](x)
    scale = np.exp(0.6 * x[:, 0]) if truth == "heteroscedastic" else 1.0
    return x, f + scale * rng.standard_normal(num_rows), f


def run(truth: str, num_rows: int, seed: int, family: str) -> None:
    """One row, unless the output has it."""
    key = {"truth": truth, "num_rows": num_rows, "seed": seed, "family": family}
    if is_done(OUTPUT, key):
        return
    x, y, _ = draw(truth, num_rows, seed)
    x_new, y_new, f_new = draw(truth, NUM_NEW, seed + 10_000)
    begun = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = ps.SparseRegressor(family=family, random_state=seed).fit(x, y)
        table = fitted.predict_table(x_new)
    selected = {int(i) for i in fitted.get_support(indices=True)}
    acting = TRUTHS[truth][1]
    row = key | {"num_false": len(selected - acting), "num_missed": len(acting - selected)}
    row |= {"excess_error": mean_square(table["mean"].to_numpy() - f_new)}
    row |= interval_metrics(y_new, table["lower"].to_numpy(), table["upper"].to_numpy())
    row |= {"coverage_of_mean": float(((table["mean_lower"] <= f_new) & (f_new <= table["mean_upper"])).mean())}
    low, high = x_new[:, 0] < -1, x_new[:, 0] > 1  # where noise that varies is small and large
    inside = ((table["lower"] <= y_new) & (y_new <= table["upper"])).to_numpy()
    row |= {"coverage_low": float(inside[low].mean()), "coverage_high": float(inside[high].mean())}
    row |= {"cpu_seconds": round(time.process_time() - begun, 1)}
    append_row(OUTPUT, row | {"warnings": sorted({str(w.message) for w in caught})[:3]})


def table(rows: list[Row]) -> str:
    """Means over seeds."""
    lines = [
        "| truth | rows | family | seeds | exact | false | missed | excess | coverage | x0 < -1 | x0 > 1 | of mean | width |",
        "|" + "---|" * 13,
    ]
    keys = sorted({(list(TRUTHS).index(r["truth"]), r["num_rows"], r["family"]) for r in rows})
    for number, num_rows, family in keys:
        truth = list(TRUTHS)[number]
        found = [r for r in rows if (r["truth"], r["num_rows"], r["family"]) == (truth, num_rows, family)]
        exact = sum(not r["num_false"] and not r["num_missed"] for r in found)
        columns = (
            *("num_false", "num_missed", "excess_error", "coverage", "coverage_low", "coverage_high"),
            *("coverage_of_mean", "mean_width"),
        )
        cells = [f"{np.mean([r[name] for r in found]):.3g}" for name in columns]
        lines.append(f"| {truth} | {num_rows:,} | {family} | {len(found)} | {exact} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truths", nargs="*", choices=[*TRUTHS, []], help="all of them where left out")
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES)
    parser.add_argument("--seeds", type=seeds, default=range(1, 6), help="such as 1-5")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for seed in arguments.seeds:
            for truth in arguments.truths or TRUTHS:
                for num_rows in arguments.rows:
                    run(truth, num_rows, seed, "normal")
                    if truth == "heteroscedastic":
                        run(truth, num_rows, seed, "heteroscedastic")
    text = table(read_rows(OUTPUT))
    OUTPUT.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
