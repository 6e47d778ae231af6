"""Dense networks in plain PyTorch: without regularisation, with dropout, and an ensemble with Gaussian heads.

The paper trains 2000-10000-100-10-1 by SGD with momentum 0.9, batches of 500, 80,000 steps at learning rate 1e-3. Here the
network is 2000-100-20-10-1 and the steps are 20,000 at 4e-3, so learning rate times steps are the paper's.
"""

import copy
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from common import PROB, Array, Data, Fitted
from torch import Tensor, nn
from torch.distributions import Normal

HIDDEN = (100, 20, 10)
STEPS, LEARNING_RATE, MOMENTUM, BATCH = 20_000, 4e-3, 0.9, 500


def dense(data: Data, seed: int, effort: float) -> Fitted:
    """DNN of the table: no regularisation at all."""
    return _dense(data, seed, effort, (0.0, 0.0, 0.0, 0.0), "no regularisation")


def dropout(data: Data, seed: int, effort: float) -> Fitted:
    """Dropout of the table: 0.2 of the inputs, 0.5 of the hidden units, as the paper states it."""
    return _dense(data, seed, effort, (0.2, 0.5, 0.5, 0.5), "dropout 0.2 of inputs, 0.5 of hidden units")


def _dense(data: Data, seed: int, effort: float, rates: tuple[float, ...], note: str) -> Fitted:
    torch.manual_seed(seed)
    sizes = [data.train.x.shape[1], *HIDDEN, 1]
    net = network(sizes, rates)
    x, y = tensors(data.train.x, data.train.y)
    optimiser = torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM)
    for rows in itertools.islice(batches(len(x), seed), int(STEPS * effort)):
        optimiser.zero_grad()
        (net(x[rows]).squeeze(-1) - y[rows]).square().mean().backward()
        optimiser.step()
    return Fitted(predictor(net), network=name_of(sizes), note=note)


class Ensemble:
    """Dense networks with a mean and a variance each, mixed with equal weights (Lakshminarayanan et al. 2017)."""

    def __init__(self, members: list[nn.Module], centre: float, scale: float) -> None:
        self._members, self._centre, self._scale = members, centre, scale

    def moments(self, x: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the mixture."""
        with torch.no_grad():
            outputs = torch.stack([member.eval()(tensors(x)[0]) for member in self._members])
        means, variances = outputs[..., 0], outputs[..., 1].exp()
        variance = (variances + means.square()).mean(0) - means.mean(0).square()
        return means.mean(0).numpy() * self._scale + self._centre, variance.sqrt().numpy() * self._scale

    def interval(self, x: Array) -> tuple[Array, Array]:
        """Of a new observation, by the normal law with the mixture's moments, as its authors do."""
        mean, sd = self.moments(x)
        half = float(Normal(0.0, 1.0).icdf(torch.tensor(0.5 * (1 + PROB)))) * sd
        return mean - half, mean + half


def deep_ensemble(data: Data, seed: int, effort: float) -> Fitted:
    """Five dense networks with Gaussian heads, each stopped where the validation rows are likeliest."""
    centre, scale = float(data.train.y.mean()), float(data.train.y.std())
    sizes = [data.train.x.shape[1], *HIDDEN, 2]
    members = [_gaussian_member(data, sizes, centre, scale, 100 * seed + number, effort) for number in range(5)]
    ensemble = Ensemble(members, centre, scale)
    note = "5 members, Adam at 1e-3, stopped early on the validation rows; interval by the mixture's moments"
    return Fitted(lambda x: ensemble.moments(x)[0], None, ensemble.interval, name_of(sizes), note)


def _gaussian_member(data: Data, sizes: list[int], centre: float, scale: float, seed: int, effort: float) -> nn.Module:
    torch.manual_seed(seed)
    net = network(sizes)
    x, y, x_held, y_held = tensors(
        *(data.train.x, (data.train.y - centre) / scale, data.validation.x, (data.validation.y - centre) / scale)
    )
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    best, kept, worse = float("inf"), net, 0
    for step, rows in enumerate(itertools.islice(batches(len(x), seed), int(5_000 * effort))):
        optimiser.zero_grad()
        _negative_log_likelihood(net(x[rows]), y[rows]).backward()
        optimiser.step()
        if step % 20 == 19:
            with torch.no_grad():
                loss = float(_negative_log_likelihood(net(x_held), y_held))
            best, kept, worse = (loss, copy.deepcopy(net), 0) if loss < best else (best, kept, worse + 1)
            if worse == 15:
                break
    return kept


def _negative_log_likelihood(output: Tensor, y: Tensor) -> Tensor:
    mean, log_variance = output.unbind(-1)
    return 0.5 * (log_variance + (y - mean).square() / log_variance.exp()).mean()


def network(sizes: list[int], rates: tuple[float, ...] = ()) -> nn.Sequential:
    """tanh between the layers, as the paper's; dropout before each layer where a rate is given."""
    parts: list[nn.Module] = []
    for depth, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        parts += [nn.Tanh()] if depth else []
        parts += [nn.Dropout(rates[depth])] if rates and rates[depth] else []
        parts.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*parts)


def name_of(sizes: list[int]) -> str:
    """``[3, 2, 1]`` as ``3-2-1``."""
    return "-".join(str(size) for size in sizes)


def batches(num_rows: int, seed: int) -> Iterator[Tensor]:
    """Rows of one batch after another, each epoch in a new order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator)[: max(1, num_rows // BATCH) * BATCH].split(BATCH)


def tensors(*arrays: Array) -> list[Tensor]:
    """In single precision."""
    return [torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)) for array in arrays]


def predictor(net: nn.Module) -> Callable[[Array], Array]:
    """The network as a function of arrays, without dropout."""

    def predict(x: Array) -> Array:
        with torch.no_grad():
            return net.eval()(tensors(x)[0]).squeeze(-1).double().numpy()

    return predict
