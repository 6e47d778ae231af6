"""Measures against scikit-learn's and by hand, the words of a summary, and folders that are replaced as one."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn import metrics as sklearn
from sklearn.ensemble import HistGradientBoostingRegressor

from pyro_sparse import folders
from pyro_sparse.estimators import ANY_OTHER
from pyro_sparse.measures import deviances, least_squares, log_losses, measured, standard_errors
from pyro_sparse.report import alike, collected_warnings, with_levels
from pyro_sparse.summary import directions, summary
from pyro_sparse.tables import Column, Encoding, Table, prepare

NETWORK = "sparse model"


def tables(response: Any, family: str = "auto", count: int = 120) -> tuple[Table, Table, np.random.Generator]:
    """Rows of three inputs, one of them text, and a response to the first."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(count, 2)), columns=["u", "v"])
    frame["colour"] = random.choice(["red", "green"], count)
    frame["y"] = response(frame["u"].to_numpy(), random)
    return *prepare(frame, "y", family=family).split(0.25, 0), random


def intervals(test: Table, mean: Any, half: float) -> pd.DataFrame:
    return pd.DataFrame({"observed": test.target, "mean": mean, "lower": mean - half, "upper": mean + half})


def test_numbers_are_measured_beside_least_squares_trees_and_the_mean() -> None:
    train, test, _ = tables(lambda u, random: u**2 + 0.3 * random.normal(size=len(u)))
    y, mean = test.target.to_numpy(), test.inputs["u"].to_numpy() ** 2
    found = measured("normal", train, test, intervals(test, mean, 0.5), 7)
    trees = HistGradientBoostingRegressor(random_state=7).fit(train.inputs.to_numpy(), train.target)
    expected = {
        NETWORK: mean,
        "least squares on all inputs": least_squares(train, test.inputs),
        "boosted trees": trees.predict(test.inputs.to_numpy()),
        "mean of the fitted rows": np.full(len(y), train.target.mean()),
    }
    assert list(found["models"]) == list(expected)
    for name, prediction in expected.items():
        assert found["models"][name]["rmse"] == pytest.approx(sklearn.root_mean_squared_error(y, prediction))
        assert found["models"][name]["r2"] == pytest.approx(sklearn.r2_score(y, prediction))
    assert found["covered"] == (np.abs(y - mean) <= 0.5).sum() and found["mean_width"] == pytest.approx(1)
    better = standard_errors((y - train.target.mean()) ** 2, (y - mean) ** 2)
    assert found["models"]["mean of the fitted rows"]["better_by"] == pytest.approx(better)
    assert NETWORK in found["models"] and "better_by" not in found["models"][NETWORK]


def test_counts_are_measured_by_deviance() -> None:
    train, test, _ = tables(lambda u, random: random.poisson(np.exp(u)), count=400)
    y, rate = test.target.to_numpy(), np.exp(test.inputs["u"].to_numpy())
    found = measured("poisson", train, test, intervals(test, rate, 3.0), 0)
    mean = np.full(len(y), train.target.mean())
    for name, prediction in ((NETWORK, rate), ("mean of the fitted rows", mean)):
        expected = sklearn.mean_poisson_deviance(y, prediction)
        assert found["models"][name]["deviance"] == pytest.approx(expected)
    # The law is Poisson regression's own, so it does nearly as well as the truth.
    assert (
        found["models"]["Poisson regression on all inputs"]["deviance"] < sklearn.mean_poisson_deviance(y, rate) + 0.3
    )
    assert found["covered_if_calibrated"] == [int(stats.binom.ppf(0.025, len(y), 0.95)), len(y)]
    assert np.isfinite(deviances(np.array([0.0, 3.0]), np.zeros(2))).all()


def class_predictions(test: Table, probabilities: Any, labels: list[str]) -> pd.DataFrame:
    columns = {f"P({label})": probabilities[:, k] for k, label in enumerate(labels)}
    return pd.DataFrame({"observed": test.target} | columns)


def test_classes_are_measured_by_accuracy_log_loss_brier_and_sets() -> None:
    labels = ["one", "three", "two"]  # sorted, as the columns are
    train, test, random = tables(lambda u, _: np.select([u < -0.5, u < 0.5], ["one", "two"], "three"))
    probabilities = random.dirichlet(np.ones(3), len(test.target))
    found = measured("classes", train, test, class_predictions(test, probabilities, labels), 0)
    y, ours = test.target.to_numpy(), found["models"][NETWORK]
    assert ours["accuracy"] == pytest.approx(sklearn.accuracy_score(y, np.array(labels)[probabilities.argmax(1)]))
    assert ours["log_loss"] == pytest.approx(sklearn.log_loss(y, probabilities, labels=labels))
    hit = y[:, None] == np.array(labels)
    assert ours["brier"] == pytest.approx(np.square(hit - probabilities).sum(1).mean())
    shares = train.target.value_counts(normalize=True)[labels].to_numpy()
    frequencies = found["models"]["class frequencies"]
    assert frequencies["log_loss"] == pytest.approx(sklearn.log_loss(y, np.tile(shares, (len(y), 1)), labels=labels))
    assert found["models"]["logistic regression on all inputs"]["accuracy"] > 0.8
    ordered = np.sort(probabilities, 1)[:, ::-1]
    sizes = 1 + (ordered.cumsum(1)[:, :2] < 0.95).sum(1)
    assert found["mean_set_size"] == pytest.approx(sizes.mean()) and found["set_size_without_inputs"] == 3


def test_sets_are_judged_by_what_they_contain() -> None:
    """Sets of 100 rows that contain 0.96 each: 4 misses expected, and a Poisson number of them lies between 1 and 8."""
    train, test, _ = tables(lambda u, _: np.where(u > 0, "yes", "no"), count=400)
    probabilities = np.where((test.target == "yes").to_numpy()[:, None], [0.04, 0.96], [0.96, 0.04])
    found = measured("classes", train, test, class_predictions(test, probabilities, ["no", "yes"]), 0)
    assert found["covered_if_calibrated"] == [92, 99] and found["covered"] == 100 and found["mean_set_size"] == 1


def test_class_that_the_fit_has_not_seen_is_a_miss() -> None:
    train, test, _ = tables(lambda u, _: np.where(u > 0, "yes", "no"))
    test.target.iloc[0] = "maybe"
    predictions = class_predictions(test, np.full((len(test.target), 2), 0.5), ["no", "yes"])
    found = measured("classes", train, test, predictions, 0)
    assert found["covered"] == len(test.target) - 1 and np.isfinite(found["models"][NETWORK]["log_loss"])
    assert log_losses(np.array([[False, False]]), np.array([[0.5, 0.5]])) == pytest.approx(-np.log(np.finfo(float).eps))


def test_level_that_only_unseen_rows_have() -> None:
    for response in (
        lambda u, random: u,
        lambda u, random: random.poisson(np.exp(u)),
        lambda u, _: np.where(u > 0, "a", "b"),
    ):
        train, test, _ = tables(response)
        train.inputs["colour=red"] = 0.0
        family, count = train.response.family, len(test.target)
        predictions = intervals(test, np.ones(count), 1.0) if family != "classes" else None
        if predictions is None:
            predictions = class_predictions(test, np.full((count, 2), 0.5), ["a", "b"])
        models = measured(family, train, test, predictions, 0)["models"]
        assert all(np.isfinite(value) for scores in models.values() for value in scores.values())


def test_least_squares_is_numpys() -> None:
    train, test, _ = tables(lambda u, random: u + random.normal(size=len(u)))
    design = np.column_stack([np.ones(len(train.inputs)), train.inputs])
    weights = np.linalg.lstsq(design, train.target.to_numpy(), rcond=None)[0]
    expected = np.column_stack([np.ones(len(test.inputs)), test.inputs]) @ weights
    assert least_squares(train, test.inputs) == pytest.approx(expected)


def test_standard_errors_of_a_paired_difference() -> None:
    # Losses differ by 1, 1, 3, 3: mean 2, standard error sqrt(4/3) / 2.
    assert standard_errors(np.array([2.0, 2.0, 4.0, 4.0]), np.ones(4)) == pytest.approx(2 / ((4 / 3) ** 0.5 / 2))


def effect(means: list[float], half: float = 0.1, **more: Any) -> pd.DataFrame:
    mean, value = np.array(means), np.arange(float(len(means)))
    columns = {"input": "u", "value": value, "mean": mean, "mean_lower": mean - half, "mean_upper": mean + half}
    far = mean - mean[0]
    columns |= {"difference": far, "difference_lower": far - 1.4 * half, "difference_upper": far + 1.4 * half}
    return pd.DataFrame(columns | more)


@pytest.mark.parametrize(
    ("means", "direction", "ends"),
    [
        ([1, 2, 3], "rises", [1, 3]),
        ([1, 2, 1.99, 3], "rises", [1, 3]),
        ([5, 4, 1], "falls", [5, 1]),
        ([0, 1], "rises", [0, 1]),
        ([0, 2, 1], "not monotone", [0, 2]),
        ([1, 0, 3, 2.5], "not monotone", [0, 3]),
        ([1, 1.15, 1.145], "rises", [1, 1.145]),  # a difference of .15, whose interval reaches by .14 to both sides
        ([1.15, 1, 1.005], "falls", [1.15, 1.005]),
        ([1, 1.1, 1.13], "no clear effect on its own", [1, 1.13]),
    ],
)
def test_direction_of_an_effect(means: list[float], direction: str, ends: list[float]) -> None:
    (found,) = directions(effect(means))
    assert found["direction"] == direction and [mean for _, mean, _, _ in found["ends"]] == pytest.approx(ends)
    for _, mean, lower, upper in found["ends"]:
        assert (mean - lower, upper - mean) == pytest.approx((0.1, 0.1))


def test_levels_of_text_differ_between_extremes() -> None:
    (found,) = directions(effect([2, 5, 1, 3], value=["red", "blue", "green", "any other"]))
    assert found["direction"] == "differs" and [end[:2] for end in found["ends"]] == [["green", 1], ["blue", 5]]
    assert "u: differs: between 1 (0.9 to 1.1) at green and 5 (4.9 to 5.1) at blue" in study(effects=[found])
    (found,) = directions(effect([2, 2.1], value=["red", "blue"]))
    assert found["direction"] == "no clear effect on its own"


def test_effects_name_levels_in_place_of_columns() -> None:
    columns = (Column("k", ("a", "b", "c")), Column("l", ("no", "yes")), Column("u"))
    parts = [effect([0, 1, 2], value=["k=a", "k=c", ANY_OTHER], input="k")]
    parts += [effect([0, 1], value=["l=yes", ANY_OTHER], input="l"), effect([0, 1])]
    named = with_levels(pd.concat(parts, ignore_index=True), Encoding("y", columns))
    assert named["value"].tolist() == ["a", "c", "b", "yes", "no", 0, 1]
    one = effect([0, 1], value=["k=a", ANY_OTHER], input="k")
    assert with_levels(one, Encoding("y", columns))["value"].tolist() == ["a", "b or c"]
    many = Encoding("y", (Column("k", ("a", "b", "c", "d", "e")),))
    assert with_levels(one, many)["value"].tolist() == ["a", ANY_OTHER]


def test_direction_among_classes() -> None:
    pair = pd.concat([effect([1, 0], **{"class": "no"}), effect([0, 1], **{"class": "yes"})])
    (found,) = directions(pair)
    assert (found["class"], found["direction"]) == ("yes", "rises")
    three = pd.concat([effect([1, 0.2], **{"class": "maybe"}), pair])
    (found,) = directions(three)
    assert (found["class"], found["direction"]) == ("no", "falls")
    assert directions(pair.iloc[:0]) == []


def study(family: str = "normal", **changes: Any) -> str:
    """The summary of made-up metrics."""
    models = {NETWORK: {"rmse": 1.0, "r2": 0.5}, "boosted trees": {"rmse": 2.0, "r2": 0.2, "better_by": 3.0}}
    models["least squares on all inputs"] = {"rmse": 2.0, "r2": 0.2, "better_by": 3.0}
    models["mean of the fitted rows"] = {"rmse": 2.0, "r2": 0.0, "better_by": 3.0}
    sizes = {"mean_width": 4.0, "mean_width_without_inputs": 8.0, "interval_score": 5.0}
    covered = {"covered": 19, "coverage": 0.95, "covered_if_calibrated": [17, 20]}
    held_out = {"models": models, **covered, **sizes}
    metrics = {
        "target": "y",
        "family": family,
        "classes": None,
        "rows": {"read": 100, "dropped": 0, "fitted": 80, "held_out": 20},
        "inputs": ["u", "v", "w"],
        "left_out": {},
        "selected": ["u"],
        "effects": directions(effect([10, 20])),
        "runs": 3,
        "rounds": 2,
        "selected_in_runs": {"u": 1.0, "v": 2 / 3, "w": 0.0},
        "alike": [],
        "hidden": [20, 10],
        "weights": {"kept": [5, 7, 6], "of": 100},
        "converged": True,
        "noise_scale": 1.0,
        "held_out": held_out,
    }
    for name, by in changes.pop("better_by", {}).items():
        models[name]["better_by"] = by
    held_out |= {name: changes.pop(name) for name in ("covered", "covered_if_calibrated") if name in changes}
    return " ".join(summary("data", metrics | changes).split())


def test_summary_says_which_way_and_how_sure() -> None:
    text = study()
    assert "u: rises from 10 (9.9 to 10.1) at 0 to 20 (19.9 to 20.1) at 1" in text
    assert "on the mean of 'y'" in text and "noise of standard deviation 1 " in text
    assert "u in 3 of 3 runs; v in 2 of 3 runs" in text and "the final model does not read them: v" in text
    assert "the average of 3, with 5, 7 and 6 of 100 weights kept" in text and "falls short" not in text
    assert "in the end" not in study(selected_in_runs={"u": 1.0, "v": 1 / 3, "w": 0.0})
    assert "network 5 of 100 weights kept" in study(weights={"kept": [5], "of": 100})
    assert "model linear, 5 of 100 weights kept" in study(weights={"kept": [5], "of": 100}, hidden=[])
    assert "u in 3 of 3 runs; v in 0 of 3 runs" in study(
        selected=["u", "v"], selected_in_runs={"u": 1.0, "v": 0.0, "w": 0.0}
    )
    assert "one run says which inputs" in study(runs=1)
    assert "kept is what more than half choose" in text
    assert "kept is what fits best of the vote, each run and forward selection" in study(
        selected_in_runs={"u": 1 / 3, "v": 0.0, "w": 0.0}
    )


def test_inputs_that_may_stand_for_a_selected_one_are_named() -> None:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(200, 3)), columns=["u", "v", "w"])
    frame["near"] = frame["u"] - 0.1 * frame["w"]
    frame["against"] = -2 * frame["u"] - 0.6 * frame["v"]
    frame["far"] = frame["u"] + frame["v"]
    frame["colour"] = random.choice(["red", "green", "blue"], 200)
    frame["red"] = (frame["colour"] == "red").astype(float)
    table = prepare(frame.assign(y=random.normal(size=200)), "y")
    names = list(table.inputs.columns)
    support = np.isin(names, ["u", "w", "red"])
    found = alike(table.inputs, support, table.encoding)
    correlation = frame.drop(columns="colour").corr()["u"]
    expected = [("colour", "red", 1.0), ("near", "u", correlation["near"]), ("against", "u", correlation["against"])]
    assert [(one["input"], one["selected"]) for one in found] == [pair[:2] for pair in expected]
    assert [one["correlation"] for one in found] == pytest.approx([pair[2] for pair in expected])
    for selected in ([], names):  # nothing to stand for, nothing left out
        assert alike(table.inputs, np.isin(names, selected), table.encoding) == []
    constant = table.inputs.assign(near=1.0)
    assert [one["input"] for one in alike(constant, support, table.encoding)] == ["colour", "against"]


def test_of_warnings_that_differ_in_numbers_the_first_is_kept() -> None:
    with collected_warnings() as notes:
        for text in ("varies 8.2 times", "other", "varies 11 times"):
            warnings.warn(text, stacklevel=1)
    assert notes == ["varies 8.2 times", "other"]


def test_summary_names_inputs_alike() -> None:
    pair = {"input": "v", "selected": "u", "correlation": -0.957}
    said = "correlated with what is selected: v with u (-0.96); either may be what acts"
    assert said in study(alike=[pair]) and "alike" not in study()
    assert "v with u (-0.96) and 2 more; either" in study(alike=[pair] * 10)


def test_summary_of_classes_names_the_one_that_moves() -> None:
    parts = [effect([1, 0], **{"class": "no"}), effect([0, 1], **{"class": "yes"})]
    moved = study(classes={"no": 50, "yes": 30}, effects=directions(pd.concat(parts)), family="normal")
    assert "on P(yes), averaged" in moved and "u: rises from 0" in moved
    parts.append(effect([0.5, 0.5], **{"class": "maybe"}))
    moved = study(classes={"maybe": 1, "no": 50, "yes": 30}, effects=directions(pd.concat(parts)), family="normal")
    assert "u: P(no) falls from 1" in moved


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"better_by": {"boosted trees": -2.5}}, "Boosted trees predict better, clearly: by 2.5 standard errors"),
        (
            {"better_by": {"least squares on all inputs": -0.5}},
            "Least squares on all inputs predicts better, though no more than chance may do: by 0.5",
        ),
        (
            {"better_by": {"mean of the fitted rows": 1.5}},
            "Not clearly better than the mean of the fitted rows: by 1.5",
        ),
        (
            {"rows": {"read": 100, "dropped": 40, "most_blanks": ["u", 39], "fitted": 40, "held_out": 20}},
            "Blanks cost 40% of the rows: --ignore 'u'",
        ),
        (
            {"rows": {"read": 100, "dropped": 40, "most_blanks": ["y", 39], "fitted": 40, "held_out": 20}},
            "Blanks cost 40% of the rows.",
        ),
        ({"covered": 15}, "The intervals are too narrow"),
        ({"covered": 20, "covered_if_calibrated": [15, 19]}, "The intervals are too wide"),
        ({"selected": []}, "No input was selected"),
        ({"converged": False}, "The refit has not converged"),
    ],
)
def test_summary_says_where_it_falls_short(changes: dict[str, Any], said: str) -> None:
    text = study(**changes)
    assert "Where it falls short" in text and said in text


def test_trees_that_are_better_by_chance_are_not_mentioned_as_better() -> None:
    assert "falls short" not in study(better_by={"boosted trees": -1.5})


def result(folder: Path, name: str) -> None:
    (folder / "metrics.json").write_text(name)
    (folder / "estimator").mkdir()
    (folder / "estimator" / name).write_text(name)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_folder_is_replaced_when_the_new_one_is_ready(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with folders.replacing(out, {"command": "fit"}) as new:
        result(new, "first")
        (new / "summary.txt").write_text("first")
        assert not out.exists()
    first = contents(out)
    (out / "mine.txt").write_text("mine")
    with folders.replacing(out, {"command": "fit"}) as new:
        result(new, "second")
        assert contents(out) == first | {"mine.txt": "mine"}
    found = contents(out)
    assert found["metrics.json"] == "second" and set(found) == {
        *("mine.txt", "metrics.json", "pyro_sparse.json", str(Path("estimator") / "second"))
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("fails_at", range(6))
def test_replacing_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    out = tmp_path / "out"
    with folders.replacing(out, {"command": "fit"}) as new:
        result(new, "first")
    first, move, calls = contents(out), shutil.move, []

    def failing(source: Path, to: Path) -> None:
        calls.append(source)
        if len(calls) == fails_at + 1:
            raise KeyboardInterrupt
        move(source, to)

    monkeypatch.setattr(shutil, "move", failing)
    with pytest.raises(KeyboardInterrupt), folders.replacing(out, {"command": "fit"}) as new:
        result(new, "second")
    assert contents(out) == first and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_of_another_command_is_left_alone(tmp_path: Path) -> None:
    folders.claim(tmp_path / "demo", {"command": "demo"})
    with (
        pytest.raises(ValueError, match="holds what `pyro-sparse demo` wrote"),
        folders.replacing(tmp_path / "demo", {"command": "fit"}),
    ):
        pass
    folders.claim(tmp_path / "demo", {"command": "demo"})
