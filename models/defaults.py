"""The default prior: hyper-parameters derived from the network and the number of rows, layer by layer."""

import math

import torch
from torch import nn

from pyro_sparse.models.spike_slab import SpikeSlab

SLAB_SCALE = 1.0
FINAL_THRESHOLD = 0.1  # in units of the layer's largest initial weight


def default_prior(module: nn.Module, num_data: int, select_inputs: bool = True) -> dict[str, SpikeSlab]:
    r"""Spike-and-slab laws by parameter name, one for each layer (a weight and its bias).

    A weight kept costs :math:`c = \frac12 \log n` nats in all (BIC) where the inputs are known to matter. Where they are
    to be found it costs :math:`\log C` more, with :math:`C` the number of weights of its layer (an extended BIC), and
    :math:`\log p` more still in the first layer of p inputs. With :math:`b` the layer's largest initial
    weight, the inclusion threshold starts at 3 b, so that no weight is outside the spike before the data say so (at most 0.6
    where layers are narrow, but never under 1.5 b), and ends at 0.1 b. With a slab of scale 1 this fixes the rest:
    :math:`\sigma_0^{-2} = 2 c / (0.1 b)^2 + 1` and :math:`\log((1 - \lambda) / \lambda) = c - \log(1 / \sigma_0)`. The
    final spike is kept above :math:`0.165 / \sqrt n`, where learning rates up to 0.01 are stable.

    Args:
        module: the network, with its start values; data are taken to be of about unit variance.
        num_data: rows, >= 2.
        select_inputs: whether some inputs may not matter.

    Raises:
        ValueError: where ``num_data`` is smaller.
    """
    if not num_data >= 2:
        raise ValueError(f"num_data must be >= 2, got {num_data}")
    layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    laws = {}
    for depth, parameters in enumerate(layers.values()):
        widest = max((p for _, p in parameters), key=lambda p: p.numel())
        largest = max(float(p.detach().abs().max()) for _, p in parameters)
        cost = 0.5 * math.log(num_data)
        if select_inputs:
            cost += math.log(widest.numel())
        if select_inputs and depth == 0:  # which inputs matter is a choice of its own
            cost += math.log(widest[0].numel())
        law = _law(largest if largest > 0 else 1.0, cost, num_data).to(widest.detach())
        laws.update({name: law for name, _ in parameters})
    return laws


def _law(largest: float, cost: float, num_data: int) -> SpikeSlab:
    spike = (2 * cost / (FINAL_THRESHOLD * largest) ** 2 + SLAB_SCALE**-2) ** -0.5
    spike = min(max(spike, 0.165 / math.sqrt(num_data)), 0.5 * SLAB_SCALE)
    slab_prob = 1 / (1 + math.exp(max(cost - math.log(SLAB_SCALE / spike), 0.0)))
    initial = _spike_scale(max(min(3 * largest, 0.6 * SLAB_SCALE), 1.5 * largest), slab_prob)
    return SpikeSlab(slab_prob, spike, SLAB_SCALE, min(max(initial, spike), 0.99 * SLAB_SCALE))


def _spike_scale(threshold: float, slab_prob: float) -> float:
    """The spike scale with the given inclusion threshold: the threshold rises with it, so bisection finds it."""
    low, high = 1e-12, SLAB_SCALE * (1 - 1e-6)
    for _ in range(100):
        middle = math.sqrt(low * high)
        law = SpikeSlab(*torch.tensor([slab_prob, middle, SLAB_SCALE], dtype=torch.float64), validate_args=False)
        low, high = (middle, high) if float(law.inclusion_threshold) < threshold else (low, middle)
    return low
