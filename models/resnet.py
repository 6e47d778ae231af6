"""Residual networks for images of 32 × 32 pixels."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn


def resnet(depth: int = 20, num_classes: int = 10, width: int = 16, in_channels: int = 3) -> nn.Module:
    """The residual network for CIFAR: 20, 32, 44, 56 or 110 layers, logits from images.

    It takes normalised images (rows, in_channels, height, width) and returns (rows, num_classes). Three groups of
    (depth - 2) / 6 basic blocks, of ``width``, 2 and 4 ``width`` channels, each group at half the resolution of the one
    before; where a block changes the shape, its shortcut is a 1 × 1 convolution with batch normalisation. At the
    defaults it has 272,474 parameters, 466,906 at depth 32. Convolutions start from normals of variance
    2 / (kernel area × output channels), the last layer from PyTorch's uniforms.

    Args:
        depth: 6 n + 2, n >= 1.
        num_classes, width, in_channels: each >= 1.

    Raises:
        ValueError: where one is not.

    Source: He et al. (2016), Deep residual learning, section 4.2, with shortcuts B; He et al. (2015) for the start.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6 n + 2 with n >= 1 (20, 32, 44, 56, 110), got {depth}")
    for name, value in {"num_classes": num_classes, "width": width, "in_channels": in_channels}.items():
        if not value >= 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv1"] = _Convolution(in_channels, width, 3)
    parts["bn1"] = nn.BatchNorm2d(width)
    parts["relu"] = nn.ReLU()
    channels = [width, width, 2 * width, 4 * width]
    for group in (1, 2, 3):
        blocks = [_Block(channels[group - 1], channels[group], stride=1 if group == 1 else 2)]
        blocks += [_Block(channels[group], channels[group]) for _ in range((depth - 2) // 6 - 1)]
        parts[f"layer{group}"] = nn.Sequential(*blocks)
    parts["pool"] = _Mean()
    parts["fc"] = nn.Linear(4 * width, num_classes)
    return nn.Sequential(parts)


class _Convolution(nn.Conv2d):
    """Without bias, of unchanged size at stride 1; fresh chains draw their start from ``reset_parameters``, as it does."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class _Mean(nn.Module):
    """Over all pixels. Adaptive pooling changes tensors in place where channels are last, which a CUDA graph cannot capture."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class _Block(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _Convolution(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _Convolution(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut.add_module("conv", _Convolution(in_channels, channels, 1, stride))
            self.shortcut.add_module("bn", nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))
