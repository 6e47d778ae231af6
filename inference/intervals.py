r"""Intervals of Bernstein-von Mises type from the Fisher information of the kept weights: theorems 2.1, 2.2, section A.4.

For a normal response with Jacobian :math:`J` (rows, weights) of the mean, and prior precisions :math:`\rho` of the weights
relative to the noise variance (0 for plain maximum likelihood), the covariance of the kept weights is
:math:`\hat\sigma^2 (J^T J + \mathrm{diag}\,\rho)^+`, which is :math:`H^{-1} / n` of theorem 2.2 where :math:`\rho = 0`.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FisherInformation:
    """The information about kept weights, decomposed once.

    Attributes:
        factor: (num_weights, rank); the covariance of the weights is ``noise_variance * factor @ factor.T``.
        scale: (num_weights,) column scales of the decomposition, by which gradients are judged in or out of its range.
        noise_variance: sigma-hat squared, the mean squared leave-one-out residual.
        degrees_of_freedom: rows less the sum of leverages.
        leverages: (num_rows,) of the fit, in [0, 1).
        rank: of the information; smaller than the number of weights where it is singular.
    """

    factor: Tensor
    scale: Tensor
    noise_variance: float
    degrees_of_freedom: float
    leverages: Tensor
    rank: int

    def variance_of_mean(self, gradients: Tensor) -> Tensor:
        """Variance of the fitted mean at rows with the given gradients (rows, num_weights): Sigma-hat / n."""
        return self.noise_variance * (gradients @ self.factor).square().sum(-1)

    def outside_range(self, gradients: Tensor) -> Tensor:
        """Which rows ask for a direction that the training data say nothing about, (rows,) booleans."""
        scaled = gradients / self.scale
        basis = torch.linalg.qr(self.factor * self.scale[:, None]).Q
        rest = (scaled - scaled @ basis @ basis.T).norm(dim=-1)
        outside: Tensor = rest > 1e-6 * scaled.norm(dim=-1).clamp(min=torch.finfo(scaled.dtype).tiny)
        return outside

    def quantile(self, prob: float) -> float:
        """Half width of the central interval in standard deviations: Student's t below 200 degrees of freedom."""
        from scipy import stats

        level = 0.5 * (1 + prob)
        small = self.degrees_of_freedom < 200
        return float(stats.t.ppf(level, self.degrees_of_freedom) if small else stats.norm.ppf(level))


def fisher_information(jacobian: Tensor, residuals: Tensor, relative_precision: Tensor) -> FisherInformation:
    """Decomposes the information.

    Args:
        jacobian: (rows, weights) derivatives of the mean.
        residuals: (rows,) of the response.
        relative_precision: (weights,) prior precision times noise variance, >= 0; zero for no prior.
    """
    num_rows, num_weights = jacobian.shape
    augmented = torch.cat([jacobian, relative_precision.sqrt().diag()])
    scale = augmented.norm(dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    if num_weights:
        _, upper = torch.linalg.qr(augmented / scale, mode="r")
        _, singular, right = torch.linalg.svd(upper)
        cutoff = torch.finfo(jacobian.dtype).eps * max(augmented.shape) * singular[0]
        rank = int((singular > cutoff).sum())
        factor = right[:rank].T / singular[:rank] / scale[:, None]
    else:
        rank, factor = 0, jacobian.new_zeros(0, 0)
    leverages = (jacobian @ factor).square().sum(1).clamp(max=1 - 1e-9)
    freedom = float(num_rows - leverages.sum())
    if freedom < 1:
        warnings.warn(
            f"the {num_weights} kept weights leave {freedom:.2g} degrees of freedom of {num_rows} rows: intervals are "
            "hardly worth having; keep fewer weights or take more rows",
            stacklevel=4,
        )
    noise = float((residuals / (1 - leverages)).square().mean())
    return FisherInformation(factor, scale, noise, max(freedom, 1.0), leverages, rank)
