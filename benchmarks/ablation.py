"""How flat the defaults are: one of them changed at a time, on simulated and real data.

    python benchmarks/ablation.py                                       all that is missing, about two hours on one core
    python benchmarks/ablation.py paper --seeds 1 --changes "3 networks" "1 network"
    python benchmarks/ablation.py --table                               benchmarks/results/ablation.md

``paper``: the paper's generator, 10,000 rows, 100 inputs of which 5 act. ``additive``: three of twenty act, 1,000 rows (see
truths.py). ``diabetes``: scikit-learn's, in five folds. The error is the root mean squared one on rows that the fit has not
seen, noise included.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import RESULTS, Array, Row, append_row, interval_metrics, is_done, mean_square, read_rows, seeds
from real_data import fold
from sklearn.datasets import load_diabetes
from truths import TRUTHS, draw

import pyro_sparse as ps
from pyro_sparse import estimators
from pyro_sparse.datasets import PAPER_INPUTS, paper_regression

OUTPUT = RESULTS / "ablation.jsonl"
Data = tuple[Array, Array, Array, Array, set[int] | None]


def paper(seed: int) -> Data:
    """10,000 rows and as many new ones."""
    x, y, _ = paper_regression(seed, 10_000, 100)
    x_new, y_new, _ = paper_regression(seed + 10_000, 10_000, 100)
    return x, y, x_new, y_new, {number - 1 for number in PAPER_INPUTS}


def additive(seed: int) -> Data:
    """1,000 rows and 5,000 new ones."""
    x, y, _ = draw("additive", 1_000, seed)
    x_new, y_new, _ = draw("additive", 5_000, seed + 10_000)
    return x, y, x_new, y_new, TRUTHS["additive"][1]


def diabetes(seed: int) -> Data:
    """A fold; the truth is not known."""
    x, y = load_diabetes(return_X_y=True)
    test = fold(len(y), seed - 1, "diabetes")
    return x[~test], y[~test], x[test], y[test], None


SETS: dict[str, Callable[[int], Data]] = {"paper": paper, "additive": additive, "diabetes": diabetes}


@contextmanager
def priors(change: Callable[[ps.SpikeSlab], dict[str, Any]]) -> Iterator[None]:
    """The default prior with some of its hyper-parameters changed, layer by layer."""

    def changed(module: torch.nn.Module, num_data: int, select_inputs: bool) -> dict[str, ps.SpikeSlab]:
        return {
            name: _with(law, change(law)) for name, law in ps.default_prior(module, num_data, select_inputs).items()
        }

    with mock.patch.object(estimators, "default_prior", changed):
        yield


def _with(law: ps.SpikeSlab, changes: dict[str, Any]) -> ps.SpikeSlab:
    names = ("slab_prob", "spike_scale", "slab_scale", "initial_spike_scale")
    return ps.SpikeSlab(**({name: getattr(law, name) for name in names} | changes))


def odds(law: ps.SpikeSlab, nats: float) -> dict[str, Any]:
    """The prior log-odds of the slab moved: a weight costs so many nats less."""
    return {"slab_prob": torch.sigmoid(torch.logit(law.slab_prob) + nats)}


def initial(law: ps.SpikeSlab, factor: float) -> dict[str, Any]:
    """The spike's start, no narrower than its end and no wider than 0.9 of the slab."""
    return {"initial_spike_scale": (factor * law.initial_spike_scale).clamp(law.spike_scale, 0.9 * law.slab_scale)}


def final(law: ps.SpikeSlab, factor: float) -> dict[str, Any]:
    """The spike's end, and with it the threshold."""
    return {"spike_scale": (factor * law.spike_scale).minimum(law.initial_spike_scale)}


@contextmanager
def rates(factor: float) -> Iterator[None]:
    """The default learning rate changed."""
    default = estimators.default_schedule

    def changed(num_data: int, steps: int) -> ps.PriorAnnealing:
        schedule = default(num_data, steps)
        return replace(schedule, learning_rate=factor * schedule.learning_rate)

    with mock.patch.object(estimators, "default_schedule", changed):
        yield


Change = dict[str, Any] | Callable[[], Any]
CHANGES: dict[str, Change] = {
    "defaults": {},
    "1 network": {"num_networks": 1},
    "9 networks": {"num_networks": 9},
    "1 run": {"num_runs": 1},
    "9 runs": {"num_runs": 9},
    "1 round": {"rounds": 1},
    "no linear model": {"hidden": (20, 10)},
    "one hidden layer of 20": {"hidden": (20,)},
    "hidden layers of 50, 20": {"hidden": (50, 20)},
    "half of the steps": {"steps": 5_000},
    "twice the steps": {"steps": 20_000},
    "half of the learning rate": lambda: rates(0.5),
    "twice the learning rate": lambda: rates(2.0),
    "a weight costs 2 nats less": lambda: priors(lambda law: odds(law, 2.0)),
    "a weight costs 2 nats more": lambda: priors(lambda law: odds(law, -2.0)),
    "half of the initial spike": lambda: priors(lambda law: initial(law, 0.5)),
    "twice the initial spike": lambda: priors(lambda law: initial(law, 2.0)),
    "0.7 of the final spike": lambda: priors(lambda law: final(law, 0.7)),
    "1.4 of the final spike": lambda: priors(lambda law: final(law, 1.4)),
}


def run(name: str, seed: int, change: str) -> None:
    """One row, unless the output has it."""
    key = {"set": name, "seed": seed, "change": change}
    if is_done(OUTPUT, key):
        return
    x, y, x_new, y_new, truth = SETS[name](seed)
    how = CHANGES[change]
    options = how if isinstance(how, dict) else {}
    begun = time.process_time()
    with warnings.catch_warnings(record=True) as caught, how() if callable(how) else nullcontext():
        warnings.simplefilter("always")
        fitted = ps.SparseRegressor(random_state=seed, **options).fit(x, y)
        table = fitted.predict_table(x_new)
    selected = {int(i) for i in fitted.get_support(indices=True)}
    row: Row = {"rmse": mean_square(table["mean"].to_numpy() - y_new) ** 0.5, "num_selected": len(selected)}
    if truth is not None:
        row |= {"num_false": len(selected - truth), "num_missed": len(truth - selected)}
    row |= interval_metrics(y_new, table["lower"].to_numpy(), table["upper"].to_numpy())
    row |= {"kept": [fit.structure.num_kept for fit in fitted.fits_], "hidden": list(fitted.hidden_)}
    row |= {"cpu_seconds": round(time.process_time() - begun, 1)}
    append_row(OUTPUT, key | row | {"warnings": sorted({str(w.message) for w in caught})[:3]})


def table(rows: list[Row]) -> str:
    """Means over seeds; compare changes that have as many."""
    lines = []
    for name in SETS:
        found = [row for row in rows if row["set"] == name]
        if not found:
            continue
        lines += [f"**{name}**", "", "| | seeds | RMSE | inputs | false | missed | coverage | CPU seconds |"]
        lines.append("|" + "---|" * 8)
        for change in CHANGES:
            own = [row for row in found if row["change"] == change]
            if own:
                lines.append(f"| {change} | {len(own)} | {' | '.join(_cell(own, *column) for column in COLUMNS)} |")
        lines.append("")
    return "\n".join(lines)


COLUMNS = (
    *(("rmse", ".4g"), ("num_selected", ".1f"), ("num_false", ".1f"), ("num_missed", ".1f")),
    *(("coverage", ".3f"), ("cpu_seconds", ".0f")),
)


def _cell(rows: list[Row], name: str, style: str) -> str:
    return format(float(np.mean([row[name] for row in rows])), style) if name in rows[0] else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="all of them where left out")
    parser.add_argument("--changes", nargs="*", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--seeds", type=seeds, default=range(1, 4), help="such as 1-5")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for seed in arguments.seeds:
            for name in arguments.sets or SETS:
                for change in arguments.changes:
                    run(name, seed, change)
    text = table(read_rows(OUTPUT))
    OUTPUT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
