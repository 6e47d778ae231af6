"""Runs on disk: the same draws as in memory, after any interruption the same bits, and errors that say what is wrong."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import sampler, store
from pyro_sparse.inference.minibatch import augment_name

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(60, generator=GENERATOR)
SCHEDULE = ps.PriorAnnealing(5, 10, 10, 5, 60, learning_rate=1e-3)


def make_model() -> Any:
    """A network and a noise scale, which is sampled on the logarithmic scale."""
    torch.manual_seed(0)
    net = ps.SparseNet([3, 4, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        sigma = pyro.sample("sigma", dist.HalfNormal(torch.tensor(1.0)))
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def annealed(
    out: Path | None = None, model: Any = None, schedule: ps.PriorAnnealing = SCHEDULE, **options: Any
) -> ps.Run:
    options = {"batch_size": 20, "num_draws": 12, "progress": False} | options
    data = options.pop("data", (X, Y))
    return ps.anneal(make_model() if model is None else model, data, schedule, out=out, **options)


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def killed_at(monkeypatch: pytest.MonkeyPatch, out: Path, step: int, saved_every: int, **options: Any) -> None:
    """A run on disk that ends, without any farewell, once so many steps are done; checkpoints at every k-th step."""
    done: list[int] = []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == step:
            raise Killed
        return len(done) % saved_every == 0

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store.Store, "is_due", is_due)
        patch.setattr(store.Store, "close", lambda keeper: keeper._lock.close())  # no farewell
        annealed(out, **options)


def assert_same(found: ps.Run, expected: ps.Run) -> None:
    """Bit for bit: positions, draws, trace, history."""
    assert torch.equal(found.positions, expected.positions)
    chains, draws, _ = expected.draws.shape
    assert found.draws.shape == expected.draws.shape
    for chain in range(chains):
        for draw in range(draws):
            assert torch.equal(found.draws[chain, draw], expected.draws[chain, draw])
    for group in ("posterior", "sample_stats"):
        ours, theirs = found.trace[group].to_dataset().load(), expected.trace[group].to_dataset()
        xr.testing.assert_identical(ours.drop_attrs(), theirs.drop_attrs())
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
        assert {k: v for k, v in ours.attrs.items() if k != store.IDENTITY} == theirs.attrs
    xr.testing.assert_identical(found.history, expected.history)
    assert (found.schedule, found.seed, found.input_names) == (expected.schedule, expected.seed, expected.input_names)


@pytest.mark.parametrize(("num_chains", "together"), [(1, True), (2, True), (2, False)])
def test_a_run_on_disk_is_the_run_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chains: int, together: bool
) -> None:
    monkeypatch.setattr(sampler, "TOGETHER", sampler.TOGETHER if together else 0)
    options: dict[str, Any] = {"num_chains": num_chains, "input_names": ["a", "b", "c"]}
    expected = annealed(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = annealed(tmp_path / "run.zarr", **options)
        loaded = ps.load(tmp_path / "run.zarr", make_model(), (X, Y))
    assert_same(run, expected)
    assert_same(loaded, expected)
    for found in (run, loaded):
        assert ps.select(found).num_kept == ps.select(expected).num_kept
        xr.testing.assert_allclose(ps.mipp(found), ps.mipp(expected))
        xr.testing.assert_allclose(ps.predict(found, X[:5]), ps.predict(expected, X[:5]))
        assert_same(found.chain(num_chains - 1), expected.chain(num_chains - 1))


@pytest.mark.parametrize(
    ("step", "saved_every", "together"),
    [(1, 1, True), (61, 7, True), (90, 90, True), (95, 4, False), (170, 11, False)],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, saved_every: int, together: bool
) -> None:
    monkeypatch.setattr(sampler, "TOGETHER", sampler.TOGETHER if together else 0)
    expected, out = annealed(num_chains=2), tmp_path / "run.zarr"
    killed_at(monkeypatch, out, step, saved_every, num_chains=2)
    tree = xr.open_datatree(out, engine="zarr")
    written = tree["sample_stats"]["step"].values
    complete = expected.trace["sample_stats"]["step"].values[written >= 0]
    assert np.array_equal(written[written >= 0], complete)
    if step > 40:
        partial = ps.load(out, make_model(), (X, Y))
        chains, draws, _ = partial.draws.shape
        assert draws >= 1 and torch.equal(
            torch.stack([partial.draws[c, d] for c in range(chains) for d in range(draws)]),
            expected.draws[:chains, :draws].flatten(0, 1),
        )
        assert partial.trace["posterior"].sizes["draw"] == draws
    assert_same(annealed(out, num_chains=2, resume=True), expected)
    assert_same(annealed(out, num_chains=2, resume=True), expected)  # a run that is through


def test_resume_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    assert_same(annealed(tmp_path / "new" / "run.zarr", resume=True), annealed())


def test_another_run_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(monkeypatch, tmp_path / "run.zarr", 70, 5, num_chains=2)
    schedule = ps.PriorAnnealing(5, 10, 10, 5, 61, learning_rate=1e-3)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "its seed is 0, here it is 1"),
        ({"schedule": schedule}, r"its schedule\['sample_steps'\] is 60, here it is 61"),
        ({"batch_size": 30}, "its batch_size is 20, here it is 30"),
        ({"num_draws": 6}, "its num_draws is 12, here it is 6"),
        ({"num_chains": 3}, "its num_chains is 2, here it is 3"),
        ({"data": (X, Y + 1e-6)}, "its data_hash is .*, here it is .*"),
        ({"input_names": ["a", "b", "c"]}, r"its input_names is None, here it is \['a', 'b', 'c'\]"),
        ({"model": ps.normal_regression(ps.SparseNet([3, 5, 1]), 60)}, "its sites is .*, here it is .*"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "Potential", None)  # all of that is found before the model is traced
        for change, message in changes:
            with pytest.raises(ValueError, match=f"run.zarr holds another run: {message}; make it the same"):
                annealed(tmp_path / "run.zarr", resume=True, **({"num_chains": 2} | change))
    annealed(tmp_path / "run.zarr", resume=True, num_chains=2)


def test_another_model_of_the_same_sites_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(monkeypatch, tmp_path / "run.zarr", 70, 5)
    net = ps.SparseNet([3, 4, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0))

    def model(x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.HalfNormal(torch.tensor(1.0)))
        mean = net(x).squeeze(-1).sin()
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    with pytest.raises(ValueError, match=r"its log_density\['y'\] is "):
        ps.load(tmp_path / "run.zarr", model, (X, Y))
    with pytest.raises(ValueError, match=r"its log_density\['y'\] is "):
        annealed(tmp_path / "run.zarr", model, resume=True)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    annealed(tmp_path / "run.zarr")
    with pytest.raises(
        FileExistsError, match=r"out must be a new folder, or resume=True be given, but .*run.zarr is there"
    ):
        annealed(tmp_path / "run.zarr")
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="out must be a new folder"):
        annealed(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    annealed(tmp_path / "empty")
    with pytest.raises(ValueError, match="out must name the folder of the run that resume=True goes on with, got None"):
        annealed(resume=True)


def test_a_folder_of_another_kind_or_without_draws_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="must be the folder of a run that anneal"):
        ps.load(tmp_path, make_model(), (X, Y))
    killed_at(monkeypatch, tmp_path / "run.zarr", 20, 5)
    with pytest.raises(ValueError, match="must hold a draw to be loaded, got none yet: go on with resume=True"):
        ps.load(tmp_path / "run.zarr", make_model(), (X, Y))
    annealed(tmp_path / "run.zarr", resume=True)
    with pytest.raises(ValueError, match="holds another run: its data_hash"):
        ps.load(tmp_path / "run.zarr", make_model(), (X + 1, Y))


def test_a_disk_that_is_too_small_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        free = 10

    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: Disk)
    with pytest.raises(
        OSError, match=r"out must be on a disk with room for all draws, 1.63e-06 GB, but .* has 1e-08 GB free"
    ):
        annealed(tmp_path / "run.zarr")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_stops_the_run_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = store.Store._put

    def failing(keeper: Any, name: str, chain: int, draws: slice, values: Any) -> None:
        if draws.start == 5 and name == "sample_stats/loss":  # its weights are there, its step must not be
            raise OSError(28, "No space left on device")
        put(keeper, name, chain, draws, values)

    with monkeypatch.context() as patch:
        patch.setattr(store, "FLUSH_BYTES", 0)  # each draw by itself
        patch.setattr(store.Store, "_put", failing)
        with pytest.raises(
            OSError, match=r"draw 5 of chain 0 could not be written to .* \(No space left on device\)"
        ) as caught:
            annealed(tmp_path / "run.zarr")
    assert caught.value.errno == 28
    assert ps.load(tmp_path / "run.zarr", make_model(), (X, Y)).draws.shape[:2] == (1, 5)
    assert_same(annealed(tmp_path / "run.zarr", resume=True), annealed())


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(monkeypatch, tmp_path / "run.zarr", 70, 5)
    code = (
        "import sys, fcntl; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.zarr" / store.LOCK.format(""))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(
            BlockingIOError, match="out must be written by one process at a time, but another one holds"
        ):
            annealed(tmp_path / "run.zarr", resume=True)
        other.communicate()
    annealed(tmp_path / "run.zarr", resume=True)


def test_ctrl_c_ends_with_the_step_and_saves_it(tmp_path: Path) -> None:
    """A long run; the signal comes while it samples."""
    schedule = ps.PriorAnnealing(1, 1, 1, 1, 30_000, learning_rate=1e-3)
    out = tmp_path / "run.zarr"

    def press() -> None:
        while not (out / store.LOCK.format("")).exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs behind with it ignored
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped after step [\d,]+ of 30,004 with \d+ draws of this chain on disk"
    ):
        annealed(out, schedule=schedule, num_draws=1_000)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, usual)
    (checkpoint,) = store.read_checkpoints(out, X, 1)
    assert checkpoint is not None and 0 < checkpoint.number < 30_000


SCRIPT = """
import sys, torch
sys.path.insert(0, {here!r})
torch.set_num_threads(1)
import test_store
from pyro_sparse.inference import store
store.SECONDS = store.PATIENCE = 0
test_store.annealed(sys.argv[1], num_chains=2, resume=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_leaves_a_run_that_another_ends(tmp_path: Path, kills: int) -> None:
    """SIGKILL wherever it falls, a checkpoint after every step; each process goes on where the last one stood."""
    out, expected = tmp_path / "run.zarr", annealed(num_chains=2)
    command = [sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent)), str(out)]
    delays = np.random.default_rng(0).exponential(0.02, kills)
    for delay in delays:
        before = store.read_checkpoints(out, X, 1)[0].number if out.exists() else 0  # type: ignore[union-attr]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                found = store.read_checkpoints(out, X, 1)[0] if out.exists() else None
                if found is not None and found.number > before:
                    time.sleep(delay)
                    break
            process.kill()
        written = xr.open_datatree(out, engine="zarr")["sample_stats"]["step"].values
        known = expected.trace["sample_stats"]["step"].values
        assert np.array_equal(written[written >= 0], known[written >= 0])
    assert_same(annealed(out, num_chains=2, resume=True), expected)


def test_draws_that_come_fast_are_on_disk_within_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several draws a write, and several a chunk: what the checkpoint follows is there, the rest may not be."""
    monkeypatch.setattr(store, "BLOCK", 5 * 22)
    killed_at(monkeypatch, tmp_path / "run.zarr", 80, 60)
    steps = xr.open_datatree(tmp_path / "run.zarr", engine="zarr")["sample_stats"]["step"].values[0]
    assert (steps[:6] >= 0).all()
    assert_same(annealed(tmp_path / "run.zarr", resume=True), annealed())
    draws = ps.load(tmp_path / "run.zarr", make_model(), (X, Y)).draws
    assert torch.equal(draws[0, -1], draws[0, 11]) and torch.equal(draws[-1, -12], draws[0, 0])
    for index in ((0, 12), (1, 0), (0, -13)):
        with pytest.raises(IndexError, match=r"index must lie in \[-"):
            draws[index]


def test_what_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BLOCK", 1)  # a chunk a draw
    out = tmp_path / "run.zarr"
    annealed(out)
    (out / "posterior" / "layer1.weight" / "c" / "0" / "2" / "0" / "0").unlink()
    loaded = ps.load(out, make_model(), (X, Y))
    for use in (lambda: loaded.draws[0, 2], lambda: ps.mipp(loaded)):
        with pytest.raises(ValueError, match=r"run.zarr must hold draw 2 of chain 0, but it is missing or damaged"):
            use()
    (out / "posterior" / "layer1.weight" / "c" / "0" / "3" / "0" / "0").write_bytes(b"1234")
    with pytest.raises(
        ValueError, match=r"must hold draws 3 to 3 of chain 0, but 'posterior/layer1.weight' cannot be read"
    ):
        loaded.draws[0, 3]
    (out / "sample_stats" / "step" / "c" / "0" / "0").unlink()
    with pytest.raises(
        ValueError, match=r"must hold draw 0 of chain 0 to be gone on with, but it is missing or damaged"
    ):
        annealed(out, resume=True)
    (out / store.CHECKPOINT.format("")).write_bytes(b"PK")
    for again in (lambda: annealed(out, resume=True), lambda: ps.load(out, make_model(), (X, Y))):
        with pytest.raises(ValueError, match=r"checkpoint.npz is damaged \(.*\): delete it, and resume=True"):
            again()
    (out / store.CHECKPOINT.format("")).unlink()
    assert_same(annealed(out, resume=True), annealed())
    (out / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"zarr.json is damaged \(.*\): the run in it cannot be read"):
        ps.load(out, make_model(), (X, Y))


def test_a_run_without_a_checkpoint_has_no_history(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    expected = annealed(out, num_chains=2)
    (out / store.CHECKPOINT.format("")).unlink()
    loaded = ps.load(out, make_model(), (X, Y))
    assert dict(loaded.history.sizes) == {"chain": 0, "step": 0}
    second = loaded.chain(1)
    assert torch.equal(second.draws[0, -1], expected.draws[1, -1])
    assert second.history.sizes["chain"] == 0 and set(second.history) == set(expected.history)
    xr.testing.assert_identical(expected.chain(1).history, expected.history.isel(chain=[1]))


def doubled(x: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * x


def untouched(x: Tensor, generator: torch.Generator) -> Tensor:
    return x


def test_what_is_loaded_is_augmented_as_the_run_was(tmp_path: Path) -> None:
    net = ps.SparseNet([3, 1], prior=ps.SpikeSlab(0.99, 0.01, 1.0))
    out, plain, model = tmp_path / "run.zarr", tmp_path / "plain.zarr", ps.normal_regression(net, 60)
    run = annealed(out, model, augment=doubled)
    assert ps.select(run).selected_inputs
    train = ps.PriorAnnealing(20, 0, 0, 0, learning_rate=1e-3)

    def refitted(source: ps.Run) -> Tensor:
        return ps.refit(source, ps.select(source), schedule=train, progress=False).free

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ps.load(out, model, (X, Y), augment=doubled)
    assert torch.equal(refitted(loaded), refitted(run))
    with pytest.warns(
        UserWarning,
        match=r"run.zarr were augmented by doubled, and what .* by batches is not augmented: .* augment=doubled\)",
    ):
        assert not torch.equal(refitted(ps.load(out, model, (X, Y))), refitted(run))
    with pytest.warns(
        UserWarning, match=r"were augmented by doubled, .* is augmented by untouched: .* augment=doubled"
    ):
        ps.load(out, model, (X, Y), augment=untouched)
    annealed(plain, model)
    with pytest.warns(UserWarning, match=r"were not augmented, .* is augmented by untouched: .* leave augment out"):
        ps.load(plain, model, (X, Y), augment=untouched)


@pytest.mark.parametrize("augment", [None, doubled, functools.partial(doubled)])
def test_the_name_of_an_augmentation_is_what_the_run_has_written(augment: Any, tmp_path: Path) -> None:
    annealed(tmp_path / "run.zarr", augment=augment)
    assert augment_name(augment) == store.read_identity(tmp_path / "run.zarr")["augment"]


def test_numbers_of_numpy_and_paths_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schedule = ps.PriorAnnealing(np.int64(5), 10, 10, 5, 60, learning_rate=np.float64(1e-3))  # type: ignore[arg-type]
    options = {"num_draws": np.int64(12), "num_chains": np.int64(1), "seed": np.int32(0), "batch_size": np.int64(20)}
    run = annealed(Path("run.zarr"), schedule=schedule, **options)
    loaded = ps.load("run.zarr", make_model(), (X, Y))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert_same(run, annealed())
    assert_same(loaded, annealed())
    with pytest.raises(TypeError, match=r"num_draws must be a whole number, got 4\.0"):
        annealed(num_draws=4.0)


def test_names_and_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError, match=r"out must lie in a folder, but .*file is a file"):
        annealed(tmp_path / "file" / "run.zarr")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "text").write_text("text")
    with pytest.raises(FileExistsError, match=r"out must be the folder of a run, or a new one, but .*foreign is there"):
        annealed(tmp_path / "foreign", resume=True)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("..", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"site '\.\.' must have a name that can be one of a folder"):
        annealed(tmp_path / "run.zarr", model)
    with pytest.raises(ValueError, match=r"data must be those of .*, of shapes \[\[60, 3\], \[60\]\], got \[\[59, 3\]"):
        annealed(tmp_path / "run.zarr")
        ps.load(tmp_path / "run.zarr", make_model(), (X[:59], Y[:59]))


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    annealed(tmp_path / "run.zarr")
    with np.load(tmp_path / "run.zarr" / store.CHECKPOINT.format(""), allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "bfiu" for name in file.files)
    names = {path.name for path in (tmp_path / "run.zarr").iterdir()}
    assert names == {
        *("zarr.json", "posterior", "sample_stats", "unconstrained_posterior"),
        *(store.CHECKPOINT.format(""), store.LOCK.format(""), store.START),
    }
