"""A run on disk: draws and statistics in Zarr as they come, and a checkpoint from which it goes on to the same bits.

A run folder is a Zarr store that ``xarray.open_datatree`` opens at any moment, of the shape of the whole run: draws that are
not there yet are NaN and their step is -1. Beside the arrays lies ``.checkpoint.npz``, which is replaced at once or not at
all. Nothing is pickled: arrays, and settings in JSON.
"""

import contextlib
import hashlib
import json
import math
import operator
import os
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.layout import Layout, Site, group_of, named_dims
from pyro_sparse.inference.moments import Moments
from pyro_sparse.inference.potential import Potential

CHECKPOINT, LOCK, START, IDENTITY = ".checkpoint{}.npz", ".lock{}", ".start.npy", "pyro_sparse_run"
FORMAT = 1
SECONDS = 5.0  # between two checkpoints, and at least
PATIENCE = 50  # times what writing one takes
FLUSH_SECONDS, FLUSH_BYTES = 0.2, 1 << 23  # draws that come faster are written together
BLOCK = 1 << 16  # numbers of a chunk; a larger draw has chunks of its own

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes:
        ended: (chain, coordinate) last positions of the chains that are through.
        number: the next step of the chains that are not; 0 before their first.
        position, momentum: theirs, (coordinate,) or (chain, coordinate).
        history: (chain, step, column) of what the progress bar showed, for each chain that has begun.
        moments: the state of the running moments of a run whose draws are sparse.
        spike_progress: of the last step.
    """

    ended: Tensor
    number: int
    position: Tensor
    momentum: Tensor
    history: list[Array]
    moments: Mapping[str, Array] = field(default_factory=dict)
    spike_progress: float = 1.0


class StoredDraws:
    """Draws on disk as ``draws[chain, draw]``, a flat position each; ``shape`` is (chain, draw, coordinate)."""

    def __init__(self, path: Path, layout: Layout, like: Tensor, chains: tuple[int, ...], num_draws: int) -> None:
        self._path, self._layout, self._like, self._chains = path, layout, like, chains
        self._block: tuple[int, int, Array] | None = None  # chain, first draw, draws: what was read last
        self.shape = torch.Size((len(chains), num_draws, layout.num_coordinates))

    def __getitem__(self, index: tuple[int, int]) -> Tensor:
        """One draw.

        Raises:
            IndexError: outside of the shape.
            ValueError: where what the disk holds of it is missing or damaged.
        """
        place, draw = (_counted(i, size) for i, size in zip(index, self.shape[:2], strict=True))
        chain, size = self._chains[place], _draws_in_block(self._layout)
        first = draw - draw % size
        if self._block is None or self._block[:2] != (chain, first):
            self._block = chain, first, self._read(chain, first, min(first + size, self.shape[1]))
        flat = self._block[2][draw - first]
        if np.isnan(flat).any():
            raise ValueError(f"{self._path} must hold draw {draw} of chain {chain}, but it is missing or damaged")
        return torch.from_numpy(flat.copy()).to(self._like)

    def _read(self, chain: int, first: int, last: int) -> Array:
        """(draw, coordinate) of some draws."""
        group, parts = _open(self._path), []
        for site in self._layout.sites:
            name = _home(site, unconstrained=site.transform is not None)
            try:
                parts.append(np.asarray(group[name][chain, first:last]).reshape(last - first, -1))
            except Exception as error:  # whatever a decoder makes of damaged bytes
                raise ValueError(
                    f"{self._path} must hold draws {first} to {last - 1} of chain {chain}, but '{name}' cannot be read: {error}"
                ) from error
        return np.concatenate(parts, 1)

    def of_chains(self, chains: slice) -> "StoredDraws":
        """Those of some chains."""
        return StoredDraws(self._path, self._layout, self._like, self._chains[chains], self.shape[1])


def _counted(index: Any, size: int) -> int:
    """A number of one of so many, counted from the end where it is negative."""
    number = operator.index(index)
    if not -size <= number < size:
        raise IndexError(f"index must lie in [{-size}, {size}), got {number}")
    return number % size


def _draws_in_block(layout: Layout) -> int:
    return max(1, BLOCK // max(1, layout.num_coordinates))


def each_draw(draws: Tensor | StoredDraws) -> Iterator[Tensor]:
    """All of them, chain by chain."""
    chains, number, _ = draws.shape
    for chain in range(chains):
        for draw in range(number):
            yield draws[chain, draw]


def each_block(draws: Tensor | StoredDraws, chain: int) -> Iterator[Tensor]:
    """Those of one chain, (draw, coordinate), as many at once as are few numbers."""
    _, number, coordinates = draws.shape
    for some in torch.arange(number).split(max(1, BLOCK // max(1, coordinates))):
        yield torch.stack([draws[chain, int(draw)] for draw in some])


def _home(site: Site, unconstrained: bool = False) -> str:
    """Where the value of a site is."""
    group = "unconstrained_posterior" if unconstrained else group_of(site)
    return f"{group}/{site.name}"


def _open(path: Path, mode: str = "r") -> Any:
    import zarr

    return zarr.open_group(path, mode=mode, use_consolidated=False)  # type: ignore[arg-type]


class Store:
    """The folder of one run, held by one process at a time; of several that share a run, each holds its part.

    Raises:
        BlockingIOError: where another process holds it.
    """

    def __init__(
        self, path: Path, layout: Layout, like: Tensor, moments: Moments | None = None, part: str = ""
    ) -> None:
        self.path, self._saved = path, path / CHECKPOINT.format(part)
        self._layout, self._like, self._moments = layout, like, moments
        self._pending: list[tuple[int, int, Tensor, Mapping[str, float]]] = []
        self._group = _open(path, "r+")
        self._lock = _locked(path / LOCK.format(part))
        self._arrays: dict[str, Any] = {}
        self._due = time.monotonic() + SECONDS
        self._flush_due = 0.0
        checkpoint = self.checkpoint()
        if moments is not None and checkpoint is not None:
            moments.restore(checkpoint.moments)

    def write(self, chain: int, draw: int, position: Tensor, row: Mapping[str, float]) -> None:
        """One draw, on disk within a fifth of a second.

        Raises:
            OSError: naming draw and remedy; what was written before stays.
        """
        position = position.detach().to("cpu", copy=True)
        if self._moments is not None:
            self._moments.add(chain, position)
            position = self._moments.included(position)
        self._pending.append((chain, draw, position, row))
        num_bytes = len(self._pending) * position.numel() * position.element_size()
        if time.monotonic() >= self._flush_due or num_bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has come; the step of a draw last, by which it is known to be complete."""
        begun = time.monotonic()
        pending, self._pending = self._pending, []
        for chain in dict.fromkeys(draw[0] for draw in pending):
            own = [draw[1:] for draw in pending if draw[0] == chain]
            try:
                self._write(chain, own[0][0], torch.stack([draw[1] for draw in own]), [draw[2] for draw in own])
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"draw {own[0][0]} of chain {chain} could not be written to {self.path} ({error.strerror or error}): the "
                    "draws before it are there; make room and go on with resume=True",
                ) from error
        self._flush_due = time.monotonic() + max(FLUSH_SECONDS, 20 * (time.monotonic() - begun))

    def _write(self, chain: int, first: int, positions: Tensor, rows: list[Mapping[str, float]]) -> None:
        """Successive draws of a chain: positions (draw, coordinate)."""
        values, draws = self._layout.constrained(positions), slice(first, first + len(rows))
        for site, part in self._layout.parts(positions):
            self._put(_home(site), chain, draws, values[site.name].numpy())
            if site.transform is not None:
                self._put(_home(site, unconstrained=True), chain, draws, part.numpy())
        for name in sorted(rows[0], key=lambda name: name == "step"):
            self._put(f"sample_stats/{name}", chain, draws, np.array([row[name] for row in rows]))

    def _put(self, name: str, chain: int, draws: slice, values: Array) -> None:
        if name not in self._arrays:
            self._arrays[name] = self._group[name]
        try:
            self._arrays[name][chain, draws] = values
        except ValueError as error:  # of a chunk that is there in part, what it holds is read first
            raise self._damaged(name, chain, error) from error

    def _damaged(self, name: str, chain: int, error: ValueError) -> ValueError:
        return ValueError(
            f"{self.path} must be whole to be gone on with, but '{name}' of chain {chain} cannot be read ({error}): name "
            "another folder for a new run"
        )

    def check_draws(self, chain: int, steps: list[int]) -> None:
        """Whether the draws of a chain that came at these steps are complete.

        Raises:
            ValueError: naming the first that is not.
        """
        name = "sample_stats/step"
        try:
            found = np.asarray(self._group[name][chain, : len(steps)])
        except ValueError as error:
            raise self._damaged(name, chain, error) from error
        if (found != steps).any():
            draw = int((found != steps).argmax())
            raise ValueError(
                f"{self.path} must hold draw {draw} of chain {chain} to be gone on with, but it is missing or damaged: "
                f"delete {self._saved.name} there, and resume=True computes all draws again"
            )

    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        return time.monotonic() > self._due

    def save(self, checkpoint: Checkpoint) -> None:
        """Replaces the checkpoint by this one, after the draws that led to it."""
        self.flush()
        begun = time.monotonic()
        arrays = {f"history/{chain}": rows for chain, rows in enumerate(checkpoint.history)}
        tensors = {name: getattr(checkpoint, name) for name in ("ended", "position", "momentum")}
        arrays |= {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        arrays |= {name: np.array(getattr(checkpoint, name)) for name in ("number", "spike_progress")}
        arrays |= {} if self._moments is None else self._moments.state()
        partial = self._saved.with_name(f"{self._saved.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._saved)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"a checkpoint could not be written to {self.path} ({error.strerror or error}): the one before is there; make "
                "room and go on with resume=True",
            ) from error
        if checkpoint.number == 0:  # a chain is through
            self._write_moments()
        self._due = time.monotonic() + max(SECONDS, PATIENCE * (time.monotonic() - begun))

    def _write_moments(self) -> None:
        if self._moments is None:
            return
        for group, dataset in self._moments.datasets().items():
            for chain in self._moments.chains():
                for name, values in dataset.items():
                    self._group[f"{group}/{name}"][chain] = values.values[chain]

    def checkpoint(self) -> Checkpoint | None:
        """The last one; None before the first."""
        return _read_checkpoint(self._saved, self._like)

    def settle(self, layout: Layout) -> None:
        """Takes over the final prior of a run that looks for one."""
        self._layout = layout
        if self._moments is not None:
            self._moments.settle(layout)

    def close(self) -> None:
        """Lets another process have it."""
        try:
            self.flush()
            self._write_moments()
        finally:
            self._lock.close()


def create(path: Path, write: Callable[[Path], None]) -> None:
    """A new folder that is written elsewhere first: in place at once or not at all.

    Raises:
        OSError: where there is something, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as beside:
            new = Path(beside) / "new"
            write(new)
            os.replace(new, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"out must be a new folder, but {path} cannot be made ({error.strerror or error}): name another",
        ) from error


def read_start(path: Path, like: Tensor) -> Tensor:
    """The position that the first chain of a run folder starts from."""
    return torch.from_numpy(np.load(path / START, allow_pickle=False)).to(like)


def read_checkpoints(path: Path, like: Tensor, processes: int) -> list[Checkpoint | None]:
    """Those of a run folder, of each process that shared it; None of one that has none."""
    parts = [f"-{rank}" for rank in range(processes)] if processes > 1 else [""]
    return [_read_checkpoint(path / CHECKPOINT.format(part), like) for part in parts]


def _read_checkpoint(saved: Path, like: Tensor) -> Checkpoint | None:
    if not saved.exists():
        return None
    try:
        with np.load(saved, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{saved} is damaged ({error}): delete it, and resume=True computes the draws again from the start"
        ) from error
    tensors = {name: torch.from_numpy(arrays[name]).to(like.device) for name in ("ended", "position", "momentum")}
    history = [arrays[f"history/{chain}"] for chain in range(sum(name.startswith("history/") for name in arrays))]
    moments = {name: array for name, array in arrays.items() if name.startswith("moments/")}
    progress = float(arrays.get("spike_progress", 1.0))
    return Checkpoint(
        number=int(arrays["number"]), history=history, moments=moments, spike_progress=progress, **tensors
    )


def read_identity(path: Path) -> dict[str, Any]:
    """What the run of a folder was given.

    Raises:
        ValueError: where it is no folder of a run.
    """
    settings = path / "zarr.json"
    try:
        attributes = json.loads(settings.read_text(encoding="utf-8"))["attributes"] if settings.is_file() else {}
    except (ValueError, KeyError) as error:
        raise ValueError(f"{settings} is damaged ({error}): the run in it cannot be read") from error
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


def num_bytes(layout: Layout, like: Tensor, num_chains: int, num_draws: int, sparse: bool) -> tuple[int, int]:
    """At least and at most, of draws, moments and two checkpoints; statistics are nothing beside them."""
    twice = sum(site.shape.numel() for site in layout.sites if site.transform is not None)
    weights = sum(site.shape.numel() for site in layout.spike_slab_sites())
    of_draws = num_chains * num_draws * (layout.num_coordinates + twice)
    always = num_chains * (6 * layout.num_coordinates + (9 * weights if sparse else 0))
    least = of_draws - (num_chains * num_draws * weights if sparse else 0)
    return like.element_size() * (least + always), like.element_size() * (of_draws + always)


def is_run(path: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return (path / "zarr.json").is_file()


def check_folder(path: Path, resume: bool, given: Mapping[str, Any], needed: int) -> None:
    """Whether a run can be written to a folder, or gone on with; before anything else is done.

    Raises:
        FileExistsError: where there is something else.
        ValueError: where another run is there.
        PermissionError: where nothing can be written.
        OSError: where the disk is too small for all draws.
    """
    if resume and is_run(path):
        check_same(path, read_identity(path), given)
        _check_writable(path)
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        rule = "the folder of a run, or a new one" if resume else "a new folder, or resume=True be given"
        raise FileExistsError(f"out must be {rule}, but {path} is there")
    folder = next(parent for parent in path.parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"out must lie in a folder, but {folder} is a file")
    _check_writable(folder)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"out must be on a disk with room for all draws, {needed / 1e9:.3g} GB, but {folder} has {free / 1e9:.3g} GB free: "
            "lower num_draws or name another"
        )


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"out must lie where files can be written, but nothing can be written to {folder}: name another"
        )


def write_empty(
    path: Path,
    layout: Layout,
    like: Tensor,
    statistics: Mapping[str, str],
    attributes: Mapping[str, Any],
    coords: Mapping[str, Array],
    num_chains: int,
    num_draws: int,
    moments: Moments | None,
) -> None:
    """The arrays of the whole run, of which no chunk is written yet.

    Args:
        like: the position that the first chain starts from, which is kept.
        statistics: names and types of what is kept of every draw.
        coords: of axes of the sites.
        moments: of the weights; draws then hold only what they include.
    """
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    # A damaged byte is found when it is read. Draws that are whole are not compressed, as the last bits of a weight are noise;
    # the zeros of sparse ones take no room.
    checked, sparse = [Crc32cCodec()], [ZstdCodec(level=1), Crc32cCodec()]

    for site in layout.sites:
        if site.name in (".", "..", "zarr.json") or "/" in site.name or len(site.name.encode()) > 200:
            raise ValueError(
                f"site '{site.name}' must have a name that can be one of a folder to be written to disk: rename it"
            )
    size, block = (num_chains, num_draws), min(num_draws, _draws_in_block(layout))
    dtype = str(like.dtype).removeprefix("torch.")
    root = zarr.open_group(path, mode="w")
    groups = ["posterior", "sample_stats", *["unconstrained_posterior"] * any(s.transform for s in layout.sites)]
    groups += ["buffers"] * (layout.num_buffers > 0)
    for name in groups:
        group = root.create_group(name)
        for dim, length in zip(("chain", "draw"), size, strict=True):
            group.create_array(dim, data=np.arange(length), dimension_names=(dim,))
    for dim, labels in coords.items():
        text = labels.astype(np.dtypes.StringDType())
        root.create_array(f"posterior/{dim}", data=text, dimension_names=(dim,))
    for name, dataset in ({} if moments is None else moments.datasets()).items():
        group = root.create_group(name)
        group.create_array("chain", data=np.arange(num_chains), dimension_names=("chain",))
        for weight, empty in dataset.items():
            chunks = (1, *(max(length, 1) for length in empty.shape[1:]))
            dims = [str(dim) for dim in empty.dims]
            group.create_array(str(weight), data=empty.values, chunks=chunks, dimension_names=dims)
        groups.append(name)
    values = layout.constrained(torch.zeros(layout.num_coordinates).to(like))
    own = named_dims({name: value.shape for name, value in values.items()})
    for site in layout.sites:
        shapes = {group_of(site): values[site.name].shape}
        if site.transform is not None:
            shapes["unconstrained_posterior"] = site.shape
        for home, shape in shapes.items():
            axes = named_dims({site.name: shape})[site.name] if home == "unconstrained_posterior" else own[site.name]
            root.create_array(
                f"{home}/{site.name}",
                shape=(*size, *shape),
                chunks=(1, block, *(max(length, 1) for length in shape)),
                dtype=dtype,
                fill_value=np.nan,
                dimension_names=("chain", "draw", *axes),
                compressors=checked if moments is None else sparse,
            )
    for name, kind in statistics.items():
        root.create_array(
            f"sample_stats/{name}",
            shape=size,
            chunks=(1, min(num_draws, 1_000)),
            compressors=checked,
            dtype=kind,
            fill_value=np.nan if kind == "float64" else -1,
            dimension_names=("chain", "draw"),
        )
    for node in (root, *(root[name] for name in groups)):
        node.attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr's, of metadata in one place, which xarray reads
        zarr.consolidate_metadata(path)
    np.save(path / START, like.detach().cpu().numpy(), allow_pickle=False)


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
    """What identifies the sites of a model and their priors."""
    sites = [[site.name, site.kind, *site.shape] for site in spec.layout.sites]
    laws = {site.name: site.law for site in spec.layout.spike_slab_sites() if site.law is not None}
    names = ("slab_prob", "spike_scale", "slab_scale", "initial_spike_scale")
    return {"sites": sites, "priors": {n: digest(getattr(law, k) for k in names) for n, law in laws.items()}}


def _close(here: dict[str, float], there: Any) -> bool:
    """Equal to what other machines round."""
    if not isinstance(there, dict) or here.keys() != there.keys():
        return False
    pairs = [(value, there[name]) for name, value in here.items()]
    return all(math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4) or one != one != other for one, other in pairs)


def _distance(one: Any, other: Any) -> float:
    """0 where they are the same, and the more the less alike."""
    if one == other:
        return 0.0
    numbers = isinstance(one, float) and isinstance(other, float) and math.isfinite(one - other)
    return abs(one - other) / (1 + abs(other)) if numbers else math.inf


def densities_of(spec: Specification, like: Tensor) -> dict[str, float]:
    """The log density of every site at one position and batch, by which models of the same sites are told apart."""
    position = 0.3 * torch.linspace(-1, 1, spec.layout.num_coordinates).to(like)
    potential = Potential(spec)
    batch = spec.data if spec.loader is not None else replace(spec, augment=None).batches(0, 0, like.device)(0)
    with torch.random.fork_rng([like.device.index or 0] if like.is_cuda else []):
        torch.manual_seed(0)
        evaluation = potential(position, potential.tempering(1.0, 1.0, 1.0, position), batch)
    return {name: float(value) for name, value in evaluation.log_prob.items()}


def difference(found: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first thing given that differs from what was found: its name, and both values."""
    for name, value in given.items():
        here: Any = json.loads(json.dumps(value))
        there: Any = json.loads(json.dumps(found.get(name)))
        if here == there or (name == "log_density" and _close(here, there)):
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            key = max({**here, **there}, key=lambda k: _distance(here.get(k), there.get(k)))
            return f"{name}[{key!r}]", there.get(key), here.get(key)
        return name, there, here
    return None


def check_same(path: Path, found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Whether a folder holds the run that is to be gone on with.

    Raises:
        ValueError: naming what differs, its value there and here.
    """
    differs = difference(found, given)
    if differs is not None:
        name, there, here = differs
        raise ValueError(
            f"{path} holds another run: its {name} is {there}, here it is {here}; make it the same, or name another folder"
        )
