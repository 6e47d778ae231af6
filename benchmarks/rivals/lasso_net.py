"""LassoNet (Lemhadri et al. 2021) by its authors' package: a residual network whose inputs a skip layer gates."""

import contextlib
import io
from functools import partial

import numpy as np
import torch
from common import Array, Data, Fitted, mean_square
from rivals.networks import name_of, tensors

HIDDEN = (20, 10)
RATES = (1e-3, 3e-4, 1e-4)  # of the path: the package's own, and smaller ones where that diverges


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """The whole path; of its networks the one that predicts the first half of the validation rows best."""
    from lassonet import LassoNetRegressor
    from lassonet.interfaces import NonFiniteLossError

    level, scale = data.train.y.mean(), data.train.y.std()
    num_tuned = len(data.validation.y) // 2
    tuning = data.validation[:num_tuned]
    x, y = tensors(data.train.x, (data.train.y - level) / scale)
    x_tune, y_tune = tensors(tuning.x, (tuning.y - level) / scale)

    for rate in RATES:
        model = LassoNetRegressor(
            hidden_dims=HIDDEN,
            batch_size=500,
            optim=(partial(torch.optim.Adam, lr=1e-3), partial(torch.optim.SGD, lr=rate, momentum=0.9)),
            n_iters=(max(1, int(200 * effort)), max(1, int(20 * effort))),
            patience=(10, 5),
            path_multiplier=1.1,
            lambda_start=1.0,
            verbose=0,
            random_state=seed,
            torch_seed=seed,
            device="cpu",
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(NonFiniteLossError):
            path = model.path(x, y, X_val=x_tune, y_val=y_tune, return_state_dicts=True)
            break
    else:
        raise ValueError(f"LassoNet diverged at each learning rate of {RATES}")

    def predict(x: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model.predict(tensors(x)[0])).squeeze(-1) * scale + level

    errors = []
    for point in path:
        model.load(point.state_dict)
        errors.append(mean_square(predict(tuning.x) - tuning.y))
    best = path[int(np.argmin(errors))]
    model.load(best.state_dict)
    note = f"lambda {best.lambda_:.3g}, {len(path)} points of the path, M 10, batches of 500, learning rate {rate:g}"
    sizes = [data.train.x.shape[1], *HIDDEN, 1]
    return Fitted(predict, best.selected.nonzero().flatten().tolist(), None, name_of(sizes), note, num_tuned)
