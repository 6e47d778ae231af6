"""predict: the mean of the response and its intervals, from a fit or averaged over draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference.family import Classes, Family
from pyro_sparse.inference.refit import Fit
from pyro_sparse.inference.response import Response
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.store import each_draw
from pyro_sparse.inference.warning import warn


def predict(
    source: Fit | Sequence[Fit] | Run,
    x_new: Any,
    prob: float = 0.95,
    site: str | None = None,
    sparse: bool = False,
    progress: bool = False,
) -> xr.Dataset:
    """The mean of the response at new rows, the interval of that mean and what to expect of a new observation.

    From a fit: Bernstein-von Mises intervals by the Fisher information of the kept weights. The interval of the mean is
    about the sparse network, not about the unknown function, whose bias it does not know. From several fits: their average,
    with the variance between them added to that within. From a run: averages over the draws of its sampling phase.

    Args:
        source: a :class:`Fit`, several of one response (refits of independent runs), or a :class:`Run` that ends with a
            sampling phase.
        x_new: the model's arguments without its response, any number of rows; one may stand alone.
        prob: probability content of the intervals and prediction sets, in (0, 1).
        site: the response, where the model has several (of a run; a fit has its own).
        sparse: of a run, whether each draw is taken without the weights that it does not include (inclusion probability 1/2
            or less), so that sparse networks are averaged.
        progress: of a run, whether to show a bar.

    Returns:
        Dataset over ``row``, by the law of the response:

        - Normal, with one scale or one for each row: ``mean, mean_lower, mean_upper`` and ``lower, upper`` of a new
          observation.
        - Poisson: the same of the rate, its interval symmetric in the log rate, and of a new count, whole numbers.
        - Bernoulli: P(y = 1) and its interval, symmetric in the log-odds, over (row,), and ``in_set`` over (row, class):
          the smallest set of classes whose probabilities sum to ``prob`` or more.
        - Categorical, OneHotCategorical: the probabilities and their intervals, symmetric in the log-odds of each class
          against the rest, and ``in_set``, all over (row, class).
        - after a refit by batches: ``mean`` and ``in_set`` alone.
        - any other, from a run alone: mean and interval of the mean, over (row, response_dim_0, ...).

    Raises:
        ValueError: naming the argument, the rule and the value; for a run that ends by cooling, whose draws surround a
            mode and are no posterior.

    Source: theorem 2.2 and section A.4 of the paper.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie in (0, 1), got {prob}")
    if isinstance(source, Run):
        return _predict_run(source, x_new, prob, site, sparse, progress)
    fits = checked_fits(source)
    if sparse:
        raise ValueError("sparse must be False for a fit, whose network is sparse, got True")
    if any(fit.by_batches for fit in fits):
        return _means(fits, x_new, prob)
    return as_table(_pooled([_moments(fit, x_new, prob) for fit in fits]), prob)


def checked_fits(source: Any) -> list[Fit]:
    """One fit or several, which are of one family of responses.

    Raises:
        TypeError, ValueError: where they are not.
    """
    if not isinstance(source, (Fit, Sequence)):
        raise TypeError(f"source must be a Fit or several, or one Run for predict, got {type(source).__name__}")
    fits = [source] if isinstance(source, Fit) else list(source)
    if not fits:
        raise ValueError("source must hold at least one fit, got none")
    wrong = next((fit for fit in fits if not isinstance(fit, Fit)), None)
    if wrong is not None:
        raise TypeError(f"source must hold fits alone where it holds several, got a {type(wrong).__name__}")
    names = {fit.family.name for fit in fits} if len(fits) > 1 else set()
    if len(names) > 1:
        raise ValueError(f"source must hold fits of one family of responses, got {', '.join(sorted(names))}")
    return fits


def _means(fits: Sequence[Fit], x_new: Any, prob: float) -> xr.Dataset:
    """The mean alone, averaged over fits, and the classes to expect."""
    means = []
    for fit in fits:
        link = fit.evaluate(fit.family.link, fit.response.inputs(x_new, fit.free.dtype))
        means.append(fit.family.mean(fit.family.score(link.double())))
    mean, family = torch.stack(means).mean(0), fits[0].family
    columns = {"mean": mean}
    if isinstance(family, Classes):
        columns |= family.observation(mean, torch.zeros_like(mean), None, 0.0, prob)
    return _dataset(columns)


@dataclass(frozen=True)
class Moments:
    """What a fit, or an average, says of some rows.

    Attributes:
        family: of the response.
        mean, mean_variance: of the response, and the variance of that mean.
        score, score_variance: the mean on the scale of its interval, and its variance there.
        noise_variance: of a normal response about its mean.
        half_width: of the intervals, in standard deviations.
    """

    family: Family
    mean: Tensor
    mean_variance: Tensor
    score: Tensor
    score_variance: Tensor
    noise_variance: Tensor | None
    half_width: float


def _moments(fit: Fit, x_new: Any, prob: float) -> Moments:
    inputs = fit.response.inputs(x_new, fit.free.dtype)
    family, information = fit.family, fit.information
    link = fit.evaluate(family.link, inputs)
    gradients = fit.jacobian(lambda law: family.score(family.link(law)), inputs)
    outside = int(information.outside_range(gradients).any(1).sum())
    if outside:
        warn(
            f"at {outside} of {len(link)} rows the mean depends on directions of the weights that the training rows say "
            f"nothing about (information of rank {information.rank}): their intervals are too narrow",
        )
    if not fit.converged:
        warn(
            f"the refit is {fit.distance:.1e} standard errors from its maximum: the intervals are not to be trusted",
        )
    score = family.score(link)
    variance = information.variance(gradients).reshape(score.shape)
    mean, noise = family.mean(score), family.noise_variance(link)
    noise = None if noise is None else information.prediction_error * noise
    return Moments(
        family, mean, family.mean_variance(mean, variance), score, variance, noise, information.quantile(prob)
    )


def _pooled(parts: Sequence[Moments]) -> Moments:
    """The average of several, by the law of total variance."""
    if len(parts) == 1:
        return parts[0]

    def total(mean: str, variance: str) -> tuple[Tensor, Tensor]:
        means, variances = (torch.stack([getattr(part, name) for part in parts]) for name in (mean, variance))
        return means.mean(0), variances.mean(0) + means.var(0, correction=0)

    noises = [part.noise_variance for part in parts if part.noise_variance is not None]
    return Moments(
        parts[0].family,
        *total("mean", "mean_variance"),
        *total("score", "score_variance"),
        torch.stack(noises).mean(0) if noises else None,
        max(part.half_width for part in parts),
    )


def _predict_run(run: Run, x_new: Any, prob: float, site: str | None, sparse: bool, progress: bool) -> xr.Dataset:
    if run.schedule.last_phase != "sample":
        raise ValueError(
            "the run must end with a sampling phase to be averaged over its draws, got one that ends with "
            f"'{run.schedule.last_phase}': set sample_steps in the schedule, or refit"
        )
    if run.is_sparse and not sparse:
        warn(
            "draws are sparse: predicted is the average of networks without the weights that a draw does not include, as by "
            "sparse=True"
        )
    response = Response(run.spec, site)
    inputs = response.inputs(x_new)
    first = run.spec.layout.constrained(run.draws[0, 0])
    family: Family
    try:
        family = response.family(first)
    except ValueError:
        family = Family()
    one = tuple(item[:1] for item in inputs)
    is_noisy = family.noise_variance(response.evaluate(family.link, first, one)) is not None
    scores, means, noises = _Running(), _Running(), _Running()
    residuals = _Residuals(family, response, first) if is_noisy else None
    number = run.draws.shape[0] * run.draws.shape[1]
    for draw in tqdm(each_draw(run.draws), total=number, disable=not progress, unit="draw", desc="predict"):
        values = run.spec.layout.constrained(run.spec.layout.included(draw) if sparse else draw)
        link = response.evaluate(family.link, values, inputs).double()
        scores.add(family.score(link))
        means.add(family.mean(family.score(link)))
        if residuals is not None:
            noises.add(_noise(family, link))
            residuals.add(values)
    noise = None if residuals is None else noises.mean * residuals.dispersion
    quantile = float(torch.special.ndtri(torch.tensor(0.5 * (1 + prob)).double()))
    averaged = Moments(family, means.mean, means.variance, scores.mean, scores.variance, noise, quantile)
    return as_table(averaged, prob)


class _Residuals:
    """sigma-hat squared, in units of the model's noise variance: the mean squared residual of the draws.

    It exceeds that of the averaged prediction (section A.4) by the variance of the draws at the training rows, which is
    sigma² times the effective number of parameters: unbiased for a linear model, where A.4 falls short by k / n.
    """

    def __init__(self, family: Family, response: Response, values: dict[str, Tensor]) -> None:
        self._family, self._response = family, response
        self._observed = response.observed(values).double()
        self._squares, self._expected = _Running(), _Running()

    def add(self, values: dict[str, Tensor]) -> None:
        link = self._response.evaluate(self._family.link, values, self._response.spec.data).double()
        self._squares.add((self._observed - self._family.score(link)).square())
        self._expected.add(_noise(self._family, link))

    @property
    def dispersion(self) -> Tensor:
        return (self._squares.mean / self._expected.mean).mean()


class _Running:
    """Mean and variance (denominator n) of tensors that come one by one, by Welford's update."""

    def __init__(self) -> None:
        self._count, self.mean, self._deviation = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        self._count += 1
        off = value - self.mean
        self.mean = self.mean + off / self._count
        self._deviation = self._deviation + off * (value - self.mean)

    @property
    def variance(self) -> Tensor:
        return self._deviation / self._count


def _noise(family: Family, link: Tensor) -> Tensor:
    noise = family.noise_variance(link)
    assert noise is not None
    return noise


def as_table(moments: Moments, prob: float) -> xr.Dataset:
    """The table of predictions, of intervals with content ``prob``."""
    family, mean = moments.family, moments.mean
    half = moments.half_width * moments.score_variance.sqrt()
    columns = {
        "mean": mean,
        "mean_lower": family.mean(moments.score - half),
        "mean_upper": family.mean(moments.score + half),
    }
    columns |= family.observation(mean, moments.mean_variance, moments.noise_variance, moments.half_width, prob)
    return _dataset(columns)


def _dataset(columns: dict[str, Tensor]) -> xr.Dataset:
    classes = "class" if "in_set" in columns else "response_dim_0"
    dims = ["row", classes, *(f"response_dim_{axis}" for axis in range(1, columns["mean"].dim()))]
    arrays = {name: (dims[: column.dim()], np.asarray(column.cpu())) for name, column in columns.items()}
    table = xr.Dataset({n: (d, a if a.dtype == bool else a.astype(float)) for n, (d, a) in arrays.items()})
    return table.assign_coords({dim: np.arange(size) for dim, size in table.sizes.items() if dim in ("row", "class")})
