"""predict: the mean of the response and its intervals, from a fit or averaged over draws."""

import warnings
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.family import Family
from pyro_sparse.inference.refit import Fit
from pyro_sparse.inference.response import Response
from pyro_sparse.inference.sampler import Run


def predict(source: Fit | Run, x_new: Any, prob: float = 0.95, site: str | None = None) -> xr.Dataset:
    """The mean of the response at new rows, the interval of that mean and what to expect of a new observation.

    From a fit: Bernstein-von Mises intervals by the Fisher information of the kept weights. The interval of the mean is
    about the sparse network, not about the unknown function, whose bias it does not know. From a run: averages over the
    draws of its sampling phase.

    Args:
        source: a :class:`Fit`, or a :class:`Run` that ends with a sampling phase.
        x_new: the model's arguments without its response, any number of rows; one may stand alone.
        prob: probability content of the intervals and prediction sets, in (0, 1).
        site: the response, where the model has several (of a run; a fit has its own).

    Returns:
        Dataset over ``row``, by the law of the response:

        - Normal, with one scale or one for each row: ``mean, mean_lower, mean_upper`` and ``lower, upper`` of a new
          observation.
        - Poisson: the same of the rate, its interval symmetric in the log rate, and of a new count, whole numbers.
        - Bernoulli: P(y = 1) and its interval, symmetric in the log-odds, over (row,), and ``in_set`` over (row, class):
          the smallest set of classes whose probabilities sum to ``prob`` or more.
        - Categorical, OneHotCategorical: the probabilities and their intervals, symmetric in the log-odds of each class
          against the rest, and ``in_set``, all over (row, class).
        - any other, from a run alone: mean and interval of the mean, over (row, response_dim_0, ...).

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
    family, information = fit.family, fit.information
    link = fit.evaluate(family.link, inputs)
    gradients = fit.jacobian(lambda law: family.score(family.link(law)), inputs)
    outside = int(information.outside_range(gradients).any(1).sum())
    if outside:
        warnings.warn(
            f"at {outside} of {len(link)} rows the mean depends on directions of the weights that the training rows say "
            f"nothing about (information of rank {information.rank}): their intervals are too narrow",
            stacklevel=3,
        )
    if not fit.converged:
        warnings.warn(
            f"the refit is {fit.distance:.1e} standard errors from its maximum: the intervals are not to be trusted",
            stacklevel=3,
        )
    score = family.score(link)
    variance = information.variance(gradients).reshape(score.shape)
    mean = family.mean(score)
    noise = family.noise_variance(link)
    return as_table(
        family,
        mean,
        family.mean_variance(mean, variance),
        (score, variance.sqrt()),
        None if noise is None else information.prediction_error * noise,
        information.quantile(prob),
        prob,
    )


def _predict_run(run: Run, x_new: Any, prob: float, site: str | None) -> xr.Dataset:
    if run.schedule.last_phase != "sample":
        raise ValueError(
            "the run must end with a sampling phase to be averaged over its draws, got one that ends with "
            f"'{run.schedule.last_phase}': set sample_steps in the schedule, or refit"
        )
    response = Response(run.spec, site)
    inputs = response.inputs(x_new)
    draws = [run.spec.layout.constrained(draw) for draw in run.draws.flatten(0, 1)]
    family: Family
    try:
        family = response.family(draws[0])
    except ValueError:
        family = Family()
    links = torch.stack([response.evaluate(family.link, values, inputs) for values in draws]).double()
    scores = torch.stack([family.score(link) for link in links])
    means = family.mean(scores)
    return as_table(
        family,
        means.mean(0),
        means.var(0, correction=0),
        (scores.mean(0), scores.std(0, correction=0)),
        _averaged_noise(family, response, draws, links),
        float(torch.special.ndtri(torch.tensor(0.5 * (1 + prob)).double())),
        prob,
    )


def _averaged_noise(family: Family, response: Response, draws: list[dict[str, Tensor]], links: Tensor) -> Tensor | None:
    """sigma-hat squared of section A.4: by the mean squared residual of the averaged prediction."""
    if family.noise_variance(links[0]) is None:
        return None
    data = response.spec.data
    fitted = torch.stack([response.evaluate(family.link, values, data) for values in draws]).double()
    residuals = response.observed(draws[0]).double() - family.score(fitted.mean(0))
    expected, new = (torch.stack([_noise(family, link) for link in at]).mean(0) for at in (fitted, links))
    return new * (residuals.square() / expected).mean()


def _noise(family: Family, link: Tensor) -> Tensor:
    noise = family.noise_variance(link)
    assert noise is not None
    return noise


def as_table(
    family: Family,
    mean: Tensor,
    mean_variance: Tensor,
    score: tuple[Tensor, Tensor],
    noise_variance: Tensor | None,
    half_width: float,
    prob: float,
) -> xr.Dataset:
    """The table of predictions.

    Args:
        family: of the response.
        mean, mean_variance: of the response, and the variance of that mean.
        score: the mean on the scale of its interval, and the standard deviation there.
        noise_variance: of a normal response about its mean.
        half_width: of the intervals, in standard deviations.
        prob: their content.
    """
    centre, sd = score
    columns = {
        "mean": mean,
        "mean_lower": family.mean(centre - half_width * sd),
        "mean_upper": family.mean(centre + half_width * sd),
    }
    columns |= family.observation(mean, mean_variance, noise_variance, half_width, prob)
    classes = "class" if "in_set" in columns else "response_dim_0"
    dims = ["row", classes, *(f"response_dim_{axis}" for axis in range(1, mean.dim()))]
    arrays = {name: (dims[: column.dim()], np.asarray(column.cpu())) for name, column in columns.items()}
    table = xr.Dataset({n: (d, a if a.dtype == bool else a.astype(float)) for n, (d, a) in arrays.items()})
    return table.assign_coords({dim: np.arange(size) for dim, size in table.sizes.items() if dim in ("row", "class")})
