"""The pruning rivals of the benchmarks, each against its defining equations, on problems small enough to do by hand."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_sparse as ps

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPARSE = ("DPF", "SM", "DSR", "BNN_BIC")
ROWS, BATCH = 60, 12


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.Linear(5, 3)
        )


def problem_of(load: Any, **changed: Any) -> Any:
    """60 rows, three classes, 20 epochs of five batches; 130 parameters, 103 of them of layers, 52 to keep."""
    training = load("pruning.training")
    torch.manual_seed(0)
    x = torch.randn(ROWS, 6)
    y = (x[:, :3] + 0.3 * torch.randn(ROWS, 3)).argmax(1)
    recipe = training.Recipe(20, BATCH, 0.1, weight_decay=5e-3)
    settings: dict[str, Any] = {"network": network, "train": (x, y), "augment": None, "recipe": recipe, "keep": 0.4}
    return training.Problem(logits=lambda net, images: net(images), **settings | changed)


def training_of(load: Any, policy: Any, seed: int = 0, **changed: Any) -> Any:
    return load("pruning.training").Training(problem_of(load, **changed), policy, seed)


def test_without_a_mask_the_step_is_sgd_of_pytorch(load: Any) -> None:
    """Momentum, weight decay, both drops of the rate and the running statistics of BatchNorm, over a whole run."""
    from pyro_sparse.inference.minibatch import Batches

    module = load("pruning.training")
    found = training_of(load, module.Policy(), seed=3).run("dense")
    problem, net = found.problem, network(3).train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [50, 75])
    batches = Batches(ROWS, BATCH, 3, 0, torch.device("cpu"))
    for number in range(100):
        rows = batches(number)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(problem.train[0][rows]), problem.train[1][rows]).backward()
        optimiser.step()
        schedule.step()
    for (name, own), right in zip(found.net.state_dict().items(), net.state_dict().values(), strict=True):
        assert torch.allclose(own, right, atol=1e-5), name
    assert found.number == 100 and not found.net.training


def test_augmented_batches_are_those_of_our_own_runs(load: Any) -> None:
    augment = ps.ImageAugmentation()
    images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)
    seen: list[Tensor] = []

    def flat(_: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))

    def logits(net: nn.Module, some: Tensor) -> Tensor:
        seen.append(some.clone())
        return net(some.float() / 255)

    module = load("pruning.training")
    problem = module.Problem(flat, logits, (images, torch.zeros(20).long()), augment, module.Recipe(1, 5, 0.1), 1.0)
    module.Training(problem, module.Policy(), 7).run("dense")
    ours: list[Tensor] = []

    def model(some: Tensor, labels: Tensor | None = None) -> Any:
        import pyro
        import pyro.distributions as dist

        weight = pyro.sample("weight", ps.SpikeSlab(0.1, 0.01, 1.0).expand([2]).to_event(1))
        ours.append(some.clone())
        with pyro.plate("rows", 20, subsample_size=len(some)):
            return pyro.sample("y", dist.Categorical(logits=weight.expand(len(some), 2)), obs=labels)

    from pyro_sparse.inference.inspection import inspect

    spec = inspect(model, problem.train, 5, 0, augment)
    batches = spec.batches(7, 0, torch.device("cpu"))
    assert len(seen) == 4
    for number, some in enumerate(seen):
        assert torch.equal(some, batches(number)[0])


def gradient_at(training: Any, weights: Tensor, number: int) -> Tensor:
    """Of the mean loss of a batch, at given weights, by autograd on a copy of the network."""
    net = network(0).train()
    nn.utils.vector_to_parameters(weights, net.parameters())
    images, labels = training.batches(number)
    loss = nn.functional.cross_entropy(net(images), labels)
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(net.parameters()))])


def test_dpf_applies_the_gradient_at_the_masked_weights_to_the_dense_ones(load: Any) -> None:
    training = training_of(load, load("pruning.dpf").Feedback())
    mask = torch.arange(len(training.mask)) % 3 > 0
    training.keep_only(mask)
    weights, momentum = training.weights.clone(), torch.zeros_like(training.weights)
    assert (weights[~mask] != 0).any()  # what is left out stays
    for number in range(1, 4):  # not a step that refreshes the mask
        training.number = number
        momentum = 0.9 * momentum + gradient_at(training, weights * mask, number) + 5e-3 * weights
        weights = weights - 0.1 * momentum
        training.step()
        assert torch.allclose(training.weights, weights, atol=1e-6)
    assert torch.equal(training.mask, mask)


def test_dpf_takes_the_largest_of_all_layers_along_a_cubic(load: Any) -> None:
    dpf = load("pruning.dpf")
    assert [dpf.num_kept(10, 90, share) for share in (0.0, 0.375, 0.75, 1.0)] == [90, 20, 10, 10]
    training = training_of(load, dpf.Feedback())
    masks = []
    while training.number < 100:
        training.step()
        masks.append(training.mask)
        if training.number == 17:
            places, sizes = training.layer_coordinates(), training.weights.abs()
            kept = training.mask[places]
            assert sizes[places][kept].min() > sizes[places][~kept].max()
    moved = [number for number in range(1, 100) if not torch.equal(masks[number], masks[number - 1])]
    assert set(moved) <= {16, 32, 48, 64, 75} and moved[0] == 16 and moved[-1] == 75
    counts = [int(masks[number].sum()) for number in (0, 16, 32, 48, 64, 75, 99)]
    cubes = [(1 - number / 75) ** 3 for number in (0, 16, 32, 48, 64, 75, 75)]
    assert counts == [27 + round(25 + 78 * cube) for cube in cubes]
    assert all(mask[48:72].all() and mask[127:].all() for mask in masks)  # biases and BatchNorm


def two_layers(load: Any, policy: Any, first: list[float], second: list[float]) -> Any:
    """A training of given weights, zero where the mask leaves out, of layers of eight and four weights without biases."""

    def small(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))

    module = load("pruning.training")
    recipe = module.Recipe(4, 2, 0.1)
    rows = (torch.ones(4, 2), torch.zeros(4).long())
    problem = module.Problem(small, lambda net, images: net(images).expand(-1, 2), rows, None, recipe, 0.5)
    training = module.Training(problem, module.Policy(), 0)
    training.policy = policy
    training.weights = torch.tensor([*first, *second])
    training.mask = training.weights != 0
    return training


def test_sparse_momentum_drops_by_size_and_regrows_by_momentum_by_hand(load: Any) -> None:
    policy = load("pruning.sparse_momentum").Regrow()
    training = two_layers(load, policy, [4.0, -3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.5, -2.0, 0.0, 0.0])
    training.momentum = torch.tensor([1.0, -1.0, 1.0, 1.0, 9.0, -8.0, 0.1, 0.2, 3.0, -3.0, 0.3, -0.4])
    policy.move(training, 0.5)
    # Two of the first layer and one of the second go. Mean sizes of momentum are 1 and 3, so of the three places a quarter
    # is the first layer's and three quarters the second's: 0.75 and 2.25, in whole numbers 1 and 2.
    kept = [True, True, False, False, True, False, False, False]
    assert training.mask.tolist() == [*kept, True, True, False, True]
    assert training.weights.tolist() == [4.0, -3.0, 0, 0, 0, 0, 0, 0, 0.5, -2.0, 0, 0]  # 0.5 was dropped and came back
    momentum = [1.0, -1.0, 1.0, 1.0, 9.0, -8.0, 0.1, 0.2, 3.0, -3.0, 0.3, -0.4]
    assert training.momentum.tolist() == pytest.approx(momentum)


def test_sparse_momentum_moves_once_an_epoch_and_feels_momentum_everywhere(load: Any) -> None:
    sparse = load("pruning.sparse_momentum")
    rates = [sparse.drop_rate(share) for share in (0.0, 0.5, 1.0)]
    assert rates == pytest.approx([0.5, 0.2525, 0.005])
    module = load("pruning.training")
    recipe = module.Recipe(60, BATCH, 0.05)
    training = training_of(load, sparse.Regrow(), recipe=recipe)
    first = [int(training.mask[part].sum()) for part in training.layers]
    assert first == [12, 10, 3] and int(training.mask.sum()) == 52  # 103 to 25, in each layer the same share
    begin = training.weights.clone()
    masks = []
    while training.number < 300:
        training.step()
        masks.append(training.mask)
    assert (training.momentum[~training.mask] != 0).any()
    moved = [number + 1 for number in range(1, 300) if not torch.equal(masks[number], masks[number - 1])]
    assert moved == [100, 200]  # of 60 epochs of five steps; none at the end of the last
    assert {int(mask.sum()) for mask in masks} == {52} and not training.weights[~training.mask].any()
    assert not torch.equal(begin, training.weights)


def test_whole_numbers_in_proportion(load: Any) -> None:
    shares = load("pruning.training").shares
    assert shares(10, [1.0, 1.0, 2.0], [9, 9, 9]) == [3, 2, 5]  # 2.5, 2.5 and 5
    assert shares(10, [1.0, 1.0, 8.0], [9, 9, 2]) == [4, 4, 2]  # what there is no room for goes to the others
    assert shares(6, [1.0, 0.0, 5.0], [9, 9, 2]) == [4, 0, 2]
    assert shares(3, [0.0, 0.0], [1, 5]) == [1, 2] and shares(0, [1.0], [0]) == [0]
    with pytest.raises(ValueError, match="total must be at most the room, 3, got 4"):
        shares(4, [1.0, 1.0], [1, 2])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        room = torch.randint(0, 30, (6,), generator=generator).tolist()
        weights = torch.rand(6, generator=generator).pow(4).tolist()
        total = int(torch.randint(0, sum(room) + 1, (), generator=generator))
        found = shares(total, weights, room)
        assert sum(found) == total and all(0 <= own <= free for own, free in zip(found, room, strict=True))


def test_the_largest_are_exactly_as_many(load: Any) -> None:
    largest = load("pruning.training").largest
    assert largest(torch.tensor([1.0, 1.0, 1.0, 2.0]), 2).tolist() == [True, False, False, True]
    assert largest(torch.tensor([1.0, 2.0]), 0).sum() == 0


def test_dsr_reallocates_in_proportion_to_what_is_left(load: Any) -> None:
    dsr = load("pruning.dsr")
    policy = dsr.Reallocate()
    training = two_layers(load, policy, [4.0, -3.0, 2.0, 0.1, 0.2, 0.0, 0.0, 0.0], [0.05, -0.02, 0.0, 0.0])
    training.extra["threshold"] = torch.tensor(0.15)
    places = torch.zeros(12)
    for number in range(200):
        policy.move(training)
        # 0.1 of the first layer goes, of the second all but its largest, 0.05: four and one are left of two that grow,
        # 1.6 and 0.4: two in the first, none in the second, and not where one was dropped just now.
        assert training.mask[[0, 1, 2, 4, 8]].all() and not training.mask[[3, 9, 10, 11]].any()
        assert int(training.mask[5:8].sum()) == 2
        assert training.weights.tolist() == pytest.approx([4.0, -3.0, 2.0, 0, 0.2, 0, 0, 0, 0.05, 0, 0, 0])
        assert float(training.extra["threshold"]) == pytest.approx(0.075)  # 2 exceed 1.1 × 1.4 % of 12
        places += training.mask
        training.number = number + 1
        training.weights = torch.tensor([4.0, -3.0, 2.0, 0.1, 0.2, 0.0, 0.0, 0.0, 0.05, -0.02, 0.0, 0.0])
        training.mask, training.extra["threshold"] = training.weights != 0, torch.tensor(0.15)
    # Each of three places gets one of two: 400 / 3, a binomial of 200 and 2/3; five standard errors.
    assert all(abs(float(count) - 400 / 3) < 5 * (200 * 2 / 9) ** 0.5 for count in places[5:8])


def test_dsr_moves_its_threshold_and_hides_gradients_outside_the_mask(load: Any) -> None:
    dsr = load("pruning.dsr")
    policy = dsr.Reallocate()
    weights = [4.0, -3.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 5.0, 2.0, 0.0, 0.0]
    training = two_layers(load, policy, weights[:8], weights[8:])
    training.extra["threshold"] = torch.tensor(0.5)
    policy.move(training)  # drops nothing, less than 0.9 × 1.4 % of 12
    assert float(training.extra["threshold"]) == 1.0 and training.mask.tolist() == [w != 0 for w in weights]
    training.gradient = torch.ones(12)
    policy.gradient(training, 0)
    assert training.gradient.tolist() == [float(w != 0) for w in weights]
    due = [number for number in range(100_000) if dsr.is_due(number, 100_000)]
    periods = {end: due[due.index(end) + 1] - end for end in (100, 12_600, 40_000, 70_400)}
    assert periods == {100: 100, 12_600: 200, 40_000: 400, 70_400: 800} and 94_000 < due[-1] < 95_000
    assert not dsr.is_due(0, 100) and dsr.is_due(1, 100)


def test_the_slope_of_bic_is_that_of_the_prior(load: Any) -> None:
    """Of the slab alone, which is the usual weight decay, then of the mixture; the spike puts the wanted share outside."""
    bic, module = load("pruning.bic"), load("pruning.training")
    decayed = training_of(load, module.Policy())
    recipe = replace(decayed.problem.recipe, weight_decay=0.0)
    training = training_of(load, bic.Mode(5e-3), recipe=recipe)
    for _ in range(50):
        training.step()
        decayed.step()
    assert torch.allclose(training.weights, decayed.weights, atol=1e-5)
    weights = training.weights.clone()
    right = gradient_at(training, weights, 50)
    training.step()
    spike, slab = float(training.extra["spike_scale"]), (5e-3 * ROWS) ** -0.5
    law = ps.SpikeSlab(1e-6, spike, slab)
    assert int((weights.abs() >= law.inclusion_threshold * 0.9999).sum()) == 52
    own = weights.clone().requires_grad_()
    (slope,) = torch.autograd.grad(-law.log_prob(own).sum() / ROWS, own)
    assert torch.allclose(training.gradient, right + slope, atol=1e-4, rtol=1e-4)
    while training.number < 97:
        training.step()
    assert int(training.mask.sum()) == 52 and not training.weights[~training.mask].any()
    before = training.mask.clone()
    training.step()
    assert torch.equal(before, training.mask) and not training.weights[~training.mask].any()


def test_the_spike_of_bic_is_never_near_the_bound_of_stability(load: Any) -> None:
    bic, module = load("pruning.bic"), load("pruning.training")
    for scale in (1e-3, 0.1):
        law = ps.SpikeSlab(bic.SLAB_PROB, bic.spike_of(scale, 1.0), 1.0)
        assert float(law.inclusion_threshold) == pytest.approx(scale, rel=1e-4)
    recipe = module.Recipe(20, BATCH, 5.0, weight_decay=0.0)  # 0.5 in the second half
    training = training_of(load, bic.Mode(5e-3), recipe=recipe)
    training.weights.mul_(1e-3)
    training.gradient.zero_()
    training.policy.gradient(training, 50)
    assert 0.5 / (ROWS * float(training.extra["spike_scale"]) ** 2) == pytest.approx(0.25 * 2 * 1.9)


def test_the_best_run_is_that_of_the_smallest_bic(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bic = load("pruning.bic")
    problem = problem_of(load)
    found = bic.fit(problem, 1)
    assert len(found.trainings) == 3 and len({one.seed for one in found.trainings}) == 3
    right = []
    for one in found.trainings:
        logits = one.net(problem.train[0]).detach().log_softmax(1)[torch.arange(ROWS), problem.train[1]]
        right.append(float(-2 * logits.sum()) + 52 * math.log(ROWS))
    assert [bic.bic(one) for one in found.trainings] == pytest.approx(right, rel=1e-5)
    assert next(iter(found.networks())) is found.trainings[right.index(min(right))].net


def test_dropout_drops_inputs_of_all_layers_but_the_images(load: Any) -> None:
    """Each with probability p, the others divided by 1 - p; in evaluation too. False alarms: five standard errors."""
    dropout = load("pruning.dropout")
    net = nn.Sequential(nn.Linear(4, 2000, bias=False), nn.Identity(), nn.Linear(2000, 1, bias=False)).eval()
    nn.init.ones_(net[0].weight)
    nn.init.ones_(net[2].weight)
    dropout.with_dropout(net, 0.2)
    torch.manual_seed(0)
    with torch.no_grad():
        found = torch.stack([net(torch.ones(1, 4))[0, 0] for _ in range(400)])
    kept = found / 4 * 0.8  # units that were not dropped: binomial of 2,000 and 0.8
    assert torch.allclose(kept, kept.round(), atol=1e-2)
    assert abs(float(kept.mean()) - 1600) < 5 * (2000 * 0.16 / 400) ** 0.5
    assert abs(float(kept.var()) / 320 - 1) < 5 * (2 / 400) ** 0.5
    fitted = dropout.fit(problem_of(load), 0)
    x = torch.randn(3, 6)
    passes = [net(x) for net in fitted.networks()]
    assert len(passes) == 30 and not torch.equal(passes[0], passes[1]) and fitted.kept == 1


def test_probabilities_are_averaged_over_members(load: Any) -> None:
    ensemble, dense, module = load("pruning.ensemble"), load("pruning.dense"), load("pruning.training")
    problem = problem_of(load)
    fitted = ensemble.fit(problem, 2)
    members = [one.net for one in fitted.trainings]
    assert len(members) == 5 and fitted.kept == 5
    x = torch.randn(7, 6)
    each = torch.stack([net(x).detach().double().softmax(1) for net in members])
    found = module.probabilities(problem, fitted, x, rows=3)
    assert torch.allclose(found, each.mean(0)) and float(each.var(0).max()) > 0
    alone = module.probabilities(problem, dense.fit(problem, 2), x)
    assert torch.allclose(alone, each[0])


def test_swag_has_the_moments_of_the_iterates(load: Any) -> None:
    """From 161/300 of the run on, after each epoch; covariance of draws by its formula, within five standard errors."""
    swag, module = load("pruning.swag"), load("pruning.training")

    class Watched(swag.Collect):
        def after(self, training: Any, number: int) -> None:
            super().after(training, number)
            iterates.append(training.weights.clone())

    iterates: list[Tensor] = []
    recipe = module.Recipe(60, BATCH, 0.1)
    training = training_of(load, Watched(), recipe=recipe)
    while training.number < 300:
        training.step()
    own = torch.stack(iterates[4::5][32:]).double()  # epochs 33 to 60: 161 / 300 × 60 = 32.2
    extra = training.extra
    assert len(own) == 28 == int(extra["count"])
    assert torch.allclose(extra["mean"].double(), own.mean(0), atol=1e-5)
    assert torch.allclose(extra["square"].double(), own.square().mean(0), atol=1e-5)
    means = own.cumsum(0) / torch.arange(1, 29)[:, None]
    assert torch.allclose(extra["columns"].double(), (own - means)[-20:], atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([swag.draw(extra, generator) for _ in range(4_000)]).double()
    columns = (own - means)[-20:]
    right = torch.diag(own.var(0, correction=0)) / 2 + columns.T @ columns / (2 * 19)
    error = torch.cov(draws.T) - right
    spread = ((right.diag()[:, None] * right.diag() + right.square()) / 4_000).sqrt()
    assert float((error / spread.clamp(min=1e-12)).abs().max()) < 6  # of 8,515 entries, of which 1e-5 would lie outside
    assert float(((draws.mean(0) - own.mean(0)) / (right.diag() / 4_000).sqrt().clamp(min=1e-9)).abs().max()) < 5


def test_swag_makes_running_statistics_anew_for_each_draw(load: Any) -> None:
    swag = load("pruning.swag")
    fitted = swag.fit(problem_of(load), 0)
    training = fitted.trainings[0]
    net = next(iter(fitted.networks()))
    x = training.problem.train[0]
    hidden = net[0](x)
    assert torch.allclose(net[1].running_mean, hidden.mean(0), atol=1e-5)  # an epoch of five batches of 12
    batches = torch.stack([net[0](training.batches(number)[0]).var(0) for number in range(5)])
    assert torch.allclose(net[1].running_var, batches.mean(0), rtol=1e-4)
    assert not net.training and net[1].momentum == 0.1


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_methods_keep_exactly_the_wanted_share_of_all_parameters(load: Any, name: str) -> None:
    methods, module = load("pruning.methods"), load("pruning.training")
    problem = problem_of(load, recipe=module.Recipe(100, BATCH, 0.05))
    fitted = methods.METHODS[name](problem, 1)
    (net,) = fitted.networks()
    weights = nn.utils.parameters_to_vector(net.parameters())
    assert fitted.kept == 52 / 130
    mask = fitted.trainings[0].mask if name != "BNN_BIC" else next(t.mask for t in fitted.trainings if t.net is net)
    assert int(mask.sum()) == 52 and not weights[~mask].any()
    assert int((weights != 0).sum()) >= 49  # one that grew where nothing reaches it is still zero
    probs = module.probabilities(problem, fitted, problem.train[0])
    accuracy = float((probs.argmax(1) == problem.train[1]).double().mean())
    assert accuracy > 0.55, accuracy  # a third by chance, with a standard error of 0.06


def test_a_training_of_other_settings_begins_anew(load: Any, tmp_path: Path) -> None:
    """Of another share, recipe, data or start; and what lies beside it stays."""
    dpf, module = load("pruning.dpf"), load("pruning.training")
    x, y = problem_of(load).train
    others: list[dict[str, Any]] = [{}, {"keep": 0.5}, {"recipe": module.Recipe(10, BATCH, 0.1)}, {"train": (x + 1, y)}]
    others.append({"network": lambda seed: network(seed + 1)})
    for changed in others:
        found = dpf.fit(problem_of(load, folder=tmp_path, **changed), 0).trainings[0]
        right = dpf.fit(problem_of(load, **changed), 0).trainings[0]
        assert torch.equal(found.seen, right.seen) and found.number == right.number
    assert len(list(tmp_path.glob("dpf-0-*.pt"))) == len(others)


def test_a_killed_training_has_lost_a_minute(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("pruning.training")
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)

    class Killed(module.Policy):
        def after(self, training: Any, number: int) -> None:
            if number == 40:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training_of(load, Killed(), folder=tmp_path).run("dense")
    seen: list[int] = []

    class Watched(module.Policy):
        def after(self, training: Any, number: int) -> None:
            seen.append(number)

    training_of(load, Watched(), folder=tmp_path).run("dense")
    assert seen == list(range(40, 100))


def test_a_share_that_biases_alone_exceed_is_refused(load: Any) -> None:
    with pytest.raises(ValueError, match=r"keep must leave weights beside the 27 biases and scales, got 0\.2"):
        load("pruning.dpf").fit(problem_of(load, keep=0.2), 0)


@pytest.mark.parametrize("name", [*SPARSE, "dense", "MC dropout", "SWAG"])
def test_a_stopped_training_goes_on_to_the_same_bits(load: Any, tmp_path: Path, name: str) -> None:
    methods, module = load("pruning.methods"), load("pruning.training")
    problem = problem_of(load)
    right = methods.METHODS[name](problem, 1).trainings[0]
    stopped = replace(problem, folder=tmp_path, deadline=-math.inf)
    stops = 0
    while True:  # a step each time
        try:
            found = methods.METHODS[name](stopped, 1)
            break
        except module.OutOfTimeError:
            stops += 1
    assert stops == 99 * len(found.trainings)
    for key in ("weights", "momentum", "mask"):
        assert torch.equal(getattr(found.trainings[0], key), getattr(right, key)), key
    for own, of in zip(found.trainings[0].net.buffers(), right.net.buffers(), strict=True):
        assert torch.equal(own, of)
    again = methods.METHODS[name](stopped, 1)  # ended: nothing is done
    assert torch.equal(again.trainings[0].seen, right.seen)


def test_the_row_of_a_method_is_complete(load: Any) -> None:
    methods, cifar = load("pruning.methods"), load("gpu.cifar")
    problem = problem_of(load)
    data = cifar.Data(problem.train, problem.train, 3 * torch.randn(40, 6), "made up")
    row = methods.row_of("deep ensemble", problem, 1, data)
    assert row["kept"] == row["num_trainings"] == 5 and row["seconds_an_epoch"] > 0
    assert {"accuracy", "nll", "ece", "brier", "js_distance", "note"} <= set(row)
    # weights, what the network sees, momentum and gradient in four bytes, the mask in one, BatchNorm's 8 + 8 numbers and count
    assert row["state_mib"] * 2**20 == 130 * 17 + 4 * 16 + 8


def test_sparse_momentum_shares_by_means_of_what_there_was_and_fills_only_what_is_free(load: Any) -> None:
    """Layers of unequal numbers kept, where the mean and the sum differ; then one that has no room for its part."""
    policy = load("pruning.sparse_momentum").Regrow()
    training = two_layers(load, policy, [4.0, -3.0, 2.0, 1.0, 5.0, 6.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0])
    training.momentum = torch.tensor([1.0, 1.0, 1.0, 7.0, 1.0, 1.0, 3.0, 4.0, 2.0, 9.0, 8.0, 7.0])
    policy.move(training, 0.5)
    # Four places; means 2 and 2, so two each (sums 12 and 2: three and one; means after the drop 1 and none).
    assert [int(training.mask[part].sum()) for part in training.layers] == [5, 2]


def test_sparse_momentum_hands_on_what_has_no_room(load: Any) -> None:
    policy = load("pruning.sparse_momentum").Regrow()
    training = two_layers(load, policy, [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0], [5.0, 6.0, 7.0, 0.0])
    training.momentum = torch.tensor([0.01] * 8 + [1.0] * 4)
    policy.move(training, 0.5)  # 2 + 2 go, all belong to the second, which has room for 1 + 2 of them
    assert [int(training.mask[part].sum()) for part in training.layers] == [3, 4]


def test_sparse_momentum_spares_a_layer_that_is_nearly_dense_and_rounds_up(load: Any) -> None:
    policy = load("pruning.sparse_momentum").Regrow()
    training = two_layers(load, policy, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0], [1.0, 2.0, 0.0, 0.0])
    training.momentum = torch.tensor([0.6] * 7 + [9.0] + [0.4, 0.4, 0.9, 0.1])
    policy.move(
        training, 0.4
    )  # an eighth of seven, not three of them, and 0.8 of the second: one each, and one each back
    assert training.mask.tolist() == [False] + [True] * 7 + [False, True, True, False]


def test_sparse_momentum_begins_at_random_and_its_rate_falls(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, module = load("pruning.sparse_momentum"), load("pruning.training")
    one, two = (training_of(load, sparse.Regrow(), seed) for seed in (0, 1))
    sizes = network(0)[0].weight.detach().reshape(-1).abs()
    assert not torch.equal(one.mask, two.mask) and sizes[one.mask[:48]].min() < sizes[~one.mask[:48]].max()
    rates: list[float] = []
    monkeypatch.setattr(sparse.Regrow, "move", staticmethod(lambda _, rate: rates.append(rate)))
    training_of(load, sparse.Regrow(), recipe=module.Recipe(60, BATCH, 0.05)).run("sm")
    assert rates == [sparse.drop_rate(1 / 3), sparse.drop_rate(2 / 3)]


def test_dsr_grows_zeros_and_its_target_is_a_share_of_the_layers_weights(load: Any) -> None:
    dsr = load("pruning.dsr")
    assert (dsr.FIRST_THRESHOLD, dsr.TARGET, dsr.TOLERANCE) == (1e-3, 0.014, 0.1)
    policy = dsr.Reallocate()
    # All places taken: what was dropped may come back, from zero.
    training = two_layers(load, policy, [4.0, 3.0, 2.0, 0.1, 5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    training.extra["threshold"] = torch.tensor(0.5)
    policy.move(training)
    assert training.mask.all() and float(training.weights[3]) == 0
    assert float(training.extra["threshold"]) == 0.25


@pytest.mark.parametrize(("dropped", "factor"), [(88, 2.0), (92, 1.0), (100, 1.0), (107, 1.0), (112, 0.5)])
def test_dsr_leaves_its_threshold_within_a_tenth_of_the_target(load: Any, dropped: int, factor: float) -> None:
    """1.4 % of 7,143 weights are 100; the other 14,286 parameters do not count."""
    dsr, module = load("pruning.dsr"), load("pruning.training")

    def wide(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 7_143), nn.Linear(7_143, 1, bias=False))

    rows = (torch.ones(4, 1), torch.zeros(4).long())
    problem = module.Problem(wide, lambda net, x: net(x).expand(-1, 2), rows, None, module.Recipe(1, 2, 0.1), 0.7)
    training = module.Training(problem, dsr.Reallocate(), 0)
    training.layers = training.layers[1:]
    training.weights.fill_(1.0)
    training.mask.fill_(True)
    begin = training.layers[0].start
    training.weights[begin : begin + dropped] = 0.1
    training.extra["threshold"] = torch.tensor(0.5)
    dsr.Reallocate.move(training)
    assert float(training.extra["threshold"]) == 0.5 * factor


def test_dsr_reallocates_at_random_by_seed(load: Any) -> None:
    policy = load("pruning.dsr").Reallocate()
    masks = []
    for seed in range(8):
        training = two_layers(load, policy, [4.0, -3.0, 2.0, 0.1, 0.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0])
        training.seed, training.extra["threshold"] = seed, torch.tensor(0.15)
        policy.move(training)
        masks.append(tuple(training.mask.tolist()))
    assert len(set(masks)) > 1


def test_bic_refits_with_the_slab_alone_for_a_thirtieth_and_decays_once(load: Any) -> None:
    bic = load("pruning.bic")
    assert (bic.RUNS, bic.SLAB_PROB, bic.BEGIN, bic.REFIT) == (3, 1e-6, 0.5, 1 / 30)
    fitted = bic.fit(problem_of(load), 1)
    assert {one.problem.recipe.weight_decay for one in fitted.trainings} == {0.0}
    assert {one.policy.decay for one in fitted.trainings} == {5e-3}
    training = fitted.trainings[0]
    for number, is_mixture in ((96, True), (97, False), (99, False)):
        training.gradient.zero_()
        training.policy.gradient(training, number)
        assert torch.allclose(training.gradient, 5e-3 * training.weights, atol=1e-7) is not is_mixture, number
    assert bic.spike_of(10.0, 1.0) == pytest.approx(0.5)  # at most a half of the slab's


def test_dropout_drops_in_each_later_layer_and_predicts_the_same_twice(load: Any) -> None:
    dropout = load("pruning.dropout")
    assert (dropout.RATE, dropout.PASSES) == (0.05, 30)
    net = nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))
    dropout.with_dropout(net, 1.0)
    dropped: list[bool] = []
    for layer in net:
        layer.register_forward_hook(lambda _, inputs, __: dropped.append(not inputs[0].any()))
    net(torch.ones(2, 50))
    fitted, x = dropout.fit(problem_of(load), 0), torch.randn(3, 6)
    assert len(fitted.trainings[0].net[0]._forward_pre_hooks) == 0
    assert all(len(fitted.trainings[0].net[place]._forward_pre_hooks) == 1 for place in (3, 4))
    problem, probabilities = problem_of(load), load("pruning.training").probabilities
    one, two = (probabilities(problem, fitted, x) for _ in range(2))
    assert torch.equal(one, two)


def test_swag_holds_the_rate_of_the_first_drop_and_draws_30_times(load: Any) -> None:
    swag = load("pruning.swag")
    fitted = swag.fit(problem_of(load), 0)
    recipe = fitted.trainings[0].problem.recipe
    assert [recipe.rate_at(share) for share in (0.4, 0.5, 0.99)] == pytest.approx([0.1, 0.01, 0.01])
    weights = [nn.utils.parameters_to_vector(net.parameters()).clone() for net in fitted.networks()]
    assert len(weights) == 30 and not torch.equal(weights[0], weights[1])
    again = [nn.utils.parameters_to_vector(net.parameters()).clone() for net in fitted.networks()]
    assert all(torch.equal(one, two) for one, two in zip(weights, again, strict=True))
    fitted.trainings[0].seed = 1
    other = next(iter(fitted.networks()))
    assert not torch.equal(nn.utils.parameters_to_vector(other.parameters()), weights[0])
    assert (swag.BEGIN, swag.RANK, swag.DRAWS) == ((161, 300), 20, 30)


def test_the_row_has_its_costs_and_its_images_in_order(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, cifar, module = load("pruning.methods"), load("gpu.cifar"), load("pruning.training")
    problem = problem_of(load)
    trainings = [module.Training(problem, module.Policy(), seed) for seed in (0, 1)]
    for one, seconds in zip(trainings, (40.0, 80.0), strict=True):
        one.seconds = seconds
        one.net.eval()
    trainings[1].extra["more"] = torch.zeros(10)
    nets = lambda: iter([one.net for one in trainings])  # noqa: E731
    monkeypatch.setitem(methods.METHODS, "made up", lambda *_: module.Fitted(nets, trainings, 2.0))
    data = cifar.Data(problem.train, problem.train, 3 * torch.randn(40, 6), "made up")
    row = methods.row_of("made up", problem, 1, data)
    assert row["seconds_an_epoch"] == pytest.approx(3.0)  # 60 of each over 20 epochs
    assert row["state_mib"] * 2**20 == 130 * 17 + 4 * 16 + 8 + 40
    probs = module.probabilities(problem, methods.METHODS["made up"](problem, 1), problem.train[0])
    assert row["accuracy"] == pytest.approx(float((probs.argmax(1) == problem.train[1]).double().mean()))


def test_a_training_that_diverges_says_so_and_seconds_add_up(load: Any, tmp_path: Path) -> None:
    module = load("pruning.training")
    with pytest.raises(ArithmeticError, match="dense has a loss of nan at step 100 of 100"):
        training_of(load, module.Policy(), recipe=module.Recipe(20, BATCH, 1e30)).run("dense")
    stopped = training_of(load, module.Policy(), folder=tmp_path, deadline=-math.inf)
    with pytest.raises(module.OutOfTimeError, match="dense at step 1 of 100"):
        stopped.run("dense")
    stopped.seconds = 1_000.0
    (path,) = tmp_path.glob("dense-0-*.pt")
    stopped.save(path)
    with pytest.raises(module.OutOfTimeError, match="dense at step 2 of 100"):
        (again := training_of(load, module.Policy(), folder=tmp_path, deadline=-math.inf)).run("dense")
    assert again.seconds > 1_000 and not list(tmp_path.glob("*.part"))


def test_each_training_has_a_file_that_is_whole(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble, module = load("pruning.ensemble"), load("pruning.training")
    ensemble.fit(problem_of(load, folder=tmp_path), 2)
    assert len(list(tmp_path.iterdir())) == 5
    (path,) = tmp_path.glob("dense-2-*.pt")
    before = path.read_bytes()

    def killed(_: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        training_of(load, module.Policy(), 2).save(path)
    assert path.read_bytes() == before


def test_the_table_of_methods_by_hand(load: Any) -> None:
    table = load("pruning.methods").table
    row = {
        "kind": "predicted",
        "predictor": "DPF",
        "drops": "0.5, 0.75",
        "kept": 0.1,
        "accuracy": 0.9,
        "nll": 0.3,
        "ece": 0.02,
    }
    row |= {"js_distance": 5.0, "seconds_an_epoch": 0.2, "num_trainings": 1, "state_mib": 0.5, "cpu_seconds": 10.0}
    rows = [row, row | {"accuracy": 0.92}, {"kind": "stopped", "predictor": "DPF"}]
    ours = {"kind": "predicted", "predictor": "anneal", "drops": "0.75", "kept": 0.1, "accuracy": 0.91}
    rows += [ours | {"nll": 0.4, "ece": 0.03}, row | {"drops": "0.75"}]
    lines = table(rows).splitlines()
    assert lines[2] == "| ours, selected and refitted | 1 | 10.00 | 91.00 | 0.4000 | 0.0300 | - | - | - | - | - |"
    figures = "10.00 (0.00) | 91.00 (1.41) | 0.3000 (0.0000) | 0.0200 (0.0000) | 5.00 (0.00)"
    assert lines[3] == f"| DPF | 2 | {figures} | 0.200 | 1 | 0.50 | 10 |" and len(lines) == 5
    assert lines[4].startswith("| DPF, rates as ours | 1 | 10.00 | 90.00 |")


def test_digits_have_the_papers_rates_and_more_on_demand(load: Any) -> None:
    cases = load("pruning_digits").cases
    two, one = (0.5, 0.75), (0.75,)
    assert cases(["ours", "DPF", "SWAG"], False) == [("ours", one), ("DPF", two), ("SWAG", two)]
    assert cases(["ours", "DPF", "SWAG"], True)[3:] == [("stiff", one), ("DPF", one)]
    assert cases(["SWAG"], True) == [("SWAG", two)]


def rows_of(script: str, output: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", "--output", str(output), *options]
    subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_rivals_on_images_leave_what_time_is_over_for_and_make_no_row_twice(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--methods", "DPF", "SWAG", "--epochs", "2", "--folder", str(tmp_path / "runs"))
    late = rows_of("gpu/cifar_rivals.py", tmp_path / "rows.jsonl", *options, "--minutes", "1e-9")
    assert [(row["kind"], row["predictor"]) for row in late] == [("left", "DPF"), ("left", "SWAG")]
    rows = rows_of("gpu/cifar_rivals.py", tmp_path / "rows.jsonl", *options)[2:]
    assert [(row["kind"], row["setting"]) for row in rows] == [("predicted", "DPF"), ("predicted", "SWAG")]
    assert rows[0]["kept"] == pytest.approx(0.1, abs=5e-5) and rows[1]["kept"] == rows[1]["keep"] == 1
    assert rows_of("gpu/cifar_rivals.py", tmp_path / "rows.jsonl", *options) == late + rows


@pytest.mark.slow
def test_the_digits_run_with_all_methods(load: Any, tmp_path: Path) -> None:
    rows = rows_of("pruning_digits.py", tmp_path / "rows.jsonl")
    methods = load("pruning.methods")
    assert [row["predictor"] for row in rows] == ["average", "anneal", *methods.METHODS]
    for row in rows:
        wanted = 5.0 if row["predictor"] == "deep ensemble" else 1.0 if row["predictor"] in methods.DENSE else 0.1
        assert row["kept"] == pytest.approx(wanted, abs=0.01), row["predictor"]
    assert max(row["accuracy"] for row in rows) > 0.9
    assert (tmp_path / "rows.md").read_text() == methods.table(rows)
