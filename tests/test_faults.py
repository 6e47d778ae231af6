"""Runs on disk under real faults: full and read-only disks, a likelihood that breaks late, damage, other models, processes."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import sampler, store
from pyro_sparse.inference.minibatch import Batches

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(60, generator=GENERATOR)
SCHEDULE = ps.PriorAnnealing(1, 1, 1, 1, 60, learning_rate=1e-3)
SETTINGS: dict[str, Any] = {"schedule": SCHEDULE, "batch_size": 20, "num_draws": 30, "progress": False}
PRIOR = ps.SpikeSlab(0.1, 0.1, 1.0)


def make_model(
    prior: ps.SpikeSlab = PRIOR,
    intercept: str = "intercept",
    intercept_scale: float = 1.0,
    shift: float = 0.0,
    like: Tensor = X,
    family: Any = dist.Normal,
    change: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda mean, x, b: mean,
    seed: int = 0,
) -> Any:
    """A network and an intercept; every argument is something in which two models may differ."""
    torch.manual_seed(seed)
    net = ps.SparseNet([3, 4, 1], prior=prior).to(like)
    constant = torch.full((1,), shift).to(like)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        b = pyro.sample(intercept, dist.Normal(torch.zeros(()).to(like), intercept_scale))
        mean = change(net(x).squeeze(-1) + b + constant, x, b)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("y", family(mean, 1.0), obs=y)

    return model


def annealed(out: Path | None = None, model: Any = None, data: Any = (X, Y), **options: Any) -> ps.Run:
    model = make_model() if model is None else model
    return ps.anneal(model, data, out=out, **(SETTINGS | options))


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def killed(monkeypatch: pytest.MonkeyPatch, out: Path, step: int = 40, **options: Any) -> None:
    """A run that ends after so many steps, without any farewell, with checkpoints at every fifth."""
    done: list[int] = []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == step:
            raise Killed
        return len(done) % 5 == 0

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store.Store, "is_due", is_due)
        patch.setattr(store.Store, "close", lambda keeper: keeper._lock.close())
        annealed(out, **options)


def assert_begins_as(found: ps.Run, expected: ps.Run) -> int:
    """Whether the draws of one chain are the first of another run, bit for bit; how many there are."""
    number = found.draws.shape[1]
    for draw in range(number):
        assert torch.equal(found.draws[0, draw], expected.draws[0, draw])
    trace = found.trace["posterior"]["layer1.weight"].values
    assert (trace == expected.trace["posterior"]["layer1.weight"].values[:, :number]).all()
    return number


def assert_same(found: ps.Run, expected: ps.Run) -> None:
    assert assert_begins_as(found, expected) == expected.draws.shape[1]
    assert torch.equal(found.positions, expected.positions)


class Disk:
    """A small file system of its own, which can be filled, emptied and made read-only."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        self._filler.unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs Linux and its administrator")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_at_a_draw(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before can be read; once there is room, the run goes on to the bits of one that never stopped."""
    monkeypatch.setattr(store, "FLUSH_BYTES", 0)  # each draw by itself
    expected, out, write = annealed(), disk.path / "run.zarr", store.Store.write

    def filling(keeper: Any, chain: int, draw: int, *value: Any) -> None:
        if draw == 17:
            disk.fill()
        write(keeper, chain, draw, *value)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "write", filling)
        with pytest.raises(
            OSError,
            match=r"draw 17 of chain 0 could not be written to .*No space left.*: the draws before it are there; "
            "make room and go on with resume=True",
        ):
            annealed(out)
    assert assert_begins_as(ps.load(out, make_model(), (X, Y)), expected) == 17
    with pytest.raises(OSError, match="could not be written to"):
        annealed(out, resume=True)  # still full
    assert assert_begins_as(ps.load(out, make_model(), (X, Y)), expected) == 17
    disk.empty()
    assert_same(annealed(out, resume=True), expected)


def test_a_disk_that_is_full_at_a_checkpoint(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before it stays, and is gone on with."""
    monkeypatch.setattr(store, "FLUSH_BYTES", 0)
    expected, out, done = annealed(), disk.path / "run.zarr", []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == 50:
            disk.fill()
        return len(done) in (30, 50)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "is_due", is_due)
        with pytest.raises(
            OSError, match=r"a checkpoint could not be written to .*No space left.*: the one before is there; make room"
        ):
            annealed(out)
    checkpoint = store.read_checkpoints(out, X, 1)[0]
    assert checkpoint is not None and checkpoint.number == 30
    assert not [path for path in out.rglob("*") if "partial" in path.name]
    disk.empty()
    assert_same(annealed(out, resume=True), expected)


def test_a_disk_that_cannot_be_written(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new run and none to go on with, before the model is traced; what is there can be read."""
    out = disk.path / "run.zarr"
    killed(monkeypatch, out)
    disk.make_read_only()
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "Potential", None)
        for path, resume, where in ((disk.path / "new.zarr", False, "disk"), (out, True, r"run\.zarr")):
            with pytest.raises(
                PermissionError,
                match=f"out must lie where files can be written, but nothing can be written to .*{where}:",
            ):
                annealed(path, resume=resume)
    assert assert_begins_as(ps.load(out, make_model(), (X, Y)), annealed()) == 15


def test_a_disk_without_room_for_the_folder(disk: Disk) -> None:
    """Draws would fit, what is beside them does not; nothing is left behind."""
    disk.fill()
    os.truncate(disk.path / "filler", os.path.getsize(disk.path / "filler") - 24 * 1024)
    with pytest.raises(OSError, match=r"out must be a new folder, but .*run.zarr cannot be made \(No space left"):
        annealed(disk.path / "run.zarr")
    assert [path.name for path in disk.path.iterdir()] == ["filler"]


def test_a_folder_that_another_process_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look whether it is there and the first write; it stays as it is."""
    out, check = tmp_path / "run.zarr", store.check_folder

    def checked(path: Path, *arguments: Any) -> None:
        check(path, *arguments)
        path.mkdir()
        (path / "file").write_text("text")

    monkeypatch.setattr(sampler, "check_folder", checked)
    with pytest.raises(
        OSError, match=r"out must be a new folder, but .*run.zarr cannot be made \(Directory not empty\)"
    ):
        annealed(out)
    assert (out / "file").read_text() == "text" and list(tmp_path.iterdir()) == [out]


def breaking_at(limit: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The mean as it was, and NaN at a row once the intercept times its first input is beyond the limit."""
    return lambda mean, x, b: mean + 0 * (limit - b * x[:, 0]).sqrt()


def test_a_likelihood_that_breaks_late(tmp_path: Path) -> None:
    """Named are the step whose batch has such a row, the site and the remedy; all before it stays, in memory and on disk."""
    data, limit = (X, Y + 3), 1.25
    healthy = annealed(data=data, num_draws=60)
    b = healthy.trace["posterior"]["intercept"].values[0]  # after steps 4, 5, ..., 63
    batches = Batches(60, 20, 0, 0, X.device)
    broken = (step for step in range(5, 64) if (b[step - 5] * X[batches(step), 0]).max() > limit)
    first, model = next(broken), make_model(change=breaking_at(limit))
    assert first > 15
    with pytest.raises(
        ps.NonFiniteError, match=f"log density of 'y' became NaN or infinite at step {first} "
    ) as caught:
        annealed(tmp_path / "run.zarr", model, data, num_draws=60)
    assert "(sample step" in str(caught.value) and "lower learning_rate (0.001)" in str(caught.value)
    assert caught.value.step == first and caught.value.run is None
    assert caught.value.values["intercept"] == pytest.approx(b[first - 5], rel=1e-5)
    assert caught.value.__notes__ == [f"the draws before it are in {tmp_path / 'run.zarr'}, where load reads them"]
    loaded = ps.load(tmp_path / "run.zarr", model, data)
    assert loaded.draws.shape[1] == first - 4  # of steps 4, ..., first - 1
    for draw in range(first - 4):
        torch.testing.assert_close(loaded.draws[0, draw], healthy.draws[0, draw], rtol=1e-5, atol=1e-6)
    assert ps.mipp(loaded).sizes["chain"] == 1


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str, bool]] = [  # model, options, message, whether load sees it
    ({"prior": ps.SpikeSlab(0.1, 0.11, 1.0)}, {}, r"its priors\['layer1.weight'\] is", True),
    ({"intercept": "b"}, {}, r"its sites is \[\['intercept', .*here it is \[\['b', ", True),
    ({"intercept_scale": 2.0}, {}, r"its log_density\['intercept'\] is -", True),
    ({"family": dist.Laplace}, {}, r"its log_density\['y'\] is -", True),
    ({"shift": 1.0}, {}, r"its log_density\['y'\] is -", True),
    (
        {"like": X.double()},
        {"data": (X.double(), Y.double())},
        r"its data is .*'float32'.*here it is .*'float64'",
        True,
    ),
    ({}, {"data": (X, Y.double())}, r"its data is .*\['float32', 60\].*\['float64', 60\]", True),
    ({}, {"data": (X.flip(0), Y.flip(0))}, "its data_hash is", True),
    ({}, {"batch_size": None}, "its batch_size is 20, here it is None", False),
]


def test_another_model_or_other_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays as it is."""
    out = tmp_path / "run.zarr"
    killed(monkeypatch, out)
    for different, options, message, is_seen in CHANGES:
        model = make_model(**different)
        with pytest.raises(ValueError, match=message):
            annealed(out, model, resume=True, **options)
        if is_seen:
            with pytest.raises(ValueError, match=message):
                ps.load(out, model, options.get("data", (X, Y)))
    with monkeypatch.context() as patch:  # sums are then in another order
        patch.setattr(torch, "get_num_threads", lambda: 7)
        with pytest.raises(ValueError, match="its threads is 1, here it is 7"):
            annealed(out, resume=True)
    assert_same(annealed(out, resume=True), annealed())


def test_a_folder_that_was_moved_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, tmp_path / "run.zarr")
    moved = tmp_path / "another place" / "deep" / "run"
    moved.parent.mkdir(parents=True)
    shutil.move(tmp_path / "run.zarr", moved)
    run = annealed(moved, resume=True)
    assert_same(run, annealed())
    shutil.move(moved, tmp_path / "run.zarr")
    assert_same(ps.load(tmp_path / "run.zarr", make_model(), (X, Y)), annealed())
    assert [path.name for path in tmp_path.iterdir()].count("run.zarr") == 1


@pytest.mark.parametrize("name", ["sample_stats/step", "posterior/layer1.weight"])
def test_a_run_with_a_chunk_that_was_cut_off_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Found where the draws are checked, or where the chunk is written next."""
    out = tmp_path / "run.zarr"
    killed(monkeypatch, out)
    for chunk in (out / name / "c").rglob("*"):
        if chunk.is_file():
            os.truncate(chunk, chunk.stat().st_size // 2)
    with pytest.raises(
        ValueError,
        match=f"run.zarr must be whole to be gone on with, but '{name}' of chain 0 cannot be read .*: name another",
    ):
        annealed(out, resume=True)


def test_a_chunk_that_was_cut_off_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    annealed(out)
    run = ps.load(out, make_model(), (X, Y))
    chunk = next(path for path in (out / "posterior" / "layer2.weight" / "c").rglob("*") if path.is_file())
    for size in (chunk.stat().st_size // 2, 0):
        os.truncate(chunk, size)
        for use in (ps.mipp, lambda run: ps.predict(run, X[:2])):
            with pytest.raises(
                ValueError,
                match=r"run.zarr must hold draws 0 to 29 of chain 0, but 'posterior/layer2.weight' cannot be",
            ):
                use(run)


WRITER = """
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {here!r})
import test_faults
from pyro_sparse.inference import store
store.FLUSH_SECONDS = 0
test_faults.SETTINGS["schedule"] = test_faults.ps.PriorAnnealing(1, 1, 1, 1, 1_000, learning_rate=1e-3)
test_faults.annealed(test_faults.Path(sys.argv[1]), num_draws=1_000)
"""


@pytest.mark.slow
def test_a_run_is_read_while_another_process_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw that load hands out is that of the run, ever more of them; nobody else may write."""
    monkeypatch.setitem(SETTINGS, "schedule", ps.PriorAnnealing(1, 1, 1, 1, 1_000, learning_rate=1e-3))
    expected, out = annealed(num_draws=1_000), tmp_path / "run.zarr"
    command = [sys.executable, "-c", WRITER.format(here=str(Path(__file__).parent)), str(out)]
    counts = []
    with subprocess.Popen(command) as writer:
        while writer.poll() is None:
            if not (out / store.LOCK.format("")).exists():
                continue
            try:
                counts.append(assert_begins_as(ps.load(out, make_model(), (X, Y)), expected))
            except ValueError as error:
                assert "must hold a draw to be loaded" in str(error)
            if len(counts) == 1:
                with pytest.raises(BlockingIOError, match=r"one process at a time, but another one holds .*run.zarr"):
                    annealed(out, num_draws=1_000, resume=True)
    assert writer.returncode == 0
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert_same(ps.load(out, make_model(), (X, Y)), expected)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    annealed(out)
    chunk = out / "posterior" / "layer1.weight" / "c" / "0" / "0" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[17] ^= 64
    chunk.write_bytes(content)
    loaded = ps.load(out, make_model(), (X, Y))
    with pytest.raises(ValueError, match=r"'posterior/layer1.weight' cannot be read"):
        ps.mipp(loaded)


def test_a_damaged_record_of_what_is_complete_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.zarr"
    killed(monkeypatch, out)
    (out / "sample_stats" / "step" / "c" / "0" / "0").write_bytes(b"1234")
    with pytest.raises(ValueError, match="must say which draws are complete, but 'sample_stats/step' cannot be read"):
        ps.load(out, make_model(), (X, Y))
    with pytest.raises(FileNotFoundError, match="path must be the folder of a run, but there is no "):
        ps.load(tmp_path / "other.zarr", make_model(), (X, Y))


@pytest.mark.filterwarnings("ignore:the model is run eagerly")
def test_a_model_that_runs_eagerly_is_told_apart_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program has no text that could be compared."""
    monkeypatch.setattr("pyro_sparse.inference.potential.traced", lambda *_: 1 / 0)
    killed(monkeypatch, tmp_path / "run.zarr")
    with pytest.raises(ValueError, match=r"its log_density\['y'\] is "):
        annealed(tmp_path / "run.zarr", make_model(shift=1.0), resume=True)


def test_weights_drawn_without_a_seed_are_those_of_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a chain that had not begun when it was killed; without a train phase all start from the weights given."""
    schedule = ps.PriorAnnealing(0, 4, 4, 4, 40, learning_rate=1e-3)
    options: dict[str, Any] = {"schedule": schedule, "num_chains": 2, "num_draws": 5}
    monkeypatch.setattr(sampler, "TOGETHER", 0)  # one after the other
    expected = annealed(model=make_model(seed=1), **options)
    killed(monkeypatch, tmp_path / "run.zarr", model=make_model(seed=1), **options)
    assert_same(annealed(tmp_path / "run.zarr", make_model(seed=2), resume=True, **options), expected)
