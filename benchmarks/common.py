"""What the benchmarks share: the paper's data, metrics, versions and hardware, and results as JSON lines."""

import contextlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_sparse.datasets import PAPER_INPUTS, paper_regression

Array = np.ndarray[Any, Any]
Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
PROB = 0.95  # of every interval
TRUTH = frozenset(i - 1 for i in PAPER_INPUTS)  # columns counted from 0


@dataclass(frozen=True)
class Rows:
    """Inputs (rows, inputs), responses and their true means (rows,)."""

    x: Array
    y: Array
    f: Array

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.x[rows], self.y[rows], self.f[rows])


@dataclass(frozen=True)
class Data:
    """A training set, and validation and test rows that no method is fitted to."""

    train: Rows
    validation: Rows
    test: Rows


def paper_data(seed: int, num_rows: int, num_inputs: int, num_held_out: int = 1_000) -> Data:
    """One data set of the paper: its scripts draw training, validation and test rows from one stream, in this order."""
    rows = Rows(*paper_regression(seed, num_rows + 2 * num_held_out, num_inputs))
    end = num_rows + num_held_out
    return Data(rows[:num_rows], rows[num_rows:end], rows[end:])


@dataclass(frozen=True)
class Fitted:
    """What a method hands back.

    Attributes:
        predict: the mean of the response at inputs (rows, inputs).
        selected: columns it reads, counted from 0; None where it reads all by construction.
        interval: of a new observation at inputs, as lower and upper; None: split conformal around the mean, calibrated on
            the validation rows after the first ``num_tuned``.
        network: its layers, where it is one.
        note: settings worth knowing, and how intervals and selection come about.
        num_tuned: validation rows that tuning has seen.
    """

    predict: Callable[[Array], Array]
    selected: Iterable[int] | None = None
    interval: Callable[[Array], tuple[Array, Array]] | None = None
    network: str = ""
    note: str = ""
    num_tuned: int = 0


def evaluate(fitted: Fitted, data: Data) -> Row:
    """The columns of the table for one fit."""
    mean = fitted.predict(data.test.x)
    if fitted.interval is None:
        kept = data.validation[fitted.num_tuned :]
        half = conformal_half_width(kept.y - fitted.predict(kept.x))
        lower, upper = mean - half, mean + half
    else:
        lower, upper = fitted.interval(data.test.x)
    row = {
        "msfe": mean_square(fitted.predict(data.train.x) - data.train.y),
        "mspe": mean_square(mean - data.test.y),
        "excess_error": mean_square(mean - data.test.f),
    }
    kind = {"intervals": "split conformal" if fitted.interval is None else "own"}
    described = {"network": fitted.network, "note": fitted.note} | kind
    return selection_errors(fitted.selected) | row | interval_metrics(data.test.y, lower, upper) | described


def selection_errors(selected: Iterable[int] | None, truth: frozenset[int] = TRUTH) -> Row:
    """How many inputs are selected, of them falsely, and how many that act are missed; None where nothing is selected."""
    if selected is None:
        return {"num_selected": None, "num_false": None, "num_missed": None}
    found = {int(i) for i in selected}
    counts = {"num_selected": len(found), "num_false": len(found - truth), "num_missed": len(truth - found)}
    return counts | ({"selected": sorted(found)} if len(found) <= 50 else {})


def false_selection_rate(rows: list[Row]) -> float:
    """FSR of section 4.1: false inputs over selected ones, both summed over data sets; NaN where none is selected."""
    selected = sum(row["num_selected"] for row in rows)
    return sum(row["num_false"] for row in rows) / selected if selected else math.nan


def negative_selection_rate(rows: list[Row], num_true: int = len(TRUTH)) -> float:
    """NSR of section 4.1: missed inputs over those that act, both summed over data sets."""
    return sum(row["num_missed"] for row in rows) / (num_true * len(rows))


def mean_square(error: Array) -> float:
    """The mean of the squares."""
    return float(np.mean(np.square(error)))


def interval_metrics(y: Array, lower: Array, upper: Array) -> Row:
    """Share of the responses inside, mean width and mean interval score."""
    return {
        "coverage": float(np.mean((y >= lower) & (y <= upper))),
        "mean_width": float(np.mean(upper - lower)),
        "interval_score": interval_score(y, lower, upper),
    }


def interval_score(y: Array, lower: Array, upper: Array, prob: float = PROB) -> float:
    """Mean of the width plus 2 / (1 - prob) times the distance by which y lies outside (Gneiting and Raftery 2007)."""
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return float(np.mean(upper - lower + 2 / (1 - prob) * outside))


def conformal_half_width(residuals: Array, prob: float = PROB) -> float:
    """Split conformal: the ceil((n + 1) prob)-th smallest absolute residual of rows that the fit has not seen."""
    rank = math.ceil((len(residuals) + 1) * prob)
    return float(np.sort(np.abs(residuals))[rank - 1]) if rank <= len(residuals) else math.inf


def environment(*packages: str) -> Row:
    """Versions and hardware of this machine; ``packages`` beside the usual ones, left out where not installed."""
    cpu = next((line.split(":")[1].strip() for line in _cpu_lines() if "model name" in line), platform.machine())
    versions: Row = {"torch": torch.__version__}
    names = {"pyro": "pyro-ppl", "pyro_sparse": "pyro-sparse"} | {name: name for name in packages}
    for key, name in names.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[key] = importlib.metadata.version(name)
    return versions | {"python": platform.python_version(), "cpu": cpu, "threads": torch.get_num_threads()}


def _cpu_lines() -> Iterator[str]:
    path = Path("/proc/cpuinfo")
    return iter(path.read_text().splitlines()) if path.exists() else iter(())


def append_row(path: Path, row: Row, *packages: str) -> None:
    """Prints a row and appends it, with the environment, to a file of JSON lines."""
    print(json.dumps(row), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(row | {"environment": environment(*packages)}) + "\n")


def read_rows(path: Path) -> list[Row]:
    """All rows of a file of JSON lines; none where it is not there. A line that a kill cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def is_done(path: Path, key: Row) -> bool:
    """Whether the file has a row with these entries."""
    return any(key.items() <= row.items() for row in map(_plain, read_rows(path)))


def _plain(row: Row) -> Row:
    return {name: value for name, value in row.items() if not isinstance(value, (list, dict))}


def seeds(text: str) -> list[int]:
    """``"1-3,7"`` as [1, 2, 3, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
