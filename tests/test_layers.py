"""A sparse module is a plain module outside of handlers and a set of spike-and-slab sites inside of them."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import AutoDelta
from pyro.nn import PyroModule
from torch import Tensor, nn

import pyro_sparse as ps

PRIOR = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5)
SITES = ["layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"]
X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Plain(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Probabilistic(PyroModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def make(prior: Any = PRIOR, **options: Any) -> ps.SparseNet:
    return ps.SparseNet([3, 2, 1], prior=prior, **options)


def sites(model: Callable[..., Any], *args: Any) -> dict[str, Any]:
    nodes = poutine.trace(model).get_trace(*args).nodes
    return {name: node for name, node in nodes.items() if node["type"] in ("sample", "param")}


def twins() -> tuple[ps.SparseModule, nn.Module]:
    """A sparse network and the plain one it came from."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    return ps.sparsify(module, PRIOR), module


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid", "gelu", "silu", "elu", "softplus"])
def test_outside_of_handlers_it_is_the_plain_forward(activation: str) -> None:
    net = make(activation=activation)
    first, function, second = net.module
    right = second(getattr(torch.nn.functional, activation)(first(X)))
    assert torch.equal(net(X), right)
    assert torch.equal(net(X), net.module(X))
    assert not poutine.trace(net.module).get_trace(X).stochastic_nodes
    assert list(net.state_dict()) == SITES and isinstance(function, nn.Module)


def test_sparse_linear_is_a_linear_layer() -> None:
    layer = ps.SparseLinear(3, 2, prior=PRIOR)
    assert torch.equal(layer(X), nn.functional.linear(X, layer.module.weight, layer.module.bias))
    assert list(sites(layer, X)) == ["weight", "bias"]
    plain = nn.Linear(3, 2)
    assert layer.load_state_dict(plain.state_dict()) == ([], []) and torch.equal(layer(X), plain(X))
    assert list(ps.SparseLinear(3, 2, bias=False).state_dict()) == ["weight"]


def test_under_a_handler_its_weights_are_sites_of_the_prior() -> None:
    net = make()
    nodes = sites(net, X)
    assert list(nodes) == SITES and all(node["type"] == "sample" for node in nodes.values())
    for name, node in nodes.items():
        assert isinstance(node["fn"].base_dist, ps.SpikeSlab)
        assert node["fn"].batch_shape == () and node["value"].shape == net.module.get_parameter(name).shape
        assert torch.allclose(node["fn"].log_prob(node["value"]), PRIOR.log_prob(node["value"]).sum())


def test_the_drawn_weights_are_the_ones_that_act() -> None:
    net = make()
    values = {name: torch.randn_like(p) for name, p in net.module.named_parameters()}
    right = copy.deepcopy(net.module)
    right.load_state_dict(values)
    assert torch.equal(poutine.condition(net, values)(X), right(X))
    assert not torch.equal(net(X), right(X))


@pytest.mark.parametrize("parent", [Plain, Probabilistic, lambda net: net])
def test_state_dict_is_the_plain_modules(parent: Callable[[nn.Module], nn.Module]) -> None:
    sparse, module = twins()
    ours, plain = parent(sparse), parent(module)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for p in plain.state_dict().values():
        p.copy_(torch.full(p.shape, 2))
    for strict in (True, False):
        assert ours.load_state_dict(plain.state_dict(), strict=strict) == ([], [])
    assert plain.load_state_dict(ours.state_dict()) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))
    assert float(sparse.module[3].weight.detach()[0, 0]) == 2.0


@pytest.mark.parametrize("parent", [Plain, Probabilistic, lambda net: net])
def test_a_state_dict_that_does_not_fit_is_refused(parent: Callable[[nn.Module], nn.Module]) -> None:
    ours = parent(twins()[0])
    missing, unexpected, wrong = (dict(ours.state_dict()) for _ in range(3))
    key = next(k for k in missing if k.endswith("0.weight"))
    del missing[key]
    unexpected[key.replace("0.weight", "0.other")] = torch.ones(1)
    wrong[key] = torch.ones(7)
    for state, message in ((missing, "Missing key"), (unexpected, "Unexpected key"), (wrong, "size mismatch")):
        with pytest.raises(RuntimeError, match=message):
            ours.load_state_dict(state)


@pytest.mark.parametrize("parent", [Plain, Probabilistic, lambda net: net])
def test_parameters_and_buffers_are_the_plain_modules(parent: Callable[[nn.Module], nn.Module]) -> None:
    sparse, module = twins()
    ours, plain = parent(sparse), parent(module)
    for listing in ("named_parameters", "named_buffers"):
        got, right = dict(getattr(ours, listing)()), dict(getattr(plain, listing)())
        assert list(got) == list(right)
        assert all(torch.equal(got[name], right[name]) for name in right if "head" not in name)
    assert len(list(ours.parameters())) == len(list(plain.parameters()))
    ours.requires_grad_(False)
    assert not any(p.requires_grad for p in ours.parameters())


def test_a_plain_optimiser_trains_it() -> None:
    net = make()
    before = [p.detach().clone() for p in net.parameters()]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    net(X).square().sum().backward()
    optimiser.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, net.module.parameters(), strict=True))
    net.zero_grad()
    assert all(p.grad is None for p in net.module.parameters())


@pytest.mark.parametrize("parent", [Plain, Probabilistic, lambda net: net])
def test_to_moves_weights_and_hyper_parameters(parent: Callable[[nn.Module], nn.Module]) -> None:
    net = make()
    parent(net).to(torch.float64)
    assert all(p.dtype is torch.float64 for p in net.module.parameters())
    assert all(law.sample().dtype is law.spike_scale.dtype is torch.float64 for law in net.priors.values())
    assert all(node["value"].dtype is torch.float64 for node in sites(net, X.double()).values())
    net.float()
    assert all(node["value"].dtype is torch.float32 for node in sites(net, X).values())
    assert PRIOR.slab_scale.dtype is torch.float32


@pytest.mark.parametrize("parent", [Plain, Probabilistic, lambda net: net])
def test_train_and_eval_reach_the_plain_module(parent: Callable[[nn.Module], nn.Module]) -> None:
    sparse, _ = twins()
    whole = parent(sparse)
    whole.eval()
    assert not any(part.training for part in sparse.module.modules())
    whole.train()
    assert all(part.training for part in sparse.module.modules())


def test_apply_reaches_every_part_once() -> None:
    net, seen = make(), []
    net.apply(seen.append)
    assert [part for part in seen if part is not net] == [*net.module, net.module]


@pytest.mark.parametrize("prior", [PRIOR, None])
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_are_independent_and_the_same(how: str, prior: ps.SpikeSlab | None) -> None:
    net = make(prior, name="net")
    if how == "deepcopy":
        twin = copy.deepcopy(net)
    else:
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert torch.equal(twin(X), net(X)) and twin.sparse_names == net.sparse_names
    with torch.no_grad():
        twin.module[0].weight.zero_()
    assert not torch.equal(twin(X), net(X))
    if prior is not None:
        assert list(sites(twin, X)) == list(sites(net, X)) == [f"net.{name}" for name in SITES]


def test_a_second_call_in_one_trace_reuses_the_weights() -> None:
    net = make()

    def model() -> tuple[Tensor, Tensor]:
        return net(X), net(X)

    trace = poutine.trace(model).get_trace()
    first, second = trace.nodes["_RETURN"]["value"]
    assert torch.equal(first, second)
    assert len(trace.stochastic_nodes) == len(SITES)
    assert not torch.equal(first, poutine.trace(model).get_trace().nodes["_RETURN"]["value"][0])


@pytest.mark.parametrize("where", [lambda name, parameter: True, lambda name, parameter: "weight" in name])
def test_two_bare_networks_clash_unless_named(where: Callable[[str, nn.Parameter], bool]) -> None:
    plain = nn.Linear(3, 1)
    first, second, named = (ps.sparsify(plain, PRIOR, where, name=name) for name in ("", "", "other"))
    with pytest.raises(ValueError, match=r"two networks use the site name 'weight': give one of them a name="):
        poutine.trace(lambda: first(X) + second(X)).get_trace()
    nodes = sites(lambda: first(X) + named(X))
    assert list(nodes) == ["weight", "bias", "other.weight", "other.bias"]


def test_a_network_with_flat_parameters_may_be_called_twice_in_one_model() -> None:
    law = ps.SpikeSlab(0.5, 0.1, 1.0, 0.2)
    net, other = (ps.sparsify(nn.Linear(2, 1), law, where=lambda name, _: name == "weight") for _ in range(2))
    x = torch.ones(3, 2)
    trace = pyro.poutine.trace(lambda: net(x) + net(x)).get_trace()
    weight, bias = trace.nodes["weight"]["value"], trace.nodes["bias"]["value"]
    assert torch.allclose(trace.nodes["_RETURN"]["value"], 2 * (x @ weight.T + bias))
    with pytest.raises(ValueError, match="two networks use the site name"):
        pyro.poutine.trace(lambda: net(x) + other(x)).get_trace()


def test_the_site_of_a_network_may_not_be_taken_by_another_statement() -> None:
    net = ps.SparseLinear(3, 1, prior=PRIOR)

    def model() -> Tensor:
        pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0))
        return net(X)

    with pytest.raises(ValueError, match="site name 'weight'"):
        poutine.trace(model).get_trace()


def test_as_a_child_of_a_pyro_module_its_sites_have_full_names() -> None:
    nodes = sites(Probabilistic(Probabilistic(make())), X)
    assert list(nodes) == [f"net.net.{name}" for name in SITES]
    assert all(node["type"] == "sample" for node in nodes.values())


def test_as_a_child_of_a_plain_module_its_sites_have_its_own_name() -> None:
    parent = Plain(make(name="inner"))
    assert list(sites(parent, X)) == [f"inner.{name}" for name in SITES]
    assert torch.equal(parent(X), parent.head(parent.net.module(X)))


def test_sparsify_copies_and_keeps_the_weights() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    before = copy.deepcopy(module.state_dict())
    net = ps.sparsify(module, PRIOR)
    assert torch.equal(net(X), module(X))
    with torch.no_grad():
        net.module[0].weight.zero_()
    net.double()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert list(sites(net, X.double())) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_parameters_left_out_are_param_sites_without_a_prior() -> None:
    asked = []

    def where(name: str, parameter: nn.Parameter) -> bool:
        asked.append((name, tuple(parameter.shape)))
        return name.endswith("weight")

    net = ps.sparsify(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), PRIOR, where=where)
    nodes = sites(net, X)
    assert asked == [("0.weight", (2, 3)), ("0.bias", (2,)), ("2.weight", (1, 2)), ("2.bias", (1,))]
    assert {name: node["type"] for name, node in nodes.items()} == {
        "0.weight": "sample",
        "0.bias": "param",
        "2.weight": "sample",
        "2.bias": "param",
    }
    assert torch.equal(nodes["0.bias"]["value"], net.module[0].bias)


def test_tied_weights_are_one_site() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    net = ps.sparsify(module, PRIOR)
    value = torch.randn(3, 3)
    assert list(sites(net, X)) == ["0.weight"]
    assert torch.allclose(poutine.condition(net, {"0.weight": value})(X), torch.tanh(X @ value.T) @ value.T)


def test_a_dict_gives_each_parameter_its_own_prior() -> None:
    wide = ps.SpikeSlab(0.5, torch.tensor([[0.1], [0.2]]), 2.0)
    net = make({"layer1.weight": wide, "layer2.bias": PRIOR})
    value = torch.randn(2, 3)
    assert torch.allclose(net.site_law("layer1.weight").log_prob(value), wide.log_prob(value).sum())
    assert torch.allclose(net.site_law("layer2.bias").log_prob(torch.ones(1)), PRIOR.log_prob(torch.ones(1)))
    with pytest.raises(ValueError, match=r"the prior of site 'layer1.bias' is unset.*ps\.default_prior"):
        sites(net, X)


def test_an_unset_prior_is_an_error_under_any_other_inference() -> None:
    net = make(None, name="net")

    def model() -> None:
        pyro.sample("y", dist.Normal(net(X).sum(), 1.0), obs=torch.tensor(0.5))

    message = r"the prior of site 'net.layer1.weight' is unset: pass prior=ps.default_prior\(module, num_data\)"
    for use in (
        lambda: sites(model),
        lambda: MCMC(NUTS(model), num_samples=1, disable_progbar=True).run(),
        lambda: AutoDelta(model)(),
        lambda: sites(ps.annealed(0.5)(model)),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert torch.equal(net(X), net.module(X))


def test_default_prior_fits_what_the_message_asks_for() -> None:
    module = make(None).module
    net = ps.sparsify(module, ps.default_prior(module, 1000))
    assert list(sites(net, X)) == SITES


def test_a_plate_around_the_network_is_refused() -> None:
    """It would multiply the prior by the plate's size, in silence where the values are given."""
    net = make()

    def model() -> None:
        with pyro.plate("rows", 4, dim=-1):
            net(X)

    values = dict(net.module.named_parameters())
    for wrapped in (model, poutine.condition(model, values)):
        with pytest.raises(ValueError, match=r"the network of site 'layer1.weight' is called inside plate 'rows'"):
            poutine.trace(wrapped).get_trace()


def test_more_than_one_draw_at_a_time_is_refused() -> None:
    net = make()
    values = {name: p.detach().expand(5, 1, *p.shape) for name, p in net.module.named_parameters()}
    with pytest.raises(
        ValueError, match=r"site 'layer1.weight' drew a value of shape .*networks take one draw at a time"
    ):
        poutine.condition(net, values)(X)
    with pytest.raises(ValueError, match="inside plate '_num_predictive_samples'"):
        Predictive(lambda: net(X), posterior_samples=values, parallel=True)()


@pytest.mark.parametrize("bad", [torch.relu, None, "net", make()])
def test_sparsify_takes_plain_modules_only(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"module must be a plain torch.nn.Module, got"):
        ps.sparsify(bad, PRIOR)


def test_where_must_choose_a_parameter() -> None:
    with pytest.raises(ValueError, match="where must choose at least one parameter"):
        ps.sparsify(nn.Linear(3, 1), PRIOR, where=lambda name, parameter: False)
    with pytest.raises(ValueError, match="where must choose at least one parameter"):
        ps.sparsify(nn.ReLU(), PRIOR)


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (
            {"layer1.wieght": PRIOR},
            ValueError,
            r"prior must name sparse parameters of the module.*got \['layer1.wieght'\]",
        ),
        (0.5, TypeError, r"prior must be a SpikeSlab, a mapping from parameter names to SpikeSlab, or None, got 0.5"),
        (PRIOR.expand([5, 7]), ValueError, r"prior of 'layer1.weight' must broadcast to .*\(2, 3\), got \(5, 7\)"),
        (
            {"layer2.bias": PRIOR.expand([4, 1])},
            ValueError,
            r"prior of 'layer2.bias' must broadcast .*\(1,\), got \(4, 1\)",
        ),
        ({"layer2.bias": dist.Normal(0.0, 1.0)}, TypeError, r"prior of 'layer2.bias' must be a SpikeSlab, got Normal"),
    ],
)
def test_priors_that_do_not_fit(prior: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(prior)


@pytest.mark.parametrize("sizes", [[], [3], [3, 0], [3, -1, 1], [3, float("nan")]])
def test_sizes_are_at_least_two_widths(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes must list at least two widths >= 1, got"):
        ps.SparseNet(sizes)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of tanh, relu, .*, got 'tanhh'"):
        ps.SparseNet([3, 1], activation="tanhh")


def test_printing_shows_the_network() -> None:
    assert "4 spike-and-slab sites" in repr(make()) and "Linear(in_features=3, out_features=2" in repr(make())
