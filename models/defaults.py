"""The default prior: hyper-parameters derived from the network and the number of rows, layer by layer."""

import math

from torch import nn

from pyro_sparse.models.spike_slab import SpikeSlab

SLAB_SCALE = 1.0
FINAL_THRESHOLD = 0.1  # in units of the layer's largest initial weight


def default_prior(module: nn.Module, num_data: int, select_inputs: bool = True) -> dict[str, SpikeSlab]:
    r"""Spike-and-slab laws by parameter name, one for each layer (a weight and its bias).

    Where the inputs that matter are to be found among p, a weight kept costs :math:`c = \frac12 \log n` nats in all, as in
    BIC, and in the first layer :math:`2 \log p` more. Where all are known to matter it costs
    :math:`c = \frac12 \log n + \frac12 \log C` with C the number of weights of its layer, the extended BIC of index 1/2; so
    does every weight of a linear model, where an input has but one and the index is enough for p up to n.
    The inclusion threshold ends at a tenth of :math:`b`, the layer's largest initial weight, which with a slab of scale 1
    fixes the rest: :math:`\sigma_0^{-2} = 2 c / (0.1 b)^2 + 1` and
    :math:`\log((1 - \lambda) / \lambda) = c - \log(1 / \sigma_0)`. The spike starts at 0.7 / sqrt(fan-in), as wide as the
    network's start, so that it shrinks and does not choose before the data have spoken (at 1 / sqrt(fan-in) where all
    inputs matter; at most 0.7). The final one is kept above :math:`0.165 / \sqrt n`, where learning rates up to 0.01 are
    stable.

    Args:
        module: the network, with its start values; data are taken to be of about unit variance.
        num_data: rows, >= 2.
        select_inputs: False where all inputs are known to matter.

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
        fan_in = widest[0].numel() if widest.dim() else 1
        many = select_inputs and len(layers) > 1  # an input has more than one weight
        choice = 2 * math.log(fan_in) * (depth == 0) if many else 0.5 * math.log(widest.numel())
        initial = min((0.7 if select_inputs else 1.0) / math.sqrt(fan_in), 0.7 * SLAB_SCALE)
        law = _law(largest if largest > 0 else 1.0, 0.5 * math.log(num_data) + choice, initial, num_data).to(
            widest.detach()
        )
        laws.update({name: law for name, _ in parameters})
    return laws


def _law(largest: float, cost: float, initial: float, num_data: int) -> SpikeSlab:
    spike = (2 * cost / (FINAL_THRESHOLD * largest) ** 2 + SLAB_SCALE**-2) ** -0.5
    spike = min(max(spike, 0.165 / math.sqrt(num_data)), 0.5 * SLAB_SCALE)
    slab_prob = 1 / (1 + math.exp(max(cost - math.log(SLAB_SCALE / spike), 0.0)))
    return SpikeSlab(slab_prob, spike, SLAB_SCALE, max(initial, spike))
