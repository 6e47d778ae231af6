"""The mixture-Gaussian (spike-and-slab) law of one weight, equation (3) of the paper."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class SpikeSlab(TorchDistribution):
    r"""Spike-and-slab law of a weight: a narrow normal around zero mixed with a wide one.

    .. math:: p(w) = \lambda N(w; 0, \sigma_1^2) + (1 - \lambda) N(w; 0, \sigma_0^2)

    with :math:`\lambda` = ``slab_prob``, :math:`\sigma_1` = ``slab_scale`` and :math:`\sigma_0` = ``current_spike_scale``,
    which :meth:`at` moves from ``initial_spike_scale`` (progress 0) to ``spike_scale`` (progress 1, the default), linearly
    in the variance. The scales are standard deviations; the paper states variances.

    Args:
        slab_prob: probability of the slab, in (0, 1); a number or a tensor (one for the site or one a weight).
        spike_scale: standard deviation of the spike at the end of the annealing, > 0.
        slab_scale: standard deviation of the slab, larger than either spike scale.
        initial_spike_scale: standard deviation of the spike at its start, >= ``spike_scale``; the same where left out.
        validate_args: whether arguments and values are checked; Pyro's setting where left out.

    Raises:
        ValueError: naming the argument, the rule and the value, where an argument breaks a rule.

    Source: equation (3) and section 3.1 of the paper.
    """

    arg_constraints = {
        "slab_prob": constraints.unit_interval,
        "spike_scale": constraints.positive,
        "slab_scale": constraints.positive,
        "initial_spike_scale": constraints.positive,
    }
    support = constraints.real
    has_rsample = False

    def __init__(
        self,
        slab_prob: float | Tensor,
        spike_scale: float | Tensor,
        slab_scale: float | Tensor,
        initial_spike_scale: float | Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        given = (
            slab_prob,
            spike_scale,
            slab_scale,
            spike_scale if initial_spike_scale is None else initial_spike_scale,
        )
        like = next((a for a in given if isinstance(a, Tensor)), torch.empty(0))
        tensors = [torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in given]
        # Not broadcast: one hyper-parameter for a whole layer costs one logarithm, not one a weight.
        self.slab_prob, self.spike_scale, self.slab_scale, self.initial_spike_scale = tensors
        self.progress: float | Tensor = 1.0
        super().__init__(torch.broadcast_shapes(*(t.shape for t in tensors)), validate_args=False)
        self._validate_args = TorchDistribution._validate_args if validate_args is None else validate_args
        if self._validate_args:
            self._check()

    def _check(self) -> None:
        rules = [
            ("slab_prob", (self.slab_prob > 0) & (self.slab_prob < 1), "lie in (0, 1)"),
            ("spike_scale", self.spike_scale > 0, "be > 0"),
            ("initial_spike_scale", self.initial_spike_scale >= self.spike_scale, "be >= spike_scale"),
            (
                "slab_scale",
                (self.slab_scale > self.initial_spike_scale) & self.slab_scale.isfinite(),
                "be finite and > spike_scale and initial_spike_scale",
            ),
        ]
        for name, holds, rule in rules:
            if not bool(holds.all()):
                value = getattr(self, name).expand(holds.shape)[~holds].flatten()[0].item()
                raise ValueError(f"{name} must {rule}, got {value:g}")

    def _copy(self, batch_shape: torch.Size, progress: float | Tensor) -> Self:
        new = type(self).__new__(type(self))
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name))
        new.progress = progress
        super(SpikeSlab, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def expand(self, batch_shape: torch.Size | list[int] | tuple[int, ...], _instance: Any = None) -> Self:
        """The same law over ``batch_shape``; hyper-parameters are kept in their own shapes."""
        torch.broadcast_shapes(self.batch_shape, torch.Size(batch_shape))
        return self._copy(torch.Size(batch_shape), self.progress)

    def at(self, progress: float | Tensor) -> Self:
        """The law on the way from the initial (``progress`` 0) to the final spike (1); ``at`` again starts afresh."""
        return self._copy(self.batch_shape, progress)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same law with its hyper-parameters on another device or of another floating type."""
        new = self._copy(self.batch_shape, self.progress)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).to(*args, **kwargs))
        return new

    @classmethod
    def joined(cls, laws: Sequence[Self], values: Sequence[Tensor]) -> Self:
        """One law of the weights of several sites, laid end to end: hyper-parameters one a weight."""
        new = laws[0]._copy(torch.Size([sum(value.numel() for value in values)]), laws[0].progress)
        for name in cls.arg_constraints:
            parts = [getattr(law, name).expand(value.shape) for law, value in zip(laws, values, strict=True)]
            setattr(new, name, torch.cat([part.reshape(-1) for part in parts]))
        return new

    @property
    def _current_spike_variance(self) -> Tensor:
        if isinstance(self.progress, float) and self.progress == 1.0:
            return self.spike_scale**2
        return (1 - self.progress) * self.initial_spike_scale**2 + self.progress * self.spike_scale**2

    @property
    def current_spike_scale(self) -> Tensor:
        """sigma_0 at the present progress u: sqrt((1 - u) initial_spike_scale² + u spike_scale²)."""
        return self._current_spike_variance.sqrt()

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each weight in ``value``, of the broadcast shape of value and batch."""
        if self._validate_args:
            self._validate_sample(value)
        if value.shape != self.batch_shape:
            value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        square = value * value
        slab = self.slab_prob.log() - self.slab_scale.log() - _HALF_LOG_TAU - 0.5 * self.slab_scale**-2 * square
        # Bayes' rule, p(w) = lambda N(w; 0, slab²) / inclusion probability: no difference of large numbers far out.
        return slab - torch.nn.functional.logsigmoid(self._inclusion_log_odds(square))

    def inclusion_probability(self, value: Tensor) -> Tensor:
        """pi(gamma = 1 | w), the probability that a weight of this value came from the slab, in [0, 1]."""
        return torch.sigmoid(self._inclusion_log_odds(value * value))

    def _inclusion_log_odds(self, square: Tensor) -> Tensor:
        return self._curvature * square - self._exclusion_log_odds_at_zero

    @property
    def _curvature(self) -> Tensor:
        return 0.5 * (1 / self._current_spike_variance - self.slab_scale**-2)

    @property
    def _exclusion_log_odds_at_zero(self) -> Tensor:
        scales = self.slab_scale.log() - 0.5 * self._current_spike_variance.log()
        return torch.log1p(-self.slab_prob) - self.slab_prob.log() + scales

    @property
    def inclusion_threshold(self) -> Tensor:
        """|w| at which the inclusion probability is 1/2 (Algorithm 1, step iii); 0 where every weight is included."""
        return (self._exclusion_log_odds_at_zero.clamp(min=0) / self._curvature).sqrt()

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Independent draws, of shape ``sample_shape + batch_shape``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            slab = torch.bernoulli(self.slab_prob.expand(shape)).bool()
            scale = torch.where(slab, self.slab_scale, self.current_spike_scale)
            return scale * torch.randn(shape, dtype=scale.dtype, device=scale.device)

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.slab_scale).expand(self.batch_shape)

    @property
    def variance(self) -> Tensor:
        mixed = self.slab_prob * self.slab_scale**2 + (1 - self.slab_prob) * self.current_spike_scale**2
        return mixed.expand(self.batch_shape)
