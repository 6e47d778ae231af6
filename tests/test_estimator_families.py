"""Rounds and runs of the estimators, the classifier, and counts and noise of varying scale."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_iris

import pyro_sparse as ps
from pyro_sparse import estimators

Array = np.ndarray[Any, Any]
SHORT = ps.PriorAnnealing(100, 500, 900, 200, learning_rate=1e-2)
TINY = ps.PriorAnnealing(5, 10, 10, 5, learning_rate=1e-2)
RNG = np.random.default_rng(11)
X = RNG.normal(size=(600, 6))
NEW = RNG.normal(size=(4_000, 6))


def options(**others: Any) -> dict[str, Any]:
    return {"hidden": (5,), "schedule": SHORT, "random_state": 0, "num_runs": 1, "num_networks": 1} | others


def log_odds(x: Array) -> Array:
    return 3 * x[:, 1] - 2 * np.abs(x[:, 4])


@pytest.fixture(scope="module")
def classified() -> ps.SparseClassifier:
    labels = np.where(RNG.random(600) < 1 / (1 + np.exp(-log_odds(X))), "yes", "no")
    return ps.SparseClassifier(**options()).fit(pd.DataFrame(X, columns=list("abcdef")), labels)


def test_two_classes_have_the_right_inputs_and_probabilities(classified: ps.SparseClassifier) -> None:
    assert classified.classes_.tolist() == ["no", "yes"] and classified.selected_inputs_ == ["b", "e"]
    new = pd.DataFrame(NEW, columns=list("abcdef"))
    probability, truth = classified.predict_proba(new), 1 / (1 + np.exp(-log_odds(NEW)))
    assert probability.shape == (4_000, 2) and np.allclose(probability.sum(1), 1)
    assert np.abs(probability[:, 1] - truth).mean() < 0.06
    assert np.array_equal(classified.predict(new), np.where(probability[:, 1] > 0.5, "yes", "no"))
    drawn = np.random.default_rng(0).random(4_000) < truth
    members = classified.predict_set(new, prob=0.9)
    assert members[np.arange(4_000), drawn.astype(int)].mean() > 0.88
    assert members.any(1).all() and not members.all()


def test_the_table_of_two_classes_is_symmetric(classified: ps.SparseClassifier) -> None:
    table = classified.predict_table(pd.DataFrame(NEW[:50], columns=list("abcdef"), index=range(7, 57)))
    assert list(table) == [*(f"P(no){end}" for end in ("", "_lower", "_upper")), *table.columns[3:]]
    assert table.index.tolist() == list(range(7, 57)) and table.columns[-1] == "set"
    assert np.allclose(table["P(no)"], 1 - table["P(yes)"]) and np.allclose(
        table["P(no)_lower"], 1 - table["P(yes)_upper"]
    )
    assert (table["P(yes)_lower"] < table["P(yes)"]).all() and (table["P(yes)"] < table["P(yes)_upper"]).all()
    assert set(table["set"]) <= {"no", "yes", "no yes"}


def test_the_effects_of_a_classifier_are_probabilities(classified: ps.SparseClassifier) -> None:
    effects = classified.effects(pd.DataFrame(X, columns=list("abcdef")), num_points=5)
    assert set(effects["class"]) == {"no", "yes"} and len(effects) == 2 * 2 * 5
    for _, part in effects.groupby(["input", "class"]):
        assert np.allclose(part["difference"], part["mean"] - part["mean"].iloc[0])
        assert (part["difference_lower"] <= part["difference"]).all() and (
            part["difference"] <= part["difference_upper"]
        ).all()
    rising = effects[(effects["input"] == "b") & (effects["class"] == "yes")]["mean"]
    falling = effects[(effects["input"] == "b") & (effects["class"] == "no")]["mean"]
    assert (np.diff(rising) > 0).all() and np.allclose(rising.to_numpy(), 1 - falling.to_numpy())


def test_a_saved_classifier_predicts_the_same(classified: ps.SparseClassifier, tmp_path: Path) -> None:
    new = pd.DataFrame(NEW[:20], columns=list("abcdef"))
    classified.save(tmp_path)
    again = ps.SparseClassifier.load(tmp_path)
    pd.testing.assert_frame_equal(again.predict_table(new), classified.predict_table(new))
    assert again.classes_.tolist() == ["no", "yes"] and np.array_equal(again.supports_, classified.supports_)
    with pytest.raises(ValueError, match="must hold a SparseRegressor, got a SparseClassifier"):
        ps.SparseRegressor.load(tmp_path)


def test_three_classes() -> None:
    x, y = load_iris(return_X_y=True)
    fitted = ps.SparseClassifier(hidden=(6,), steps=3_000, num_runs=1, num_networks=2, random_state=0).fit(x, y + 5)
    assert fitted.classes_.tolist() == [5, 6, 7] and fitted.fit_.module()[-1].out_features == 3
    assert np.mean(fitted.predict(x) == y + 5) > 0.93
    members = fitted.predict_set(x)
    assert members.shape == (150, 3) and members[np.arange(150), y].mean() >= 0.95
    assert set(fitted.get_support(indices=True)) & {2, 3}


def test_labels_that_cannot_be_classified_are_refused() -> None:
    with pytest.raises(ValueError, match="y must have at least two classes, got only a in all 600 rows"):
        ps.SparseClassifier(**options()).fit(X, ["a"] * 600)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        ps.SparseClassifier(**options()).fit(X, X[:, 0])


def test_counts() -> None:
    """2,000 new rows: the count intervals cover at least 94 % (binomial, one false alarm in 10,000 at 96 %)."""
    rate, rate_new = (np.exp(1.5 + 0.8 * x[:, 0] - 0.4 * x[:, 2] ** 2) for x in (X, NEW))
    y, y_new = (np.random.default_rng(3).poisson(r) for r in (rate, rate_new))
    fitted = ps.SparseRegressor("poisson", **options()).fit(X, y)
    assert fitted.selected_inputs_ == [0, 2] and fitted.noise_scale_ is None
    table = fitted.predict_table(NEW)
    assert np.abs(table["mean"] / rate_new - 1).median() < 0.12
    assert ((table["lower"] <= y_new) & (y_new <= table["upper"])).mean() > 0.94
    assert (table[["lower", "upper"]] % 1 == 0).all(axis=None) and (table["lower"] >= 0).all()


def test_noise_that_varies_has_intervals_that_vary() -> None:
    scale, scale_new = (np.exp(0.7 * x[:, 3]) for x in (X, NEW))
    y, y_new = 20 + 5 * X[:, 0] + scale * RNG.normal(size=600), 20 + 5 * NEW[:, 0] + scale_new * RNG.normal(size=4_000)
    fitted = ps.SparseRegressor("heteroscedastic", **options()).fit(X, y)
    assert {0, 3} <= set(fitted.selected_inputs_) and fitted.noise_scale_ is None
    table = fitted.predict_table(NEW)
    inside = ((table["lower"] <= y_new) & (y_new <= table["upper"])).to_numpy()
    for part in (NEW[:, 3] < -0.7, NEW[:, 3] > 0.7):
        assert 0.88 < inside[part].mean() < 0.99
    widths = (table["upper"] - table["lower"]).to_numpy()
    assert np.corrcoef(np.log(widths), np.log(scale_new))[0, 1] > 0.9


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-1"), (0.5, "0.5")])
def test_what_is_no_count_is_refused(value: float, shown: str) -> None:
    y = np.arange(600.0)
    y[3] = value
    with pytest.raises(ValueError, match=rf"y must hold counts 0, 1, 2, ... for the poisson family, got {shown}"):
        ps.SparseRegressor("poisson", **options()).fit(X, y)


SETTINGS: list[tuple[str, Any, int]] = [
    *(("rounds", 0, 1), ("num_runs", 0, 1), ("num_networks", 0, 1), ("steps", 99, 100), ("batch_size", 0, 1)),
    *(("rounds", 0.5, 1), ("num_networks", None, 1), ("steps", 150.5, 100)),
]


def test_unknown_families_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="family must be one of normal, heteroscedastic, poisson, got 'gamma'"):
        ps.SparseRegressor("gamma", **options()).fit(X, X[:, 0])
    for name, value, least in SETTINGS:
        with pytest.raises(ValueError, match=f"{name} must be a whole number >= {least}, got {value!r}"):
            ps.SparseRegressor(**options(**{name: value})).fit(X, X[:, 0])
    for hidden in (5, (2.5,), (0,)):
        with pytest.raises(ValueError, match="hidden must be a tuple of whole numbers >= 1, such as"):
            ps.SparseRegressor(**options(hidden=hidden)).fit(X, X[:, 0])
    with pytest.raises(ValueError, match="schedule must be a PriorAnnealing, got 'x'"):
        ps.SparseRegressor(schedule="x").fit(X, X[:, 0])  # type: ignore[arg-type]


def test_inputs_that_are_all_constant_are_not_selected() -> None:
    fitted = ps.SparseRegressor(**options(hidden=None)).fit(np.ones((60, 2)), X[:60, 0])
    assert fitted.selected_inputs_ == []


def test_of_nearly_equal_inputs_one_is_kept_though_each_run_keeps_another() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=80)
    x = np.column_stack([a + 0.05 * rng.normal(size=80) for _ in range(9)])
    y = a + 0.8 * rng.normal(size=80)
    for seed in range(2):
        fitted = ps.SparseRegressor(
            **options(hidden=(), schedule=None, steps=2_000, num_runs=3, random_state=seed)
        ).fit(x, y)
        assert len(fitted.selected_inputs_) >= 1 and fitted.score(x, y) > 0.5


class Scripted:
    """Stands for annealing: each call keeps the inputs that the script says, of all chains or each, and notes its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kept: set[str] | tuple[set[str], ...]) -> None:
        self.kept, self.given, self.choosing = list(kept), [], []
        monkeypatch.setattr(estimators, "anneal", self.anneal)
        monkeypatch.setattr(estimators, "default_prior", self.prior)
        self._anneal, self._prior = ps.anneal, ps.default_prior

    def prior(self, net: torch.nn.Module, num_data: int, select_inputs: bool) -> Any:
        self.choosing.append(select_inputs)
        return self._prior(net, num_data, select_inputs)

    def anneal(self, model: Any, data: Any, schedule: Any, batch_size: int, **others: Any) -> ps.Run:
        self.given.append(others["input_names"])
        run = self._anneal(model, data, TINY, batch_size, **(others | {"num_draws": 1}))
        for chain, position in enumerate(run.positions):
            kept = self.kept[0][chain] if isinstance(self.kept[0], tuple) else self.kept[0]
            weight = next(part for site, part in run.spec.layout.parts(position) if site.name == "layer1.weight")
            position.fill_(1.0)
            weight[:] = torch.tensor([float(name in kept) for name in others["input_names"]])
        if len(self.kept) > 1:
            self.kept.pop(0)
        return run


def test_rounds_go_on_until_no_input_is_dropped_and_then_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch, {"x0", "x1", "x5"}, {"x0", "x5"})
    fitted = ps.SparseRegressor(**options()).fit(X, X[:, 0])
    assert script.given == [[f"x{i}" for i in range(6)], ["x0", "x1", "x5"], ["x0", "x5"], ["x0", "x5"]]
    assert script.choosing == [True, True, True, False]
    assert fitted.num_rounds_ == 4 and fitted.columns_.tolist() == [0, 5] and fitted.selected_inputs_ == [0, 5]
    assert fitted.fit_.module()[0].in_features == 2


def test_the_last_round_may_drop_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch, {f"x{i}" for i in range(6)}, {"x2"})
    fitted = ps.SparseRegressor(**options()).fit(X, X[:, 2])
    assert script.choosing == [True, False] and fitted.columns_.tolist() == list(range(6))
    assert fitted.selected_inputs_ == [2] and fitted.get_support(indices=True).tolist() == [2]


@pytest.mark.parametrize(("rounds", "choosing"), [(1, [True, False]), (2, [True, True, False])])
def test_rounds_can_be_limited(monkeypatch: pytest.MonkeyPatch, rounds: int, choosing: list[bool]) -> None:
    script = Scripted(monkeypatch, {"x0", "x1", "x2", "x3"}, {"x0", "x1", "x2"}, {"x0", "x1"})
    ps.SparseRegressor(**options(rounds=rounds)).fit(X, X[:, 0])
    assert script.choosing == choosing


def test_where_nothing_survives_no_weight_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch, set())
    fitted = ps.SparseRegressor(**options()).fit(X, X[:, 0])
    assert script.choosing == [True] and fitted.selected_inputs_ == [] and np.ptp(fitted.predict(X)) == 0


def test_inputs_that_most_runs_choose_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ({"x0", "x1", "x2"}, {"x0", "x2", "x4"}, {"x0", "x2", "x4"})
    second = ({"x0"}, {"x0", "x4"}, {"x0", "x2", "x4"})
    script = Scripted(monkeypatch, first, second, {"x0", "x4"})
    fitted = ps.SparseRegressor(**options(num_runs=3, num_networks=2)).fit(X, X[:, 0] + RNG.normal(size=600))
    assert script.given[1:] == [["x0", "x2", "x4"], ["x0", "x4"], ["x0", "x4"]]
    assert script.choosing == [True, True, True, False] and fitted.num_rounds_ == 4 and len(fitted.fits_) == 2
    # What a run chose in the last round that had the input: x1 in the first, x2 in the second.
    assert fitted.supports_[:, :5].astype(int).tolist() == [[1, 1, 0, 0, 1], [1, 0, 0, 0, 1], [1, 0, 1, 0, 1]]
    assert np.allclose(fitted.inclusion_probability_, [1, 1 / 3, 1 / 3, 0, 1, 0])
    assert fitted.columns_.tolist() == [0, 4] and fitted.selected_inputs_ == [0, 4]


def test_where_no_input_has_a_majority_those_of_one_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, ({"x0"}, {"x1"}), {"x0"}, {"x1"})
    fitted = ps.SparseRegressor(**options(num_runs=2, rounds=1)).fit(X, X[:, 0])
    assert fitted.supports_.sum(0).tolist() == [1, 1, 0, 0, 0, 0] and len(fitted.columns_) == 1


def test_where_most_runs_keep_nothing_and_the_best_neither_the_mean_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Scripted(monkeypatch, set())
    fitted = ps.SparseRegressor(**options(num_runs=3)).fit(X, X[:, 0])
    assert fitted.selected_inputs_ == [] and np.ptp(fitted.predict(X)) == 0 and fitted.effects(X).empty
    assert fitted.predict(X)[0] == pytest.approx(X[:, 0].mean(), abs=1e-4)


def test_predictions_average_the_networks(tmp_path: Path) -> None:
    y = np.abs(X[:, 0]) + 0.3 * RNG.normal(size=600)
    fitted = ps.SparseRegressor(**options(num_networks=3, schedule=TINY, rounds=1)).fit(X, y)
    assert len(fitted.fits_) == 3 and fitted.supports_.shape == (1, 6) and fitted.hidden_ == (5,)
    inputs = ((NEW - X.mean(0)) / X.std(0)).astype(np.float32)[:, fitted.columns_]
    single = [ps.predict(fit, inputs) for fit in fitted.fits_]
    mean = np.mean([one["mean"].values for one in single], 0)
    assert np.allclose(fitted.predict(NEW), mean * y.std() + y.mean(), rtol=1e-5, atol=1e-5)
    assert np.ptp([one["mean"].values for one in single], 0).mean() > 0.01
    fitted.save(tmp_path)
    ps.SparseRegressor(**options(num_networks=2, schedule=TINY, rounds=1)).fit(X, y).save(tmp_path / "again")
    fitted.save(tmp_path / "again")
    (tmp_path / "again" / "network9").mkdir()
    again = ps.SparseRegressor.load(tmp_path / "again")
    assert again.get_params() == fitted.get_params()
    assert np.array_equal(again.predict_interval(NEW), fitted.predict_interval(NEW))
    assert again.fit_.loss == fitted.fit_.loss and any(fit is again.fit_ for fit in again.fits_)


@pytest.mark.parametrize("bent", [False, True])
def test_a_linear_model_is_kept_where_it_is_the_better_one(bent: bool) -> None:
    y = 2 * X[:, 1] - X[:, 3] + RNG.normal(size=600)
    y = np.abs(X[:, 1]) + 0.3 * RNG.normal(size=600) if bent else y
    fitted = ps.SparseRegressor(**options(hidden=None, num_networks=2)).fit(X, y)
    assert fitted.hidden_ == ((20, 10) if bent else ()) and len(fitted.fits_) == (2 if bent else 1)
    assert fitted.selected_inputs_ == ([1] if bent else [1, 3])


@pytest.mark.parametrize("num_classes", [2, 3])
def test_where_no_input_helps_the_probabilities_are_the_shares(num_classes: int) -> None:
    """Of rare classes too, which a slab about probabilities of one half would pull up."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2_000, 3)), np.zeros(2_000, int)
    y[:4], y[4 : 4 + 500 * (num_classes - 2)] = 1, 2
    fitted = ps.SparseClassifier(hidden=(), steps=200, num_runs=1, random_state=0).fit(x, y)
    assert fitted.selected_inputs_ == []
    assert np.allclose(fitted.predict_proba(x[:1])[0], np.bincount(y) / 2_000, rtol=0.02)


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ps.SparseRegressor(**options(hidden=(), steps=np.int8(100), device=torch.device("cpu"))).fit(X, X[:, 0])
    first.save(tmp_path)  # numbers of NumPy and devices are written
    second = ps.SparseRegressor(**options(hidden=())).fit(X, 100 * X[:, 1])
    monkeypatch.setattr(second, "x_mean_", np.array([object()], dtype=object))
    monkeypatch.setattr(estimators, "_plain", lambda value: value)
    with pytest.raises((TypeError, ValueError)):
        second.save(tmp_path)
    monkeypatch.undo()
    assert np.array_equal(ps.SparseRegressor.load(tmp_path).predict(NEW), first.predict(NEW))


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["2021-01-01", "2022-01-01"], dtype="datetime64[D]"),
        np.array([5, 70], dtype="timedelta64[s]"),
        np.array(["a", "b"], dtype=object),
        np.array([1, 5], dtype=np.int8),
        np.array([1.0, 2.0], dtype=np.float32),
    ],
)
def test_labels_of_a_loaded_classifier_are_those_saved(labels: Array, tmp_path: Path) -> None:
    fitted = ps.SparseClassifier(**options(hidden=(), schedule=TINY)).fit(X, labels[(X[:, 0] > 0).astype(int)])
    fitted.save(tmp_path)
    found, expected = ps.SparseClassifier.load(tmp_path).predict(NEW), fitted.predict(NEW)
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize(("scale", "selected"), [(0.5, [0]), (500.0, [0, 2])])
def test_a_column_is_constant_where_rounding_could_make_what_varies(scale: float, selected: list[int]) -> None:
    """Near 1e13 double precision has steps of 0.002; a column of times may vary by no more than this."""
    x = X.copy()
    x[:, 1] = 0.0
    x[:, 2] = 1e13 + scale * X[:, 1]
    fitted = ps.SparseRegressor(**options(hidden=())).fit(x, X[:, 0] - X[:, 1] + 0.1 * RNG.normal(size=len(x)))
    assert fitted.selected_inputs_ == selected


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({"device": "gpu"}, lambda e: e.fit(X, X[:, 0]), "device must be one that PyTorch can use here, got 'gpu'"),
        ({}, lambda e: e.fit(X, np.where(X[:, 0] > 0, "a", "b")), "y must hold numbers, got '.'; for classes"),
        ({}, lambda e: e.fit(X, X[:, 0]).effects(X, num_points=1), "num_points must be a whole number >= 2, got 1"),
        ({}, lambda e: e.fit(X, X[:, 0]).effects(X, num_rows=0), "num_rows must be a whole number >= 1, got 0"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said(arguments: dict[str, Any], call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ps.SparseRegressor(**options(hidden=(), schedule=TINY, **arguments)))


def test_numbers_of_numpy_and_booleans_are_numbers() -> None:
    made = ps.SparseRegressor(**options(hidden=(), schedule=TINY, batch_size=np.int32(20)))
    assert np.isfinite(made.fit(X, X[:, 0] > 0).predict(NEW)).all()
