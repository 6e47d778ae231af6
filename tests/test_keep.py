"""A wanted share of weights is what the final prior includes, by the promised path, everywhere alike, to the same bits."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import keeping, store
from pyro_sparse.inference import step as steps
from pyro_sparse.inference.inspection import inspect
from pyro_sparse.inference.keeping import Keeping, _scale, law_to_keep, settled
from pyro_sparse.inference.layout import Layout, Site

N = 20_000
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 30, generator=GENERATOR)
Y = 2 * X[:, 0] - X[:, 1] + 0.5 * torch.randn(N, generator=GENERATOR)
OWN = ps.SpikeSlab(1e-6, 0.002, 0.5, 0.25)


def schedule(
    train: int = 100, power: int = 500, spike: int = 150, cool: int = 100, sample: int = 0, **options: Any
) -> Any:
    given = {"learning_rate": 0.1, "temperature": 0.01, "sample_temperature": 0.01, "learning_rate_drops": (train,)}
    return ps.PriorAnnealing(train, power, spike, cool, sample, **(given | options))


BRIEF = schedule(3, 10, 10, 10, learning_rate=0.02)


def table() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))


def images() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 5, 6)), nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1)),
    )


def model_of(module: nn.Module, prior: Any = None) -> Callable[..., Any]:
    net = ps.sparsify(module, prior=prior)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def annealed(
    keep: float, make: Callable[[], nn.Module] = table, plan: Any = BRIEF, prior: Any = None, **options: Any
) -> ps.Run:
    torch.manual_seed(0)
    options = {"num_draws": 5, "progress": False} | options
    return ps.anneal(model_of(make(), prior), (X, Y), plan, 50, keep=keep, **options)


def brief(keep: float = 0.1, **options: Any) -> ps.Run:
    """Too short a run to reach its share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return annealed(keep, **options)


def num_included(run: ps.Run, position: Tensor) -> int:
    """By hand, of the prior that the run discloses."""
    values = run.spec.layout.constrained(position)
    return sum(int((law.inclusion_probability(values[name]) > 0.5).sum()) for name, law in run.priors.items())


def num_weights(run: ps.Run) -> int:
    return sum(site.shape.numel() for site in run.spec.layout.spike_slab_sites())


@pytest.mark.parametrize(
    ("keep", "make", "plan", "prior", "seed"),
    [
        (0.1, table, schedule(), None, 0),
        (0.05, images, schedule(), OWN, 1),
        pytest.param(0.5, table, schedule(sample=100, cool=0, sample_temperature=1e-4), OWN, 2, marks=pytest.mark.slow),
        pytest.param(0.5, images, schedule(), None, 3, marks=pytest.mark.slow),
        pytest.param(0.05, table, schedule(), None, 4, marks=pytest.mark.slow),
        pytest.param(0.1, images, schedule(), OWN, 5, marks=pytest.mark.slow),
        pytest.param(0.1, table, schedule(0, 600, 200, 200), None, 6, marks=pytest.mark.slow),
        pytest.param(0.05, table, schedule(0, 600, 200, 200), OWN, 7, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:minibatch noise adds")
def test_the_share_is_reached_on_the_cubic_path(
    keep: float, make: Callable[[], nn.Module], plan: Any, prior: Any, seed: int, recwarn: Any
) -> None:
    """Within 0.3 points, for which the run warns. Without a train phase the start is a fresh network's."""
    run = annealed(keep, make, plan, prior, seed=seed)
    assert not [warning for warning in recwarn if "are kept instead of" in str(warning.message)]
    total = num_weights(run)
    assert num_included(run, run.positions[0]) / total == pytest.approx(keep, abs=0.003)
    begin, power = plan.train_steps, plan.power_steps
    end = begin + power + plan.spike_steps
    path = run.history.isel(chain=0)
    since = (path["step"].values - begin) / power
    wanted = keep + (1 - keep) * (1 - np.clip(since, 0, 1)) ** 3
    follows = (since > 0.1) & (path["step"].values < end)
    assert np.abs(path["num_kept"].values / total - wanted)[follows].max() < 0.03
    last = path["spike_progress"].values[path["step"].values >= end]
    assert (last == last[0]).all() and last[0] == run.trace["sample_stats"]["spike_progress"].values.min()


def test_a_share_out_of_reach_warns() -> None:
    """The narrowest spike leaves out every weight below 0.5."""
    with pytest.warns(
        UserWarning, match=r"0.00 % of the weights are kept instead of 50 %: give the power and"
    ) as caught:
        annealed(0.5, prior=ps.SpikeSlab(1e-6, 0.09, 1.0, 0.1))
    assert len(caught) == 1


@pytest.fixture(scope="module")
def run() -> ps.Run:
    pyro.clear_param_store()
    return brief(plan=schedule(3, 10, 10, 0, 20, learning_rate=0.02))


def test_the_final_prior_is_that_of_all_that_follows(run: ps.Run) -> None:
    progress = float(run.trace["sample_stats"]["spike_progress"][0, -1])
    law = next(iter(run.priors.values()))
    before = law_to_keep(0.1, run.schedule, N, _scale(run.spec.layout)).at(progress)
    assert 0 < progress < 1 and torch.isclose(law.spike_scale.flatten()[0], before.current_spike_scale, rtol=1e-3)
    assert torch.isclose(law.inclusion_threshold.flatten()[0], before.inclusion_threshold, rtol=1e-3)
    found, draws = ps.mipp(run), run.spec.layout.constrained(run.draws[0])
    structure = ps.select(run)
    for name, own in run.priors.items():
        right = own.inclusion_probability(draws[name]).mean(0)
        assert np.allclose(found[name][0], right, atol=1e-6)
        if name.endswith("weight"):  # a bias takes up what constant units add
            assert not (structure.masks[name] & (right <= 0.5)).any()
    for draw in range(5):
        assert int(run.trace["sample_stats"]["num_kept"][0, draw]) == num_included(run, run.draws[0, draw])
    kept = torch.stack([run.spec.layout.included(draw) for draw in run.draws[0]])
    assert int((kept != 0).sum()) - 5 == sum(num_included(run, draw) for draw in run.draws[0])  # 5 noise scales
    module, means = table(), []
    for position in kept:
        module.load_state_dict({k: v for k, v in run.spec.layout.constrained(position).items() if k != "sigma"})
        means.append(module(X[:4]).detach().squeeze(-1))
    assert np.allclose(ps.predict(run, X[:4], sparse=True)["mean"], torch.stack(means).mean(0), atol=1e-6)


def test_without_a_spike_phase_or_cooling_the_share_is_settled_too() -> None:
    run = brief(plan=schedule(0, 20, 0, 0, 10))
    path = run.history["spike_progress"].values[0]
    assert (path[20:] == path[20]).all() and path[20] == float(run.trace["sample_stats"]["spike_progress"][0, 0])


def test_a_graph_sees_the_spike_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card: warmed up as one, then what it would replay."""
    expected = brief()
    monkeypatch.setattr(steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(steps, "captured", lambda call, device: [call() for _ in range(steps.WARM_UPS)] and call)
    run = brief()
    assert run.trace.attrs["program"] == "traced as a CUDA graph"
    assert torch.allclose(run.draws, expected.draws, rtol=1e-4, atol=1e-6)
    assert np.allclose(run.history["spike_progress"], expected.history["spike_progress"], atol=1e-6)


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


PLAN = schedule(3, 10, 6, 0, 6, learning_rate=0.02)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 2), nn.Tanh(), nn.Linear(2, 1))


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[] if step in (5, 13, 19) else pytest.mark.slow) for step in (2, 3, 5, 13, 18, 19, 21)],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before and at the first step of a phase, and between two moves of the spike, which are three steps apart."""
    monkeypatch.setattr(keeping, "LOOKS", 5)
    expected, out = brief(make=small, plan=PLAN), tmp_path / "run.zarr"
    done: list[int] = []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == step + 1:
            raise Killed
        return len(done) == step

    options: dict[str, Any] = {"make": small, "plan": PLAN, "out": out, "sparse_draws": True}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store.Store, "is_due", is_due)
        patch.setattr(store.Store, "close", lambda keeper: keeper._lock.close())
        brief(**options)
    found, again = brief(resume=True, **options), brief(resume=True, **options)  # the second is through
    torch.manual_seed(0)
    loaded = ps.load(out, model_of(small()), (X, Y))
    for run in (found, again, loaded):
        assert torch.equal(run.positions, expected.positions)
        xr.testing.assert_identical(run.history, expected.history)
        for name, law in expected.priors.items():
            assert torch.equal(run.priors[name].spike_scale, law.spike_scale)
            right = law.inclusion_probability(expected.spec.layout.constrained(expected.draws[0])[name]).mean(0)
            assert np.allclose(run.trace["posterior_inclusion"][name][0], right, atol=1e-6)
        for draw in range(5):
            assert torch.equal(run.draws[0, draw], expected.spec.layout.included(expected.draws[0, draw]))
    assert len(set(expected.history["spike_progress"].values[0])) > 4


def test_another_share_is_not_gone_on_with(tmp_path: Path) -> None:
    brief(out=tmp_path / "run.zarr")
    with pytest.raises(ValueError, match=r"its keep is 0.1, here it is 0.2"):
        brief(0.2, out=tmp_path / "run.zarr", resume=True)
    with pytest.raises(ValueError, match="holds another run"):
        torch.manual_seed(0)
        ps.anneal(model_of(table()), (X, Y), BRIEF, 50, 5, out=tmp_path / "run.zarr", resume=True, progress=False)


REFUSED: dict[str, tuple[float, Any, dict[str, Any], str]] = {
    "0": (0.0, BRIEF, {}, r"keep must lie in \(0, 1\), the share of weights to keep, got 0.0"),
    "1": (1.0, BRIEF, {}, r"keep must lie in \(0, 1\)"),
    "NaN": (float("nan"), BRIEF, {}, r"keep must lie in \(0, 1\), .* got nan"),
    "chains": (0.1, BRIEF, {"num_chains": 2}, "num_chains must be 1 with keep, .* got 2"),
    "no power phase": (0.1, schedule(power=0), {}, "power_steps must be >= 1 with keep"),
    "nothing after": (0.1, schedule(cool=0), {}, r"cool_steps \+ sample_steps must be >= 1 with keep"),
    "a spike that stays": (
        0.1,
        BRIEF,
        {"prior": ps.SpikeSlab(0.1, 0.1, 1.0)},
        "initial_spike_scale must exceed spike_scale with keep",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_aimed_at_is_refused(name: str) -> None:
    keep, plan, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        annealed(keep, plan=plan, **options)


def test_a_model_without_a_sparse_site_has_nothing_to_keep() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(ValueError, match="keep must be None for a model without a spike-and-slab site"):
        ps.anneal(model, (X, Y), BRIEF, 50, 5, keep=0.1, progress=False)


@pytest.mark.parametrize("keep", [0.05, 0.5])
def test_the_law_that_is_taken_where_none_is_set(keep: float) -> None:
    for num_data in (200, 50_000):
        law = law_to_keep(keep, schedule(power=1_000_000), num_data, 0.005)
        ps.SpikeSlab(law.slab_prob, law.spike_scale, law.slab_scale, law.initial_spike_scale, validate_args=True)
        # The pull of the slab, in units of the mean loss, is a weight decay of 5e-4.
        assert 1 / (num_data * float(law.slab_scale) ** 2) == pytest.approx(5e-4)
        assert float(law.slab_prob) == pytest.approx(keep, rel=1e-3)
    assert float(law.slab_scale) == pytest.approx(0.2)  # the paper's, at 50,000 rows


@pytest.mark.parametrize("steps", [4_000, 8_000])
def test_a_short_power_phase_makes_the_spike_stiffer(steps: int) -> None:
    """The spike whose threshold is the scale of the weights then falls by exp(-20 / 2) in it, the prior half raised."""
    plan, scale = schedule(power=steps), 0.05
    law = law_to_keep(0.5, plan, 50_000, scale)
    rate = plan.at(plan.train_steps + steps - 1).learning_rate / plan.friction / 50_000
    bites = ps.SpikeSlab(law.slab_prob, (rate * steps / 40) ** 0.5, law.slab_scale)
    assert 1e-9 < float(law.slab_prob) < 0.4
    assert float(bites.inclusion_threshold) == pytest.approx(scale, rel=0.02)
    assert float(law_to_keep(0.5, schedule(power=10), 50_000, scale).slab_prob) == pytest.approx(1e-9)


@pytest.mark.parametrize("drops", [(), (1_100,)])
def test_the_spike_is_never_so_narrow_that_steps_are_near_their_bound(drops: tuple[int, ...]) -> None:
    """Of weights that are nearly all zero the narrowest spike is wanted; it must be that of a quarter of the bound."""
    plan = schedule(7, 1_000, 100, 10, learning_rate=0.05, learning_rate_drops=drops)
    law = ps.SpikeSlab(0.1, 1e-4, 1.0, 0.5)
    moving, _ = keeping_of([law], 0.2, plan, num_data=200)
    position = torch.linspace(0, 1e-4, 500, dtype=torch.float64)
    number, ratios = 7, []
    while number < plan.num_steps:
        variance = float(law.at(moving.progress(number, position)).current_spike_scale) ** 2
        steps = range(number, moving.until(number))
        ratios += [plan.at(s).learning_rate * plan.at(s).prior_power / 200 / variance for s in (steps[0], steps[-1])]
        number = steps[-1] + 1
    bound = 2 * (2 - plan.friction)
    assert max(ratios) == pytest.approx(0.25 * bound, rel=1e-3)


def keeping_of(laws: list[ps.SpikeSlab], keep: float, plan: Any, num_data: int = 10**12) -> tuple[Keeping, Layout]:
    """With so many rows that any spike is stable."""
    sites = [Site(f"w{i}", "spike_slab", torch.Size([500]), None, law, None, None) for i, law in enumerate(laws)]
    layout = Layout(tuple(sites))
    return Keeping(keep, layout, plan, num_data), layout


def count(laws: list[ps.SpikeSlab], position: Tensor, progress: float) -> int:
    parts = zip(laws, position.reshape(len(laws), -1), strict=True)
    return sum(int((law.at(progress).inclusion_probability(part) > 0.5).sum()) for law, part in parts)


CONSTANT = ps.SpikeSlab(1e-3, 0.01, 1.0)
TWO = [ps.SpikeSlab(1e-6, 1e-3, 1.0, 0.4), ps.SpikeSlab(1e-3, 0.01, 2.0, 0.3)]


@pytest.mark.parametrize("laws", [[ps.SpikeSlab(1e-6, 1e-3, 1.0, 0.5)], TWO, [CONSTANT, TWO[0]]])
def test_where_the_spike_goes_is_where_so_many_weights_are_included(laws: list[ps.SpikeSlab]) -> None:
    """At one position, weights of all sizes: to the one at the threshold, and by no more than tenfold in variance."""
    plan = schedule(7, 1_000, 100, 10)
    moving, layout = keeping_of(laws, 0.2, plan)
    generator = torch.Generator().manual_seed(1)
    position = torch.randn(layout.num_coordinates, generator=generator, dtype=torch.float64).sinh() * 0.3
    fixed = count(laws, position, 0.0)  # of which the widest spike frees none
    for number in range(107, 1_107, 50):
        wanted = round((0.2 + 0.8 * (1 - (number - 7) / 1_000) ** 3) * len(position))
        assert abs(count(laws, position, moving.progress(number, position)) - max(wanted, fixed)) <= 1, number
    begun = moving.progress(1_006, position)
    for number in range(1_007, 1_108, 10):
        progress = moving.progress(number, position)
        assert abs(count(laws, position, progress) - max(round(0.2 * len(position)), fixed)) <= 0.003 * len(position), (
            number
        )
        for law in laws:
            ratio = law.at(begun).current_spike_scale / law.at(progress).current_spike_scale
            assert float(ratio.square()) <= 10 * (1 + 1e-3)
    assert moving.end == 1_107 and moving.progress(1_107, position) == moving.progress(1_110, position)


def test_the_spike_is_narrowed_into_a_gap_by_tenfold_and_no_further_than_its_middle() -> None:
    law, plan = ps.SpikeSlab(1e-6, 1e-4, 1.0, 0.5), schedule(0, 100, 100, 10)
    for gap, most in ((1e-6, 10.0), (0.5, 2.0)):
        moving, _ = keeping_of([law], 0.2, plan)
        position = torch.cat([torch.full((400,), 0.1 * gap), torch.full((100,), 0.1)]).double()
        scales = [float(law.at(moving.progress(n, position)).current_spike_scale) for n in (99, 100, 150, 200)]
        narrowing = [(scales[1] / scale) ** 2 for scale in scales]
        assert narrowing[0] == pytest.approx(1.0, rel=1e-2)
        threshold = [float(law.at(moving.progress(n, position)).inclusion_threshold) for n in (100, 200)]
        assert threshold[0] == pytest.approx(0.1, rel=1e-3)  # the smallest of those included
        if gap == 1e-6:
            assert narrowing[2:] == pytest.approx([10**0.5, most], rel=1e-2)
        else:  # the geometric middle of the two spikes
            ends = [0.1, 0.05]
            assert ends[1] < threshold[1] < ends[0]
            assert threshold[1] == pytest.approx((ends[0] * ends[1]) ** 0.5, rel=0.02)


def test_a_prior_of_ones_own_keeps_all_but_its_spike() -> None:
    run = brief(prior=OWN)
    spec = inspect(model_of(table(), OWN), (X, Y), 50, 0)
    progress = float(run.trace["sample_stats"]["spike_progress"][0, -1])
    for name, law in run.priors.items():
        for part in ("slab_prob", "slab_scale", "initial_spike_scale"):
            assert torch.equal(getattr(law, part), getattr(OWN, part))
        assert torch.equal(law.spike_scale, settled(spec, progress).layout[name].law.spike_scale)  # type: ignore[union-attr]
        assert OWN.spike_scale <= law.spike_scale <= OWN.initial_spike_scale
