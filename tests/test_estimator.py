"""SparseRegressor behaves as scikit-learn's regressors do, finds the right inputs, and its intervals cover."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

import pyro_sparse as ps

TINY = ps.PriorAnnealing(15, 15, 15, 15, learning_rate=1e-2)
SHORT = ps.PriorAnnealing(300, 1_000, 2_000, 500, learning_rate=1e-2)
Array = np.ndarray[Any, Any]


def regressor(schedule: ps.PriorAnnealing = TINY, **options: Any) -> ps.SparseRegressor:
    return ps.SparseRegressor(
        **({"hidden": (4,), "schedule": schedule, "num_runs": 1, "num_networks": 1, "random_state": 0} | options)
    )


def function(x: Array) -> Array:
    return 10 + 6 * x[:, 3] + 6 * np.tanh(2 * x[:, 7])


def data(num_rows: int = 500, seed: int = 0) -> tuple[Array, Array]:
    """Ten inputs in units of their own, of which the fourth and the eighth act; noise of standard deviation 1.5."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 10))
    return x * UNITS + 3 * UNITS, function(x) + 1.5 * rng.normal(size=num_rows)


UNITS = np.logspace(-3, 3, 10)
X, Y = data()
FRAME = pd.DataFrame(X, columns=[f"x{i}" for i in range(10)], index=np.arange(500) + 7)
NEW, Y_NEW = data(4_000, 1)


@pytest.fixture(scope="module")
def found() -> ps.SparseRegressor:
    return regressor(SHORT, hidden=(6,), num_networks=2).fit(FRAME, Y)


def test_exactly_the_inputs_that_act_are_found(found: ps.SparseRegressor) -> None:
    assert found.selected_inputs_ == ["x3", "x7"]
    assert found.get_support().tolist() == [i in (3, 7) for i in range(10)]
    assert found.get_support(indices=True).tolist() == [3, 7]
    assert found.inclusion_probability_.tolist() == [float(i in (3, 7)) for i in range(10)]
    assert found.get_feature_names_out().tolist() == ["x3", "x7"]
    assert found.feature_names_in_.tolist() == list(FRAME) and found.n_features_in_ == 10
    assert found.transform(FRAME).shape == (500, 2) and np.array_equal(found.transform(FRAME), X[:, [3, 7]])
    assert found.fit_.converged and found.columns_.tolist() == [3, 7] and found.num_rounds_ == 3


def test_it_predicts_near_the_function_in_the_responses_own_units(found: ps.SparseRegressor) -> None:
    new = pd.DataFrame(NEW, columns=FRAME.columns)
    truth = function(NEW / UNITS - 3)
    assert np.square(found.predict(new) - truth).mean() < 0.1 * 1.5**2
    assert found.noise_scale_ == pytest.approx(1.5, rel=0.15)
    assert found.score(new, Y_NEW) > 0.9


@pytest.mark.parametrize("prob", [0.5, 0.95])
def test_intervals_cover_new_observations(found: ps.SparseRegressor, prob: float) -> None:
    """4,000 fresh rows: binomial bounds left once in 10,000 times, and 4 % for the noise scale estimated from 500."""
    new = pd.DataFrame(NEW, columns=FRAME.columns)
    interval = found.predict_interval(new, prob)
    assert interval.shape == (4_000, 2)
    covered = ((interval[:, 0] <= Y_NEW) & (interval[:, 1] >= Y_NEW)).mean()
    z = stats.norm.ppf(0.5 * (1 + prob))
    low, high = (2 * stats.norm.cdf(z * factor) - 1 for factor in (0.94, 1.06))
    noise = 4 * (prob * (1 - prob) / 4_000) ** 0.5
    assert low - noise <= covered <= high + noise
    assert np.median(np.diff(interval, axis=1)) == pytest.approx(2 * z * 1.5, rel=0.1)


def test_the_table_keeps_the_index_and_the_interval_holds_the_mean(found: ps.SparseRegressor) -> None:
    table = found.predict_table(FRAME.iloc[5:20])
    assert table.index.equals(FRAME.index[5:20])
    assert list(table) == ["mean", "mean_lower", "mean_upper", "lower", "upper"]
    order = table[["lower", "mean_lower", "mean", "mean_upper", "upper"]].to_numpy()
    assert (np.diff(order, axis=1) > 0).all()
    assert np.array_equal(table["mean"], found.predict(FRAME.iloc[5:20]))
    with pytest.raises(ValueError, match=r"prob must lie in \(0, 1\), got 95"):
        found.predict_table(FRAME, prob=95)
    rows = FRAME.iloc[5:8].to_numpy().tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing names
        assert np.allclose(found.predict_table(rows)["mean"], table["mean"][:3])


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_columns_in_another_order_are_refused(found: ps.SparseRegressor) -> None:
    with pytest.raises(ValueError, match="feature names should match"):
        found.predict(FRAME[FRAME.columns[::-1]])
    with pytest.raises(ValueError, match="9 features, but SparseRegressor is expecting 10"):
        found.predict(X[:, :9])


def test_saved_and_loaded_it_predicts_the_same(found: ps.SparseRegressor, tmp_path: Path) -> None:
    found.save(tmp_path / "fit")
    again = ps.SparseRegressor.load(tmp_path / "fit")
    assert np.array_equal(again.predict_table(FRAME).to_numpy(), found.predict_table(FRAME).to_numpy())
    assert again.selected_inputs_ == ["x3", "x7"] and again.noise_scale_ == found.noise_scale_
    assert np.array_equal(again.inclusion_probability_, found.inclusion_probability_)
    assert again.get_feature_names_out().tolist() == ["x3", "x7"]
    with pytest.raises(ValueError, match="feature names should match"):
        again.predict(FRAME[FRAME.columns[::-1]])
    files = sorted(path.name for path in (tmp_path / "fit").iterdir())
    assert files == ["estimator.json", "network0", "network1"]
    json.loads((tmp_path / "fit" / "estimator.json").read_text())
    with np.load(tmp_path / "fit" / "network0" / "fit.npz", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "bfiu" for name in file.files)


def test_saved_on_a_card_it_is_loaded_on_the_cpu_and_is_json_for_any_reader(tmp_path: Path) -> None:
    x = np.column_stack([X[:100, 3], np.full(100, 3.0)])
    fitted = ps.SparseRegressor(hidden=(), steps=400, num_runs=1, random_state=0).fit(x, X[:100, 3] + X[:100, 0])
    fitted.save(tmp_path)
    file = tmp_path / "estimator.json"
    settings = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    settings["parameters"]["device"] = "cuda"
    file.write_text(json.dumps(settings))
    again = ps.SparseRegressor.load(tmp_path)
    assert again.device == "cpu" and np.array_equal(again.predict(x), fitted.predict(x))


def test_rows_far_outside_of_the_fitted_ones_are_warned_of(found: ps.SparseRegressor) -> None:
    """By more than half of the range in a selected input; others do not matter."""
    low, high = FRAME["x3"].min(), FRAME["x3"].max()
    new = FRAME.iloc[5:9].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.predict(new.assign(x3=high + 0.49 * (high - low), x0=1e9))
    new.loc[new.index[2], "x3"] = low - 0.51 * (high - low)
    with pytest.warns(UserWarning, match=f"1 of 4 rows .* the first is row {new.index[2]}, where x3 is"):
        found.predict(new)
    with pytest.warns(UserWarning, match="the first is row 2, where x3 is"):
        found.predict_interval(new.reset_index(drop=True))


def test_it_can_be_pickled(found: ps.SparseRegressor) -> None:
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.predict_interval(FRAME), found.predict_interval(FRAME))


CHECKS = {
    *("check_estimators_pickle", "check_n_features_in", "check_dict_unchanged", "check_no_attributes_set_in_init"),
    *(
        "check_methods_subset_invariance",
        "check_fit2d_1sample",
        "check_estimators_nan_inf",
        "check_estimators_unfitted",
    ),
}


@pytest.mark.filterwarnings("ignore")
def test_some_of_scikit_learns_own_checks() -> None:
    done = set()
    for est, check in estimator_checks_generator(regressor(ps.PriorAnnealing(4, 4, 4, 4), hidden=(2,))):
        name = getattr(check, "func", check).__name__
        if name in CHECKS - done:
            check(est)
            done.add(name)
    assert done == CHECKS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_of_scikit_learns_own_checks() -> None:
    results = check_estimator(regressor(ps.PriorAnnealing(4, 4, 4, 4), hidden=(2,)), on_fail=None, on_skip=None)
    # Sixteen steps cannot learn: what the checks ask of the score is asked of `found` above.
    failed = [r for r in results if r["status"] == "failed" and "score" not in str(r["exception"])]
    assert not failed, "\n".join(f"{r['check_name']}: {r['exception']!r}" for r in failed)
    assert sum(r["status"] == "passed" for r in results) > 45


def test_parameters_are_kept_as_given() -> None:
    options = {
        "family": "normal",
        "hidden": (5, 3),
        "activation": "relu",
        "steps": 4_000,
        "schedule": TINY,
        "batch_size": 30,
        "rounds": 1,
        "num_runs": 2,
        "num_networks": 2,
        "random_state": 4,
        "device": "cpu",
        "progress": False,
    }
    est = ps.SparseRegressor(**options)
    assert est.get_params() == options and clone(est).get_params() == options
    est.fit(X[:100], Y[:100])
    assert est.get_params() == options and est.supports_.shape == (2, 10) and est.run_.spec.batch_size == 30
    assert est.fit_.module().layer2.weight.shape == (3, 5)
    assert set(est.inclusion_probability_.tolist()) <= {0.0, 0.5, 1.0}
    assert "not fitted" in str(catch(clone(est)))


def catch(est: ps.SparseRegressor) -> Exception:
    with pytest.raises(NotFittedError) as error:
        est.predict(X)
    return error.value


def test_before_fitting_every_verb_says_so(tmp_path: Path) -> None:
    est = regressor()
    for call in (est.predict, est.predict_interval, est.predict_table, est.transform):
        with pytest.raises(NotFittedError):
            call(X)
    for other in (est.get_support, lambda: est.save(tmp_path)):
        with pytest.raises(NotFittedError):
            other()


def test_the_same_random_state_gives_the_same_fit() -> None:
    one, two, other = (regressor(random_state=s).fit(X[:80], Y[:80]).predict(X) for s in (1, 1, 2))
    assert np.array_equal(one, two) and not np.array_equal(one, other)
    states = [np.random.RandomState(0) for _ in range(2)]
    one, two = (regressor(random_state=s).fit(X[:80], Y[:80]).predict(X) for s in states)
    assert np.array_equal(one, two)


def test_the_units_of_inputs_and_response_do_not_matter() -> None:
    plain = regressor().fit(X / UNITS, Y)
    for x in (1000 * X - 3, 1e-14 * X):
        scaled = regressor().fit(x, 5e4 * Y - 2e5)
        assert np.allclose(scaled.predict_interval(x), 5e4 * plain.predict_interval(X / UNITS) - 2e5, rtol=1e-2)


def test_it_works_in_pipelines_and_cross_validation() -> None:
    scores = cross_val_score(make_pipeline(StandardScaler(), regressor()), X[:120], Y[:120], cv=2)
    assert np.isfinite(scores).all()
    frame = FRAME.assign(color=np.where(np.arange(500) % 2, "red", "blue"))
    columns = ColumnTransformer(
        [("numbers", StandardScaler(), ["x3", "x7"]), ("color", OneHotEncoder(sparse_output=False), ["color"])]
    ).set_output(transform="pandas")
    pipeline = make_pipeline(columns, regressor()).fit(frame[:100], Y[:100])
    assert pipeline.predict(frame).shape == (500,)
    names = pipeline[-1].feature_names_in_.tolist()
    assert names == ["numbers__x3", "numbers__x7", "color__color_blue", "color__color_red"]
    assert set(pipeline[-1].selected_inputs_) <= set(names)


def test_a_constant_column_is_never_selected() -> None:
    x = np.column_stack([X[:, 3] / UNITS[3], np.full(500, 7.3), X[:, 7] / UNITS[7], np.full(500, 0.1 + 0.2)])
    x[::2, 3] = 0.3  # constant but for the rounding
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        est = regressor(ps.PriorAnnealing(100, 300, 600, 100, learning_rate=1e-2)).fit(x, Y)
    assert est.get_support().tolist() == [True, False, True, False]
    other = x.copy()
    other[:, [1, 3]] += 5.0
    assert np.isfinite(est.predict_interval(x)).all()
    assert np.allclose(est.predict_interval(other), est.predict_interval(x))


def test_numbers_beyond_single_precision_are_named(found: ps.SparseRegressor) -> None:
    frame = FRAME.copy()
    frame.loc[12, "x3"] = 1e39
    with pytest.raises(
        ValueError, match="X must hold numbers that single precision can hold, got 1e\\+39 of 'x3' in row 5"
    ):
        found.predict(frame)
    with pytest.raises(
        ValueError, match="y must vary by more than double precision can square, got values up to 1e-200"
    ):
        regressor().fit(X, np.where(np.arange(500) == 3, 1e-200, 0.0))


def test_a_column_of_text_is_named() -> None:
    frame = FRAME.assign(place=["north", "south"] * 250, code=pd.Categorical(["1", "2"] * 250))
    with pytest.raises(
        ValueError, match="X must hold numbers, got 'north' in column 'place': code text by columns of 0 and 1"
    ):
        regressor().fit(frame, Y)


def test_a_folder_that_holds_no_estimator_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path must be a folder that save has written, got .*nothing"):
        ps.SparseRegressor.load(tmp_path / "nothing")


@pytest.mark.parametrize("slope", [0.0, 0.8])
def test_noise_that_varies_with_an_input_no_network_reads_is_warned_of_by_the_fit(slope: float) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 3))
    y = x[:, 0] + 0.3 * np.exp(slope * x[:, 1]) * rng.normal(size=600)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = ps.SparseRegressor(hidden=(), steps=400, num_runs=1, random_state=0).fit(x, y)
    assert fitted.selected_inputs_ == [0]
    assert any("noise is clearly larger" in str(w.message) for w in caught) == (slope > 0)


@pytest.mark.parametrize("constant", [0.0, 3.0, 0.1])
def test_a_constant_response_is_refused(constant: float) -> None:
    with pytest.raises(ValueError, match=f"y must not be constant, got {constant:g} in all of 50 rows"):
        regressor().fit(X[:50], np.full(50, constant))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.where(np.arange(500)[:, None] == 3, np.nan, X), Y, "NaN"),
        (X, np.where(np.arange(500) == 3, np.nan, Y), "NaN"),
        (X, Y[:499], "inconsistent numbers of samples"),
        (X[:, 0], Y, "Expected 2D array"),
    ],
)
def test_what_is_wrong_with_the_data_is_named(x: Array, y: Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regressor().fit(x, y)


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1, got 0"):
        regressor(batch_size=0).fit(X, Y)


@pytest.mark.filterwarnings("ignore:the .* kept weights leave")
@pytest.mark.parametrize("num_rows", [2, 5, 25])
def test_with_more_inputs_than_rows_nothing_is_nan(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 60))
    y = x[:, 0] + 0.1 * rng.normal(size=num_rows)
    est = regressor().fit(x, y)
    table = est.predict_table(rng.normal(size=(20, 60)))
    assert np.isfinite(table.to_numpy()).all() and (table["upper"] > table["lower"]).all()
    assert np.isfinite(est.noise_scale_) and est.noise_scale_ > 0


def test_where_nothing_is_kept_it_is_the_mean_with_honest_intervals() -> None:
    """Noise alone: the mean, and the textbook's interval around it at n - 1 or n degrees of freedom."""
    y = np.random.default_rng(5).normal(size=100) * 4 + 50
    est = regressor(ps.PriorAnnealing(20, 300, 600, 100, learning_rate=1e-2)).fit(X[:100], y)
    assert est.selected_inputs_ == [] and est.get_support().sum() == 0
    assert est.effects(X).empty and list(est.effects(X))[:5] == ["input", "value", "mean", "mean_lower", "mean_upper"]
    assert np.allclose(est.predict(X), y.mean(), atol=0.3 * y.std() / 10)
    half = np.diff(est.predict_interval(X), axis=1) / 2
    assert np.allclose(half, stats.t.ppf(0.975, 99) * y.std(ddof=1) * (1 + 1 / 100) ** 0.5, rtol=0.03)
    with pytest.warns(UserWarning, match="No features were selected"):
        assert est.transform(X).shape == (500, 0)


def test_a_short_schedule_needs_no_other_setting() -> None:
    est = regressor(ps.PriorAnnealing(0, 5, 5, 5, 3)).fit(X[:50], Y[:50])
    assert est.run_.draws.shape[1] == 3


def test_a_learning_rate_too_large_for_the_data_is_lowered_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.RandomState(0)
    x = rng.randn(60, 1) + 0.1 * rng.randn(60, 50)  # one direction holds almost all of the variance
    y = x[:, 0] + 0.01 * rng.randn(60)
    schedule = ps.PriorAnnealing(30, 30, 60, 100, learning_rate=0.1)
    monkeypatch.setattr("pyro_sparse.estimators.default_schedule", lambda num_data, steps: schedule)
    with pytest.warns(UserWarning, match="diverged at learning_rate 0.1, .* starting again with 0.033"):
        fitted = ps.SparseRegressor(hidden=(20, 10), num_runs=1, num_networks=1, random_state=0).fit(x, y)
    assert fitted.run_.schedule.learning_rate < 0.1 and np.isfinite(fitted.predict_interval(x)).all()
    with pytest.raises(ps.NonFiniteError, match="lower learning_rate"):
        ps.SparseRegressor(schedule=schedule, num_runs=1, num_networks=1, random_state=0).fit(x, y)
