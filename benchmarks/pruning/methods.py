"""All methods by name, the row of one, and the table of many."""

import math
import statistics
from collections.abc import Callable

import torch
from common import Row
from gpu import cifar
from pruning import bic, dense, dpf, dropout, dsr, ensemble, sparse_momentum, swag
from pruning.training import Fitted, Problem, probabilities

METHODS: dict[str, Callable[[Problem, int], Fitted]] = {
    "dense": dense.fit,
    "DPF": dpf.fit,
    "SM": sparse_momentum.fit,
    "DSR": dsr.fit,
    "BNN_BIC": bic.fit,
    "MC dropout": dropout.fit,
    "deep ensemble": ensemble.fit,
    "SWAG": swag.fit,
}
OURS = {
    "average": "ours, average over sparse draws",
    "refreshed": "the same, statistics anew",
    "anneal": "ours, selected and refitted",
    "whole": "ours, average over whole draws",
    "stiff average": "ours under a stiffer prior, average",
    "stiff anneal": "ours under a stiffer prior, refitted",
}
DENSE = ("dense", "MC dropout", "deep ensemble", "SWAG")  # which keep all weights, whatever the share


def row_of(name: str, problem: Problem, seed: int, data: cifar.Data) -> Row:
    """What a method keeps, how well it predicts, and what it costs.

    ``seconds_an_epoch`` is of one training; ``state_mib`` is the memory that one keeps between two steps, the images apart.

    Raises:
        OutOfTimeError: at the deadline, after saving what was on its way.
    """
    if problem.train[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
    fitted = METHODS[name](problem, seed)
    trained = fitted.trainings
    row: Row = {"kept": fitted.kept, "num_trainings": len(trained), "note": fitted.note}
    row["seconds_an_epoch"] = sum(one.seconds for one in trained) / (len(trained) * problem.recipe.epochs)
    row["state_mib"] = max(one.state_bytes() for one in trained) / 2**20
    if problem.train[0].is_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    images = data.test[0] if data.unfamiliar is None else torch.cat([data.test[0], data.unfamiliar])
    row |= cifar.measures(data, probabilities(problem, fitted, images).cpu().numpy())
    loss = row["nll"]
    if not math.isfinite(loss):
        raise ArithmeticError(f"{name} predicts with an NLL of {loss}")
    return row


def table(rows: list[Row]) -> str:
    """Means over seeds, standard deviations in brackets, of the rows of one network."""
    quality = {"kept": (100, 2), "accuracy": (100, 2), "nll": (1, 4), "ece": (1, 4), "js_distance": (1, 2)}
    costs = {"seconds_an_epoch": (1, 3), "num_trainings": (1, 0), "state_mib": (1, 2), "cpu_seconds": (1, 0)}
    heads = ["", "seeds", "kept, %", "accuracy, %", "NLL", "ECE", "JS-distance"]
    heads += ["seconds an epoch", "trainings", "state, MiB", "CPU seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for predictor in [*OURS, *METHODS]:
        own = [row for row in rows if row["kind"] == "predicted" and row["predictor"] == predictor]
        if own:
            cells = [_mean_sd(own, name, *how) for name, how in quality.items()]
            cells += [_mean_sd(own, name, *how).split(" ")[0] for name, how in costs.items()]
            lines.append(f"| {OURS.get(predictor, predictor)} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean_sd(rows: list[Row], name: str, factor: float, digits: int) -> str:
    values = [factor * row[name] for row in rows if row.get(name) is not None]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
