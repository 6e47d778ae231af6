"""What happens to images before a network sees them: augmentation of a batch on its device, and normalisation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # of the training images in 0..1, by channel
CIFAR10_STD = (0.2470, 0.2435, 0.2616)

# Published scripts erase normalised CIFAR images with the raw means. In the units of uint8 images that colour is
# 255 (mean + std × mean), to the next whole number; of images in 0..1, a 255th of it.
CIFAR10_ERASE_FILL = tuple(
    round(255 * (mean + std * mean)) for mean, std in zip(CIFAR10_MEAN, CIFAR10_STD, strict=True)
)

TRIES = 10  # of a rectangle that fits, as in torchvision


class Normalize(nn.Module):
    """Images (rows, channels, height, width), uint8 in 0..255 or floating in 0..1, to (images - mean) / std by channel.

    The first layer of a network for raw images. It returns the floating type of ``mean``, a buffer that moves with the
    module; mean and std are what the constructor was told, so they are no part of the ``state_dict``.

    Args:
        mean, std: one number a channel, in units of images in 0..1 (``CIFAR10_MEAN``, ``CIFAR10_STD``); std > 0.

    Raises:
        ValueError: where they are not, or the images have another number of channels.
        TypeError: of images of other whole numbers than uint8.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not len(mean):
            raise ValueError(f"mean and std must have one number a channel, got {len(mean)} and {len(std)}")
        for value in mean:
            if not math.isfinite(value):
                raise ValueError(f"mean must be finite, got {value}")
        for value in std:
            if not 0 < value < math.inf:
                raise ValueError(f"std must be positive and finite, got {value}")
        for name, values in (("mean", mean), ("std", std)):
            column = torch.tensor([float(value) for value in values])[:, None, None]
            self.register_buffer(name, column, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return _normalized(images, self.mean, self.std)

    def extra_repr(self) -> str:
        mean, std = ([round(value, 6) for value in column.flatten().tolist()] for column in (self.mean, self.std))
        return f"mean={mean}, std={std}"


@torch.fx.wrap  # one node in a traced graph: it asks for shape and type
def _normalized(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    if images.dim() < 3 or images.shape[-3] != len(mean):
        raise ValueError(f"images must be (rows, {len(mean)}, height, width), got {tuple(images.shape)}")
    _check_kind(images)
    scale = 1 if images.is_floating_point() else 255
    return (images.to(mean.dtype) / scale - mean) / std


@dataclass(frozen=True)
class ImageAugmentation:
    """Random crops, flips and erased rectangles of a batch of images: ``augmentation(images, generator) -> images``.

    Images (rows, channels, height, width), uint8 or floating, keep shape, type and device. Each image gets its own crop of
    the image in a border of ``padding`` zeros, all (2 padding + 1)² offsets being equally likely; with probability 1/2 it
    is mirrored; with probability ``erase_prob`` a rectangle of it becomes ``fill``. The area of the rectangle is uniform and
    its aspect log-uniform, its sides are rounded to pixels, the first of ten tries with both sides shorter than the image's
    is put anywhere in it with equal chances, and where none fits the image stays. All random numbers come from
    ``generator``, which is on the device of the images; nothing waits for that device.

    Args:
        padding: pixels, >= 0.
        flip: whether to mirror left and right.
        erase_prob: in [0, 1].
        erase_area: least and greatest share of the image, 0 < least <= greatest <= 1.
        erase_aspect: least and greatest height / width, 0 < least <= greatest.
        fill: a number or one a channel, in the images' own units (uint8: whole numbers in 0..255). CIFAR scripts that erase
            after normalisation write the raw means there: ``pyro_sparse.models.images.CIFAR10_ERASE_FILL`` for uint8.

    Raises:
        ValueError, TypeError: where a setting, the images or the generator are not so.

    Source: Zhong et al. (2020), Random erasing data augmentation, in the form of ``torchvision.transforms.RandomErasing``.
    """

    padding: int = 4
    flip: bool = True
    erase_prob: float = 0.0
    erase_area: tuple[float, float] = (0.02, 0.4)
    erase_aspect: tuple[float, float] = (0.3, 3.33)
    fill: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        if not (self.padding >= 0 and self.padding == int(self.padding)):
            raise ValueError(f"padding must be a whole number >= 0, got {self.padding}")
        if not 0 <= self.erase_prob <= 1:
            raise ValueError(f"erase_prob must lie in [0, 1], got {self.erase_prob}")
        _check_range("erase_area", self.erase_area, 1.0)
        _check_range("erase_aspect", self.erase_aspect, math.inf)
        fill = tuple(float(value) for value in self.fill) if isinstance(self.fill, Iterable) else float(self.fill)
        if fill == () or not all(map(math.isfinite, _numbers(fill))):
            raise ValueError(f"fill must be a finite number or one a channel, got {self.fill}")
        # Equal settings have one text, however they were written: it tells runs apart.
        plain = {
            "padding": int(self.padding),
            "flip": bool(self.flip),
            "erase_prob": float(self.erase_prob),
            "erase_area": tuple(float(value) for value in self.erase_area),
            "erase_aspect": tuple(float(value) for value in self.erase_aspect),
            "fill": fill,
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        _check_batch(images, generator)
        images = self._moved(images, generator)
        return self._erased(images, generator) if self.erase_prob > 0 else images

    def _moved(self, images: Tensor, generator: torch.Generator) -> Tensor:
        rows, channels, height, width = images.shape
        down, right, side = _uniform(3, images, generator)
        y = _below(down, 2 * self.padding + 1) + torch.arange(height, device=images.device)
        x = torch.arange(width, device=images.device)
        if self.flip:
            x = torch.where(side < 0.5, width - 1 - x, x)
        x = x + _below(right, 2 * self.padding + 1)
        # Of all ways to index, one flat index shared by the channels is the fastest on a CPU.
        pixel = (y[:, :, None] * (width + 2 * self.padding) + x[:, None, :]).reshape(rows, 1, height * width)
        padded = F.pad(images, [self.padding] * 4).flatten(2)
        return padded.gather(2, pixel.expand(-1, channels, -1)).reshape(images.shape)

    def _erased(self, images: Tensor, generator: torch.Generator) -> Tensor:
        height, width = images.shape[-2:]
        u = _uniform(2 * TRIES + 3, images, generator)
        (low, high), (flat, steep) = self.erase_area, map(math.log, self.erase_aspect)
        area = height * width * (low + (high - low) * u[:TRIES])
        aspect = (flat + (steep - flat) * u[TRIES : 2 * TRIES]).exp()
        tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (tall < height) & (wide < width)
        first = fits.int().argmax(0, keepdim=True)  # of equal values the first
        tall, wide = (sides.gather(0, first)[0] for sides in (tall, wide))
        down, right, chosen = u[2 * TRIES :]
        y = torch.arange(height, device=images.device) - _below(down, height - tall + 1)
        x = torch.arange(width, device=images.device) - _below(right, width - wide + 1)
        erased = fits.any(0) & (chosen < self.erase_prob)
        inside = (erased & (y >= 0) & (y < tall))[:, None, :, None] & ((x >= 0) & (x < wide))[:, None, None, :]
        return torch.where(inside, self._colour(images), images)

    def _colour(self, images: Tensor) -> Tensor:
        values = _numbers(self.fill)
        if len(values) not in (1, images.shape[1]):
            raise ValueError(f"fill must be one number or one a channel ({images.shape[1]}), got {len(values)}")
        if not images.is_floating_point() and not all(v == int(v) and 0 <= v <= 255 for v in values):
            raise ValueError(f"fill must be whole numbers in 0..255 for uint8 images, got {self.fill}")
        # Filled on the device: copying a list to it would wait.
        return torch.stack([images.new_full((1, 1), value) for value in values])


def _numbers(fill: float | tuple[float, ...]) -> tuple[float, ...]:
    return fill if isinstance(fill, tuple) else (fill,)


def _uniform(number: int, images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniforms in [0, 1), (number, rows, 1): each row has its own."""
    shape = (number, len(images), 1)
    return torch.rand(shape, generator=generator, device=images.device, dtype=torch.float32)


def _below(uniform: Tensor, number: Tensor | int) -> Tensor:
    """Whole numbers from 0, below ``number``."""
    return (uniform * number).long()


def _check_range(name: str, limits: Sequence[float], top: float) -> None:
    if len(limits) != 2 or not 0 < limits[0] <= limits[1] <= top or limits[1] == math.inf:
        bound = " <= 1" if top == 1 else ""
        raise ValueError(f"{name} must be (least, greatest) with 0 < least <= greatest{bound}, got {limits}")


def _check_kind(images: Tensor) -> None:
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 or floating, got {images.dtype}")


def _check_batch(images: Tensor, generator: torch.Generator) -> None:
    if images.dim() != 4:
        raise ValueError(f"images must be (rows, channels, height, width), got {tuple(images.shape)}")
    _check_kind(images)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != images.device.type:
        raise ValueError(f"generator must be on the images' device, {images.device}, got {generator.device}")
