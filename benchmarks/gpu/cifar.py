"""The paper's image tables: residual networks on CIFAR-10 at a wanted share of weights, their calibration and their speed.

    python benchmarks/gpu/cifar.py --runs 20:0.1:1 --data DIR --folder RUNS --minutes 6 --output "$OUT/gpu_cifar.jsonl"
    python benchmarks/gpu/cifar.py --runs 20:0.1:1,20:0.2:1,32:0.1:1-3 --data DIR --folder RUNS --stages run
    python benchmarks/gpu/cifar.py --setting dense --runs 20:1:1 --data DIR --folder RUNS --stages run
    python benchmarks/gpu/cifar.py --setting paper-text --runs 20:0.1:1 --data DIR --folder RUNS --stages run
    python benchmarks/gpu/cifar.py --smoke --device cpu                          seconds, random images
    python benchmarks/gpu/cifar.py --smoke --device cpu --data DIR --rows 5000   minutes, real images

``--runs`` are depth:share:seeds, one after the other. ``--data`` holds ``cifar-10-batches-py`` as torchvision leaves it (SVHN,
``test_32x32.mat``, may lie beside it), or ``load.py``, a module whose ``load("cifar10_train")`` gives uint8 images
(rows, 32, 32, 3) and labels, as of "cifar10_test" and "svhn_test". For a machine without a network: carry the images and wheels
of what it lacks,

    pip install --no-index --no-deps WHEELS/*.whl && pip install --no-index --no-deps --no-build-isolation -e .

Stages. ``check``: weights after ten steps of a tiny network at temperature 0 against double precision on the CPU.
``time``: seconds an epoch of our step, as a CUDA graph of traced operations and of a compiled program, and of plain
PyTorch. ``run``: prior annealing whose last quarter samples (``--setting keep`` aims at the share by the schedule for
images; ``paper-text`` and ``paper-scripts`` take the paper's schedule and priors, of which text and scripts say different
things; ``dense`` is SGD with weight decay, at temperature 0 and without a prior), and then what the tables need of each
predictor: ``average``, over draws without the weights that they do not include (BNN_average), ``anneal``, the selected
network refitted for ten epochs (BNN_anneal), ``refreshed``, the first with running statistics of BatchNorm of its sparse
networks instead of those of the whole draws, and ``whole``, over draws as they are. One JSON line a figure, written as it
is found. When ``--minutes`` are over the run is saved to ``--folder`` with the step it is in, and the same command goes
on with it; runs that ``--output`` holds already are left out.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import math
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, Row, append_row, is_done, seeds

import pyro_sparse as ps
from pyro_sparse.datasets import cifar10, svhn
from pyro_sparse.inference import response
from pyro_sparse.inference.calibration import entropy_counts
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.keeping import prepared
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.step import Table, step_maker
from pyro_sparse.inference.store import each_draw
from pyro_sparse.models.images import CIFAR10_ERASE_FILL, CIFAR10_MEAN, CIFAR10_STD

SETTINGS = ("keep", "paper-text", "paper-scripts", "dense")
PRECISIONS = ("bfloat16", "tf32", "float32")
STAGES = ("check", "time", "run")
PREDICTORS = ("average", "anneal", "refreshed", "whole")
DECAY, RATE = 5e-4, 0.1
LAW = ps.SpikeSlab(1e-9, 0.01, 0.2, 0.03)  # where any will do
# By depth and share: the paper's variance of the spike, at its end by the text, at its start by the scripts, and slab_prob.
PAPER = {(20, 0.2): (1.5e-5, 1e-8), (20, 0.1): (6e-5, 1e-9), (32, 0.1): (3e-5, 2e-9), (32, 0.05): (1e-4, 2e-8)}
EPOCH_ROUNDS = 3
STATISTICS_ROWS = 10_000  # that running statistics are made of anew, in ten batches

Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """Images (rows, 3, 32, 32), uint8, and labels, on the device; of SVHN images alone, None where there are none."""

    train: Images
    test: Images
    unfamiliar: Tensor | None
    source: str

    def about(self) -> Row:
        rows = {"train_rows": len(self.train[0]), "test_rows": len(self.test[0])}
        return {"data": self.source, **rows, "svhn_rows": 0 if self.unfamiliar is None else len(self.unfamiliar)}


def random_data(num_rows: int, device: str) -> Data:
    """Images of noise around a colour for each class."""
    generator = torch.Generator().manual_seed(0)

    def some(rows: int) -> Images:
        labels = torch.randint(10, (rows,), generator=generator)
        colours = 255 * torch.rand(10, 3, 1, 1, generator=torch.Generator().manual_seed(1))
        noisy = colours[labels] + 60 * torch.randn(rows, 3, 32, 32, generator=generator)
        return noisy.clamp(0, 255).to(torch.uint8).to(device), labels.to(device)

    return Data(some(num_rows), some(num_rows // 2), some(num_rows // 3)[0].flip(1), "random")


def load(folder: Path, num_rows: int | None, device: str) -> Data:
    """Of a folder; ``num_rows`` of the training images and, of those to predict, half as many at most."""
    if (folder / "load.py").exists():
        found = importlib.util.spec_from_file_location("load", folder / "load.py")
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        read: Callable[[str], Images] = lambda name: _tensors(*module.load(name))  # noqa: E731
        files = [p.name for p in sorted(folder.glob("cifar10_train.*.zip"))]
        source = next((name for name in files if "lossless" in name), *files[:1]) if files else "load.py"
    else:
        kinds = {"cifar10_train": (cifar10, True), "cifar10_test": (cifar10, False), "svhn_test": (svhn, False)}
        read, source = lambda name: kinds[name][0](folder, train=kinds[name][1]), "torchvision"
    train, test = read("cifar10_train"), read("cifar10_test")
    unfamiliar = None
    with contextlib.suppress(FileNotFoundError):
        unfamiliar = read("svhn_test")[0]
    less = None if num_rows is None else num_rows // 2
    train, test = (
        (images[:limit].to(device), labels[:limit].to(device))
        for (images, labels), limit in ((train, num_rows), (test, less))
    )
    return Data(train, test, None if unfamiliar is None else unfamiliar[:less].to(device), source)


def _tensors(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Images:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), torch.from_numpy(labels)


def network(depth: int, width: int, seed: int) -> nn.Module:
    """The residual network for raw images, logits from uint8; with fresh weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        net = ps.resnet(depth, width=width)
    return nn.Sequential(ps.Normalize(CIFAR10_MEAN, CIFAR10_STD), net)


def logits_of(net: Callable[[Tensor], Tensor], images: Tensor, precision: str) -> Tensor:
    """In single precision, whatever the network is computed in."""
    # No cache of converted weights: it would outlive the trace that it was filled in.
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False):
        logits = net(images.contiguous(memory_format=torch.channels_last))
    return logits.float() if precision == "bfloat16" else logits


@dataclass(frozen=True)
class Task:
    """One run: a network, a share and a seed, and how it is computed."""

    setting: str
    depth: int
    keep: float
    seed: int
    epochs: int
    width: int
    precision: str
    erase_prob: float
    batch: int

    def about(self) -> Row:
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in self.about().values())

    @property
    def augment(self) -> ps.ImageAugmentation:
        return ps.ImageAugmentation(erase_prob=self.erase_prob, fill=CIFAR10_ERASE_FILL)

    @property
    def share(self) -> float | None:
        """That ``anneal`` aims at."""
        return self.keep if self.setting == "keep" else None

    @property
    def law(self) -> ps.SpikeSlab | None:
        """None where it follows from the share."""
        if self.setting in ("keep", "dense"):
            return None if self.setting == "keep" else LAW
        variance, slab_prob = PAPER[self.depth, self.keep]
        end = variance if self.setting == "paper-text" else variance / 10
        return ps.SpikeSlab(slab_prob, end**0.5, 0.2, (10 * end) ** 0.5)

    def schedule(self, num_rows: int) -> ps.PriorAnnealing:
        steps = num_rows // self.batch
        if self.setting == "keep":
            return ps.PriorAnnealing.images(steps, self.epochs)
        if self.setting != "dense":
            return ps.PriorAnnealing.paper_cifar(steps, self.epochs, sample=True)
        drops = (steps * (self.epochs // 2), steps * (3 * self.epochs // 4))
        return ps.PriorAnnealing(
            steps * self.epochs, 0, 0, 0, learning_rate=RATE, weight_decay=DECAY, learning_rate_drops=drops
        )

    def model(self, num_rows: int, like: Tensor) -> Callable[..., Any]:
        """The Pyro model around a network with the weights of the seed."""
        net = ps.sparsify(network(self.depth, self.width, self.seed), self.law).to(like)

        def model(images: Tensor, labels: Tensor | None = None) -> Any:
            logits = logits_of(net, images, self.precision)
            with pyro.plate("images", num_rows, subsample_size=len(images)):
                return pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

        return model


def allow(precision: str) -> None:
    """Products and convolutions in TF32, or in full single precision."""
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    # A run then goes on to the same bits; and programs that are compared differ by what they are, not by chance.
    torch.backends.cudnn.deterministic = True


def errors(images: Images, precision: str) -> Row:
    """How far the weights are after ten steps at temperature 0, of a tiny network, from those in double precision on the CPU.

    As a share of the way that they went, by precision; and how the last one was computed.
    """
    schedule = ps.PriorAnnealing(4, 3, 3, 0, learning_rate=0.005, temperature=0.0, weight_decay=DECAY)
    device, usual = images[0].device, torch.get_default_dtype()
    ends: dict[str, Tensor] = {}
    row: Row = {"precision": precision}
    for name in ("double", *dict.fromkeys(("float32", precision))):
        task = Task("keep", 8, 0.1, 0, 12, 8, name, 0.0, 50)
        like = torch.zeros(0, dtype=torch.float64) if name == "double" else torch.zeros(0, device=device)
        rows = tuple(part[:200].to(like.device) for part in images)
        allow(name)
        model = dataclasses.replace(task, setting="dense").model(200, like)
        torch.set_default_dtype(like.dtype)
        run = ps.anneal(model, rows, schedule, 50, num_draws=1, progress=False)
        torch.set_default_dtype(usual)
        begin = start(run.spec, 0, 0, False)
        ends.setdefault("start", begin.double().cpu())
        ends[name] = run.positions[0].double().cpu()
        row["program"] = run.trace.attrs["program"]
    allow(precision)
    went = (ends["double"] - ends["start"]).norm()
    return row | {name: float((ends[name] - ends["double"]).norm() / went) for name in ends if name in PRECISIONS}


def wait(like: Tensor) -> None:
    """For the card to end its work."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def seconds_an_epoch(step: Callable[[int], Any], num_steps: int, like: Tensor, first: int = 0) -> float:
    """Of steps numbered from ``first``: the median of some epochs after a warm-up."""
    for number in range(min(20, num_steps)):
        step(first + number)
    rounds = []
    for _ in range(EPOCH_ROUNDS):
        wait(like)
        begun = time.perf_counter()
        for number in range(num_steps):
            step(first + number)
        wait(like)
        rounds.append(time.perf_counter() - begun)
    return sorted(rounds)[EPOCH_ROUNDS // 2]


def ours(task: Task, images: Images, compiling: bool) -> Row:
    """A whole step (batch, augmentation, gradient, prior, noise, momentum, statistics) in the spike phase."""
    begun, num_rows = time.perf_counter(), len(images[0])
    schedule = dataclasses.replace(task, setting="keep").schedule(num_rows)
    spec = inspect(task.model(num_rows, torch.zeros(0, device=images[0].device)), images, task.batch, 0, task.augment)
    spec = spec if task.share is None else prepared(spec, task.share, schedule)
    position = start(spec, 0, 0, False)
    batches = spec.batches(0, 0, position.device)
    potential = Potential(spec, position, (batches(0), batches(1)))
    step = step_maker(potential, Table(schedule, position), position, 0, [0], compiling)(position, [0])
    step(0)
    step.losses()
    row: Row = {
        "method": f"ours, {step.kind}",
        "reason": potential.reason,
        "start_seconds": time.perf_counter() - begun,
    }
    first = schedule.train_steps + schedule.power_steps
    row["seconds"] = seconds_an_epoch(step, num_rows // task.batch, position, first)
    return row | {"loss": step.losses()[0]}  # which says whether all was finite


def plain(task: Task, images: Images, compiling: bool) -> Row:
    """SGD with momentum and weight decay, no prior and no noise, the same augmentation: fused, in channels_last."""
    begun, device = time.perf_counter(), images[0].device
    net = network(task.depth, task.width, task.seed).to(device).to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=DECAY, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(len(images[0]), device=device)

    def loss(some: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_of(net, some, task.precision), labels)

    # With CUDA graphs, as ours has; longer searches for kernels would take longer than they save here.
    computed = torch.compile(loss, mode="reduce-overhead") if compiling else loss

    def step(number: int) -> None:
        rows = order[number * task.batch : (number + 1) * task.batch]
        some = task.augment(images[0].index_select(0, rows), generator)
        computed(some, images[1].index_select(0, rows)).backward()
        optimiser.step()
        optimiser.zero_grad()

    step(0)
    wait(images[0])
    row: Row = {"method": "PyTorch" + ", compiled" * compiling, "start_seconds": time.perf_counter() - begun}
    return row | {"seconds": seconds_an_epoch(step, len(images[0]) // task.batch, images[0])}


def times(task: Task, images: Images, deadline: float, compiling: bool) -> Iterator[Row]:
    """One row a method; a fault of one costs no other."""
    for compiled in (False, True)[: 1 + compiling]:
        for method in (ours, plain):
            if time.monotonic() > deadline:
                return
            try:
                yield {"kind": "epoch"} | method(task, images, compiled)
            except Exception as error:
                yield {"kind": "failed", "method": method.__name__, "compiled": compiled, "error": said(error)}


def said(error: Exception) -> str:
    """On one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:1_000]


@contextlib.contextmanager
def interrupted_at(deadline: float) -> Iterator[None]:
    """As by Ctrl-C when the time has come, which ``anneal`` answers by saving what it has."""
    timer = threading.Timer(max(deadline - time.monotonic(), 0.01), os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def annealed(task: Task, images: Images, folder: Path, deadline: float) -> tuple[ps.Run | None, Row]:
    """The run, from where it was in its folder; None where time was over before it ended."""
    num_rows, path = len(images[0]), folder / task.name
    schedule = task.schedule(num_rows)
    row: Row = {"resumed": path.exists(), "num_steps": schedule.num_steps}
    draws = schedule.length("sample") // (num_rows // task.batch) or 1
    begun, run = time.perf_counter(), None
    try:
        with interrupted_at(deadline):
            model = task.model(num_rows, torch.zeros(0, device=images[0].device))
            run = ps.anneal(
                *(model, images, schedule, task.batch, draws),
                **{"seed": task.seed, "out": path, "resume": True, "augment": task.augment, "keep": task.share},
                progress=False,
            )
    except KeyboardInterrupt as stop:
        row["stopped"] = str(stop) or "before the first step"
    row["seconds"] = time.perf_counter() - begun
    if run is None:
        return None, row
    row |= {"program": run.trace.attrs["program"], "loss": float(run.history["loss"][0, -1]), "num_draws": draws}
    priors = {(float(law.spike_scale), float(law.slab_prob)) for law in run.priors.values()}
    return run, row | {"spike_variance": max(scale**2 for scale, _ in priors), "slab_prob": max(p for _, p in priors)}


def kept_shares(run: ps.Run, kept: Tensor) -> Row:
    """Of (coordinate,) or (draw, coordinate) booleans: among all parameters, and among weights of layers alone, means."""
    layout = run.spec.layout
    masks = {site.name: part for site, part in layout.parts(kept) if site.law is not None}
    dims = {site.name: len(site.shape) for site in layout.spike_slab_sites()}

    def share(names: Iterable[str]) -> float:
        parts = [masks[name].reshape(*kept.shape[:-1], -1) for name in names]
        return float(torch.cat(parts, -1).double().mean())

    return {"kept": share(masks), "kept_of_layers": share(name for name in masks if dims[name] > 1)}


def measures(data: Data, probs: np.ndarray[Any, Any]) -> Row:
    """Of probabilities of the test images, and after them of the unfamiliar ones."""
    num_rows, labels = len(data.test[0]), data.test[1].cpu().numpy()
    inside, outside = probs[:num_rows], probs[num_rows:]
    row: Row = {"accuracy": float((inside.argmax(1) == labels).mean()), "nll": ps.nll(inside, labels)}
    row |= {"brier": ps.brier(inside, labels), "ece": ps.ece(inside, labels)}
    row["ece_mass"] = ps.ece(inside, labels, 20, "mass")
    with contextlib.suppress(ValueError):  # all of them outside of the histogram
        row["test_outside"] = 1 - float(entropy_counts(inside).sum()) / len(inside)
        if len(outside):
            row["svhn_outside"] = 1 - float(entropy_counts(outside).sum()) / len(outside)
            row["js_distance"] = ps.js_distance(inside, outside)
    return row


def probabilities(run: ps.Run, position: Tensor, images: Tensor) -> np.ndarray[Any, Any]:
    """Of one network, as it is."""
    of, values = response.Response(run.spec), run.spec.layout.constrained(position)
    return of.evaluate(of.family(values).link, values, of.inputs(images)).double().exp().cpu().numpy()


def refreshed(task: Task, run: ps.Run, train: Tensor, images: Tensor) -> np.ndarray[Any, Any]:
    """Averaged over sparse draws, each with the running statistics that it would have by itself."""
    layout, generator = run.spec.layout, torch.Generator(images.device).manual_seed(0)
    (sparse,) = layout.modules()
    net, total = copy.deepcopy(sparse.module), torch.zeros(())
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    norms = [part for part in net.modules() if isinstance(part, nn.BatchNorm2d)]
    with torch.no_grad():
        for draw in run.draws[0]:  # type: ignore[index]
            values = layout.constrained(layout.included(draw))
            for name, site in layout.of_module(sparse).items():
                own[name].copy_(values[site.name])
            for part in norms:
                part.reset_running_stats()
                part.momentum = None  # a plain average
            net.train()
            for some in train[:STATISTICS_ROWS].split(STATISTICS_ROWS // 10):
                logits_of(net, task.augment(some, generator), task.precision)
            net.eval()
            parts = [
                logits_of(net, some, task.precision).double().softmax(1) for some in images.split(STATISTICS_ROWS // 10)
            ]
            total = total.to(images.device) + torch.cat(parts)
    return (total / len(run.draws[0])).cpu().numpy()  # type: ignore[index]


def predicted(task: Task, run: ps.Run, data: Data, predictor: str) -> Row:
    """What one predictor makes of the images."""
    images = data.test[0] if data.unfamiliar is None else torch.cat([data.test[0], data.unfamiliar])
    begun, draws = time.perf_counter(), run.draws
    assert isinstance(draws, Tensor)
    if predictor == "dense":
        row: Row = {"kept": 1.0, "kept_of_layers": 1.0}
        probs = probabilities(run, run.positions[0], images)
    elif predictor == "anneal":
        structure = ps.select(run)
        fit = ps.refit(run, structure, progress=False)
        row = kept_shares(run, structure.kept(run.positions[0])) | {"refit_loss": fit.loss}
        probs = ps.predict(fit, images)["mean"].values
    else:
        beyond = draws[0].abs() > run.spec.layout.thresholds(draws[0, 0])
        is_sparse = predictor != "whole"
        row = kept_shares(run, beyond if is_sparse else torch.ones_like(beyond)) | {"num_draws": draws.shape[1]}
        if predictor == "refreshed":
            probs = refreshed(task, run, data.train[0], images)
        else:
            probs = ps.predict(run, images, sparse=is_sparse)["mean"].values
    return row | measures(data, probs) | {"seconds": time.perf_counter() - begun}


def parsed(text: str) -> list[tuple[int, float, int]]:
    """``"20:0.1:1-2,32:0.05:1"`` as (depth, share, seed) each."""
    found = []
    for part in text.split(","):
        depth, share, numbers = part.split(":")
        found += [(int(depth), float(share), seed) for seed in seeds(numbers)]
    return found


def run_all(tasks: list[Task], data: Data, folder: Path, deadline: float, report: Callable[[Row], None]) -> None:
    """The runs that are missing, and what each predictor makes of them; a fault of one predictor costs no other."""
    for task in tasks:
        if time.monotonic() > deadline:
            report(task.about() | {"kind": "left", "reason": "time is over"})
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run, row = annealed(task, data.train, folder, deadline)
        told = {"warnings": sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})[:5]}
        report(task.about() | {"kind": "stopped" if run is None else "annealed"} | row | told)
        if run is None:
            continue
        run = dataclasses.replace(run, draws=torch.stack(list(each_draw(run.draws)))[None])  # read once
        for predictor in ("dense",) if task.setting == "dense" else PREDICTORS:
            try:
                found = {"kind": "predicted"} | predicted(task, run, data, predictor)
            except Exception as error:
                found = {"kind": "failed", "error": said(error)}
            report(task.about() | {"predictor": predictor} | found)
        report(task.about() | {"kind": "done"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=parsed, help="depth:share:seeds, several after commas; 20:0.1:1, in a smoke test 8:0.1:1"
    )
    parser.add_argument("--setting", choices=SETTINGS, default="keep")
    parser.add_argument("--epochs", type=int, help="300, in a smoke test 12")
    parser.add_argument("--precision", choices=PRECISIONS, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--no-erasing", action="store_true", help="crops and flips alone")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, help="in their order")
    parser.add_argument("--data", type=Path, help="the folder of the images; random ones in a smoke test without it")
    parser.add_argument("--rows", type=int, help="of the training images; all where left out")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "gpu_cifar", help="for runs on their way"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the whole command, but for a prediction on its way"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="ResNet-8 of width 8, 300 random images, 12 epochs")
    parser.add_argument("--width", type=int, help="16, in a smoke test 8; narrower ones crash PyTorch on some CPUs")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_cifar.jsonl")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be > 0 and finite, got {arguments.minutes}")
    deadline = time.monotonic() + 60 * arguments.minutes
    # Where a shell has started this in the background the signal would be ignored, and no run stopped in time.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    smoke, on_card = arguments.smoke, arguments.device.startswith("cuda")
    if smoke:
        torch.set_num_threads(1)
    if arguments.data is None and not smoke:
        parser.error("--data must name the folder of the images, unless --smoke takes random ones")
    precision = arguments.precision or ("bfloat16" if on_card else "float32")
    allow(precision)
    rows = arguments.rows
    data = (
        random_data(rows or 300, arguments.device)
        if arguments.data is None
        else load(arguments.data, rows, arguments.device)
    )
    shared = {
        "setting": arguments.setting,
        "epochs": arguments.epochs or (12 if smoke else 300),
        "width": arguments.width or (8 if smoke else 16),
        "precision": precision,
        "erase_prob": 0.0 if arguments.no_erasing else 0.5,
        "batch": min(128, len(data.train[0]) // 5),
    }
    runs = arguments.runs or [(8 if smoke else 20, 0.1, 1)]
    tasks = [Task(depth=depth, keep=keep, seed=seed, **shared) for depth, keep, seed in runs]
    missing = [task for task in tasks if arguments.setting.startswith("paper") and (task.depth, task.keep) not in PAPER]
    if missing:
        parser.error(f"the paper has settings of {sorted(PAPER)}, got {(missing[0].depth, missing[0].keep)}")
    card = torch.cuda.get_device_name(arguments.device) if on_card else "cpu"
    about = {"card": card, "smoke": smoke, "deterministic": True} | data.about()

    def report(row: Row) -> None:
        peak = {"peak_gib": torch.cuda.max_memory_allocated(arguments.device) / 2**30} if on_card else {}
        append_row(arguments.output, about | row | peak, "torchvision", "numpy")

    def check() -> None:
        found = errors(data.train, precision)
        report({"kind": "check"} | found)
        if not found["float32"] < 1e-3:
            raise SystemExit(f"steps on {card} are not those of double precision: {found}")

    def measure() -> None:
        for row in times(tasks[0], data.train, deadline, compiling=not smoke):
            report(tasks[0].about() | row)

    def run() -> None:
        left = [task for task in tasks if not is_done(arguments.output, about | task.about() | {"kind": "done"})]
        run_all(left, data, arguments.folder, deadline, report)

    for stage in arguments.stages:
        {"check": check, "time": measure, "run": run}[stage]()


if __name__ == "__main__":
    main()
