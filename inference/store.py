"""A run on disk: draws and statistics in Zarr as they come, and a checkpoint from which it goes on to the same bits.

A run folder is a Zarr store that ``xarray.open_datatree`` opens at any moment, of the shape of the whole run: draws that are
not there yet are NaN and their step is -1. Beside the arrays lies ``.checkpoint.npz``, which is replaced at once or not at
all. Nothing is pickled: arrays, and settings in JSON.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.layout import Layout

CHECKPOINT, LOCK, IDENTITY = ".checkpoint.npz", ".lock", "pyro_sparse_run"
FORMAT = 1
SECONDS = 20.0  # between two checkpoints, and at least
PATIENCE = 50  # times what writing one takes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes:
        ended: (chain, coordinate) last positions of the chains that are through.
        number: the next step of the chains that are not; 0 before their first.
        position, momentum: theirs, (coordinate,) or (chain, coordinate).
        history: (chain, step, column) of what the progress bar showed, for each chain that has begun.
    """

    ended: Tensor
    number: int
    position: Tensor
    momentum: Tensor
    history: list[Array]


class StoredDraws:
    """Draws on disk as ``draws[chain, draw]``, a flat position each; ``shape`` is (chain, draw, coordinate)."""

    def __init__(self, path: Path, layout: Layout, like: Tensor, chains: tuple[int, ...], num_draws: int) -> None:
        self._path, self._layout, self._like, self._chains = path, layout, like, chains
        self.shape = torch.Size((len(chains), num_draws, layout.num_coordinates))

    def __getitem__(self, index: tuple[int, int]) -> Tensor:
        chain, draw = index
        parts = [array[self._chains[chain], draw] for array in self._arrays()]
        flat = np.concatenate([np.asarray(part).reshape(-1) for part in parts])
        return torch.from_numpy(flat).to(self._like)

    def _arrays(self) -> list[Any]:
        group = _open(self._path)
        names = [_stored_name(site.name, site.transform is not None) for site in self._layout.sites]
        return [group[name] for name in names]

    def of_chains(self, chains: slice) -> "StoredDraws":
        """Those of some chains."""
        return StoredDraws(self._path, self._layout, self._like, self._chains[chains], self.shape[1])


def each_draw(draws: Tensor | StoredDraws) -> Iterator[Tensor]:
    """All of them, chain by chain."""
    chains, number, _ = draws.shape
    for chain in range(chains):
        for draw in range(number):
            yield draws[chain, draw]


def _stored_name(site: str, constrained: bool) -> str:
    """Where the unconstrained value of a site is."""
    return f"{'unconstrained_posterior' if constrained else 'posterior'}/{site}"


def _open(path: Path, mode: str = "r") -> Any:
    import zarr

    return zarr.open_group(path, mode=mode, use_consolidated=False)  # type: ignore[arg-type]


class Store:
    """The folder of one run, held by one process at a time.

    Raises:
        BlockingIOError: where another process holds it.
    """

    def __init__(self, path: Path, layout: Layout, like: Tensor) -> None:
        self.path = path
        self._layout, self._like = layout, like
        self._lock = _locked(path / LOCK)
        self._group = _open(path, "r+")
        self._due = time.monotonic() + SECONDS

    @classmethod
    def create(
        cls,
        path: Path,
        layout: Layout,
        like: Tensor,
        statistics: Mapping[str, str],
        attributes: Mapping[str, Any],
        num_chains: int,
        num_draws: int,
    ) -> Self:
        """A new folder, in place at once or not at all.

        Args:
            statistics: names and types of what is kept of every draw.

        Raises:
            OSError: where there is something, or it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as beside:
            new = Path(beside) / "new"
            _write_empty(new, layout, like, statistics, attributes, num_chains, num_draws)
            os.replace(new, path)
        return cls(path, layout, like)

    def identity(self) -> dict[str, Any]:
        """What the run was given, as written at its creation."""
        return dict(json.loads(self._group.attrs[IDENTITY]))

    def write(self, chain: int, draw: int, position: Tensor, row: Mapping[str, float]) -> None:
        """One draw; its step is written last.

        Raises:
            OSError: naming draw and remedy; what was written before stays.
        """
        try:
            values = self._layout.constrained(position)
            for site, part in self._layout.parts(position):
                self._put("posterior", site.name, chain, draw, values[site.name])
                if site.transform is not None:
                    self._put("unconstrained_posterior", site.name, chain, draw, part)
            for name in sorted(row, key=lambda name: name == "step"):
                self._group[f"sample_stats/{name}"][chain, draw] = row[name]
        except OSError as error:
            raise OSError(
                error.errno,
                f"draw {draw} of chain {chain} could not be written to {self.path} ({error.strerror or error}): the draws "
                "before it are there; make room and go on with resume=True",
            ) from error

    def _put(self, group: str, name: str, chain: int, draw: int, value: Tensor) -> None:
        self._group[f"{group}/{name}"][chain, draw] = value.detach().cpu().numpy()

    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        return time.monotonic() > self._due

    def save(self, checkpoint: Checkpoint) -> None:
        """Replaces the checkpoint by this one."""
        begun = time.monotonic()
        arrays = {f"history/{chain}": rows for chain, rows in enumerate(checkpoint.history)}
        tensors = {name: getattr(checkpoint, name) for name in ("ended", "position", "momentum")}
        arrays |= {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        arrays["number"] = np.array(checkpoint.number)
        partial = self.path / f"{CHECKPOINT}.partial"
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path / CHECKPOINT)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"a checkpoint could not be written to {self.path} ({error.strerror or error}): the one before is there; make "
                "room and go on with resume=True",
            ) from error
        self._due = time.monotonic() + max(SECONDS, PATIENCE * (time.monotonic() - begun))

    def checkpoint(self) -> Checkpoint | None:
        """The last one; None before the first."""
        return read_checkpoint(self.path, self._like)

    def close(self) -> None:
        """Lets another process have it."""
        self._lock.close()


def read_checkpoint(path: Path, like: Tensor) -> Checkpoint | None:
    """That of a run folder; None where it has none."""
    if not (path / CHECKPOINT).exists():
        return None
    with np.load(path / CHECKPOINT, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    tensors = {name: torch.from_numpy(arrays[name]).to(like.device) for name in ("ended", "position", "momentum")}
    history = [arrays[f"history/{chain}"] for chain in range(sum(name.startswith("history/") for name in arrays))]
    return Checkpoint(number=int(arrays["number"]), history=history, **tensors)


def read_identity(path: Path) -> dict[str, Any]:
    """What the run of a folder was given.

    Raises:
        ValueError: where it is no folder of a run.
    """
    settings = path / "zarr.json"
    attributes = json.loads(settings.read_text(encoding="utf-8")).get("attributes", {}) if settings.is_file() else {}
    if IDENTITY not in attributes:
        raise ValueError(
            f"{path} must be the folder of a run that anneal(..., out=...) wrote, but it has no such settings"
        )
    found = dict(json.loads(attributes[IDENTITY]))
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {found.get('format')} of another version of pyro_sparse, this one reads {FORMAT}"
        )
    return found


def read_trace(path: Path) -> xr.DataTree:
    """The DataTree of a run folder, read where it is used."""
    return xr.open_datatree(path, engine="zarr", consolidated=True)


def num_bytes(layout: Layout, like: Tensor, num_chains: int, num_draws: int) -> int:
    """Of all draws and two checkpoints; statistics are nothing beside them."""
    twice = sum(site.shape.numel() for site in layout.sites if site.transform is not None)
    of_draws = num_chains * num_draws * (layout.num_coordinates + twice)
    return like.element_size() * (of_draws + 6 * num_chains * layout.num_coordinates)


def is_run(path: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return (path / "zarr.json").is_file()


def check_folder(path: Path, resume: bool, given: Mapping[str, Any], needed: int) -> None:
    """Whether a run can be written to a folder, or gone on with; before anything else is done.

    Raises:
        FileExistsError: where there is something else.
        ValueError: where another run is there.
        OSError: where the disk is too small for all draws.
    """
    if resume and is_run(path):
        check_same(path, read_identity(path), given)
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"out must be a new folder or resume=True be given, but {path} is there")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"out must be on a disk with room for all draws, {needed / 1e9:.3g} GB, but {folder} has {free / 1e9:.3g} GB free: "
            "lower num_draws or name another"
        )


def _write_empty(
    path: Path,
    layout: Layout,
    like: Tensor,
    statistics: Mapping[str, str],
    attributes: Mapping[str, Any],
    num_chains: int,
    num_draws: int,
) -> None:
    """The arrays of the whole run, of which no chunk is written yet."""
    import zarr

    size = num_chains, num_draws
    dtype = str(like.dtype).removeprefix("torch.")
    root = zarr.open_group(path, mode="w")
    groups = ["posterior", "sample_stats", *["unconstrained_posterior"] * any(s.transform for s in layout.sites)]
    for name in groups:
        group = root.create_group(name)
        for dim, length in zip(("chain", "draw"), size, strict=True):
            group.create_array(dim, data=np.arange(length), dimension_names=(dim,))
    values = layout.constrained(torch.zeros(layout.num_coordinates).to(like))
    for site in layout.sites:
        shapes = {"posterior": values[site.name].shape}
        if site.transform is not None:
            shapes["unconstrained_posterior"] = site.shape
        for home, shape in shapes.items():
            dims = ("chain", "draw", *(f"{site.name}_dim_{axis}" for axis in range(len(shape))))
            root.create_array(
                f"{home}/{site.name}",
                shape=(*size, *shape),
                chunks=(1, 1, *(max(length, 1) for length in shape)),
                dtype=dtype,
                fill_value=np.nan,
                dimension_names=dims,
                compressors=None,  # the last bits of a weight are noise
            )
    for name, kind in statistics.items():
        root.create_array(
            f"sample_stats/{name}",
            shape=size,
            chunks=(1, num_draws),
            dtype=kind,
            fill_value=np.nan if kind == "float64" else -1,
            dimension_names=("chain", "draw"),
        )
    for node in (root, *(root[name] for name in groups)):
        node.attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr's, of metadata in one place, which xarray reads
        zarr.consolidate_metadata(path)


def _locked(path: Path) -> Any:
    """The file, locked until it is closed or the process ends, however it ends."""
    file = path.open("w")
    with contextlib.suppress(ImportError):  # a system without such locks
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BlockingIOError(
                f"out must be written by one process at a time, but another one holds {path.parent}"
            ) from None
    return file


def digest(parts: Iterable[Any]) -> str:
    """A short hash of tensors and texts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            array = part.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            found.update(array.view(torch.uint8).numpy().data)
        else:
            found.update(str(part).encode())
    return found.hexdigest()


def data_of(spec: Specification) -> dict[str, Any]:
    """What identifies the data of a run."""
    shapes = [[str(d.dtype).removeprefix("torch."), *d.shape] for d in spec.data]
    return {
        "data": shapes,
        "data_hash": digest(spec.data),
        "num_data": spec.num_data,
        "batch_size": spec.batch_size,
    }


def model_of(spec: Specification) -> dict[str, Any]:
    """What identifies the sites of a model, and their priors at the final spike."""
    sites = [[site.name, site.kind, *site.shape] for site in spec.layout.sites]
    laws = {site.name: site.law for site in spec.layout.spike_slab_sites() if site.law is not None}
    names = ("slab_prob", "spike_scale", "slab_scale", "initial_spike_scale")
    return {"sites": sites, "priors": {n: digest(getattr(law, k) for k in names) for n, law in laws.items()}}


def check_same(path: Path, found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Whether a folder holds the run that is to be gone on with.

    Raises:
        ValueError: naming what differs, its value there and here.
    """
    for name, value in given.items():
        here, there = json.loads(json.dumps(value)), found.get(name)
        if here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            key = next(k for k in [*here, *there] if here.get(k) != there.get(k))
            name, here, there = f"{name}[{key!r}]", here.get(key), there.get(key)
        raise ValueError(f"{path} holds another run: its {name} is {there}, here it is {here}; name another folder")
