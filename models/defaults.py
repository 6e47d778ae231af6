"""The default prior: hyper-parameters derived from the network and the number of rows, layer by layer."""

import math

import torch
from torch import nn

from pyro_sparse.models.spike_slab import SpikeSlab

SLAB_SCALE = 1.0
FINAL_THRESHOLD = 0.2  # in units of the layer's largest initial weight
INITIAL_THRESHOLD = 3.0


def default_prior(module: nn.Module, num_data: int) -> dict[str, SpikeSlab]:
    r"""Spike-and-slab laws by parameter name, one for each layer (a weight and its bias).

    A weight kept costs :math:`c = \frac12 \log n + \log C` nats in all, with :math:`C` the number of weights of its layer
    (an extended BIC). The inclusion threshold starts at 3 times the layer's largest initial weight :math:`b`, so that no
    weight is outside the spike before the data say so, and ends at 0.2 times it. With a slab of scale 1 this fixes the
    rest: :math:`\sigma_0^{-2} = 2 c / (0.2 b)^2 + 1` and :math:`\log((1 - \lambda) / \lambda) = c - \log(1 / \sigma_0)`.

    Args:
        module: the network, with its start values; data are taken to be of about unit variance.
        num_data: rows, >= 2.

    Raises:
        ValueError: where ``num_data`` is smaller.
    """
    if not num_data >= 2:
        raise ValueError(f"num_data must be >= 2, got {num_data}")
    layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    laws = {}
    for parameters in layers.values():
        widest = max((p for _, p in parameters), key=lambda p: p.numel())
        largest = max(float(p.detach().abs().max()) for _, p in parameters)
        law = _law(largest if largest > 0 else 1.0, 0.5 * math.log(num_data) + math.log(widest.numel())).to(
            widest.detach()
        )
        laws.update({name: law for name, _ in parameters})
    return laws


def _law(largest: float, cost: float) -> SpikeSlab:
    spike = (2 * cost / (FINAL_THRESHOLD * largest) ** 2 + SLAB_SCALE**-2) ** -0.5
    odds_against = max(cost - math.log(SLAB_SCALE / spike), 0.0)
    slab_prob = 1 / (1 + math.exp(odds_against))
    initial = _spike_scale(INITIAL_THRESHOLD * largest, slab_prob)
    return SpikeSlab(slab_prob, spike, SLAB_SCALE, max(initial, spike))


def _spike_scale(threshold: float, slab_prob: float) -> float:
    """The spike scale with the given inclusion threshold: the threshold rises with it, so bisection finds it."""
    low, high = 1e-12, SLAB_SCALE * (1 - 1e-6)
    for _ in range(100):
        middle = math.sqrt(low * high)
        law = SpikeSlab(*torch.tensor([slab_prob, middle, SLAB_SCALE], dtype=torch.float64), validate_args=False)
        low, high = (middle, high) if float(law.inclusion_threshold) < threshold else (low, middle)
    return low
