"""All methods by name, and the row of one."""

import math
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
