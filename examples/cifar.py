"""A residual network for CIFAR-10 at a tenth of its weights: trained, averaged, scored, drawn; it goes on where it was stopped.

    python examples/cifar.py --data ~/data --download --out run

On a GPU some minutes; on a CPU days, unless ``--rows 5000 --epochs 30 --width 8 --depth 8`` (a quarter of an hour). ``run``
gets the draws (``trace.zarr``), the scores (``scores.json``), the weights of one sparse network (``network.pt``, zeros in
place) and pictures. Where SVHN is beside CIFAR-10 the entropies on its digits are drawn too.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import typer
from torch import nn

import pyro_sparse as ps
from pyro_sparse.datasets import cifar10, svhn
from pyro_sparse.models.images import CIFAR10_MEAN, CIFAR10_STD
from pyro_sparse.plots import plot_annealing, plot_entropies, plot_reliability


def scores(probs, labels):
    """Of class probabilities, by name."""
    accuracy = float((np.asarray(probs).argmax(1) == np.asarray(labels)).mean())
    return {"accuracy": accuracy, "nll": ps.nll(probs, labels), "ece": ps.ece(probs, labels)}


def main(
    data: Annotated[Path, typer.Option(help="folder of torchvision's datasets")],
    out: Annotated[Path, typer.Option(help="new folder, or one to go on with")] = Path("run"),
    download: Annotated[bool, typer.Option(help="fetch what is missing")] = False,
    depth: Annotated[int, typer.Option(help="20, 32, 44, 56, 110")] = 20,
    width: Annotated[int, typer.Option(help="channels of the first layers")] = 16,
    keep: Annotated[float, typer.Option(help="share of the weights")] = 0.1,
    epochs: int = 300,
    rows: Annotated[int | None, typer.Option(help="training images; all where left out")] = None,
    seed: int = 0,
) -> None:
    """Anneals, averages the last quarter of the epochs, refits one network, and says how good they are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = (part[:rows].to(device) for part in cifar10(data, download=download))
    test_images, test_labels = (part.to(device) for part in cifar10(data, train=False, download=download))
    torch.manual_seed(seed)
    net = ps.sparsify(nn.Sequential(ps.Normalize(CIFAR10_MEAN, CIFAR10_STD), ps.resnet(depth, width=width))).to(device)

    def model(images, labels=None):
        # No cache of weights in half precision: it would outlive the program that is traced here.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            logits = net(images)
        with pyro.plate("data", num_rows, subsample_size=len(images)):
            return pyro.sample("label", dist.Categorical(logits=logits.float()), obs=labels)

    num_rows = len(images)
    schedule = ps.PriorAnnealing.images(num_rows // 128, epochs)
    out.mkdir(parents=True, exist_ok=True)
    run = ps.anneal(
        *(model, (images, labels), schedule),
        batch_size=128,
        num_draws=epochs // 4,
        seed=seed,
        augment=ps.ImageAugmentation(),
        keep=keep,
        out=out / "trace.zarr",
        resume=True,
        sparse_draws=True,
    )
    structure = ps.select(run)
    print(structure.table().to_string())
    fit = ps.refit(run, structure)
    torch.save(fit.module().state_dict(), out / "network.pt")

    sources = {"average of sparse draws": run, "one sparse network": fit}
    predicted = {
        name: ps.predict(source, test_images, sparse=source is run)["mean"] for name, source in sources.items()
    }
    found = {name: scores(probs, test_labels.cpu()) for name, probs in predicted.items()}
    (out / "scores.json").write_text(json.dumps(found | {"kept": 1 - structure.sparsity}, indent=2))
    for name, values in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in values.items()))
    plot_annealing(run).savefig(out / "annealing.png")
    plot_reliability(predicted, test_labels.cpu()).savefig(out / "reliability.png")
    try:
        unfamiliar, _ = svhn(data, download=download)
    except FileNotFoundError as missing:
        print(f"no entropies out of distribution: {missing}")
        return
    beside = ps.predict(run, unfamiliar, sparse=True)["mean"]
    inside = predicted["average of sparse draws"]
    print(f"JS distance to SVHN: {ps.js_distance(inside, beside):.3f}")
    plot_entropies({"average of sparse draws": (inside, beside)}).savefig(out / "entropies.png")


if __name__ == "__main__":
    typer.run(main)
