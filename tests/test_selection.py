"""Inclusion probabilities are those of the draws, and select keeps what exceeds the threshold and can act."""

import dataclasses
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_sparse as ps

LAW = ps.SpikeSlab(0.1, 0.1, 1.0, 0.5)
T = float(LAW.inclusion_threshold)
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
SAMPLE = ps.PriorAnnealing(0, 0, 0, 0, 3, learning_rate=1e-6)
COOL = ps.PriorAnnealing(0, 0, 0, 3, 0, learning_rate=1e-6)


def network_run(schedule: ps.PriorAnnealing, draws: Tensor | None = None, **options: Any) -> ps.Run:
    """A run of a 3-2-1 network whose draws (chain, draw, 11) are set by hand."""
    net = ps.SparseNet([3, 2, 1], prior=LAW)

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(net(x).squeeze(-1), 1.0).to_event(1), obs=y)

    return with_draws(model, schedule, draws, **options)


def with_draws(model: Any, schedule: ps.PriorAnnealing, draws: Tensor | None, **options: Any) -> ps.Run:
    chains = 1 if draws is None else len(draws)
    options = {"num_draws": 3, "num_chains": chains, "progress": False} | options
    run = ps.anneal(model, (X, X[:, 0]), schedule, **options)
    return run if draws is None else dataclasses.replace(run, draws=draws, positions=draws[:, -1].clone())


def flat(first: list[list[float]], second: list[float], biases: tuple[float, float, float] = (0, 0, 0)) -> Tensor:
    """A position of the 3-2-1 network, in the order weight, bias, weight, bias."""
    return torch.tensor([*first[0], *first[1], *biases[:2], *second, biases[2]])


READS_FIRST = flat([[1, 0, 0], [0, 0, 0]], [1, 0])
READS_BOTH = flat([[1, 0.9 * T, 0], [0, 1, 0]], [1, -1])
READS_DEAD = flat([[0, 0, 0], [1, 1, 1]], [1, 0])  # unit 1 has no way out


@pytest.mark.parametrize("chains", [1, 2])
def test_after_sampling_mipp_is_the_mean_inclusion_probability_of_the_draws(chains: int) -> None:
    draws = 0.6 * torch.randn(chains, 3, 11)
    probabilities = ps.mipp(network_run(SAMPLE, draws))
    inclusion = 1 / (1 + 9 * 10 * np.exp(-(draws.double().numpy() ** 2) / 2 * (100 - 1)))  # Bayes' rule
    right = inclusion.mean(1)
    got = np.concatenate(
        [probabilities[f"layer{i}.{p}"].values.reshape(chains, -1) for i in (1, 2) for p in ("weight", "bias")], 1
    )
    assert np.allclose(got, right, atol=1e-5)
    assert probabilities["layer1.weight"].dims == ("chain", "layer1_out", "layer1_in")


def test_after_cooling_mipp_is_that_of_the_last_position() -> None:
    draws = torch.stack([READS_DEAD, READS_FIRST, READS_BOTH])[None]
    probabilities = ps.mipp(network_run(COOL, draws))
    right = LAW.inclusion_probability(READS_BOTH[:6]).reshape(1, 2, 3)
    assert np.allclose(probabilities["layer1.weight"].values, right, atol=1e-6)
    assert probabilities["input"].values.tolist() == [1, 1, 0]
    # and of a real run: where the chain stands, which is its last draw
    run = network_run(COOL)
    assert torch.equal(run.positions, run.draws[:, -1])


def test_an_inputs_probability_is_the_share_of_draws_with_a_live_path() -> None:
    draws = torch.stack([torch.stack([READS_DEAD, READS_FIRST, READS_BOTH]), torch.stack([READS_FIRST] * 3)])
    names = ("a", "b", "c")
    by_draw = ps.mipp(network_run(SAMPLE, draws, input_names=names))["input"]
    assert np.allclose(by_draw, [5 / 6, 1 / 6, 0]) and by_draw.dims == ("column",)
    assert by_draw["column"].values.tolist() == list(names)
    run = network_run(COOL, draws, input_names=names)
    assert np.allclose(ps.mipp(run)["input"].sel(column="b"), 0.5)  # one of two chains ends with it
    found = ps.select(run)
    assert torch.allclose(found.input_probability, torch.tensor([1.0, 0.5, 0.0])) and found.num_chains == 2
    assert ps.mipp(network_run(COOL, draws))["column"].values.tolist() == [0, 1, 2]


def test_select_keeps_what_exceeds_the_threshold_and_can_act() -> None:
    inclusion = float(LAW.inclusion_probability(torch.tensor(0.9 * T)))
    run = network_run(COOL, READS_BOTH[None, None].repeat(1, 3, 1))
    for threshold, kept in ((0.5, False), (0.99 * inclusion, True), (1.01 * inclusion, False)):
        found = ps.select(run, threshold)
        assert found.masks["layer1.weight"].tolist() == [[True, kept, False], [False, True, False]]
        right = READS_BOTH[:6].reshape(2, 3) * found.masks["layer1.weight"]
        assert torch.equal(found.values["layer1.weight"], right)
    dead = ps.select(network_run(COOL, READS_DEAD[None, None].repeat(1, 3, 1)))
    assert dead.num_kept == 0 and dead.selected_inputs == [] and dead.sparsity == 1


def test_select_after_sampling_goes_by_the_mean_over_draws() -> None:
    weights = [0.0, 0.0, 1.0]  # included in one draw of three: not selected, though the chain ends there
    draws = torch.stack([flat([[1, w, 0], [0, 0, 0]], [1, 0]) for w in weights])[None]
    assert ps.select(network_run(SAMPLE, draws)).selected_inputs == [0]
    assert ps.select(network_run(SAMPLE, draws), 0.3).selected_inputs == [0, 1]
    assert ps.select(network_run(COOL, draws)).selected_inputs == [0, 1]


@pytest.mark.parametrize("best", [0, 1])
def test_of_several_chains_the_one_of_lowest_loss_is_used(best: int) -> None:
    draws = torch.stack([READS_FIRST, READS_BOTH])[:, None].repeat(1, 3, 1)
    run = network_run(COOL, draws)
    loss = run.trace["sample_stats"]["loss"].values
    loss[:] = 2.0
    loss[best, -1] = 1.0
    assert ps.select(run).selected_inputs == [[0], [0, 1]][best]


@pytest.mark.parametrize("threshold", [0, 1, -0.1, float("nan")])
def test_a_threshold_outside_of_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=rf"min_probability must lie in \(0, 1\), got {threshold}"):
        ps.select(network_run(COOL), threshold)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")])
def test_names_must_fit_the_columns(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"input_names must be 3 different names.*got {len(names)}"):
        network_run(COOL, input_names=names)


def test_coefficients_without_a_module_select_inputs_too() -> None:
    def glm(x: Tensor, y: Tensor) -> None:
        coefficients = pyro.sample("coefficients", LAW.expand([3]).to_event(1))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x @ coefficients + intercept, 1.0).to_event(1), obs=y)

    draws = torch.tensor([0.9, 0.0, -0.8, 5.0]).repeat(1, 3, 1)
    run = with_draws(glm, COOL, draws, input_names=["a", "b", "c"])
    found = ps.select(run)
    assert found.selected_inputs == ["a", "c"] and found.num_weights == 3
    assert list(found.masks) == ["coefficients"] and float(found.values["intercept"]) == 5.0
    assert ps.mipp(run)["input"].values.tolist() == [1, 0, 1]
    assert "intercept" not in ps.mipp(run)


def test_two_networks_over_the_same_inputs_are_read_together() -> None:
    nets = [ps.SparseLinear(3, 1, bias=False, prior=LAW, name=name) for name in ("first", "second")]

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(sum(net(x).squeeze(-1) for net in nets), 1.0).to_event(1), obs=y)

    found = ps.select(with_draws(model, COOL, torch.tensor([1.0, 0, 0, 0, 0, 2.0]).repeat(1, 3, 1)))
    assert found.selected_inputs == [0, 2] and list(found.masks) == ["first.weight", "second.weight"]


def test_a_layer_without_a_spike_is_never_pruned() -> None:
    net = ps.sparsify(ps.SparseNet([3, 2, 1]).module, LAW, where=lambda name, _: "layer1" in name)

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(net(x).squeeze(-1), 1.0).to_event(1), obs=y)

    found = ps.select(with_draws(model, COOL, (1e-3 * READS_BOTH).repeat(1, 3, 1)))
    assert set(found.masks) == {"layer1.weight", "layer1.bias"} and found.num_kept == 0
    assert torch.equal(found.values["layer2.weight"], 1e-3 * READS_BOTH[8:10][None])
