"""Batches and noise as functions of (seed, chain, step): never of the global generator, so a run resumes without state."""

import hashlib

import torch
from torch import Tensor


def stream(seed: int, chain: int, purpose: str) -> int:
    """A 32-bit starting point for one purpose of one chain; neighbouring seeds give unrelated ones."""
    digest = hashlib.blake2b(f"{seed}/{chain}/{purpose}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


class Noise:
    """Standard normals of one chain: ``noise(step, out)`` fills ``out``."""

    def __init__(self, seed: int, chain: int, device: torch.device) -> None:
        self._start = stream(seed, chain, "noise")
        self._generator = torch.Generator(device)

    def __call__(self, step: int, out: Tensor) -> Tensor:
        self._generator.manual_seed((self._start + step) % 2**32)
        return out.normal_(generator=self._generator)


class Batches:
    """Row numbers of the batch of a step, ``batches(step)``: each epoch is one permutation, its remainder left out.

    With ``batch_size`` None every batch is all rows, in order. Averaged over an epoch the gradient is exactly the full
    one where ``batch_size`` divides ``num_data``; each batch alone is unbiased always.
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int | None,
        seed: int,
        chain: int,
        device: torch.device,
        purpose: str = "batches",
    ) -> None:
        self.num_data, self.batch_size = num_data, batch_size
        self._start = stream(seed, chain, purpose)
        self._device = device
        self._generator = torch.Generator()
        self._epoch = -1
        self._order = torch.arange(num_data, device=device)

    def __call__(self, step: int) -> Tensor:
        if self.batch_size is None:
            return self._order
        epoch, number = divmod(step, self.num_data // self.batch_size)
        if epoch != self._epoch:
            self._generator.manual_seed((self._start + epoch) % 2**32)
            order = torch.randperm(self.num_data, generator=self._generator)
            pinned = order.pin_memory() if self._device.type == "cuda" else order  # the copy then waits for nothing
            self._order = pinned.to(self._device, non_blocking=True)
            self._epoch = epoch
        return self._order[number * self.batch_size : (number + 1) * self.batch_size]
