"""Sparse-input neural networks (Feng and Simon 2017): sparse group lasso on the first layer, ridge on the others.

    mean squared error / 2 + ridge / 2 * |later weights|² + penalty * sum over inputs of [ mix * |w|_1 + (1 - mix) * |w|_2 ]

with w the first-layer weights of an input and the response standardised, by proximal gradient descent with momentum. It
starts from a network fitted with minibatches, whose noise keeps every weight from 0; the path that the penalty rises along
takes all rows in a step, each fit starting where the last one ended. The one that predicts the first half of the validation
rows best is kept.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from common import Data, Fitted, mean_square
from rivals.networks import BATCH, batches, name_of, network, predictor, tensors
from torch import Tensor, nn

HIDDEN = (20, 10)
PENALTIES = (0.003, 0.0042, 0.006, 0.008, 0.011, 0.015, 0.02, 0.03)
MIX, RIDGE = 0.5, 1e-4
LEARNING_RATE, MOMENTUM = 2e-2, 0.9  # with minibatches the rate falls linearly to 0, so that their noise dies out
FIRST_STEPS, STEPS = 20_000, 400


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """The whole path, and its best network."""
    torch.manual_seed(seed)
    sizes = [data.train.x.shape[1], *HIDDEN, 1]
    net = network(sizes)
    level, scale = data.train.y.mean(), data.train.y.std()
    x, y = tensors(data.train.x, (data.train.y - level) / scale)
    num_tuned = len(data.validation.y) // 2
    tuning = data.validation[:num_tuned]
    stream, path = batches(len(x), seed), []
    _descend(net, x, y, PENALTIES[0], list(itertools.islice(stream, int(effort * FIRST_STEPS))), LEARNING_RATE)
    for penalty in PENALTIES:
        _descend(net, x, y, penalty, [slice(None)] * int(effort * STEPS), 0.25 * LEARNING_RATE)
        error = mean_square(predictor(net)(tuning.x) * scale + level - tuning.y)
        path.append((error, penalty, copy.deepcopy(net)))
    _, penalty, best = min(path, key=lambda point: point[0])
    note = (
        f"penalty {penalty} of {PENALTIES[0]}..{PENALTIES[-1]}, ridge {RIDGE}; batches of {BATCH} first, then all rows"
    )
    selected = best[0].weight.detach().abs().amax(0).nonzero().flatten().tolist()
    predict = predictor(best)
    return Fitted(lambda x: predict(x) * scale + level, selected, None, name_of(sizes), note, num_tuned)


def _descend(
    net: nn.Sequential, x: Tensor, y: Tensor, penalty: float, rows_of_steps: Sequence[Any], learning_rate: float
) -> None:
    first = net[0].weight
    later = [layer.weight for layer in list(net)[1:] if isinstance(layer, nn.Linear)]
    optimiser = torch.optim.SGD(
        [
            {"params": later, "weight_decay": RIDGE},
            {"params": [p for p in net.parameters() if all(p is not q for q in later)]},
        ],
        LEARNING_RATE,
        MOMENTUM,
    )
    for step, rows in enumerate(rows_of_steps):
        rate = learning_rate * (1 - step / len(rows_of_steps))
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        (0.5 * (net(x[rows]).squeeze(-1) - y[rows]).square().mean()).backward()
        optimiser.step()
        with torch.no_grad():
            # With momentum a constant gradient g moves a weight by rate g / (1 - momentum): so far the penalty pulls back.
            first.copy_(shrunk(first, rate / (1 - MOMENTUM) * penalty))


def shrunk(weight: Tensor, reach: float) -> Tensor:
    """The proximal map of ``reach * (mix |w|_1 + (1 - mix) |w|_2)`` for every column w."""
    soft = weight.sign() * (weight.abs() - MIX * reach).clamp(min=0)
    norm = soft.norm(dim=0).clamp(min=torch.finfo(soft.dtype).tiny)
    return soft * (1 - (1 - MIX) * reach / norm).clamp(min=0)
