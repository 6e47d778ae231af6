"""Simulated data whose truth is known, and the images that sparse networks are measured on."""

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]

PAPER_INPUTS = (1, 2, 3, 4, 5)  # the inputs that the response of paper_regression depends on, counted from 1


def paper_regression(seed: int, num_rows: int = 10_000, num_inputs: int = 100) -> tuple[Array, Array, Array]:
    r"""The regression of the paper's section 4.1: five inputs act, and all are correlated.

    .. math:: y = \frac{5 x_2}{1 + x_1^2} + 5 \sin(x_3 x_4) + 2 x_5 + N(0, 1), \quad x_j = (e + z_j) / \sqrt 2

    with e and all z_j standard normal, so any two inputs correlate by one half.

    Args:
        seed: of ``numpy.random.RandomState``, in [0, 2^32); its normals are used row by row as (e, z_1, ..., noise).
        num_rows: >= 1.
        num_inputs: >= 5.

    Returns:
        x (rows, inputs), y (rows,), and f (rows,), the mean of y; the noise has variance 1.

    Raises:
        ValueError: where there are too few rows or inputs.
    """
    if not num_rows >= 1:
        raise ValueError(f"num_rows must be >= 1, got {num_rows}")
    if not num_inputs >= len(PAPER_INPUTS):
        raise ValueError(f"num_inputs must be >= {len(PAPER_INPUTS)}, got {num_inputs}")
    normals = np.random.RandomState(seed).standard_normal((num_rows, num_inputs + 2))
    x = (normals[:, :1] + normals[:, 1:-1]) / np.sqrt(2)
    f = 5 * x[:, 1] / (1 + x[:, 0] ** 2) + 5 * np.sin(x[:, 2] * x[:, 3]) + 2 * x[:, 4]
    return x, f + normals[:, -1], f


def cifar10(root: str | PathLike[str], train: bool = True, download: bool = False) -> "tuple[Tensor, Tensor]":
    """CIFAR-10 as tensors: uint8 images (rows, 3, 32, 32) and int64 labels (rows,), 50,000 for training and 10,000 for tests.

    Args:
        root: the folder that holds ``cifar-10-batches-py``, as ``torchvision.datasets.CIFAR10`` leaves it.
        train: the images for training, or those for tests.
        download: fetch it (170 MB) where it is not there yet.

    Raises:
        FileNotFoundError: where it is not there, or files have been changed.
    """
    from torchvision.datasets import CIFAR10

    data = _opened(
        lambda: CIFAR10(root, train=train, download=download), "cifar10", root, CIFAR10.base_folder, download
    )
    return _tensors(data.data.transpose(0, 3, 1, 2), data.targets)


def svhn(root: str | PathLike[str], train: bool = False, download: bool = False) -> "tuple[Tensor, Tensor]":
    """House numbers (SVHN), as CIFAR-10 is given: 73,257 for training, 26,032 for tests; the digit 0 has label 0.

    The test images, the default, are what networks for CIFAR-10 are shown to see whether they know that they do not know.

    Args:
        root: the folder that holds ``train_32x32.mat`` or ``test_32x32.mat``, as ``torchvision.datasets.SVHN`` leaves it.
        train: the images for training, or those for tests.
        download: fetch it (180 or 64 MB) where it is not there yet.

    Raises:
        FileNotFoundError: where it is not there, or the file has been changed.
    """
    from torchvision.datasets import SVHN

    split = "train" if train else "test"
    file = SVHN.split_list[split][1]
    data = _opened(lambda: SVHN(root, split=split, download=download), "svhn", root, file, download)
    return _tensors(data.data, data.labels)


def _opened(dataset: Callable[[], Any], name: str, root: str | PathLike[str], inside: str, download: bool) -> Any:
    try:
        return dataset()
    except RuntimeError as error:
        if download:  # then it says itself what went wrong
            raise
        raise FileNotFoundError(
            f"root must hold {inside}, whole and unchanged, got {root}: pass {name}(root, download=True), or put there "
            "what torchvision.datasets downloads"
        ) from error


def _tensors(images: Array, labels: Any) -> "tuple[Tensor, Tensor]":
    import torch

    return torch.from_numpy(np.ascontiguousarray(images)), torch.as_tensor(labels, dtype=torch.int64)
