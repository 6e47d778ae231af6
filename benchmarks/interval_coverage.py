"""The paper's coverage experiment (its figure 2): 95 % intervals from many training sets at fixed test points.

    python benchmarks/interval_coverage.py --seeds 1-100       a slice; run again, it goes on where it was
    python benchmarks/interval_coverage.py --methods bvm draws conformal ensemble --seeds 1-10 --inputs 100
    python benchmarks/interval_coverage.py --picture           benchmarks/results/coverage.png and .md

1,000 inputs x are drawn once; each training set of 10,000 rows meets new responses at them, so that the coverage at a
point is one too. Methods: ``bvm``, the interval of SparseRegressor; ``draws``, a posterior over a network of the inputs that
it selects, averaged over draws; ``conformal``, its predictions with a split-conformal width from 1,000 further rows;
``ensemble``, five dense networks with Gaussian heads, stopped on those 1,000 rows. Set OMP_NUM_THREADS=1. The file is not
called coverage.py: numba imports whatever has that name.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    PROB,
    RESULTS,
    Array,
    Data,
    Row,
    Rows,
    append_row,
    conformal_half_width,
    interval_metrics,
    is_done,
    paper_data,
    read_rows,
    seeds,
)
from rivals import networks
from scipy.stats import binom, norm

import pyro_sparse as ps
from pyro_sparse.datasets import paper_regression
from pyro_sparse.estimators import default_schedule

OUTPUT = RESULTS / "coverage.jsonl"
NUM_POINTS, NUM_SHOWN = 1_000, 20
POINTS_SEED = 20_211_031  # apart from the seeds of training sets
SAMPLE_STEPS = 10_000


def test_points(num_inputs: int, seed: int) -> Rows:
    """The fixed inputs, with responses that belong to one training set."""
    x, _, f = paper_regression(POINTS_SEED, NUM_POINTS, num_inputs)
    return Rows(x, f + np.random.RandomState([POINTS_SEED, seed]).standard_normal(NUM_POINTS), f)


@dataclass(frozen=True)
class Intervals:
    """Lower and upper ends for a new observation at every test point; those of the mean where the method has them."""

    lower: Array
    upper: Array
    mean_lower: Array | None = None
    mean_upper: Array | None = None


class Experiment:
    """One training set; the fit that several methods share is made once."""

    def __init__(self, data: Data, points: Rows, seed: int, effort: float) -> None:
        self.data, self.points, self.seed, self.effort = data, points, seed, effort

    @functools.cached_property
    def regressor(self) -> ps.SparseRegressor:
        """SparseRegressor on the training rows."""
        train = self.data.train
        return ps.SparseRegressor(steps=int(10_000 * self.effort), random_state=self.seed).fit(train.x, train.y)

    def bvm(self) -> Intervals:
        """Theorem 2.2 and section A.4."""
        return _from_table(self.regressor.predict_table(self.points.x, PROB), 0.0, 1.0)

    def conformal(self) -> Intervals:
        """The same predictions, with the width that 1,000 further rows ask for."""
        held = self.data.validation
        half = conformal_half_width(held.y - self.regressor.predict(held.x))
        mean = self.regressor.predict(self.points.x)
        return Intervals(mean - half, mean + half)

    def draws(self) -> Intervals:
        """Averages over draws of the posterior (the Bayesian algorithm) of a network of the selected inputs."""
        kept = np.flatnonzero(self.regressor.get_support())
        x, y = self.data.train.x[:, kept], self.data.train.y
        centre, spread, level, scale = x.mean(0), x.std(0), y.mean(), y.std()

        def tensor(values: Array) -> torch.Tensor:
            return torch.as_tensor((values - centre) / spread, dtype=torch.float32)

        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            model = ps.normal_regression(ps.SparseNet([len(kept), *self.regressor.hidden_, 1]), len(y))
        steps = max(10, int(SAMPLE_STEPS * self.effort))
        schedule = replace(default_schedule(len(y), int(10_000 * self.effort)), cool_steps=0, sample_steps=steps)
        rows = (tensor(x), torch.as_tensor((y - level) / scale, dtype=torch.float32))
        batch, num_draws = min(500, len(y)), min(100, steps)
        run = ps.anneal(model, rows, schedule, batch, num_draws=num_draws, seed=self.seed, progress=False)
        return _from_table(ps.predict(run, tensor(self.points.x[:, kept]), PROB), level, scale)

    def ensemble(self) -> Intervals:
        """Five dense networks with Gaussian heads."""
        fitted = networks.deep_ensemble(self.data, self.seed, self.effort)
        assert fitted.interval is not None
        return Intervals(*fitted.interval(self.points.x))


METHODS: dict[str, Callable[[Experiment], Intervals]] = {
    "bvm": Experiment.bvm,
    "draws": Experiment.draws,
    "conformal": Experiment.conformal,
    "ensemble": Experiment.ensemble,
}


def _from_table(table: Any, level: float, scale: float) -> Intervals:
    ends = ("lower", "upper", "mean_lower", "mean_upper")
    return Intervals(*(np.asarray(table[name]) * scale + level for name in ends))


def describe(intervals: Intervals, points: Rows) -> Row:
    """What is kept of one training set: averages, which points are covered, and the intervals that the picture shows."""
    lower, upper = intervals.lower, intervals.upper
    # The noise is standard normal, so the coverage of new responses at a point is known.
    exact = norm.cdf(upper - points.f) - norm.cdf(lower - points.f)
    row = interval_metrics(points.y, lower, upper) | {
        "exact_coverage": float(exact.mean()),
        "width_sd": float(np.std(upper - lower)),
        "covered": np.packbits((points.y >= lower) & (points.y <= upper)).tobytes().hex(),
        "shown": np.round(np.array([lower[:NUM_SHOWN], upper[:NUM_SHOWN]], dtype=float), 3).tolist(),
    }
    if intervals.mean_lower is not None and intervals.mean_upper is not None:
        inside = (points.f >= intervals.mean_lower) & (points.f <= intervals.mean_upper)
        row |= {"coverage_of_f": float(inside.mean())}
    return row


def covered(row: Row) -> Array:
    """Which test points the intervals of a row cover, (points,) booleans."""
    bits = np.frombuffer(bytes.fromhex(row["covered"]), dtype=np.uint8)
    return np.unpackbits(bits)[:NUM_POINTS].astype(bool)


def run(methods: list[str], seed: int, num_rows: int, num_inputs: int, effort: float, output: Path) -> None:
    """The rows of one training set that the output lacks."""
    shared = {"seed": seed, "num_rows": num_rows, "num_inputs": num_inputs, "effort": effort}
    missing = [name for name in methods if not is_done(output, {"method": name} | shared)]
    if not missing:
        return
    points = test_points(num_inputs, seed)
    experiment = Experiment(paper_data(seed, num_rows, num_inputs), points, seed, effort)
    for name in missing:
        begun = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            intervals = METHODS[name](experiment)
        row = {"method": name} | shared | describe(intervals, points)
        if name != "ensemble":
            row["selected"] = np.flatnonzero(experiment.regressor.get_support()).tolist()
        row |= {"cpu_seconds": round(time.process_time() - begun, 1)}  # the first method pays for the shared fit
        append_row(output, row | {"warnings": sorted({str(w.message) for w in caught})[:3]}, "numpy", "scipy")


def summary(rows: list[Row]) -> str:
    """A markdown table: coverage (sd over training sets), width, and the spread of coverage over test points."""
    lines = ["| method | training sets | coverage | exact coverage | width | interval score | points under 90 % |"]
    lines.append("|" + "---|" * 7)
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            cells = [_percent([row[key] for row in own]) for key in ("coverage", "exact_coverage")]
            widths = [f"{np.mean([row[key] for row in own]):.2f}" for key in ("mean_width", "interval_score")]
            low = f"{np.mean(np.mean([covered(row) for row in own], axis=0) < 0.9):.1%}"
            by_chance = f"{binom.cdf(np.ceil(0.9 * len(own)) - 1, len(own), PROB):.1%} by chance"
            lines.append("| " + " | ".join([name, str(len(own)), *cells, *widths, f"{low} ({by_chance})"]) + " |")
    return "\n".join(lines) + "\n"


def _percent(values: list[float]) -> str:
    spread = f" ({100 * np.std(values, ddof=1):.2f} %)" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.2f} %" + spread


def picture(rows: list[Row], method: str, num_inputs: int, path: Path) -> None:
    """Twenty test points with the intervals of one training set, as in the paper; the coverage at every point beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["seed"])
    if not own:
        raise SystemExit(f"no row of method {method} to draw")
    points = test_points(num_inputs, own[0]["seed"])
    lower, upper = np.array(own[0]["shown"])
    index = np.arange(1, NUM_SHOWN + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2, 1), layout="constrained")
    left.errorbar(
        index, (lower + upper) / 2, (upper - lower) / 2, fmt="none", ecolor="#333333", capsize=3, label="interval"
    )
    left.plot(index, points.y[:NUM_SHOWN], "o", color="#0072B2", label="observation")
    left.plot(index, points.f[:NUM_SHOWN], "_", color="#D55E00", markersize=9, label="its true mean")
    left.set(xlabel="test point", ylabel="response", xticks=index)
    left.set_title(f"{PROB:.0%} intervals of one training set", loc="left")
    left.margins(y=0.15)
    left.legend(frameon=False, ncols=3, fontsize=8)
    count = np.sum([covered(row) for row in own], axis=0)
    at = np.arange(count.min(), len(own) + 1)
    right.bar(at / len(own), np.bincount(count, minlength=len(own) + 1)[at], width=0.8 / len(own), color="#56B4E9")
    expected = NUM_POINTS * binom.pmf(at, len(own), PROB)
    right.plot(at / len(own), expected, ".-", color="#D55E00", label="if all points had 95 %")
    right.set(xlabel=f"coverage over {len(own)} training sets", ylabel="test points")
    right.set_title(f"mean {count.mean() / len(own):.1%}", loc="left")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=["bvm"])
    parser.add_argument("--seeds", type=seeds, default=seeds("1-100"), help="1-100 where left out; or 1,3,5-7")
    parser.add_argument("--inputs", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=10_000, help="of a training set")
    parser.add_argument("--effort", type=float, default=1.0, help="multiplies steps, for smoke tests")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--picture", action="store_true", help="only summarise and draw what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (arguments.rows, arguments.inputs, arguments.effort)
    if not arguments.picture:
        for seed in arguments.seeds:
            run(arguments.methods, seed, *sizes, arguments.output)
    rows = [r for r in read_rows(arguments.output) if (r["num_rows"], r["num_inputs"], r["effort"]) == sizes]
    print(summary(rows))
    usual = sizes == (10_000, 2_000, 1.0)
    beside = arguments.output if usual else arguments.output.with_stem(f"{arguments.output.stem}_{sizes[0]}x{sizes[1]}")
    beside.with_suffix(".md").write_text(f"{sizes[1]:,} inputs, {sizes[0]:,} rows.\n\n" + summary(rows))
    picture(rows, arguments.methods[0], arguments.inputs, beside.with_suffix(".png"))


if __name__ == "__main__":
    main()
