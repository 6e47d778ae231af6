"""A network without its dead channels computes the same function, from really smaller layers."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_sparse.inference.channels import compact_channels
from pyro_sparse.inference.structure import prune
from pyro_sparse.models.resnet import resnet


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, *shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def thinned(module: nn.Module, seed: int, shape: tuple[int, ...], density: float = 0.5) -> nn.Module:
    """The module pruned at random, with random statistics; of most layers the second half of the inputs is never read."""
    generator = torch.Generator().manual_seed(seed)
    values, masks = {}, {}
    for name, p in module.named_parameters():
        masks[name] = torch.rand(p.shape, generator=generator) < (density if p.dim() > 1 else 0.9)
        if p.dim() > 1 and p.shape[1] > 3:
            masks[name][:, p.shape[1] // 2 :] = False
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        scale = max(1.0, p[0].numel() * density / 2) ** -0.5 if p.dim() > 1 else 1.0
        values[name] = masks[name] * (noise.abs() + 0.2).copysign(noise) * scale
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    module.load_state_dict(prune(module, values, masks, (), shape)[0], strict=False)
    return module.eval()


def outputs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(x)
    return found


def compacted(module: nn.Module, *shape: int, tolerance: float = 1e-10) -> nn.Module:
    """The small network, which computes the same as ``module``, has its names, and leaves it as it was."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    small = compact_channels(module, shape)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert {name for name, _ in small.named_parameters()} == {name for name, _ in module.named_parameters()}
    assert not small.training
    x = images(*shape, dtype=next(module.parameters()).dtype)
    right = outputs(module, x)
    assert (outputs(small, x) - right).abs().max() <= tolerance * right.abs().max()
    return small


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Network(nn.Module):
    """Two convolutions around one thing in question, on images (2, 6, 6), and averages of what comes out."""

    def __init__(self, middle: nn.Module | Callable[[Tensor], Tensor], inner: int = 6, last: nn.Module | None = None):
        super().__init__()
        self.first = nn.Conv2d(2, inner, 3)
        self.middle = middle
        self.last = last or nn.Conv2d(inner, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def with_zeros(module: nn.Module, **channels: list[int]) -> nn.Module:
    """In double precision; the weights at the given input channels of each named layer are zero."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for name, unread in channels.items():
            module.get_submodule(name).weight[:, unread] = 0.0
    return module


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (lambda: resnet(8, width=8), (3, 12, 12)),
    "deep residual": (lambda: resnet(20, width=6), (3, 8, 8)),
    "bottlenecks": (
        lambda: torchvision.models.ResNet(
            torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=5, width_per_group=16
        ),
        (3, 32, 32),
    ),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), (3, 32, 32)),
    "mobilenet": (lambda: torchvision.models.mobilenet_v2(num_classes=5, width_mult=0.35), (3, 32, 32)),
    "concatenated": (lambda: torchvision.models.DenseNet(8, (2, 2), 8, num_classes=5), (3, 32, 32)),
    "flattened": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 16, 3), nn.Hardswish(), nn.AdaptiveAvgPool2d(3), nn.Dropout2d()),
            *(nn.Flatten(), nn.Linear(16 * 9, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3)),
        ),
        (3, 12, 12),
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_pruned_network_gets_smaller_and_computes_the_same(kind: str) -> None:
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    module = thinned(make().double(), 0, shape)
    varies = outputs(module, images(*shape)).std(0).max()
    small = compacted(module, *shape)
    assert varies > 1e-3, "the network is constant: no test of anything"
    assert size(small) < 0.7 * size(module)
    compacted(thinned(make(), 1, shape), *shape, tolerance=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_at_any_sparsity_and_without_prune_the_function_stays(seed: int) -> None:
    torch.manual_seed(seed)
    module = resnet(8, width=5).double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * (torch.rand_like(p) < (0.02, 0.1, 0.3, 0.6, 1.0)[seed % 5]))
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5 * name.endswith("var"))
    small = compacted(module, 3, 8, 8)
    again = compacted(small, 3, 8, 8)
    assert size(again) <= size(small) <= size(module)


def test_sizes_are_those_of_the_channels_that_are_read() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    module = with_zeros(module, **{"3": [0, 3]})
    with torch.no_grad():
        module[5].weight.unflatten(1, (4, 4))[:, 2] = 0.0
    small = compacted(module, 2, 6, 6)
    shapes = {name: tuple(p.shape) for name, p in small.named_parameters()}
    assert shapes == {
        **{"0.weight": (3, 2, 3, 3), "0.bias": (3,), "1.weight": (3,), "1.bias": (3,)},
        **{"3.weight": (3, 3, 3, 3), "3.bias": (3,), "5.weight": (3, 12), "5.bias": (3,)},
    }
    conv, norm, linear = small.get_submodule("3"), small.get_submodule("1"), small.get_submodule("5")
    assert (conv.in_channels, conv.out_channels, norm.num_features) == (3, 3, 3)
    assert (linear.in_features, linear.out_features) == (12, 3)
    assert torch.equal(conv.weight, module[3].weight[[0, 1, 3]][:, [1, 2, 4]])
    assert torch.equal(norm.running_var, module[1].running_var[[1, 2, 4]]) and norm.num_batches_tracked == 0


class Skip(nn.Module):
    """x + f(x), read by one layer, on images (2, 6, 6)."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(2, 5, 1, bias=False), nn.BatchNorm2d(5)
        self.branch, self.norm = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.last, self.join = nn.Linear(5, 2), join

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm0(self.stem(x)))
        return self.last(self.join(self.norm(self.branch(x)), x).mean((2, 3)))


def test_a_channel_that_a_skip_carries_stays_until_nobody_reads_it() -> None:
    module = with_zeros(Skip(), branch=[0, 1, 2])
    assert size(compacted(module, 2, 6, 6)) == size(module)  # the sum is read
    module = with_zeros(Skip(), branch=[0, 1, 2], last=[1, 2, 4])  # 0 and 3 by the last layer, 3 and 4 by the branch
    small = compacted(module, 2, 6, 6)
    assert small.get_submodule("stem").out_channels == small.get_submodule("branch").out_channels == 3
    assert torch.equal(small.get_submodule("last").weight, module.last.weight[:, [0, 3, 4]])


def joined_in_place(first: Tensor, second: Tensor) -> Tensor:
    first += second
    return first


@pytest.mark.parametrize(
    ("join", "gone"),
    [
        *((torch.add, 1), (torch.sub, 1), (torch.maximum, 1), (joined_in_place, 1), (lambda a, b: a.add_(b), 1)),
        *((torch.mul, 2), (lambda a, b: a * b, 2), (lambda a, b: a.mul(b), 2)),
        *((lambda a, b: torch.cat([a, b], 1)[:, :, :3], 4), (lambda a, b: torch.cat((a, b), dim=-3), 4)),
        *((lambda a, b: torch.cat([a, b], 2), 0), (torch.atan2, 0)),
    ],
)
def test_a_channel_goes_where_it_is_zero_whoever_reads_it(join: Callable[[Tensor, Tensor], Tensor], gone: int) -> None:
    """Channels 0 and 1 of the branch, 1 and 2 of the stem are zero: of a sum 1 is, of a product all
    three, but the branch reads 0; of a list four."""
    module = with_zeros(Skip(join))
    if gone == 4:
        module.last = nn.Linear(10, 2).double()
    with torch.no_grad():
        for norm, channels in ((module.norm, [0, 1]), (module.norm0, [1, 2])):
            norm.weight[channels], norm.bias[channels] = 0.0, 0.0
    small = compacted(module, 2, 6, 6)
    widths = small.get_submodule("stem").out_channels, small.get_submodule("branch").out_channels
    if gone == 4:
        assert widths == (3, 3) and small.get_submodule("last").in_features == 6
    else:
        assert widths == (5 - gone, 5 - gone)


def with_zero_filters(middle: Any, bias: float = 0.0) -> nn.Module:
    module = with_zeros(Network(middle))
    with torch.no_grad():
        module.first.weight[:3], module.first.bias[:3] = 0.0, bias
    return module


@pytest.mark.parametrize(
    "middle",
    [
        *(nn.BatchNorm2d(6), nn.Sigmoid(), nn.Softplus(), nn.Conv2d(6, 6, 3, groups=6), torch.exp),
        *(lambda x: x + 1.0, lambda x: 1 - x, lambda x: x + x.size(0), lambda x: F.pad(x, [1, 1], value=2.0)),
    ],
)
def test_a_channel_that_is_constant_but_not_zero_stays(middle: Any) -> None:
    assert compacted(with_zero_filters(middle), 2, 6, 6).get_submodule("first").out_channels == 6


@pytest.mark.parametrize(
    "middle",
    [
        *(nn.ReLU(), nn.Tanh(), nn.Conv2d(6, 6, 3, groups=6, bias=False), F.hardswish),
        *(lambda x: 2.0 * x, lambda x: x / 3, lambda x: F.pad(x, [1, 1, 0, 2])),
    ],
)
def test_a_channel_that_is_zero_after_its_map_goes(middle: Any) -> None:
    assert compacted(with_zero_filters(middle), 2, 6, 6).get_submodule("first").out_channels == 3
    assert compacted(with_zero_filters(middle, 0.5), 2, 6, 6).get_submodule("first").out_channels == 6


def test_what_changes_in_place_is_read_as_changed() -> None:
    class Changed(Network):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.add_(self.middle(x))
            return self.last(x)

    module = with_zeros(Changed(nn.Sigmoid()))
    with torch.no_grad():
        module.first.weight[:3], module.first.bias[:3] = 0.0, 0.0
    assert compacted(module, 2, 6, 6).get_submodule("first").out_channels == 6


@pytest.mark.parametrize(
    "middle",
    [
        *(nn.Identity(), nn.ReLU(inplace=True), nn.GELU(), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.AvgPool2d(2)),
        *(nn.AdaptiveMaxPool2d(2), nn.Upsample(scale_factor=2), nn.Dropout(), nn.ZeroPad2d(1)),
        *(nn.Conv2d(6, 6, 3, groups=6), F.relu6, lambda x: x.relu(), lambda x: x.abs().clamp(max=2.0)),
        *(lambda x: F.max_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, (2, 1)), lambda x: x[:, :, ::2, 1:]),
        *(
            lambda x: x.mean((-2, -1), keepdim=True),
            lambda x: x.amax(3, keepdim=True),
            lambda x: x.mean(3).unsqueeze(3),
        ),
        lambda x: F.interpolate(x, scale_factor=2.0),
    ],
)
def test_channels_go_through_what_takes_each_alone(middle: Any) -> None:
    module = with_zeros(Network(middle), last=[1, 4])
    keeps_all = "unsqueeze" in getattr(
        getattr(middle, "__code__", None), "co_names", ()
    )  # an operation that is not known
    assert compacted(module, 2, 6, 6).get_submodule("first").out_channels == (6 if keeps_all else 4)


class Standardised(nn.Conv2d):
    """Of weights that each depend on all."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Hooked(nn.Conv2d):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_forward_hook(lambda part, args, result: result.cumsum(1))


def hooked_map() -> nn.Module:
    part = nn.ReLU()
    part.register_forward_hook(lambda part, args, result: result.cumsum(1))
    return part


@pytest.mark.parametrize(
    "middle",
    [
        *(
            nn.Linear(4, 4),
            nn.GroupNorm(2, 6),
            nn.Conv2d(6, 6, 1, groups=2),
            nn.Softmax2d(),
            nn.PReLU(6),
            nn.InstanceNorm2d(6),
        ),
        *(nn.BatchNorm2d(6, track_running_stats=False), nn.BatchNorm2d(6, affine=False), nn.ChannelShuffle(2)),
        *(lambda x: x.cumsum(1), lambda x: x.flip(1), lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        *(lambda x: x / x.size(1), lambda x: x * x.shape[1], lambda x: x - x.mean(1, keepdim=True)),
        *(lambda x: x[:, [1, 0, 2, 3, 4, 5]], lambda x: x * torch.arange(6.0).reshape(6, 1, 1), lambda x: x + x.mean()),
        *(lambda x: x.transpose(2, 3), lambda x: x.reshape(x.size(0), 6, 4, 2, 2).sum(4)),
        *(lambda x: F.pad(x, [0, 0, 0, 0, 1, -1]), Standardised(6, 6, 1), Hooked(6, 6, 1), hooked_map()),
    ],
)
def test_around_what_is_not_known_all_channels_stay(middle: Any) -> None:
    module = with_zeros(Network(middle), last=[0, 1, 4])
    assert compacted(module, 2, 6, 6).get_submodule("first").out_channels == 6


class Views(nn.Module):
    """Flattens with the sizes written out."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.last, self.view = nn.Conv2d(2, 6, 3), nn.Linear(96, 2), view

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.view(self.conv(x)))


@pytest.mark.parametrize(
    "view",
    [
        *(lambda x: x.view(-1, 96), lambda x: x.reshape(x.shape[0], 96), lambda x: x.view(x.size(0), -1)),
        *(
            lambda x: torch.reshape(x, (x.size()[0], -1)),
            lambda x: x.flatten(1),
            lambda x: torch.flatten(x, start_dim=1),
        ),
    ],
)
def test_a_flattened_image_loses_all_numbers_of_a_channel(view: Callable[[Tensor], Tensor]) -> None:
    module = with_zeros(Views(view))
    with torch.no_grad():
        module.last.weight.unflatten(1, (6, 16))[:, [0, 5]] = 0.0
        module.last.weight[:, 20] = 0.0  # one number of a channel that stays
    small = compacted(module, 2, 6, 6)
    assert small.get_submodule("conv").out_channels == 4 and small.get_submodule("last").in_features == 64


class Uses(nn.Module):
    """A layer called twice, a parameter of two layers, or one that is read beside its layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 1, 1)
        self.other, self.how = nn.Conv2d(6, 6, 1), how
        if how == "parameter":
            self.other.weight = self.second.weight
        if how == "computed":
            nn.utils.parametrizations.weight_norm(self.second)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.first(x)))
        if self.how == "layer":
            x = torch.tanh(self.second(x))
        if self.how == "parameter":
            x = torch.tanh(self.other(x))
        y = self.last(x)
        return y * self.second.bias.sum() if self.how == "read" else y


@pytest.mark.parametrize("how", ["layer", "parameter", "read", "computed"])
def test_a_parameter_used_twice_keeps_its_channels(how: str) -> None:
    module = with_zeros(Uses(how), last=[0, 1, 2])
    x = images(2, 6, 6)
    small = compact_channels(module, (2, 6, 6))
    assert torch.allclose(outputs(small, x), outputs(module, x), rtol=1e-12, atol=1e-12)
    for name in ("second", "other") if how == "parameter" else ("second",):
        assert tuple(small.get_submodule(name).weight.shape) == (6, 6, 1, 1)


@pytest.mark.parametrize(
    ("scale", "stays"),
    [
        *((lambda x: x.size(1), 6), (lambda x: x.shape[1], 6), (lambda x: x.size()[1], 6), (lambda x: x.dim(), 6)),
        *((lambda x: x.size(0), 3), (lambda x: x.shape[0], 3), (lambda x: x.size()[0], 3)),
    ],
)
def test_a_number_of_channels_that_is_asked_for_stays(scale: Callable[[Tensor], Any], stays: int) -> None:
    class Sized(Network):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x) * scale(x)

    module = with_zeros(Sized(nn.Identity()), last=[0, 1, 4])
    assert compacted(module, 2, 6, 6).get_submodule("first").out_channels == stays


@pytest.mark.parametrize(
    ("middle", "stays"),
    [
        *((lambda x: x.mean(1), 4), (lambda x: x.amax(dim=-3), 4), (lambda x: x[:, 0, :], 4)),
        *((lambda x: x.mean(2), 2), (lambda x: x.sum(dim=-1), 2), (lambda x: x[:, :, 0], 2)),
    ],
)
def test_an_axis_of_as_many_numbers_is_no_channel_axis(middle: Callable[[Tensor], Tensor], stays: int) -> None:
    """Images of 4 channels, rows and columns, of which one goes."""
    module = with_zeros(Network(middle, 4, nn.Conv1d(4, 2, 1)), last=[0, 1])
    assert compacted(module, 2, 6, 6).get_submodule("first").out_channels == stays


@pytest.mark.parametrize("kind", ["residual", "flattened", "mobilenet"])
def test_a_network_without_any_weight_still_works(kind: str) -> None:
    make, shape = NETWORKS[kind]
    module = make().double().eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.zero_()
    small = compact_channels(module, shape)
    assert torch.equal(outputs(small, images(*shape)), outputs(module, images(*shape)))
    widths = [part.out_channels for part in small.modules() if isinstance(part, nn.Conv2d)]
    assert min(widths) == 1 and size(small) < size(module) / 4


def test_inputs_and_outputs_keep_their_channels() -> None:
    module = with_zeros(Network(nn.ReLU()))
    with torch.no_grad():
        module.first.weight[:, 0] = 0.0
        module.last.weight[1], module.last.bias[1] = 0.0, 0.0
    small = compacted(module, 2, 6, 6)
    assert small.get_submodule("first").in_channels == 2 and small.get_submodule("last").out_channels == 2


def test_a_squeeze_and_excitation_is_followed() -> None:
    class Excited(Network):
        def __init__(self) -> None:
            super().__init__(
                nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1), nn.Sigmoid())
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x * self.middle(x))

    module = with_zeros(Excited(), last=[0, 1], **{"middle.1": [0, 1, 2]})
    small = compacted(module, 2, 6, 6)
    assert small.get_submodule("first").out_channels == small.get_submodule("middle.3").out_channels == 4


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return compact_channels(thinned(resnet(8, width=4), 0, (3, 8, 8)), (3, 8, 8))


def test_it_is_saved_and_pickled_as_any_module(small: nn.Module, tmp_path: Path) -> None:
    x = images(3, 8, 8, dtype=torch.float32)
    right = outputs(small, x)
    torch.save(small, tmp_path / "small.pt")
    for again in (
        pickle.loads(pickle.dumps(small)),
        copy.deepcopy(small),
        torch.load(tmp_path / "small.pt", weights_only=False),
    ):
        assert torch.equal(outputs(again, x), right) and list(again.state_dict()) == list(small.state_dict())
    again = copy.deepcopy(small)
    for p in again.parameters():
        nn.init.constant_(p, 9.0)
    again.load_state_dict(small.state_dict())
    assert torch.equal(outputs(again, x), right)


def test_it_trains_further(small: nn.Module) -> None:
    module = copy.deepcopy(small).train()
    module(images(3, 8, 8, dtype=torch.float32)).square().sum().backward()
    assert all(p.requires_grad and p.grad is not None for p in module.parameters())


def test_it_is_traced_and_exported(small: nn.Module) -> None:
    x = images(3, 8, 8, dtype=torch.float32)
    right = outputs(small, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(small, (x,))
    assert torch.allclose(traced(x), right) and torch.allclose(torch.export.export(small, (x,)).module()(x), right)


def test_it_is_written_as_onnx(small: nn.Module, optional_import: Callable[[str], ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    torch.onnx.export(small, (images(3, 8, 8, dtype=torch.float32),), tmp_path / "small.onnx")
    onnx.checker.check_model(str(tmp_path / "small.onnx"))


def test_a_module_in_training_is_left_so() -> None:
    module = Network(nn.BatchNorm2d(6)).train()
    assert not compact_channels(module, (2, 6, 6)).training and all(part.training for part in module.modules())


def test_bad_arguments_are_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            x += 1.0  # of which torch.fx makes x = x + 1
            return y

    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got int"):
        compact_channels(3, (2,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module must be one that torch.fx can trace, got Branches"):
        compact_channels(Branches(), (2,))
    with pytest.raises(ValueError, match=r"torch.fx can trace, got Changed, of which it makes another function"):
        compact_channels(Changed(), (2,))
    with pytest.raises(
        ValueError, match=r"input_shape must be the shape of one row .*: Network refuses rows of \(3, 6, 6\)"
    ):
        compact_channels(Network(nn.ReLU()), (3, 6, 6))
