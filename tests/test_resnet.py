"""The residual networks for CIFAR: their sizes, what they compute, how they start."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import pyro_sparse as ps


def with_other_statistics(net: nn.Module) -> nn.Module:
    """Batch normalisation as after some training, so that no statistic or scale is neutral."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            for values in (part.weight, part.running_var):
                values.data = torch.rand(part.num_features) + 0.5
            for values in (part.bias, part.running_mean):
                values.data = torch.randn(part.num_features)
    return net


def forward_by_hand(net: nn.Module, images: Tensor, training: bool = False) -> Tensor:
    """Section 4.2 of the paper on ResNets, written out with the tensors of the state."""
    state = net.state_dict()

    def convolved(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        kernel = state[f"{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        mean, var = state[f"{norm}.running_mean"], state[f"{norm}.running_var"]
        if training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        scale = state[f"{norm}.weight"] / (var + 1e-5).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + state[f"{norm}.bias"][:, None, None]

    x = convolved(images, "conv1", "bn1").clamp(min=0)
    for group in (1, 2, 3):
        block = 0
        while f"layer{group}.{block}.conv1.weight" in state:
            name, stride = f"layer{group}.{block}", 2 if group > 1 and block == 0 else 1
            inner = convolved(x, f"{name}.conv1", f"{name}.bn1", stride).clamp(min=0)
            inner = convolved(inner, f"{name}.conv2", f"{name}.bn2")
            if f"{name}.shortcut.conv.weight" in state:
                x = convolved(x, f"{name}.shortcut.conv", f"{name}.shortcut.bn", stride)
            x = (inner + x).clamp(min=0)
            block += 1
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize(("depth", "number"), [(20, 272_474), (32, 466_906), (44, 661_338), (56, 855_770)])
def test_sizes(depth: int, number: int) -> None:
    """Those of 20 and 32 layers are the published ones; six layers more are six convolutions of each width."""
    assert sum(p.numel() for p in ps.resnet(depth).parameters()) == number


def test_layers_have_the_usual_names() -> None:
    names = [name for name, _ in ps.resnet(8).named_parameters()]
    block = ["conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias"]
    shortcut = ["shortcut.conv.weight", "shortcut.bn.weight", "shortcut.bn.bias"]
    assert names == [
        *["conv1.weight", "bn1.weight", "bn1.bias"],
        *[f"layer1.0.{name}" for name in block],
        *[f"layer{group}.0.{name}" for group in (2, 3) for name in block + shortcut],
        *["fc.weight", "fc.bias"],
    ]


@pytest.mark.parametrize("training", [False, True])
def test_forward_is_that_of_the_paper(training: bool) -> None:
    net = with_other_statistics(ps.resnet(14, num_classes=7, width=4, in_channels=2)).double().train(training)
    images = torch.randn(5, 2, 16, 16, dtype=torch.float64)
    expected = forward_by_hand(net, images, training)
    assert expected.shape == (5, 7)
    torch.testing.assert_close(net(images), expected)


def test_resolution_is_halved_twice() -> None:
    net, shapes = ps.resnet(8, width=4), []
    for group in (net.layer1, net.layer2, net.layer3):
        group.register_forward_hook(lambda part, given, out: shapes.append(tuple(out.shape)))
    net(torch.zeros(2, 3, 32, 32))
    assert shapes == [(2, 4, 32, 32), (2, 8, 16, 16), (2, 16, 8, 8)]


def test_torch_fx_follows_it() -> None:
    net = with_other_statistics(ps.resnet(8, width=4)).eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(images), net(images), rtol=0, atol=0)


@pytest.mark.parametrize("training", [False, True])
def test_many_networks_at_once(training: bool) -> None:
    """Outputs and advanced statistics of chains side by side are those of each alone."""
    nets = [with_other_statistics(ps.resnet(8, width=4)).double().train(training) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(nets)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        own = {name: value.clone() for name, value in buffers.items()}
        return torch.func.functional_call(nets[0], (parameters, own), (images,)), own

    together, advanced = torch.func.vmap(call)(parameters, buffers)
    for number, net in enumerate(nets):
        torch.testing.assert_close(together[number], net(images))
        for name, value in net.named_buffers():
            torch.testing.assert_close(advanced[name][number], value)


def test_a_fresh_chain_starts_every_part_anew() -> None:
    """Starts of chains call reset_parameters of each part, in this order.

    Convolutions: variance 2 / (kernel area × output channels) by chi-square, and normal by Kolmogorov-Smirnov, over 15
    layers; the last layer: uniform. False alarms: 31 tests of 1e-5.
    """
    net = ps.resnet(14)
    for values in net.state_dict().values():
        values.fill_(7)
    for part in net.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, part in net.named_modules():
        if isinstance(part, nn.Conv2d):
            std = (2 / (part.kernel_size[0] ** 2 * part.out_channels)) ** 0.5
            scores = (part.weight.detach().double() / std).flatten().numpy()
            tail = stats.chi2(len(scores)).cdf((scores**2).sum())
            assert 5e-6 < tail < 1 - 5e-6, name
            assert stats.kstest(scores, "norm").pvalue > 1e-5, name
        if isinstance(part, nn.BatchNorm2d):
            for values, start in ((part.weight, 1), (part.bias, 0), (part.running_mean, 0), (part.running_var, 1)):
                assert (values == start).all(), name
            assert part.num_batches_tracked == 0
    scores = (net.fc.weight.detach() * 8).flatten().numpy()  # of fan-in 64, within ± 1/8
    assert stats.kstest(scores, "uniform", args=(-1, 2)).pvalue > 1e-5
    assert net.fc.bias.abs().max() <= 1 / 8


def test_every_parameter_can_be_sparse() -> None:
    net = ps.resnet(8, width=4)
    sparse = ps.sparsify(net, ps.SpikeSlab(0.1, 0.01, 0.3))
    assert list(sparse.sparse_names) == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize("depth", [2, 9, 18, 21, -4])
def test_depth_must_be_six_n_plus_two(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth must be 6 n \+ 2 with n >= 1 .*, got {depth}"):
        ps.resnet(depth)


@pytest.mark.parametrize("name", ["num_classes", "width", "in_channels"])
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        ps.resnet(8, **{name: 0})
