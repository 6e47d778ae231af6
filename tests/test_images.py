"""Images: augmentation follows torchvision's laws a batch at a time, normalisation its formula, data sets its files."""

import hashlib
import importlib.util
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.io import savemat
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.datasets import CIFAR10, SVHN
from torchvision.transforms import RandomErasing
from torchvision.transforms import functional as reference

import pyro_sparse as ps
from pyro_sparse import datasets
from pyro_sparse.models.images import CIFAR10_ERASE_FILL, CIFAR10_MEAN, CIFAR10_STD

FALSE_ALARM = 1e-4  # of each comparison of laws; about forty in this file
DATA = Path(os.environ.get("PYRO_SPARSE_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "load.py").exists(), reason=f"no images in {DATA}; PYRO_SPARSE_DATA names another folder"
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coordinates(rows: int, height: int, width: int) -> Tensor:
    """Images that say where each pixel came from: channel 0 its row, channel 1 its column, both from 1."""
    y = torch.arange(1.0, height + 1)[:, None].expand(height, width)
    x = torch.arange(1.0, width + 1).expand(height, width)
    return torch.stack([y, x]).expand(rows, 2, height, width)


def moves(images: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offset down, offset right and whether mirrored, of each augmented image of coordinates."""
    height, width = images.shape[-2:]
    y, x = height // 2, width // 2  # a pixel that no crop moves out of the image
    mirrored = images[:, 1, y, x + 1] < images[:, 1, y, x]
    column = torch.where(mirrored, width - 1 - x, x)
    down, right = images[:, 0, y, x] - 1 - y + padding, images[:, 1, y, x] - 1 - column + padding
    return down.long(), right.long(), mirrored


def erased(images: Tensor) -> dict[str, Tensor]:
    """Sides and corner of the rectangle of zeros in each image (rows, 1, height, width) of ones."""
    zero = images[:, 0] == 0
    down, across = zero.any(2), zero.any(1)
    tall, wide = down.sum(1), across.sum(1)
    assert torch.equal(zero.sum((1, 2)), tall * wide)  # it is a rectangle, and whole
    return {"tall": tall, "wide": wide, "top": down.int().argmax(1), "left": across.int().argmax(1)}


def assert_uniform(cells: Tensor, number: int) -> None:
    counts = torch.bincount(cells, minlength=number).numpy()
    assert len(counts) == number
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


# Crops and flips.


def test_crop_and_flip_are_uniform_and_independent() -> None:
    """Chi-square over all 9 × 9 offsets, mirrored or not, and over the offsets of neighbouring rows."""
    down, right, mirrored = moves(ps.ImageAugmentation()(coordinates(20_000, 12, 12), generator()), 4)
    assert_uniform((down * 9 + right) * 2 + mirrored, 162)
    assert_uniform(down[::2] * 9 + down[1::2], 81)
    assert_uniform(right[::2] * 9 + down[1::2], 81)


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 1, 7, 10)])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
def test_every_pixel_is_that_of_the_padded_image(shape: tuple[int, ...], padding: int, flip: bool) -> None:
    """Against torchvision's pad, crop and flip at the offsets that images of coordinates tell."""
    images = torch.randint(0, 256, shape, generator=generator(1), dtype=torch.uint8)
    augmentation = ps.ImageAugmentation(padding, flip)
    told = moves(augmentation(coordinates(40, 32, 32), generator()), padding)
    assert flip == bool(told[2].any())
    for image, result, down, right, mirrored in zip(images, augmentation(images, generator()), *told, strict=True):
        padded = reference.pad(image, [padding] * 4)
        crop = reference.crop(padded, int(down), int(right), *shape[-2:])
        assert torch.equal(result, reference.hflip(crop) if mirrored else crop)


def test_without_padding_flip_and_erasing_images_stay() -> None:
    images = torch.rand(6, 3, 8, 8)
    assert torch.equal(ps.ImageAugmentation(0, flip=False)(images, generator()), images)


# Erasing.

SETTINGS = {
    "usual": ((0.02, 0.4), (0.3, 3.33)),
    "small": ((0.001, 0.05), (0.1, 1.5)),
    "seldom fits": ((0.9, 1.0), (0.5, 2.0)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_erased_rectangles_follow_the_law_of_torchvision(setting: str) -> None:
    """Two-sample Kolmogorov-Smirnov of sides, area, aspect and place, and how often none fits."""
    area, aspect = SETTINGS[setting]
    height, width, num_rows = 32, 24, 4_000
    augmentation = ps.ImageAugmentation(0, False, 1.0, area, aspect)
    ours = erased(augmentation(torch.ones(num_rows, 1, height, width), generator()))
    image = torch.ones(1, height, width)
    drawn = [RandomErasing.get_params(image, area, aspect, [0.0])[:4] for _ in range(num_rows)]
    top, left, tall, wide = torch.tensor(drawn).T
    none = (tall == height) & (wide == width)  # what torchvision gives back where nothing fits
    tall, wide = tall.masked_fill(none, 0), wide.masked_fill(none, 0)
    theirs = {"tall": tall, "wide": wide, "top": top, "left": left}
    fit = [int((sides["tall"] > 0).sum()) for sides in (ours, theirs)]
    assert setting != "seldom fits" or 500 < fit[1] < 3_000
    assert stats.fisher_exact([fit, [num_rows - number for number in fit]]).pvalue > FALSE_ALARM
    for of in (
        lambda s: s["tall"],
        lambda s: s["wide"],
        lambda s: s["tall"] * s["wide"],
        lambda s: s["tall"] / s["wide"],
        lambda s: s["top"] / (height - s["tall"]),
        lambda s: s["left"] / (width - s["wide"]),
    ):
        kept = [of({name: side[sides["tall"] > 0] for name, side in sides.items()}) for sides in (ours, theirs)]
        assert stats.ks_2samp(*(values.double().numpy() for values in kept)).pvalue > FALSE_ALARM


def test_a_square_of_known_size_lands_anywhere_with_equal_chances() -> None:
    augmentation = ps.ImageAugmentation(0, False, 1.0, (0.25, 0.25), (1.0, 1.0))
    found = erased(augmentation(torch.ones(8_000, 1, 12, 12), generator()))
    assert (found["tall"] == 6).all() and (found["wide"] == 6).all()
    assert_uniform(found["top"] * 7 + found["left"], 49)
    assert_uniform(found["top"][::2] * 7 + found["top"][1::2], 49)


def test_share_erased_is_erase_prob_whether_mirrored_or_not() -> None:
    augmentation = ps.ImageAugmentation(0, True, 0.3, (0.25, 0.25), (1.0, 1.0), fill=-1)
    images = augmentation(coordinates(8_000, 12, 12), generator())
    gone = (images == -1).any(1).any(1).any(1)
    assert stats.binomtest(int(gone.sum()), 8_000, 0.3).pvalue > FALSE_ALARM
    corner = torch.where(images[:, 1, 0, 0] > 0, images[:, 1, 0, 0], 13 - images[:, 1, 0, -1])
    mirrored = corner > 6
    table = [
        [int((gone & mirrored).sum()), int((gone & ~mirrored).sum())],
        [int(mirrored.sum()), int((~mirrored).sum())],
    ]
    table[1] = [table[1][0] - table[0][0], table[1][1] - table[0][1]]
    assert stats.fisher_exact(table).pvalue > FALSE_ALARM


def test_whether_an_image_is_erased_hangs_on_nothing_of_the_rectangle() -> None:
    """Two-sample Kolmogorov-Smirnov of the rectangles that half of the images get, and that the others would have got."""
    every, half = (
        erased(ps.ImageAugmentation(0, False, prob)(torch.ones(8_000, 1, 32, 32), generator())) for prob in (1.0, 0.5)
    )
    gone = half["tall"] > 0
    assert all(torch.equal(half[name][gone], every[name][gone]) for name in every)
    for values in (*every.values(), every["tall"] * every["wide"]):
        assert stats.ks_2samp(values[gone].numpy(), values[~gone].numpy()).pvalue > FALSE_ALARM


def test_erase_prob_zero_and_one() -> None:
    images = torch.ones(500, 1, 32, 32)
    assert (ps.ImageAugmentation(0, erase_prob=0.0)(images, generator()) == 1).all()
    assert (erased(ps.ImageAugmentation(0, erase_prob=1.0)(images, generator()))["tall"] > 0).all()


def test_erasing_leaves_crops_and_flips_as_they_are() -> None:
    images = torch.rand(50, 3, 32, 32) + 1
    moved = ps.ImageAugmentation()(images, generator())
    found = ps.ImageAugmentation(erase_prob=1.0, fill=-1)(images, generator())
    assert torch.equal(torch.where(found == -1, moved, found), moved)


def test_a_colour_fills_channel_by_channel() -> None:
    images = torch.zeros(20, 3, 16, 16, dtype=torch.uint8)
    found = ps.ImageAugmentation(erase_prob=1.0, fill=[10, 20, 255])(images, generator())
    inside = found[:, 0] == 10
    assert inside.any(-1).any(-1).all()
    for channel, value in enumerate([10, 20, 255]):
        assert torch.equal(found[:, channel], inside * value)


def test_the_published_colour_is_the_mean_once_normalised() -> None:
    """To half a grey level, which is what whole numbers can do."""
    colour = torch.tensor(CIFAR10_ERASE_FILL, dtype=torch.uint8)[None, :, None, None]
    found = ps.Normalize(CIFAR10_MEAN, CIFAR10_STD)(colour).flatten()
    assert ((found - torch.tensor(CIFAR10_MEAN)).abs() <= 0.5 / 255 / torch.tensor(CIFAR10_STD) + 1e-6).all()


# What holds for all of it.

EVERYTHING = ps.ImageAugmentation(erase_prob=0.5, fill=(1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_type_and_input_are_kept(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (9, 3, 20, 16)).to(dtype)
    before = images.clone()
    found = EVERYTHING(images, generator())
    assert found.shape == images.shape and found.dtype == dtype and found.device == images.device
    assert torch.equal(images, before)
    assert torch.equal(found.double(), EVERYTHING(images.double(), generator()))
    assert EVERYTHING(images[:0], generator()).shape == (0, 3, 20, 16)


def test_it_is_a_function_of_the_generator_alone() -> None:
    images = torch.rand(9, 3, 16, 16)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    own = generator()
    first, second = EVERYTHING(images, own), EVERYTHING(images, own)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    again = generator()
    assert torch.equal(EVERYTHING(images, again), first) and torch.equal(EVERYTHING(images, again), second)


def test_rows_know_nothing_of_each_other() -> None:
    images = torch.rand(9, 3, 16, 16)
    other = images.clone()
    other[4] = torch.nan
    first, second = EVERYTHING(images, generator()), EVERYTHING(other, generator())
    rest = torch.arange(9) != 4
    assert torch.equal(first[rest], second[rest]) and not torch.equal(first[4], second[4])


def test_no_value_is_asked_for_on_the_way() -> None:
    """Tensors without data refuse whatever would make the host wait for a device."""
    own = generator()
    with FakeTensorMode():
        assert EVERYTHING(torch.zeros(9, 3, 16, 16), own).shape == (9, 3, 16, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_the_host_does_not_wait() -> None:
    images, own = torch.zeros(9, 3, 16, 16, device="cuda", dtype=torch.uint8), torch.Generator("cuda")
    EVERYTHING(images, own)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = EVERYTHING(images, own)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.device == images.device


def test_its_text_says_every_setting_and_equal_settings_have_one() -> None:
    text = (
        "ImageAugmentation(padding=2, flip=False, erase_prob=1.0, erase_area=(0.1, 0.2), erase_aspect=(1.0, 2.0), "
        "fill=(1.0, 2.0))"
    )
    given = ps.ImageAugmentation(np.int64(2), 0, 1, [0.1, 0.2], (1, 2), torch.tensor([1, 2]))
    assert repr(given) == text
    assert given == eval(text, {"ImageAugmentation": ps.ImageAugmentation}) and hash(given)
    assert repr(ps.ImageAugmentation(fill=np.float32(0.5))) == repr(ps.ImageAugmentation(fill=0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": -1}, "padding must be a whole number >= 0, got -1"),
        ({"padding": 1.5}, "padding must be a whole number >= 0, got 1.5"),
        ({"padding": math.nan}, "padding must be a whole number >= 0, got nan"),
        ({"erase_prob": 1.5}, r"erase_prob must lie in \[0, 1\], got 1.5"),
        ({"erase_prob": math.nan}, r"erase_prob must lie in \[0, 1\], got nan"),
        ({"erase_area": (0.0, 0.5)}, "erase_area must be .* 0 < least <= greatest <= 1, got"),
        ({"erase_area": (0.5, 0.2)}, "erase_area must be"),
        ({"erase_area": (0.5, 1.2)}, "erase_area must be"),
        ({"erase_area": (0.5,)}, "erase_area must be"),
        ({"erase_aspect": (0.0, 3.0)}, "erase_aspect must be .* 0 < least <= greatest, got"),
        ({"erase_aspect": (3.0, 0.3)}, "erase_aspect must be"),
        ({"erase_aspect": (1.0, math.inf)}, "erase_aspect must be"),
        ({"fill": math.inf}, "fill must be a finite number or one a channel, got inf"),
        ({"fill": (1.0, math.nan)}, "fill must be a finite number or one a channel"),
        ({"fill": ()}, "fill must be a finite number or one a channel"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.ImageAugmentation(**settings)


@pytest.mark.parametrize(
    ("images", "own", "kind", "message"),
    [
        (
            torch.zeros(3, 8, 8),
            generator(),
            ValueError,
            r"images must be \(rows, channels, height, width\), got \(3, 8, 8\)",
        ),
        (torch.zeros(1, 3, 8, 8).long(), generator(), TypeError, "images must be uint8 or floating, got torch.int64"),
        (torch.zeros(1, 3, 8, 8), None, TypeError, "generator must be a torch.Generator, got NoneType"),
        (
            torch.zeros(1, 3, 8, 8, device="meta"),
            generator(),
            ValueError,
            "generator must be on the images' device, meta",
        ),
        (torch.zeros(1, 2, 8, 8), generator(), ValueError, r"fill must be one number or one a channel \(2\), got 3"),
    ],
)
def test_images_and_generator_are_checked(images: Tensor, own: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        EVERYTHING(images, own)


@pytest.mark.parametrize("fill", [0.5, 256, -1, (0, 0.4, 0)])
def test_bytes_take_whole_numbers_only(fill: Any) -> None:
    augmentation = ps.ImageAugmentation(erase_prob=0.5, fill=fill)
    with pytest.raises(ValueError, match=r"fill must be whole numbers in 0..255 for uint8 images, got"):
        augmentation(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), generator())


# Normalisation.


def test_normalised_bytes_are_those_of_torchvision() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    expected = reference.normalize(images / 255, CIFAR10_MEAN, CIFAR10_STD)
    normalize = ps.Normalize(CIFAR10_MEAN, CIFAR10_STD)
    torch.testing.assert_close(normalize(images), expected)
    torch.testing.assert_close(normalize(images / 255), expected)
    torch.testing.assert_close(normalize(images[0]), expected[0])
    assert normalize.double()(images).dtype == normalize(images / 255).dtype == torch.float64


def test_normalize_is_a_layer_without_a_state() -> None:
    normalize = ps.Normalize(CIFAR10_MEAN, CIFAR10_STD)
    net = torch.nn.Sequential(normalize, ps.resnet(8, width=2)).eval()
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert not normalize.state_dict() and not list(normalize.parameters())
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(images), net(images))
    assert repr(normalize) == "Normalize(mean=[0.4914, 0.4822, 0.4465], std=[0.247, 0.2435, 0.2616])"


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5, 0.5), (0.5,), "mean and std must have one number a channel, got 2 and 1"),
        ((), (), "mean and std must have one number a channel, got 0 and 0"),
        ((math.nan,), (1.0,), "mean must be finite, got nan"),
        ((0.5,), (0.0,), "std must be positive and finite, got 0.0"),
        ((0.5,), (math.nan,), "std must be positive and finite, got nan"),
    ],
)
def test_statistics_are_checked(mean: tuple[float, ...], std: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.Normalize(mean, std)


def test_images_to_normalise_are_checked() -> None:
    normalize = ps.Normalize(CIFAR10_MEAN, CIFAR10_STD)
    with pytest.raises(ValueError, match=r"images must be \(rows, 3, height, width\), got \(2, 1, 8, 8\)"):
        normalize(torch.zeros(2, 1, 8, 8))
    with pytest.raises(TypeError, match=r"images must be uint8 or floating, got torch\.int32"):
        normalize(torch.zeros(2, 3, 8, 8, dtype=torch.int32))


# Data sets.


@pytest.mark.parametrize("train", [False, True])
def test_cifar10_in_tensors(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (6, 32, 32, 3)).astype(np.uint8)

    class Stored(CIFAR10):
        def __init__(self, root: str, train: bool, download: bool) -> None:
            self.data, self.targets, self.asked = pixels, [3, 1, 4, 1, 5, 9], (root, train, download)
            assert self.asked == ("here", expected, True)

    expected = train
    monkeypatch.setattr("torchvision.datasets.CIFAR10", Stored)
    images, labels = datasets.cifar10("here", train, download=True)
    assert images.shape == (6, 3, 32, 32) and images.dtype == torch.uint8 and images.is_contiguous()
    assert labels.dtype == torch.int64 and labels.tolist() == [3, 1, 4, 1, 5, 9]
    assert images[2, 1, 5, 7] == pixels[2, 5, 7, 1]


@pytest.mark.parametrize(("options", "split"), [({}, "test"), ({"train": True}, "train")])
def test_svhn_in_tensors(options: dict[str, Any], split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (6, 32, 32, 3)).astype(np.uint8)

    class Stored(SVHN):
        def __init__(self, root: str, split: str, download: bool) -> None:
            self.data, self.labels = pixels.transpose(0, 3, 1, 2), np.array([3, 1, 4, 1, 5, 0])
            assert (root, split, download) == ("here", expected, False)

    expected = split
    monkeypatch.setattr("torchvision.datasets.SVHN", Stored)
    images, labels = datasets.svhn("here", **options)
    assert images.shape == (6, 3, 32, 32) and images.dtype == torch.uint8 and images.is_contiguous()
    assert labels.dtype == torch.int64 and labels.tolist() == [3, 1, 4, 1, 5, 0]
    assert images[2, 1, 5, 7] == pixels[2, 5, 7, 1]


@pytest.mark.parametrize(
    ("read", "name", "inside"),
    [(datasets.cifar10, "cifar10", "cifar-10-batches-py"), (datasets.svhn, "svhn", "test_32x32.mat")],
)
def test_missing_files_are_told_with_a_remedy(read: Callable[..., Any], name: str, inside: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read(tmp_path)
    text = str(caught.value)
    assert f"root must hold {inside}" in text and str(tmp_path) in text and f"{name}(root, download=True)" in text


def test_a_failed_download_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", fail)
    with pytest.raises(RuntimeError, match=r"^File not found or corrupted\.$"):
        datasets.cifar10("nowhere", download=True)


def packed(name: str) -> tuple[Any, Any]:
    spec = importlib.util.spec_from_file_location("load", DATA / "load.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(name)


def write(path: Path, content: dict[str, Any]) -> str:
    """One batch file; its MD5 sum, which is not the official one as the names of the photographs are not kept."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.slow
@needs_data
def test_the_real_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as official batch files and read back: all pixels, and what is known of the data."""
    folder = tmp_path / CIFAR10.base_folder
    train, test = packed("cifar10_train"), packed("cifar10_test")
    files = {f"data_batch_{i + 1}": [part[10_000 * i : 10_000 * (i + 1)] for part in train] for i in range(5)}
    sums = {
        file: write(folder / file, {"data": x.transpose(0, 3, 1, 2).reshape(-1, 3072), "labels": y.tolist()})
        for file, (x, y) in [*files.items(), ("test_batch", test)]
    }
    meta = write(folder / "batches.meta", {"label_names": list("0123456789")})
    monkeypatch.setattr(CIFAR10, "train_list", [[file, sums[file]] for file in files])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta})
    for is_train, (x, y) in ((True, train), (False, test)):
        images, labels = datasets.cifar10(tmp_path, train=is_train)
        assert torch.equal(images, torch.from_numpy(x.transpose(0, 3, 1, 2))) and labels.tolist() == y.tolist()
        assert (torch.bincount(labels) == len(images) // 10).all()
        if is_train:  # the constants are those of these images, to the four digits given
            pixels = images.transpose(0, 1).flatten(1).double() / 255
            assert pixels.mean(1).numpy() == pytest.approx(CIFAR10_MEAN, abs=6e-5)
            assert pixels.std(1).numpy() == pytest.approx(CIFAR10_STD, abs=6e-5)
    (folder / "test_batch").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="whole and unchanged"):
        datasets.cifar10(tmp_path)


@pytest.mark.slow
@needs_data
def test_the_real_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 10,000 test images as the official MATLAB file, where the digit 0 has label 10."""
    x, y = packed("svhn_test")
    file = tmp_path / "test_32x32.mat"
    savemat(file, {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None].astype(np.uint8)})
    official = ["", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", {**SVHN.split_list, "test": official})
    images, labels = datasets.svhn(tmp_path)
    assert torch.equal(images, torch.from_numpy(x.transpose(0, 3, 1, 2))) and labels.tolist() == y.tolist()
