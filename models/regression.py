"""Pyro models to start from: a normal response around a sparse network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
from torch import Tensor


def normal_regression(
    net: Callable[[Tensor], Tensor], num_data: int, min_scale: float = 0.1
) -> Callable[[Tensor, Tensor | None], Any]:
    r"""The model :math:`y \sim N(f(x), (s + \sigma)^2)`, :math:`\sigma \sim` HalfNormal(1), with a learned noise scale.

    The floor :math:`s` keeps the noise scale from collapsing where the network can follow every response (more inputs
    than rows): without it the likelihood grows without bound.

    Args:
        net: maps (rows, inputs) to (rows, 1), a :class:`SparseNet` or any module made sparse.
        num_data: rows of the training data, >= 1.
        min_scale: the floor s, > 0, in units of the response; the default suits a response of unit variance.

    Returns:
        A Pyro model of (x, y=None) with sites ``sigma_above_floor`` and ``y``, fit for batches.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if not num_data >= 1:
        raise ValueError(f"num_data must be >= 1, got {num_data}")
    if not min_scale > 0:
        raise ValueError(f"min_scale must be > 0, got {min_scale}")

    return _NormalRegression(net, num_data, min_scale)


@dataclass(frozen=True, eq=False)
class _NormalRegression:  # a class, for a function inside another cannot be pickled
    net: Callable[[Tensor], Tensor]
    num_data: int
    min_scale: float

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Any:
        scale = self.min_scale + pyro.sample("sigma_above_floor", dist.HalfNormal(1.0))
        mean = self.net(x).squeeze(-1)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, scale), obs=y)
