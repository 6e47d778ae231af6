r"""Families of responses: what a refit and a prediction need to know about the law of the observed site.

A family works on the link parameters :math:`\theta_i` (rows, q) of that law, on which no constraint lies. With :math:`R_i`
a root of the information of one observation in them, :math:`R_i R_i^T = E[-\nabla^2 \log p(y_i \mid \theta_i)]`, and
:math:`J_i` the derivatives of :math:`\theta_i` over the weights, the information about the weights is
:math:`\sum_i J_i^T R_i R_i^T J_i`. The interval of a mean is symmetric in its score, a function of the link parameters.

| family | link parameters | score | mean |
|---|---|---|---|
| Normal, one scale for all rows | mean | mean | score |
| Normal, several scales | mean, log scale | mean | score |
| Bernoulli | log-odds | log-odds | P(y = 1) |
| Categorical, OneHotCategorical | log-probabilities | log-odds of each class against the rest | P(y = k) |
| Poisson | log rate | log rate | rate |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Family:
    """A response that is known by its mean alone: no information, and nothing said of a new observation."""

    name: ClassVar[str] = "mean"

    def link(self, law: Any) -> Tensor:
        """Link parameters (rows, q) of the law of the observed site."""
        mean: Tensor = law.mean
        return mean

    def root(self, link: Tensor) -> Tensor:
        """The root (rows, q, q) of the information of one observation."""
        raise NotImplementedError

    def score(self, link: Tensor) -> Tensor:
        """(rows, ...) the scale on which the interval of the mean is symmetric."""
        return link

    def mean(self, score: Tensor) -> Tensor:
        """Mean of the response, or probabilities of its classes, from the score."""
        return score

    def mean_variance(self, mean: Tensor, score_variance: Tensor) -> Tensor:
        """Variance of the estimated mean, from that of its score."""
        return score_variance

    def around(self, mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of the interval of an average of means, whose half width is ``half``, mapped to where means can lie."""
        return mean - half, mean + half

    def noise_variance(self, link: Tensor) -> Tensor | None:
        """(rows,) variance of the response about its mean, of a family whose scale is estimated; else None."""
        return None

    def residuals(self, link: Tensor, response: Tensor) -> Tensor | None:
        """(rows,) of the response in units of its noise scale, of a family whose scale is estimated; else None."""
        noise = self.noise_variance(link)
        return None if noise is None else (response - link[:, 0]) / noise.sqrt()

    def observation(
        self, mean: Tensor, mean_variance: Tensor, noise: Tensor | None, half_width: float, prob: float
    ) -> dict[str, Tensor]:
        """What is said of a new observation: columns of the table of predictions."""
        return {}


@dataclass(frozen=True)
class _Real(Family):
    """A normal response, whose first link parameter is the mean."""

    def score(self, link: Tensor) -> Tensor:
        return link[:, 0]

    def observation(
        self, mean: Tensor, mean_variance: Tensor, noise: Tensor | None, half_width: float, prob: float
    ) -> dict[str, Tensor]:
        assert noise is not None
        half = half_width * (mean_variance + noise).sqrt()
        return {"lower": mean - half, "upper": mean + half}


@dataclass(frozen=True)
class Normal(_Real):
    """A normal response with one scale for all rows, which is no link parameter: its estimate is that of the residuals."""

    name = "normal"
    scale: float

    def link(self, law: Any) -> Tensor:
        loc: Tensor = law.loc
        return loc[:, None]

    def root(self, link: Tensor) -> Tensor:
        return link.new_full((len(link), 1, 1), 1 / self.scale)

    def noise_variance(self, link: Tensor) -> Tensor | None:
        return link.new_full((len(link),), self.scale**2)

    def varying_noise(self, residuals: Tensor, regressors: Tensor) -> tuple[float, float]:
        """Whether the variance of (rows,) residuals depends on (rows, k) regressors: Koenker's form of the Breusch-Pagan test.

        Returns:
            Its p-value, and how many times larger the mean square is in the fifth of the rows where the regressors expect
            most than in that where they expect least.
        """
        from scipy import stats

        squares = residuals.double().square()
        design = torch.cat([torch.ones_like(squares)[:, None], regressors.to(squares)], 1)
        design = design / design.norm(dim=0).clamp(min=torch.finfo(design.dtype).tiny)
        left, singular, _ = torch.linalg.svd(design, full_matrices=False)
        basis = left[:, singular > 1e-8 * singular[0]]
        expected = basis @ (basis.T @ squares)
        share = float((expected - squares.mean()).square().sum() / (squares - squares.mean()).square().sum())
        p_value = float(stats.chi2.sf(len(squares) * share, basis.shape[1] - 1)) if basis.shape[1] > 1 else 1.0
        order, fifth = expected.argsort(), max(1, len(squares) // 5)
        return p_value, float(squares[order[-fifth:]].mean() / squares[order[:fifth]].mean())


@dataclass(frozen=True)
class HeteroscedasticNormal(_Real):
    """A normal response whose scale differs between rows."""

    name = "heteroscedastic"

    def link(self, law: Any) -> Tensor:
        return torch.stack([law.loc, law.scale.log()], -1)

    def root(self, link: Tensor) -> Tensor:
        return torch.stack([(-link[:, 1]).exp(), torch.full_like(link[:, 1], math.sqrt(2))], -1).diag_embed()

    def noise_variance(self, link: Tensor) -> Tensor | None:
        return (2 * link[:, 1]).exp()


@dataclass(frozen=True)
class Classes(Family):
    """A response of classes, whose probabilities are known by their log-odds."""

    def mean(self, score: Tensor) -> Tensor:
        return score.sigmoid()

    def around(self, mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        eps = torch.finfo(mean.dtype).eps
        inside = mean.clamp(eps, 1 - eps)
        score, width = inside.logit(), half / (inside * (1 - inside))
        return (score - width).sigmoid(), (score + width).sigmoid()


@dataclass(frozen=True)
class Bernoulli(Classes):
    """A response of 0 or 1."""

    name = "bernoulli"

    def link(self, law: Any) -> Tensor:
        logits: Tensor = law.logits
        return logits[:, None]

    def root(self, link: Tensor) -> Tensor:
        return (0.5 * (logsigmoid(link) + logsigmoid(-link))).exp()[:, :, None]

    def score(self, link: Tensor) -> Tensor:
        return link[:, 0]

    def observation(
        self, mean: Tensor, mean_variance: Tensor, noise: Tensor | None, half_width: float, prob: float
    ) -> dict[str, Tensor]:
        return {"in_set": prediction_sets(torch.stack([1 - mean, mean], -1), prob)}


@dataclass(frozen=True)
class Categorical(Classes):
    """A response that is one of several classes."""

    name = "categorical"

    def link(self, law: Any) -> Tensor:
        return torch.log_softmax(law.logits, -1)

    def root(self, link: Tensor) -> Tensor:
        # Of diag(p) - p pᵀ the second part falls away: derivatives of log-probabilities are orthogonal to p.
        return (0.5 * link).exp().diag_embed()

    def score(self, link: Tensor) -> Tensor:
        own = torch.eye(link.shape[-1], dtype=torch.bool, device=link.device)
        others = link[:, None, :].masked_fill(own, -torch.inf).logsumexp(-1)
        return link - others

    def observation(
        self, mean: Tensor, mean_variance: Tensor, noise: Tensor | None, half_width: float, prob: float
    ) -> dict[str, Tensor]:
        return {"in_set": prediction_sets(mean, prob)}


@dataclass(frozen=True)
class Poisson(Family):
    """A response that counts."""

    name = "poisson"

    def link(self, law: Any) -> Tensor:
        rate: Tensor = law.rate
        return rate.log()[:, None]

    def root(self, link: Tensor) -> Tensor:
        return (0.5 * link).exp()[:, :, None]

    def score(self, link: Tensor) -> Tensor:
        return link[:, 0]

    def mean(self, score: Tensor) -> Tensor:
        return score.exp()

    def mean_variance(self, mean: Tensor, score_variance: Tensor) -> Tensor:
        return mean.square() * score_variance

    def around(self, mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
        width = half / mean.clamp(min=torch.finfo(mean.dtype).tiny)
        return mean * (-width).exp(), mean * width.exp()

    def observation(
        self, mean: Tensor, mean_variance: Tensor, noise: Tensor | None, half_width: float, prob: float
    ) -> dict[str, Tensor]:
        return {
            "lower": count_quantile(mean, mean_variance, 0.5 * (1 - prob)),
            "upper": count_quantile(mean, mean_variance, 0.5 * (1 + prob)),
        }

    def overdispersion(self, link: Tensor, response: Tensor, rank: int) -> tuple[float, float]:
        """Pearson's statistic a degree of freedom, and by how many standard deviations it exceeds 1."""
        rate, freedom = link[:, 0].exp(), max(len(link) - rank, 1)
        statistic = float(((response - rate).square() / rate).sum())
        # The variance of (y - rate)² / rate is 2 + 1 / rate.
        return statistic / freedom, (statistic - freedom) / float((2 + 1 / rate).sum().sqrt())


FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (Normal, HeteroscedasticNormal, Bernoulli, Categorical, Poisson)
}
_BY_LAW: dict[type, type[Family]] = {
    dist.Normal: Normal,
    dist.Bernoulli: Bernoulli,
    dist.Categorical: Categorical,
    dist.OneHotCategorical: Categorical,
    dist.Poisson: Poisson,
}


def unwrapped(fn: Any) -> Any:
    """The law inside Independent."""
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return fn


def family_of(laws: Sequence[Any], site: str) -> Family:
    """The family of a response from its laws on all rows, block by block.

    Raises:
        ValueError: for a law of no family here, or more than one number (class) a row.
    """
    kind = next((family for law, family in _BY_LAW.items() if isinstance(laws[0], law)), None)
    if kind is None:
        *names, last = (law.__name__ for law in _BY_LAW)
        raise ValueError(
            f"intervals need a {', '.join(names)} or {last} response, got {type(laws[0]).__name__} at site '{site}': "
            "of other laws average over draws, ps.predict(run, x) of a schedule with sample_steps"
        )
    shape = laws[0].batch_shape
    if len(shape) != 1:
        raise ValueError(f"intervals need one number a row, got shape {tuple(shape)} at site '{site}'")
    if kind is not Normal:
        return kind()
    scales = torch.cat([law.scale for law in laws])
    one_scale = bool(torch.allclose(scales, scales[0]))
    return Normal(float(scales.square().mean().sqrt())) if one_scale else HeteroscedasticNormal()


def prediction_sets(probabilities: Tensor, prob: float) -> Tensor:
    """(rows, classes) booleans: the smallest set of classes whose probabilities sum to ``prob`` or more."""
    ordered, order = probabilities.sort(-1, descending=True)
    needed = ordered.cumsum(-1) - ordered < prob - 1e-12
    return torch.zeros_like(needed).scatter(-1, order, needed)


def count_quantile(mean: Tensor, mean_variance: Tensor, level: float) -> Tensor:
    """Quantile of a new count: Poisson, its rate a gamma variable with the given mean and variance (negative binomial)."""
    from scipy import stats

    rate, variance = mean.double().cpu().numpy(), mean_variance.double().cpu().numpy().clip(min=0)
    quantile = stats.poisson.ppf(level, rate)
    certain = variance <= 1e-9 * rate  # the Poisson limit
    shape, success = (rate**2)[~certain] / variance[~certain], (rate / (rate + variance))[~certain]
    quantile[~certain] = stats.nbinom.ppf(level, shape, success)
    return torch.from_numpy(quantile).to(mean)
