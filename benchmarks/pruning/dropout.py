"""Monte Carlo dropout: dropped inputs of the layers while training, and while predicting, averaged (Gal and Ghahramani 2016).

Each input of a layer with weights, but for the images themselves, is zero with probability p, the others are divided by 1
- p. A prediction is the average over 30 such networks; BatchNorm uses its running statistics then.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pruning.training import Fitted, Policy, Problem, Training
from torch import Tensor, nn

RATE, PASSES = 0.05, 30


def with_dropout(net: nn.Module, rate: float = RATE) -> nn.Module:
    """The same network, changed in place to drop inputs of its layers whether it trains or predicts."""
    layers = [part for part in net.modules() if isinstance(part, (nn.Conv2d, nn.Linear))]

    def dropped(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (F.dropout(inputs[0], rate, training=True), *inputs[1:])

    for layer in layers[1:]:
        layer.register_forward_pre_hook(dropped)
    return net


class Seeded(Training):
    """What is dropped in a step is a function of seed and step, though PyTorch's dropout knows the global generator alone."""

    def step(self) -> None:
        torch.manual_seed(self.generator("dropout").initial_seed())
        super().step()


def fit(problem: Problem, seed: int) -> Fitted:
    """One network, and 30 of what dropout makes of it."""
    changed = replace(problem, network=lambda number: with_dropout(problem.network(number)))
    training = Seeded(changed, Policy(), seed).run("dropout")

    def networks() -> Iterator[nn.Module]:
        torch.manual_seed(training.generator("dropout").initial_seed())
        return (training.net for _ in range(PASSES))

    return Fitted(networks, [training], 1.0, f"dropout {RATE}, {PASSES} passes")
