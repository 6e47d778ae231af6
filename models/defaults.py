"""The default prior: hyper-parameters derived from the network and the number of rows, layer by layer."""

import torch
from torch import nn

from pyro_sparse.models.spike_slab import SpikeSlab


def spike_scale_for(threshold: float, slab_prob: float, slab_scale: float) -> float:
    """The spike scale at which the inclusion threshold is ``threshold``, by bisection on its logarithm."""
    low, high = -40.0, float(torch.tensor(slab_scale).log()) - 1e-6
    for _ in range(80):
        middle = 0.5 * (low + high)
        law = SpikeSlab(slab_prob, float(torch.tensor(middle).exp()), slab_scale, validate_args=False)
        if float(law.inclusion_threshold) < threshold:
            low = middle
        else:
            high = middle
    return float(torch.tensor(low).exp())


def default_prior(module: nn.Module, num_data: int) -> dict[str, SpikeSlab]:
    laws = {}
    layers = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    for layer in sorted(layers):
        own = {n: p for n, p in module.named_parameters() if n.rpartition(".")[0] == layer}
        largest = max(float(p.detach().abs().max()) for p in own.values())
        slab_prob, slab_scale = 1e-7, 0.1**0.5
        law = SpikeSlab(
            slab_prob,
            spike_scale_for(0.2 * largest, slab_prob, slab_scale),
            slab_scale,
            spike_scale_for(3.0 * largest, slab_prob, slab_scale),
        )
        laws.update(dict.fromkeys(own, law))
    return laws
