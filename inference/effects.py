"""partial_dependence: the direction and shape of what one input does, with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.refit import Fit


def partial_dependence(source: Fit | Sequence[Fit], x: Any, column: int, values: Any, prob: float = 0.95) -> xr.Dataset:
    """The mean response, averaged over rows, where one input is set to each of some values in all of them.

    Its interval is that of the average by the Fisher information of the kept weights, symmetric in its log-odds for a
    probability and in its logarithm for a rate, and takes the rows as given.

    Args:
        source: a :class:`Fit`, or several of one response, which are averaged as in ``predict``.
        x: the model's arguments without its response, as for ``predict``; a few hundred rows are enough.
        column: of the first argument, counted from 0.
        values: (num_values,) that the input is set to.
        prob: probability content of the intervals, in (0, 1).

    Returns:
        Dataset over ``value``: ``mean``, ``mean_lower``, ``mean_upper``, in the classes of a categorical response also over
        ``class``.

    Raises:
        ValueError: naming the argument, the rule and the value.

    Source: Friedman (2001), section 8.2, for the average; theorem 2.2 of the paper for its interval.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie in (0, 1), got {prob}")
    fits = [source] if isinstance(source, Fit) else list(source)
    if not fits:
        raise ValueError("source must hold at least one fit, got none")
    inputs = fits[0].response.inputs(x, fits[0].free.dtype)
    columns = inputs[0].shape[1] if inputs[0].dim() == 2 else 0
    if not 0 <= column < columns:
        raise ValueError(f"column must be one of the {columns} columns of the model's first argument, got {column}")
    grid = torch.as_tensor(np.asarray(values)).to(inputs[0])
    if grid.dim() != 1 or not len(grid):
        raise ValueError(f"values must list at least one number, got shape {tuple(grid.shape)}")
    parts = [_averages(fit, inputs, column, grid) for fit in fits]
    means, variances = (torch.stack(part) for part in zip(*parts, strict=True))
    centre = means.mean(0)
    half = max(fit.information.quantile(prob) for fit in fits) * (variances.mean(0) + means.var(0, correction=0)).sqrt()
    dims = ("value", "class")[: centre.dim()]
    lower, upper = fits[0].family.around(centre, half)
    ends = {"mean": centre, "mean_lower": lower, "mean_upper": upper}
    arrays = {name: (dims, np.asarray(end.double().cpu())) for name, end in ends.items()}
    return xr.Dataset(arrays, coords={"value": grid.double().cpu().numpy()})


def _averages(fit: Fit, inputs: tuple[Tensor, ...], column: int, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean response over the rows at each value of the grid, and its variance."""
    means, gradients = [], []
    for value in grid:
        first = inputs[0].index_fill(1, torch.tensor([column], device=value.device), float(value))
        mean, gradient = fit.average(fit.mean, (first, *inputs[1:]))
        means.append(mean)
        gradients.append(gradient)
    return torch.stack(means), fit.information.variance(torch.stack(gradients)).reshape(torch.stack(means).shape)
