"""The paper's simulated regression (its table 1): selection, errors, intervals and CPU time of ten methods.

    python benchmarks/regression_table.py                                  all that is missing, hours on one core
    python benchmarks/regression_table.py --methods LASSO --seeds 1-3      a part of it; run again, it goes on
    python benchmarks/regression_table.py --inputs 100 --rows 1000 --effort 0.05 --output /tmp/smoke.jsonl
    python benchmarks/regression_table.py --table                          benchmarks/results/regression_table.md

Ten data sets (seeds 1-10) of 10,000 training, 1,000 validation and 1,000 test rows, 2,000 inputs of which 5 act. The
validation rows choose penalties (the first half) and calibrate split-conformal intervals (the rest, or all where nothing is
chosen) of methods without intervals of their own. Set OMP_NUM_THREADS=1: CPU seconds are those of the process.
"""

import argparse
import importlib
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import (
    RESULTS,
    Data,
    Fitted,
    Row,
    append_row,
    evaluate,
    false_selection_rate,
    is_done,
    negative_selection_rate,
    paper_data,
    read_rows,
    seeds,
)

OUTPUT = RESULTS / "regression_table.jsonl"
PACKAGES = ("numpy", "scikit-learn", "skglm", "stochtree", "lassonet")
Method = Callable[[Data, int, float], Fitted]

# Where each method is, loaded when it is run: a rival whose package is missing stops nobody else.
METHODS = {
    "BNN_anneal": "rivals.ours:fit",
    "BNN_Evidence": "rivals.evidence:fit",
    "Spinn": "rivals.spinn:fit",
    "DNN": "rivals.networks:dense",
    "Dropout": "rivals.networks:dropout",
    "BART50": "rivals.bart:fit",
    "LASSO": "rivals.linear:lasso",
    "SIS": "rivals.linear:sis",
    "LassoNet": "rivals.lasso_net:fit",
    "Boosted trees": "rivals.boosting:fit",
}

# |S|, FSR, NSR, MSFE, MSPE of table 1, which has no other columns.
PAPER = {
    "BNN_anneal": ("5 (0)", "0", "0", "2.353 (0.296)", "2.428 (0.297)"),
    "BNN_Evidence": ("5 (0)", "0", "0", "2.372 (0.093)", "2.439 (0.132)"),
    "Spinn": ("10.7 (3.874)", "0.462", "0", "4.157 (0.219)", "4.488 (0.350)"),
    "DNN": ("-", "-", "-", "1.17e-5 (1.15e-6)", "16.923 (0.323)"),
    "Dropout": ("-", "-", "-", "1.104 (0.068)", "13.183 (0.716)"),
    "BART50": ("16.5 (1.222)", "0.727", "0.1", "11.182 (0.334)", "12.097 (0.366)"),
    "LASSO": ("566.8 (4.844)", "0.993", "0.26", "8.542 (0.022)", "9.496 (0.148)"),
    "SIS": ("467.2 (11.776)", "0.991", "0.2", "7.083 (0.023)", "10.114 (0.161)"),
}
COLUMNS = ("", "sets", "selected", "FSR", "NSR", "MSFE", "MSPE", "coverage", "width", "interval score", "CPU seconds")


def load(name: str) -> Method:
    """The method of that name."""
    module, function = METHODS[name].split(":")
    found: Method = getattr(importlib.import_module(module), function)
    return found


def run(name: str, seed: int, num_rows: int, num_inputs: int, effort: float, output: Path) -> None:
    """One row, unless the output has it."""
    key = {"method": name, "seed": seed, "num_rows": num_rows, "num_inputs": num_inputs, "effort": effort}
    if is_done(output, key):
        return
    data = paper_data(seed, num_rows, num_inputs)
    begun = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = load(name)(data, seed, effort)
        spent = time.process_time() - begun[1]
        row = key | evaluate(fitted, data)
    row |= {"cpu_seconds": round(spent, 1), "seconds": round(time.perf_counter() - begun[0], 1)}
    append_row(output, row | {"warnings": sorted({str(w.message) for w in caught})[:3]}, *PACKAGES)


def table(rows: list[Row]) -> str:
    """Mean (standard deviation) over data sets of each method, the paper's row below it where it has one."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    notes = []
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            lines.append("| " + " | ".join((name, str(len(own)), *cells(own))) + " |")
            first = own[0]
            notes.append(
                f"- {name}: {first['network'] or 'no network'}; {first['intervals']} intervals; {first['note']}"
            )
        if name in PAPER:
            lines.append(f"| {name}, paper | 10 | " + " | ".join((*PAPER[name], *["-"] * 4)) + " |")
    return "\n".join([*lines, "", "Network, intervals and settings of the first data set:", "", *notes, ""])


def cells(rows: list[Row]) -> list[str]:
    """The columns of one method after its name and the number of data sets."""
    selects = all(row["num_selected"] is not None for row in rows)
    selection = ["-", "-", "-"]
    if selects:
        rates = false_selection_rate(rows), negative_selection_rate(rows)
        selection = [mean_sd(rows, "num_selected", 1), *("-" if math.isnan(rate) else f"{rate:.3f}" for rate in rates)]
    errors = [mean_sd(rows, name, 3) for name in ("msfe", "mspe")]
    intervals = [mean_sd(rows, name, digits) for name, digits in _INTERVAL_COLUMNS]
    return [*selection, *errors, *intervals, mean_sd(rows, "cpu_seconds", 0)]


_INTERVAL_COLUMNS = (("coverage", 3), ("mean_width", 2), ("interval_score", 2))


def mean_sd(rows: list[Row], name: str, digits: int) -> str:
    """``1.25 (0.30)``; very small numbers with an exponent; no brackets for a single row."""
    values = [float(row[name]) for row in rows]
    kind = f".{digits}f" if statistics.fmean(values) >= 0.5 * 10**-digits or not any(values) else ".2e"
    spread = f" ({format(statistics.stdev(values), kind)})" if len(values) > 1 else ""
    return format(statistics.fmean(values), kind) + spread


def write_table(source: Path, num_rows: int, num_inputs: int) -> None:
    """Prints the table of one size, and writes it beside its rows."""
    rows = [
        row
        for row in read_rows(source)
        if (row["num_rows"], row["num_inputs"], row["effort"]) == (num_rows, num_inputs, 1.0)
    ]
    cards = sorted({row["environment"]["cpu"] for row in rows})
    head = f"The paper's generator, {num_inputs:,} inputs, {num_rows:,} rows; mean (sd) over data sets; {', '.join(cards)}.\n\n"
    text = head + table(rows)
    print(text)
    name = source.stem if (num_rows, num_inputs) == (10_000, 2_000) else f"{source.stem}_{num_rows}x{num_inputs}"
    source.with_name(f"{name}.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=seeds, default=seeds("1-10"), help="1-10 where left out; or 1,3,5-7")
    parser.add_argument("--inputs", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=10_000, help="of the training set")
    parser.add_argument("--effort", type=float, default=1.0, help="multiplies steps and draws, for smoke tests")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for seed in arguments.seeds:
            for name in arguments.methods:
                run(name, seed, arguments.rows, arguments.inputs, arguments.effort, arguments.output)
    write_table(arguments.output, arguments.rows, arguments.inputs)


if __name__ == "__main__":
    main()
