"""What tempering the prior means: an effect handler that touches spike-and-slab sites and nothing else."""

import warnings
from collections.abc import Callable
from numbers import Number
from typing import Any, Self

from pyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_sparse.models.spike_slab import SpikeSlab


def find_spike_slab(fn: Any) -> SpikeSlab | None:
    """The spike-and-slab law inside a distribution, through Independent, Masked and Expanded wrappers; None without one.

    Raises:
        ValueError: where the law stands inside any other distribution (a mixture, a transform), of which it is unclear
            what annealing its prior would mean.
    """
    if isinstance(fn, SpikeSlab):
        return fn
    if isinstance(fn, (Independent, MaskedDistribution, ExpandedDistribution)):
        return find_spike_slab(fn.base_dist)
    inside = [v for v in vars(fn).values() if isinstance(v, Distribution)] if isinstance(fn, Distribution) else []
    if any(find_spike_slab(part) is not None for part in inside):
        raise ValueError(
            f"a SpikeSlab inside a {type(fn).__name__} cannot be annealed: "
            "use it alone or inside Independent (to_event), mask or expand"
        )
    return None


def replace_spike_slab(fn: Any, change: Callable[[SpikeSlab], SpikeSlab]) -> Any:
    """``fn`` with its spike-and-slab law replaced by ``change(law)``, its wrappers rebuilt around it."""
    if isinstance(fn, SpikeSlab):
        return change(fn)
    base = replace_spike_slab(fn.base_dist, change)
    if isinstance(fn, Independent):
        return Independent(base, fn.reinterpreted_batch_ndims, validate_args=False)
    if isinstance(fn, MaskedDistribution):
        return base.mask(fn._mask)
    return base.expand(fn.batch_shape)


class annealed(Messenger):  # lower case as all of Pyro's handlers
    r"""Tempers the spike-and-slab priors of a model: the definition of prior annealing, under any Pyro inference.

    Every latent spike-and-slab site has its log density multiplied by ``prior_power`` (:math:`\eta`) and its spike moved
    to ``spike_progress`` (:math:`u`) of the way from its initial to its final scale. Every other site, an observed
    spike-and-slab site included, is as it was. Handlers nest: powers multiply, the outermost progress wins.

    Wrap the model, ``annealed(0.5, 0.2)(model)``; as a context manager it serves SVI, Predictive and traces, but
    ``pyro.infer.MCMC.run`` blocks handlers around it.

    Args:
        prior_power: in [0, 1].
        spike_progress: in [0, 1]; left out, each site keeps the progress it has.

    Raises:
        ValueError: where an argument lies outside [0, 1], or a SpikeSlab stands inside a distribution other than
            Independent, Masked or Expanded.

    Source: Algorithm 1, step (ii), and section 3.1 of the paper.
    """

    def __init__(self, prior_power: float | Tensor = 1.0, spike_progress: float | Tensor | None = None) -> None:
        super().__init__()
        for name, value in (("prior_power", prior_power), ("spike_progress", spike_progress)):
            if isinstance(value, Number) and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value}")
        self.prior_power, self.spike_progress = prior_power, spike_progress
        self._met = False

    def __enter__(self) -> Self:
        self._met = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and not self._met:
            warnings.warn(
                "annealed met no spike-and-slab site: pyro.infer.MCMC blocks outer handlers, "
                "so wrap the model: annealed(...)(model)",
                stacklevel=2,
            )

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if find_spike_slab(msg["fn"]) is None:
            return
        self._met = True
        if msg["is_observed"]:
            return
        msg["scale"] = msg["scale"] * self.prior_power
        if self.spike_progress is not None:
            progress = self.spike_progress
            msg["fn"] = replace_spike_slab(msg["fn"], lambda law: law.at(progress))
