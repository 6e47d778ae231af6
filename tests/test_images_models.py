"""Models of images as users write them, and what they are told."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_sparse as ps

N = 60
SCHEDULE = ps.PriorAnnealing(10, 10, 10, 0, 10, learning_rate=0.05, temperature=0.01, sample_temperature=0.01)
LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.2)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, 8, 8, generator=generator), torch.arange(N) % 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, 4))


def model_of(net: ps.SparseModule, single: bool = False) -> Any:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        logits = net(x).float() if single else net(x)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def annealed(net: nn.Module, single: bool = False, prior: Any = LAW, **options: Any) -> ps.Run:
    model = model_of(ps.sparsify(net, prior), single)
    return ps.anneal(model, options.pop("data", images()), SCHEDULE, 20, num_draws=4, progress=False, **options)


@pytest.mark.filterwarnings("ignore:minibatch noise adds")
def test_logits_in_single_precision_are_refitted_as_others_are() -> None:
    tables = []
    for single in (False, True):
        run = annealed(network(), single)
        tables.append(ps.predict(ps.refit(run, ps.select(run)), images()[0]))
    for name in ("mean", "mean_lower"):
        assert np.allclose(tables[0][name], tables[1][name], atol=2e-2)


class Averages(nn.Module):
    """Sets its buffer anew where it trains."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x - self.mean[:, None, None]


@pytest.mark.filterwarnings("ignore:minibatch noise adds")
def test_a_network_that_sets_its_buffers_is_left_as_it_was_by_select() -> None:
    run = annealed(nn.Sequential(Averages(), network()))
    ps.select(run)
    (sparse,) = run.spec.layout.modules()
    assert type(sparse.module.get_buffer("0.mean")) is Tensor
    assert bool(np.isfinite(ps.predict(run, images()[0])["mean"]).all())


@pytest.mark.filterwarnings("ignore:minibatch noise adds")
@pytest.mark.filterwarnings("ignore:.*are kept instead of")
def test_a_share_of_weights_with_a_prior_for_each() -> None:
    scales = 0.1 + 0.1 * torch.rand(8, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    prior = {"0.weight": ps.SpikeSlab(0.3, scales / 10, 1.0, scales), "4.weight": ps.SpikeSlab(0.3, 0.01, 1.0, 0.2)}
    run = annealed(network(), prior=prior, keep=0.4)
    assert run.priors["0.weight"].spike_scale.shape == scales.shape
    assert 0 < 1 - ps.select(run).sparsity < 0.8


def test_what_is_said_of_other_data() -> None:
    x, y = images()
    with pytest.raises(ValueError, match=r"response of site 'y' must be a class from 0 to 3, got 4 in row"):
        annealed(network(), data=(x, y + 1))
    with pytest.raises(ValueError, match=r"got \['uint8', 'int64'\] \(for uint8 images see ps.Normalize\)"):
        annealed(network(), data=(x.to(torch.uint8), y))
    with pytest.raises(ValueError, match=r"floating type of the model's parameters, got \['float64'"):
        annealed(network(), data=(x.double(), y))


@pytest.mark.filterwarnings("ignore:minibatch noise adds")
def test_floats_are_not_taken_for_the_uint8_images_of_a_run() -> None:
    x, y = images()
    raw = (255 * x.sigmoid()).to(torch.uint8)
    run = annealed(nn.Sequential(ps.Normalize([0.5] * 3, [0.2] * 3), network()), data=(raw, y), prior=None, keep=0.5)
    assert bool(np.isfinite(ps.predict(run, raw)["mean"]).all())
    with pytest.raises(ValueError, match=r"x_new must be uint8 as data\[0\], got float32"):
        ps.predict(run, raw.float())
