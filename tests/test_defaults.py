"""The default prior keeps the promises of its docstring, for every network and every number of rows."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn

import pyro_sparse as ps
from pyro_sparse.estimators import default_schedule

SIZES = [30, 100, 500, 3_000, 10_000, 100_000]


def network(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return ps.SparseNet(list(sizes), prior=None).module


def largest(module: nn.Module, layer: str) -> float:
    return max(float(p.detach().abs().max()) for name, p in module.named_parameters() if name.startswith(layer))


@pytest.mark.parametrize("select_inputs", [True, False])
@pytest.mark.parametrize("num_data", [30, 500, 10_000])
@pytest.mark.parametrize("sizes", [(10, 20, 10, 1), (100, 20, 10, 1), (4, 3, 1), (1, 1)])
def test_cost_and_thresholds_are_those_it_promises(sizes: tuple[int, ...], num_data: int, select_inputs: bool) -> None:
    module = network(*sizes).double()
    laws = ps.default_prior(module, num_data, select_inputs)
    floor = 0.165 / math.sqrt(num_data)
    for depth, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes), start=1):
        law = laws[f"layer{depth}.weight"]
        b = largest(module, f"layer{depth}")
        cost = 0.5 * math.log(num_data)
        if select_inputs:
            cost += 2 * math.log(fan_in) if depth == 1 else 0
        else:
            cost += 0.5 * math.log(fan_in * fan_out)
        # The price of leaving the spike, the log odds of exclusion at zero; more where even a slab of probability 1/2 asks it.
        asked, cost = cost, max(cost, -math.log(float(law.spike_scale)))
        excluded = 1 - float(law.inclusion_probability(torch.zeros(()).double()))
        assert math.log(excluded / (1 - excluded)) == pytest.approx(cost, rel=1e-5)
        assert float(law.slab_scale) == 1
        final, initial = float(law.inclusion_threshold), float(law.at(0.0).inclusion_threshold)
        wide = 0.7 if select_inputs else min(1.0, 0.7 * fan_in**0.5)
        assert float(law.initial_spike_scale) == pytest.approx(wide / fan_in**0.5)
        assert float(law.spike_scale) >= floor * (1 - 1e-6)
        if float(law.spike_scale) > floor * (1 + 1e-6) and cost == asked:
            assert final == pytest.approx(0.1 * b, rel=1e-5)
        else:
            assert 0.1 * b < final <= initial * (1 + 1e-9)


def test_the_floor_of_the_spike_acts_only_where_it_must() -> None:
    """A threshold of a tenth of the initial weights asks for a spike under the floor at 30 rows, not at 10,000."""
    module = network(10, 20, 1)
    scales = [float(ps.default_prior(module, n)["layer1.weight"].spike_scale) for n in (30, 10_000)]
    assert scales[0] == pytest.approx(0.165 / 30**0.5) and scales[1] > 0.165 / 100


@pytest.mark.parametrize("num_data", SIZES)
@pytest.mark.parametrize("sizes", [(10, 20, 10, 1), (100, 20, 10, 1), (2_000, 50, 1), (1, 1, 1)])
def test_a_layer_has_one_law_whose_settings_are_in_order(sizes: tuple[int, ...], num_data: int) -> None:
    module = network(*sizes)
    laws = ps.default_prior(module, num_data)
    assert list(laws) == [name for name, _ in module.named_parameters()]
    for name, law in laws.items():
        assert law.batch_shape == () and law is laws[name.replace("bias", "weight")]
        assert 0 < float(law.spike_scale) <= float(law.initial_spike_scale) < float(law.slab_scale)
        ps.SpikeSlab(law.slab_prob, law.spike_scale, law.slab_scale, law.initial_spike_scale, validate_args=True)
        assert law.log_prob(torch.tensor([0.0, 30.0])).isfinite().all()


@pytest.mark.parametrize("num_data", SIZES)
def test_the_learning_rates_of_the_estimator_are_stable_and_unbiased(num_data: int) -> None:
    """Neither an error nor a warning, for narrow and wide layers and initial weights far under the spike."""
    tiny = network(10, 20, 1)
    for p in tiny.parameters():
        nn.init.constant_(p, 1e-3)
    schedules = [default_schedule(num_data)] + ([ps.PriorAnnealing()] if num_data >= 500 else [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (network(10, 20, 10, 1), network(2_000, 50, 1), tiny):
            laws = ps.default_prior(module, num_data)
            for schedule in [*schedules, ps.PriorAnnealing(learning_rate=1e-2)]:
                schedule.check_stability(laws, num_data)


def test_start_values_of_zero_and_single_weights_have_a_prior() -> None:
    module = network(3, 2, 1)
    for p in module.parameters():
        nn.init.zeros_(p)
    for part in (module, nn.Linear(1, 1, bias=False)):
        for num_data in (2, 50, 10**7):
            for law in ps.default_prior(part, num_data).values():
                ps.SpikeSlab(
                    law.slab_prob, law.spike_scale, law.slab_scale, law.initial_spike_scale, validate_args=True
                )
                assert float(law.inclusion_threshold) > 0


def test_the_laws_have_the_floating_type_of_the_network() -> None:
    assert {law.slab_scale.dtype for law in ps.default_prior(network(3, 2, 1).double(), 50).values()} == {torch.float64}


@pytest.mark.parametrize("num_data", [1, 0, float("nan")])
def test_too_few_rows_are_refused(num_data: float) -> None:
    with pytest.raises(ValueError, match=f"num_data must be >= 2, got {num_data}"):
        ps.default_prior(network(3, 1), num_data)
