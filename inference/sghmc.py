r"""Stochastic gradient Hamiltonian Monte Carlo: one minibatch gradient and one normal draw a step.

.. math::
    v &\leftarrow (1 - \alpha) v - \epsilon \nabla \hat U(\theta) + \sqrt{2 \alpha \epsilon \tau}\, \xi \\
    \theta &\leftarrow \theta + v

with :math:`\epsilon` = learning_rate / num_data, targets :math:`\exp(-U / \tau)` up to terms of the order of
:math:`\epsilon` times the curvature. At :math:`\tau = 0` it is gradient descent with momentum, exactly.
Source: Chen, Fox and Guestrin (2014), in the form of the paper's experiments.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sparse.inference.schedule import Controls


class State(NamedTuple):
    """All that the next step needs; both of the shape of the position."""

    position: Tensor
    momentum: Tensor


def init(position: Tensor) -> State:
    """At rest at ``position``."""
    return State(position.clone(), torch.zeros_like(position))


def step(state: State, mean_gradient: Tensor, noise: Tensor | None, controls: Controls, num_data: int) -> State:
    """The state after one step.

    Args:
        mean_gradient: gradient of U / N at the position.
        noise: standard normals of the position's shape; None at temperature 0.
        controls: numbers, or tensors of no dimension.
    """
    momentum = (1 - controls.friction) * state.momentum - controls.learning_rate * mean_gradient
    if noise is not None:
        momentum = momentum + noise_scale(controls, num_data) * noise
    return State(state.position + momentum, momentum)


def with_buffers(state: State, buffers: Tensor) -> State:
    """The same with buffers at the end of the position, as a model left them, and at rest."""
    moved = state.position.shape[-1] - buffers.shape[-1]
    position = torch.cat([state.position[..., :moved], buffers], -1)
    return State(position, torch.cat([state.momentum[..., :moved], torch.zeros_like(buffers)], -1))


def noise_scale(controls: Controls, num_data: int) -> float:
    """Standard deviation of the noise of one step: sqrt(2 alpha epsilon tau)."""
    variance = 2 * controls.friction * controls.learning_rate / num_data * controls.temperature
    return math.sqrt(variance) if isinstance(variance, float) else variance**0.5
