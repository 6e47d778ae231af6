"""partial_dependence: the direction and shape of what one input does, with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.prediction import checked_fits
from pyro_sparse.inference.refit import Fit


def partial_dependence(
    source: Fit | Sequence[Fit], x: Any, column: int | Sequence[int], values: Any, prob: float = 0.95
) -> xr.Dataset:
    """The mean response, averaged over rows, where one input is set to each of some values in all of them.

    Its interval is that of the average by the Fisher information of the kept weights, symmetric in its log-odds for a
    probability and in its logarithm for a rate, and takes the rows as given. Means at two values err together, so what lies
    between them has an interval of its own: that of their difference.

    Args:
        source: a :class:`Fit`, or several of one response, which are averaged as in ``predict``.
        x: the model's arguments without its response, as for ``predict``; a few hundred rows are enough.
        column: of the first argument, counted from 0; several for an input that is coded by several, as one-hot text is.
        values: (num_values,) that the input is set to, or (num_values, num_columns).
        prob: probability content of the intervals, in (0, 1).

    Returns:
        Dataset over ``value`` (of several columns the row of ``values``): ``mean``, ``difference`` from the mean at the
        first value, and the ends of their intervals ``*_lower``, ``*_upper``; in the classes of a categorical response also
        over ``class``.

    Raises:
        ValueError: naming the argument, the rule and the value.

    Source: Friedman (2001), section 8.2, for the average; theorem 2.2 of the paper for its interval.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie in (0, 1), got {prob}")
    fits = checked_fits(source)
    inputs = fits[0].response.inputs(x, fits[0].free.dtype)
    chosen = _checked_columns(column, inputs[0])
    grid = _checked_values(values, chosen, np.ndim(column) > 0).to(inputs[0])
    parts = [_averages(fit, inputs, chosen, grid) for fit in fits]
    mean, half = _pooled(
        [(means, fit.information.variance(slopes)) for fit, (means, slopes) in zip(fits, parts, strict=True)]
    )
    between = [
        (means - means[0], fit.information.variance(slopes - slopes[0]))
        for fit, (means, slopes) in zip(fits, parts, strict=True)
    ]
    difference, reach = _pooled(between)
    quantile = max(fit.information.quantile(prob) for fit in fits)
    lower, upper = fits[0].family.around(mean, quantile * half)
    arrays = {"mean": mean, "mean_lower": lower, "mean_upper": upper, "difference": difference}
    arrays |= {"difference_lower": difference - quantile * reach, "difference_upper": difference + quantile * reach}
    dims = ("value", "class")[: mean.dim()]
    at = np.arange(len(grid)) if np.ndim(column) else grid[:, 0].double().cpu().numpy()
    return xr.Dataset({name: (dims, np.asarray(a.double().cpu())) for name, a in arrays.items()}, coords={"value": at})


def _checked_columns(column: int | Sequence[int], first: Tensor) -> list[int]:
    chosen = [int(one) for one in np.atleast_1d(np.asarray(column))]
    columns = first.shape[1] if first.dim() == 2 else 0
    for one in chosen:
        if not 0 <= one < columns:
            raise ValueError(f"column must be one of the {columns} columns of the model's first argument, got {one}")
    return chosen


def _checked_values(values: Any, chosen: list[int], several: bool) -> Tensor:
    """(num_values, num_columns)."""
    grid = torch.as_tensor(np.asarray(values))
    if grid.dim() != 1 + several or not len(grid):
        rule = f"rows of {len(chosen)} numbers, one a column" if several else "at least one number"
        raise ValueError(f"values must list {rule}, got shape {tuple(grid.shape)}")
    if several and grid.shape[1] != len(chosen):
        raise ValueError(f"values must list rows of {len(chosen)} numbers, one a column, got shape {tuple(grid.shape)}")
    return grid.reshape(len(grid), -1)


def _averages(fit: Fit, inputs: tuple[Tensor, ...], columns: list[int], grid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean response over the rows at each value of the grid, (values, ...), and its gradients, (values, ..., weights)."""
    means, gradients = [], []
    for values in grid:
        first = inputs[0].clone()
        first[:, columns] = values
        mean, gradient = fit.average(fit.mean, (first, *inputs[1:]))
        means.append(mean)
        gradients.append(gradient.reshape(*mean.shape, -1))
    return torch.stack(means), torch.stack(gradients)


def _pooled(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Average over the fits and its standard deviation: the law of total variance."""
    means, variances = (torch.stack(part) for part in zip(*parts, strict=True))
    return means.mean(0), (variances.mean(0) + means.var(0, correction=0)).sqrt()
