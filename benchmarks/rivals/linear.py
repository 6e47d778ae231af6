"""Linear models: the lasso, and sure independence screening followed by SCAD."""

import math

import numpy as np
from common import Data, Fitted, mean_square
from sklearn.linear_model import LassoCV


def lasso(data: Data, seed: int, effort: float) -> Fitted:
    """scikit-learn's LassoCV: five folds, 50 penalties down to a hundredth of the largest, the smallest error."""
    model = LassoCV(cv=5, eps=1e-2, alphas=50, precompute=True, random_state=seed)
    model.fit(data.train.x, data.train.y)
    return Fitted(model.predict, np.flatnonzero(model.coef_), note=f"5 folds, penalty {model.alpha_:.3g}")


def sis(data: Data, seed: int, effort: float) -> Fitted:
    """The n / log n inputs of largest marginal correlation, then SCAD (gamma 3.7, skglm), its penalty by validation rows."""
    from skglm import GeneralizedLinearEstimator
    from skglm.datafits import Quadratic
    from skglm.penalties import SCAD
    from skglm.solvers import AndersonCD

    x, y = data.train.x, data.train.y
    centre, level = x.mean(0), y.mean()
    num_kept = min(x.shape[1], int(len(x) / math.log(len(x))))
    correlation = np.abs((x - centre).T @ (y - level)) / x.std(0)
    kept = np.sort(np.argsort(-correlation)[:num_kept])
    screened, num_tuned = np.asfortranarray((x - centre)[:, kept]), len(data.validation.y) // 2
    largest = float(np.abs(screened.T @ (y - level)).max()) / len(y)
    tuning = data.validation[:num_tuned]
    path = []
    start = None
    for penalty in largest * np.geomspace(0.9, 5e-3, 20):
        solver = AndersonCD(max_iter=50, fit_intercept=False, warm_start=True)
        model = GeneralizedLinearEstimator(Quadratic(), SCAD(float(penalty), 3.7), solver)
        if start is not None:
            model.coef_, model.intercept_ = start.copy(), 0.0
        start = model.fit(screened, y - level).coef_
        error = mean_square((tuning.x - centre)[:, kept] @ start + level - tuning.y)
        path.append((error, float(penalty), start))
    _, penalty, coefficients = min(path, key=lambda point: point[0])
    note = f"{num_kept} inputs screened, SCAD penalty {penalty:.3g}"
    return Fitted(
        lambda new: (new - centre)[:, kept] @ coefficients + level,
        kept[coefficients != 0],
        note=note,
        num_tuned=num_tuned,
    )
