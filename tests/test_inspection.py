"""What a look at the model tells before a run: data off its scale, responses off their support, arguments of another kind."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference.minibatch import row_major

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.5 * torch.randn(60, generator=GENERATOR)
QUICK = ps.PriorAnnealing(2, 2, 2, 5, learning_rate=1e-3)


def model_of(law: Callable[[Tensor], Any], **options: Any) -> Callable[..., Any]:
    torch.manual_seed(0)
    net = ps.SparseNet([3, 4, 1], **options)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("y", law(mean), obs=y)

    return model


def normal(mean: Tensor) -> dist.Normal:
    return dist.Normal(mean, 1.0)


def quick(model: Callable[..., Any], x: Any = X, y: Any = Y, **options: Any) -> list[str]:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.anneal(model, (x, y), **{"schedule": QUICK, "batch_size": 20, "num_draws": 2, "progress": False, **options})
    return [str(warning.message) for warning in caught]


def column(scale: float, shift: float = 0.0) -> Tensor:
    return torch.cat([X[:, :2], scale * X[:, 2:] + shift], 1)


@pytest.mark.parametrize(("scale", "shift", "warned"), [(1, 0, False), (8, 0, False), (1, 50, True), (0.01, 0, True)])
def test_columns_far_from_unit_scale_are_warned_of(scale: float, shift: float, warned: bool) -> None:
    found = [text for text in quick(model_of(normal), column(scale, shift)) if "unit scale" in text]
    assert len(found) == warned
    assert not warned or (
        "1 column of the first argument is far from unit scale" in found[0] and "(column 2:" in found[0]
    )


def test_rare_columns_of_zeros_and_ones_are_not_warned_of() -> None:
    rare = torch.zeros(60, 3)
    rare[0, 0] = 1.0
    assert not [text for text in quick(model_of(normal), rare) if "unit scale" in text]


@pytest.mark.parametrize(("scale", "shift", "warned"), [(5, 0, False), (100, 0, True), (1, 1000, True)])
def test_a_response_far_from_unit_scale_is_warned_of(scale: float, shift: float, warned: bool) -> None:
    found = [text for text in quick(model_of(normal), y=scale * Y + shift) if "unit scale" in text]
    assert len(found) == warned and (not warned or "the response of site 'y' is" in found[0])


def test_a_model_that_scales_and_a_prior_that_is_given_are_not_warned_of() -> None:
    scaled = model_of(lambda mean: dist.Normal(1000 + 100 * mean, 100.0))
    slow = ps.PriorAnnealing(2, 2, 2, 5, learning_rate=1e-9)
    assert not [text for text in quick(scaled, y=100 * Y + 1000, schedule=slow) if "unit scale" in text]
    given = model_of(normal, prior=ps.SpikeSlab(0.3, 0.1, 1.0, 0.3))
    assert not [text for text in quick(given, column(1, 50), 100 * Y, schedule=slow) if "unit scale" in text]


@pytest.mark.parametrize(
    ("law", "y", "error", "message"),
    [
        (
            lambda m: dist.Poisson(m.exp()),
            -Y.round().abs() - 1,
            ValueError,
            "must lie in the support of Poisson, got -",
        ),
        (
            lambda m: dist.Gamma(m.exp(), 1.0),
            torch.where(Y[7] == Y, -2.5, Y.abs() + 1),
            ValueError,
            "got -2.5 in row 7",
        ),
        (lambda m: dist.Bernoulli(logits=m), Y > 0, TypeError, "must be numbers, got truth values: call .float()"),
    ],
)
def test_a_response_off_the_support_of_its_law_is_named(
    law: Any, y: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        quick(model_of(law), y=y)


def test_a_response_on_the_edge_of_its_support_is_hinted_at() -> None:
    y = torch.where(torch.arange(60) == 3, 0.0, torch.full((60,), 0.5))
    with pytest.raises(ps.NonFiniteError, match="on the edge of its law's support"):
        quick(model_of(lambda mean: dist.Beta(1.5, 1 + mean.exp())), y=y, schedule=ps.PriorAnnealing(50, 2, 2, 5))


def test_a_discrete_latent_without_enumeration_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        count = pyro.sample("count", dist.Poisson(3.0))
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(count * x[:, 0], 1.0), obs=y)

    with pytest.raises(ValueError, match="site 'count' is discrete"):
        quick(model)


def test_arrays_of_any_strides_are_data() -> None:
    assert quick(model_of(normal), X.numpy()[::-1], Y.numpy()[::-1]) == []


@pytest.mark.parametrize("kind", ["another byte order", "a mask that masks nothing", "requires_grad"])
def test_data_that_are_only_written_otherwise_are_taken(kind: str) -> None:
    given: dict[str, Any] = {
        "another byte order": X.numpy().astype(">f4"),
        "a mask that masks nothing": np.ma.masked_invalid(X.numpy()),
        "requires_grad": X.clone().requires_grad_(),
    }
    right, run = (ps.anneal(model_of(normal), (x, Y), QUICK, 20, num_draws=1, progress=False) for x in (X, given[kind]))
    assert torch.equal(run.positions, right.positions)
    copy.deepcopy(run)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ma.masked_greater(X.numpy(), 2.0), ValueError, r"data\[0\] must have no masked values, got \d of them"),
        (X.numpy().astype(str), TypeError, r"data\[0\] must hold numbers, got an array of <U"),
        (X.numpy().astype(object), TypeError, r"data\[0\] must hold numbers, got an array of object"),
        (X.to_sparse(), TypeError, r"data\[0\] must be dense, got torch.sparse_coo"),
    ],
)
def test_data_that_are_no_dense_numbers_are_named(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quick(model_of(normal), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": 1_000}, "schedule must be a PriorAnnealing, got 1000"),
        ({"batch_size": 10.0}, "batch_size must be a whole number, got 10.0"),
    ],
)
def test_arguments_of_another_kind_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quick(model_of(normal), **options)


def test_the_kernel_names_its_batch_size() -> None:
    with pytest.raises(TypeError, match=r"batch_size must be a whole number, got 10\.0"):
        ps.SGHMC(model_of(normal), step_size=1e-5, batch_size=10.0).setup(1, X, Y)  # type: ignore[arg-type]


@pytest.mark.parametrize("drops", [5_000, (-5,), (2.5,)])
def test_learning_rate_drops_are_steps(drops: Any) -> None:
    with pytest.raises(ValueError, match="learning_rate_drops must be a tuple of steps"):
        ps.PriorAnnealing(learning_rate_drops=drops)


def test_select_wants_a_run_with_something_to_select() -> None:
    def plain(x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x[:, 0], sigma), obs=y)

    run = ps.anneal(plain, (X, Y), QUICK, num_draws=2, progress=False)
    with pytest.raises(ValueError, match="with a spike-and-slab site, got one of 'sigma': is the network made with"):
        ps.select(run)
    for verb in (ps.select, ps.mipp):
        with pytest.raises(TypeError, match="run must be a Run of anneal, got str"):
            verb("run")  # type: ignore[operator]
    with pytest.raises(TypeError, match="source must be a Fit or several, or one Run for predict, got int"):
        ps.predict(3, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source must be a Fit or several, or one Run for predict, got int"):
        ps.partial_dependence(3, X, 0, [0.0])  # type: ignore[arg-type]


def test_offsets_may_be_an_array() -> None:
    net, share = ps.SparseNet([3, 2]), np.array([0.3, 0.7])
    for offset in (np.log(share), torch.as_tensor(share).log()):
        assert callable(ps.regression_model(net, 60, "categorical", offset=offset))  # type: ignore[arg-type]


def test_an_error_of_a_run_survives_another_process() -> None:
    error = ps.NonFiniteError("the gradient became NaN", 7, {"w": torch.ones(2)})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step) == ("the gradient became NaN", 7) and torch.equal(again.values["w"], torch.ones(2))


def test_scalar_parameters_have_a_default_prior_and_move() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * self.linear(x)

    module = Scaled()
    priors = ps.default_prior(module, 60)
    assert set(priors) == {"gain", "linear.weight", "linear.bias"}
    moved = ps.sparsify(module, priors).double()
    assert all(law.spike_scale.dtype == torch.float64 for law in moved.priors.values())


def test_a_sparse_convolution_is_the_plain_one() -> None:
    torch.manual_seed(0)
    layer = ps.SparseConv2d(3, 4, 3, padding=1, name="conv")
    images = torch.randn(2, 3, 5, 5)
    assert torch.equal(layer(images), layer.module(images)) and layer.module.weight.shape == (4, 3, 3, 3)


def test_a_factor_is_no_response() -> None:
    torch.manual_seed(0)
    net = ps.SparseNet([3, 4, 1])

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        pyro.factor("pull", -0.5 * net(torch.zeros(1, 3)).square().sum())
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    schedule = ps.PriorAnnealing(2, 2, 2, 0, 8, learning_rate=1e-3)
    run = ps.anneal(model, (X, Y), schedule, num_draws=8, progress=False)
    assert run.spec.observed == ("pull", "y") and run.spec.responses == ("y",)
    assert ps.predict(run, X)["mean"].sizes["row"] == 60
    assert ps.refit(run, ps.select(run)).response.site == "y"
    assert "mean[0]" in ps.diagnose(run).table["quantity"].values
    assert list(ps.to_arviz(run, ["log_likelihood"])["log_likelihood"].data_vars) == ["y"]


def test_rows_that_do_not_count_may_hold_anything() -> None:
    counted = torch.arange(60) % 2 == 0
    y = torch.where(counted, 2.0, -1.0)
    for masked in (lambda law, m: law.mask(m), lambda law, m: law):
        net = ps.SparseNet([3, 4, 1])

        def model(x: Tensor, y: Tensor, m: Tensor, net: Any = net, masked: Any = masked) -> None:
            mean = net(x).squeeze(-1)
            with pyro.plate("data", 60, subsample_size=len(x)), pyro.poutine.mask(mask=m):
                pyro.sample("y", masked(dist.Poisson(mean.exp(), validate_args=False), m), obs=y)

        ps.anneal(model, (X, y, counted), QUICK, 20, num_draws=2, progress=False)


def test_what_is_loaded_is_not_warned_of_again(tmp_path: Any) -> None:
    """One row, which stands for all where a fit is loaded, says nothing of scales."""
    model, x = model_of(normal), torch.cat([torch.full((1, 3), 0.05), X[1:]])
    run = ps.anneal(model, (x, Y), QUICK, num_draws=2, progress=False)
    ps.refit(run, ps.select(run, 1e-9)).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.Fit.load(tmp_path, model, (x[:1], Y[:1]))


def test_rows_of_batches_are_gathered_from_memory_in_rows() -> None:
    columns = X.T.contiguous().T
    runs = [ps.anneal(model_of(normal), (x, Y), QUICK, 20, num_draws=1, progress=False) for x in (X, columns)]
    assert torch.equal(runs[0].positions, runs[1].positions)
    assert [run.spec.data[0].is_contiguous() for run in runs] == [True, True]
    assert runs[0].spec.data[0] is X


def test_rows_in_one_piece_stay_where_they_are() -> None:
    images = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for data in (
        images,
        torch.zeros(1, 3).expand(4, 3),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(4),
        torch.zeros(1, 3).T,
    ):
        assert row_major(data) is data
