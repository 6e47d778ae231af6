"""A network for images at a tenth of its weights, beside the same network trained densely; a minute and a half, no download.

    python examples/digits.py

Scikit-learn's 1,797 handwritten digits, a third of them to learn from. Prints accuracy and calibration of both on the rest, and
draws ``digits.png``, how often each is right where it says how sure it is.
"""

import time

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import pyro_sparse as ps
from pyro_sparse.plots import plot_reliability

BATCH, EPOCHS, RATE = 50, 250, 0.02

images, labels = load_digits(return_X_y=True)
x, x_new, y, y_new = train_test_split(images, labels, train_size=600, random_state=0, stratify=labels)
x, x_new = (torch.as_tensor(part).float().reshape(-1, 1, 8, 8) / 16 for part in (x, x_new))
y = torch.as_tensor(y)
steps = len(x) // BATCH  # of an epoch


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def dense():
    """Probabilities of the network trained as usual: SGD with momentum and weight decay, the rate divided by ten at the end."""
    net = network()
    optimiser = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [3 * EPOCHS // 4])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
        schedule.step()
    return net(x_new).softmax(-1).detach()


def sparse():
    """Probabilities averaged over the draws of a posterior of sparse networks, and what one of them keeps."""
    net = ps.sparsify(network())

    def model(images, labels=None):
        logits = net(images)
        with pyro.plate("data", len(x), subsample_size=len(images)):
            return pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    total = EPOCHS * steps
    schedule = ps.PriorAnnealing(
        *(total // 2, total // 6, total // 12, 0, total // 4),  # train, raise the prior, narrow the spike, cool, sample
        learning_rate=RATE,
        learning_rate_drops=(2 * total // 3,),
        weight_decay=5e-4,
        temperature=0.02,
        sample_temperature=0.01,
    )
    run = ps.anneal(model, (x, y), schedule, batch_size=BATCH, num_draws=60, keep=0.1)
    return ps.predict(run, x_new, sparse=True)["mean"], ps.select(run)


torch.set_num_threads(1)
begun = time.perf_counter()
dense_probs = dense()
print(f"dense network: {time.perf_counter() - begun:.0f} s")
begun = time.perf_counter()
sparse_probs, structure = sparse()
print(f"sparse networks: {time.perf_counter() - begun:.0f} s\n\n{structure.table().to_string()}\n")
predictors = {"dense": dense_probs, "sparse, averaged": sparse_probs}
for name, probs in predictors.items():
    accuracy = float((torch.as_tensor(probs.values if name != "dense" else probs).argmax(1).numpy() == y_new).mean())
    print(f"{name}: accuracy {accuracy:.4f}, NLL {ps.nll(probs, y_new):.4f}, ECE {ps.ece(probs, y_new):.4f}")
plot_reliability(predictors, y_new).savefig("digits.png")
