"""PriorAnnealing: the controls of every phase at its ends, the paper's two settings, and the stability bound."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import pyro_sparse as ps

SHORT = ps.PriorAnnealing(
    train_steps=3,
    power_steps=4,
    spike_steps=5,
    cool_steps=6,
    sample_steps=2,
    learning_rate=0.1,
    friction=0.2,
    temperature=0.6,
    sample_temperature=0.9,
    weight_decay=0.01,
)


@pytest.mark.parametrize(
    ("step", "phase", "since", "temperature", "power", "progress", "decay"),
    [
        (0, "train", 0, 0.0, 0.0, 0.0, 0.01),
        (2, "train", 2, 0.0, 0.0, 0.0, 0.01),
        (3, "power", 0, 0.6, 0.0, 0.0, 0.0),
        (6, "power", 3, 0.6, 0.75, 0.0, 0.0),
        (7, "spike", 0, 0.6, 1.0, 0.0, 0.0),
        (11, "spike", 4, 0.6, 1.0, 0.8, 0.0),
        (12, "cool", 0, 0.6, 1.0, 1.0, 0.0),
        (13, "cool", 1, 0.3, 1.0, 1.0, 0.0),
        (17, "cool", 5, 0.1, 1.0, 1.0, 0.0),
        (18, "sample", 0, 0.9, 1.0, 1.0, 0.0),
        (19, "sample", 1, 0.9, 1.0, 1.0, 0.0),
    ],
)
def test_controls_at_the_ends_of_every_phase(
    step: int, phase: str, since: int, temperature: float, power: float, progress: float, decay: float
) -> None:
    right = ps.Controls(0.1, 0.2, temperature, power, progress, decay)
    assert SHORT.phase(step) == (phase, since)
    assert SHORT.at(step) == pytest.approx(right, abs=1e-15)


def test_power_and_spike_rise_linearly_and_meet() -> None:
    schedule = ps.PriorAnnealing(0, 10, 20, 1)
    assert [schedule.at(t).prior_power for t in range(11)] == pytest.approx([t / 10 for t in range(11)])
    assert [schedule.at(10 + t).spike_progress for t in range(21)] == pytest.approx([t / 20 for t in range(21)])


def test_cooling_is_by_steps_or_by_periods() -> None:
    """tau / (t - T3) with t - T3 counted from 1, in steps or in epochs."""
    schedule = ps.PriorAnnealing(0, 0, 0, 7, temperature=0.6)
    assert [schedule.at(t).temperature for t in range(7)] == pytest.approx([0.6 / k for k in range(1, 8)])
    epochs = replace(schedule, cool_period=3)
    assert [epochs.at(t).temperature for t in range(7)] == pytest.approx([0.6, 0.6, 0.6, 0.3, 0.3, 0.3, 0.2])


def test_learning_rate_drops_from_the_stated_step_on() -> None:
    schedule = ps.PriorAnnealing(2, 2, 2, 2, learning_rate=0.5, learning_rate_drops=(3, 6))
    right = [0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.005, 0.005]
    assert [schedule.at(t).learning_rate for t in range(8)] == pytest.approx(right)


def test_weight_decay_acts_in_the_train_phase_only() -> None:
    assert [SHORT.at(t).weight_decay for t in range(20)] == [0.01] * 3 + [0.0] * 17


def test_a_run_may_sample_or_cool_or_cool_then_sample() -> None:
    for cool, sample, last in ((0, 4, "sample"), (4, 0, "cool"), (4, 4, "sample")):
        schedule = ps.PriorAnnealing(1, 1, 1, cool, sample)
        assert schedule.last_phase == last and schedule.num_steps == 3 + cool + sample
    assert ps.PriorAnnealing(5, 0, 0, 0).last_phase == "train"


def test_papers_regression_setting() -> None:
    schedule = ps.PriorAnnealing.paper_regression()
    assert schedule.num_steps == 80_000 and schedule.last_phase == "cool"
    starts = [("train", 0), ("power", 5_000), ("spike", 20_000), ("cool", 60_000)]
    assert all(schedule.phase(step) == (phase, 0) for phase, step in starts)
    assert schedule.at(4_999) == pytest.approx((1e-3, 0.1, 0.0, 0.0, 0.0, 0.0))
    assert schedule.at(12_500) == pytest.approx((1e-3, 0.1, 0.1, 0.5, 0.0, 0.0))
    assert schedule.at(40_000) == pytest.approx((1e-3, 0.1, 0.1, 1.0, 0.5, 0.0))
    assert schedule.at(60_000).temperature == pytest.approx(0.1)
    assert schedule.at(79_999).temperature == pytest.approx(0.1 / 20_000)


def test_papers_cifar_setting() -> None:
    epoch = 390
    schedule = ps.PriorAnnealing.paper_cifar(steps_per_epoch=epoch)
    assert schedule.num_steps == 300 * epoch and schedule.last_phase == "cool"
    starts = [("train", 0), ("power", 150), ("spike", 200), ("cool", 225)]
    assert all(schedule.phase(number * epoch) == (phase, 0) for phase, number in starts)
    assert schedule.at(150 * epoch - 1) == pytest.approx((0.1, 0.1, 0.0, 0.0, 0.0, 5e-4))
    assert schedule.at(150 * epoch) == pytest.approx((0.01, 0.1, 0.01, 0.0, 0.0, 0.0))
    assert schedule.at(225 * epoch - 1).learning_rate == pytest.approx(0.01)
    assert schedule.at(225 * epoch) == pytest.approx((0.001, 0.1, 0.01, 1.0, 1.0, 0.0))
    assert schedule.at(226 * epoch - 1).temperature == pytest.approx(0.01)
    assert schedule.at(226 * epoch).temperature == pytest.approx(0.005)
    assert schedule.at(300 * epoch - 1).temperature == pytest.approx(0.01 / 75)


def test_setting_for_images_reaches_its_share_at_the_rate_that_it_samples_at() -> None:
    epoch = 390
    schedule = ps.PriorAnnealing.images(epoch, num_epochs=300)
    assert schedule.num_steps == 300 * epoch and schedule.last_phase == "sample"
    starts = [("train", 0), ("power", 150), ("spike", 200), ("sample", 233)]
    assert all(schedule.phase(number * epoch) == (phase, 0) for phase, number in starts)
    assert schedule.at(225 * epoch - 1).learning_rate == 0.1
    assert schedule.at(225 * epoch).learning_rate == pytest.approx(0.01)
    assert schedule.at(300 * epoch - 1) == pytest.approx((0.01, 0.1, 0.01, 1.0, 1.0, 0.0))
    slow = ps.PriorAnnealing.images(epoch, 300, learning_rate=0.02)
    assert slow.at(0).learning_rate == 0.02 and slow.at(225 * epoch).learning_rate == pytest.approx(0.002)
    assert ps.PriorAnnealing.images(epoch, 12).length("spike") == 2 * epoch  # one of them at the lower rate


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({f"{p}_steps": -1}, f"{p}_steps must be an integer >= 0, got -1")
            for p in ("train", "power", "spike", "cool", "sample")
        ),
        *(
            ({f"{p}_steps": bad}, f"{p}_steps must be an integer >= 0, got")
            for p in ("train", "cool")
            for bad in (NAN, 1.5)
        ),
        *(({"learning_rate": bad}, "learning_rate must be finite and > 0, got") for bad in (0, -1, NAN, INF)),
        *(({"friction": bad}, r"friction must lie in \(0, 1\], got") for bad in (0, -0.1, 1.1, NAN)),
        *(({"temperature": bad}, "^temperature must be finite and >= 0, got") for bad in (-1, NAN, INF)),
        *(({"sample_temperature": bad}, "sample_temperature must be finite and >= 0, got") for bad in (-1, NAN, INF)),
        *(({"weight_decay": bad}, "weight_decay must be finite and >= 0, got") for bad in (-1, NAN, INF)),
        *(({"cool_period": bad}, "cool_period must be an integer >= 1, got") for bad in (0, -3, NAN, 1.5)),
        (dict.fromkeys(("train_steps", "power_steps", "spike_steps", "cool_steps"), 0), "num_steps must be >= 1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.PriorAnnealing(**arguments)


@pytest.mark.parametrize("step", [-1, 20])
def test_steps_outside_of_the_run_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"step must lie in \[0, 20\), got {step}"):
        SHORT.at(step)


@pytest.mark.parametrize("drops", [(), (1,), (5, 9), (8,), (12, 13), (40,)])
@pytest.mark.parametrize(
    "lengths", [(3, 4, 5, 6, 2), (0, 4, 5, 0, 3), (2, 6, 0, 0, 0), (0, 0, 10, 4, 0), (3, 1, 1, 0, 1), (8, 0, 0, 0, 0)]
)
def test_stability_is_the_largest_ratio_of_all_steps(lengths: tuple[int, ...], drops: tuple[int, ...]) -> None:
    law, num_data = ps.SpikeSlab(0.3, 0.01, 1.0, 0.02), 50
    schedule = ps.PriorAnnealing(*lengths, learning_rate_drops=drops)

    def ratio(now: ps.Controls) -> float:
        spike_variance = (1 - now.spike_progress) * 0.02**2 + now.spike_progress * 0.01**2
        return now.learning_rate / num_data * now.prior_power / spike_variance

    brute_force = max(ratio(schedule.at(step)) for step in range(schedule.num_steps))
    assert schedule.stability(law, num_data) == pytest.approx(brute_force, rel=1e-6)


def test_the_narrowest_spike_of_a_site_decides() -> None:
    law = ps.SpikeSlab(0.3, torch.tensor([0.1, 0.05, 0.2]), 1.0)
    assert SHORT.stability(law, 10) == pytest.approx(0.1 / 10 / 0.05**2, rel=1e-6)


def check(ratio: float, friction: float = 1.0) -> list[str]:
    """The warnings of a run in which the ratio of one of its two sites reaches ``ratio``; spikes of scale 1 and 2."""
    schedule = ps.PriorAnnealing(1, 1, 1, 1, learning_rate=8 * ratio, friction=friction)
    laws = {"narrow": ps.SpikeSlab(0.3, 1.0, 4.0), "wide": ps.SpikeSlab(0.3, 2.0, 4.0)}
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        schedule.check_stability(laws, num_data=8)
    return [str(w.message) for w in record]


@pytest.mark.parametrize("friction", [1.0, 0.1])
def test_at_the_bound_an_error_names_site_and_remedy(friction: float) -> None:
    bound = 2 * (2 - friction)
    for ratio in (bound, 1.5 * bound):
        with pytest.raises(
            ValueError, match=r"at site 'narrow' \(num_data 8\).*lower learning_rate or raise spike_scale"
        ):
            check(ratio, friction)
    assert len(check(0.99 * bound, friction)) == 1


@pytest.mark.parametrize("friction", [1.0, 0.1])
def test_above_a_tenth_of_the_bound_a_warning_says_how_much_too_wide(friction: float) -> None:
    bound = 2 * (2 - friction)
    assert check(0.0999 * bound, friction) == []
    (warning,) = check(0.2 * bound, friction)
    assert "at site 'narrow'" in warning and "25 % too wide in variance" in warning


def test_without_spike_and_slab_sites_nothing_is_checked() -> None:
    SHORT.check_stability({}, num_data=1)
