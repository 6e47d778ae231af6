r"""Intervals of Bernstein-von Mises type from the Fisher information of the kept weights: theorems 2.1, 2.2.

With :math:`A_i = R_i^T J_i`, the Jacobian of the link parameters of row i times a root of the information of one
observation (see :mod:`~pyro_sparse.inference.family`), and prior precisions :math:`\rho` of the weights (0 for plain maximum
likelihood), the covariance of the kept weights is :math:`\phi (A^T A + \mathrm{diag}\,\rho)^+`, which is
:math:`H^{-1} / n` of theorem 2.1 where :math:`\rho = 0`. The dispersion :math:`\phi` is 1 except for a normal response.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_sparse.inference.warning import warn


@dataclass(frozen=True)
class FisherInformation:
    """The information about kept weights, decomposed once.

    Attributes:
        factor: (num_weights, rank); the covariance of the weights is ``dispersion * factor @ factor.T``.
        scale: (num_weights,) column scales of the decomposition, by which gradients are judged in or out of its range.
        dispersion: by how much the noise exceeds that of the model; 1 where the family has no noise scale.
        prediction_error: mean squared leave-one-out residual in the same units, of which the interval of a new observation is
            made; at least the dispersion, and 1 where the family has no noise scale.
        degrees_of_freedom: rows less the sum of leverages; infinite where no dispersion was estimated.
        leverages: (num_rows,) of the fit, in [0, 1); of several link parameters that of the mean, of classes the sum.
        rank: of the information; smaller than the number of weights where it is singular.
    """

    factor: Tensor
    scale: Tensor
    dispersion: float
    prediction_error: float
    degrees_of_freedom: float
    leverages: Tensor
    rank: int

    def variance(self, gradients: Tensor) -> Tensor:
        """Variance (...) of fitted numbers with the given gradients (..., num_weights): Sigma-hat / n."""
        return self.dispersion * (gradients @ self.factor).square().sum(-1)

    def outside_range(self, gradients: Tensor) -> Tensor:
        """Which gradients (..., num_weights) ask for a direction that the training data say nothing about, booleans."""
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


def fisher_information(rooted: Tensor, precision: Tensor, residuals: Tensor | None = None) -> FisherInformation:
    r"""Decomposes the information.

    Args:
        rooted: (rows, q, weights) Jacobians of the link parameters times the roots of their information.
        precision: (weights,) of the prior, >= 0; zero for no prior.
        residuals: (rows,) in units of the model's own noise scale, of a family whose first link parameter is the mean;
            the dispersion is then :math:`\sum r_i^2 / (n - \sum h_i)` with leverages h, unbiased for a linear model, and
            the error of prediction the mean of :math:`(r_i / (1 - h_i))^2`.
    """
    num_rows, num_links, num_weights = rooted.shape
    augmented = torch.cat([rooted.reshape(num_rows * num_links, num_weights), precision.sqrt().diag()])
    scale = augmented.norm(dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    if num_weights:
        _, upper = torch.linalg.qr(augmented / scale, mode="r")
        _, singular, right = torch.linalg.svd(upper)
        cutoff = torch.finfo(rooted.dtype).eps * max(augmented.shape) * singular[0]
        rank = int((singular > cutoff).sum())
        factor = right[:rank].T / singular[:rank] / scale[:, None]
    else:
        rank, factor = 0, rooted.new_zeros(0, 0)
    leverages = (rooted @ factor).square().sum(-1).clamp(max=1 - 1e-9)
    if residuals is None:
        return FisherInformation(factor, scale, 1.0, 1.0, math.inf, leverages.sum(1), rank)
    leverages = leverages[:, 0]
    freedom = float(num_rows - leverages.sum())
    if freedom < 1:
        warn(
            f"the {num_weights} kept weights leave {freedom:.2g} degrees of freedom of {num_rows} rows: intervals are "
            "hardly worth having; keep fewer weights or take more rows",
        )
    freedom = max(freedom, 1.0)
    dispersion = float(residuals.square().sum()) / freedom
    # What a network predicts of a row from the others alone: it knows of the bias and of the choice of weights, which the
    # degrees of freedom do not. A row that is fitted mostly by itself says little of that, so its leverage counts as 1/2.
    prediction_error = float((residuals / (1 - leverages.clamp(max=0.5))).square().mean())
    return FisherInformation(factor, scale, dispersion, max(dispersion, prediction_error), freedom, leverages, rank)
