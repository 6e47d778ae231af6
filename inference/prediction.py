"""predict: the mean of the response and its intervals, from a fit or averaged over draws."""

import warnings
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.refit import Fit
from pyro_sparse.inference.response import Response
from pyro_sparse.inference.sampler import Run


def predict(source: Fit | Run, x_new: Any, prob: float = 0.95, site: str | None = None) -> xr.Dataset:
    """The mean of the response at new rows, the interval of that mean and the interval of a new observation.

    From a fit: Bernstein-von Mises intervals by the Fisher information of the kept weights. The interval of the mean is
    about the sparse network, not about the unknown function, whose bias it does not know. From a run: averages over the
    draws of its sampling phase.

    Args:
        source: a :class:`Fit`, or a :class:`Run` that ends with a sampling phase.
        x_new: the model's arguments without its response, any number of rows; one may stand alone.
        prob: probability content of the intervals, in (0, 1).
        site: the response, where the model has several (of a run; a fit has its own).

    Returns:
        Dataset over ``row``: ``mean``, ``mean_lower``, ``mean_upper`` and, for a normal response, ``lower``, ``upper``
        of a new observation.

    Raises:
        ValueError: naming the argument, the rule and the value; for a run that ends by cooling, whose draws surround a
            mode and are no posterior.

    Source: theorem 2.2 and section A.4 of the paper.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie in (0, 1), got {prob}")
    return _predict_run(source, x_new, prob, site) if isinstance(source, Run) else _predict_fit(source, x_new, prob)


def _predict_fit(fit: Fit, x_new: Any, prob: float) -> xr.Dataset:
    inputs = fit.response.inputs(x_new, fit.free.dtype)
    information = fit.information
    mean = fit.response.mean(fit.values, inputs)
    gradients = fit.response.jacobian(fit.values_at, fit.free, inputs)[:, fit.matters]
    outside = int(information.outside_range(gradients).sum())
    if outside:
        warnings.warn(
            f"at {outside} of {len(mean)} rows the mean depends on directions of the weights that the training rows say "
            f"nothing about (information of rank {information.rank}): their intervals are too narrow",
            stacklevel=3,
        )
    if not fit.converged:
        warnings.warn(
            f"the refit is {fit.distance:.1e} standard errors from its maximum: the intervals are not to be trusted",
            stacklevel=3,
        )
    sd = information.variance_of_mean(gradients).sqrt()
    return as_table(mean, sd, information.noise_variance, information.quantile(prob))


def _predict_run(run: Run, x_new: Any, prob: float, site: str | None) -> xr.Dataset:
    if run.schedule.last_phase != "sample":
        raise ValueError(
            "the run must end with a sampling phase to be averaged over its draws, got one that ends with "
            f"'{run.schedule.last_phase}': set sample_steps in the schedule, or refit"
        )
    response = Response(run.spec, site)
    inputs = response.inputs(x_new)
    draws = [run.spec.layout.constrained(draw) for draw in run.draws.flatten(0, 1)]
    means = torch.stack([response.mean(values, inputs) for values in draws]).double()
    sd = means.std(0, correction=0)
    noise = _averaged_noise(response, draws) if response.is_normal(draws[0]) else None
    return as_table(means.mean(0), sd, noise, float(torch.special.ndtri(torch.tensor(0.5 * (1 + prob)).double())))


def _averaged_noise(response: Response, draws: list[dict[str, Tensor]]) -> float:
    """sigma-hat squared of section A.4: the mean squared residual of the averaged prediction."""
    residuals = torch.stack([response.residuals(values, response.spec.data) for values in draws])
    return float(residuals.double().mean(0).square().mean())


def as_table(mean: Tensor, mean_sd: Tensor, noise_variance: float | None, half_width: float) -> xr.Dataset:
    """The table of predictions: mean, its interval, and that of a new observation."""
    columns = {"mean": mean, "mean_lower": mean - half_width * mean_sd, "mean_upper": mean + half_width * mean_sd}
    if noise_variance is not None:
        total = (mean_sd.square() + noise_variance).sqrt()
        columns |= {"lower": mean - half_width * total, "upper": mean + half_width * total}
    dims = ("row", *(f"response_dim_{axis}" for axis in range(mean.dim() - 1)))
    arrays = {name: (dims, np.asarray(column.double().cpu())) for name, column in columns.items()}
    return xr.Dataset(arrays, coords={"row": np.arange(len(mean))})
