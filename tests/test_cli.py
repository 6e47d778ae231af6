"""Each command on small data from end to end, every refusal in one line, and text columns there and back."""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner

import pyro_sparse as ps
from pyro_sparse.cli import app
from pyro_sparse.datasets import paper_regression
from pyro_sparse.estimators import SparseClassifier
from pyro_sparse.folders import claim
from pyro_sparse.report import load, selected_in_runs, selected_inputs
from pyro_sparse.tables import Encoding, Table, complete, prepare, read_csv

STEPS = "--steps=400"
SHIFT = {"red": 0.0, "green": 3.0, "blue": -3.0}


def rows(seed: int = 0, count: int = 80) -> pd.DataFrame:
    """A response that depends on a number and, strongly, on a colour."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": random.normal(10, 2, count), "weight": random.normal(size=count)})
    frame["colour"] = random.choice(list(SHIFT), count)
    frame["unit"] = "mm"
    frame["y"] = frame["size"] + frame["colour"].map(SHIFT) + 0.1 * random.normal(size=count)
    return frame


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def written(frame: pd.DataFrame, folder: Path, name: str = "data.csv") -> Path:
    frame.to_csv(folder / name, index=False)
    return folder / name


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that `fit` wrote, and what it printed; rows 3 and 5 have blanks."""
    folder = tmp_path_factory.mktemp("fit")
    frame = rows()
    frame.loc[2, "size"] = np.nan
    frame.loc[4, "colour"] = "  "
    result = command("fit", written(frame, folder), "--target=y", "--out", folder / "out", STEPS, "--seeds=2")
    assert result.exit_code == 0, result.output
    assert metrics(folder / "out")["selected"] == ["size", "colour"]  # tests below need an input that is not
    return folder / "out", result.stdout


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same of a target that is text, and another input of text that says nothing."""
    folder = tmp_path_factory.mktemp("classified")
    frame = rows(count=400).assign(shape=["round", "flat", "long", "flat"] * 100)
    frame["kind"] = np.where(frame["y"] > 10, "large", "a small one")
    data = written(frame.drop(columns="y"), folder)
    result = command("fit", data, "--target=kind", "--out", folder / "out", "--steps=800", "--seeds=1")
    assert result.exit_code == 0, result.output
    assert {"size", "colour"} == set(metrics(folder / "out")["selected"])
    return folder / "out", result.stdout


def metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def test_fit_writes_what_it_promises(fitted: tuple[Path, str]) -> None:
    folder, _ = fitted
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("pyro_sparse.json", "estimator", "trace.zarr", "structure.json", "predictions.csv", "metrics.json"),
        *("summary.txt", "schedule.png", "annealing.png", "inclusion.png", "intervals.png", "network.png"),
        *("effects.csv", "effects.png"),
    }
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    for picture in folder.glob("*.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 5_000
    trace = xr.open_datatree(folder / "trace.zarr", engine="zarr", consolidated=False)
    assert trace["posterior"].sizes["draw"] in (60, 100)  # of the cooling quarter of 240 or 400 steps
    effects = pd.read_csv(folder / "effects.csv").set_index("input")
    assert set(effects.index) == {"size", "colour"} and set(effects.loc["colour", "value"]) == set(SHIFT)
    for level, shift in SHIFT.items():
        (row,) = effects.loc["colour"][effects.loc["colour", "value"] == level].to_dict("records")
        assert row["difference"] == pytest.approx(shift - SHIFT[effects.loc["colour", "value"].iloc[0]], abs=0.3)
    structure = json.loads((folder / "structure.json").read_text())
    assert structure["num_kept"] == sum(len(site["kept"]) for site in structure["weights"].values())


def test_fit_counts_rows_and_says_what_it_left_out(fitted: tuple[Path, str]) -> None:
    folder, printed = fitted
    found = metrics(folder)
    assert found["rows"] == {"read": 80, "dropped": 2, "most_blanks": ["size", 1], "fitted": 62, "held_out": 16}
    assert found["left_out"] == {"unit": "constant"}
    assert found["inputs"] == ["size", "weight", "colour"]
    assert "2 of 80 rows, for blanks, most in 'size' (1)" in printed and "'unit' (constant)" in printed
    assert printed.startswith("Target 'y' holds numbers: a normal response\n")


@pytest.mark.parametrize(
    ("support", "inputs"),
    [
        ([1, 0, 0, 0, 0], ["size"]),
        ([0, 0, 0, 1, 1], ["colour"]),
        ([0, 1, 1, 0, 0], ["weight", "colour"]),
        ([0] * 5, []),
    ],
)
def test_text_column_is_reported_as_one_input(support: list[int], inputs: list[str]) -> None:
    estimator = SimpleNamespace(get_support=lambda: np.array(support, dtype=bool))
    assert selected_inputs(estimator, prepare(rows(), "y").encoding) == inputs  # type: ignore[arg-type]


def test_text_column_counts_as_selected_in_a_run_by_any_level() -> None:
    supports = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=bool)
    shares = selected_in_runs(SimpleNamespace(supports_=supports), prepare(rows(), "y").encoding)  # type: ignore[arg-type]
    assert shares == pytest.approx({"size": 2 / 3, "weight": 0, "colour": 2 / 3})


def test_measures_are_those_of_the_written_predictions(fitted: tuple[Path, str]) -> None:
    folder, printed = fitted
    table, found = pd.read_csv(folder / "predictions.csv"), metrics(folder)["held_out"]
    assert found["models"]["sparse model"]["rmse"] == pytest.approx(
        ((table.observed - table["mean"]) ** 2).mean() ** 0.5
    )
    inside = (table.lower <= table.observed) & (table.observed <= table.upper)
    assert found["covered"] == inside.sum() and found["coverage"] == pytest.approx(inside.mean())
    assert found["mean_width"] == pytest.approx((table.upper - table.lower).mean())
    beyond = (table.lower - table.observed).clip(lower=0) + (table.observed - table.upper).clip(lower=0)
    assert found["interval_score"] == pytest.approx((table.upper - table.lower + 40 * beyond).mean())
    assert f"cover {found['covered']} of 16" in printed
    assert not set(table.row) & {3, 5} and table.row.between(1, 80).all()


def test_predict_reads_new_rows_as_the_fit_did(fitted: tuple[Path, str], tmp_path: Path) -> None:
    """The held-out rows, read from another file in another order of columns, get the predictions of the fit."""
    folder, _ = fitted
    expected = pd.read_csv(folder / "predictions.csv", index_col="row")
    new = rows().loc[expected.index - 1, ["colour", "weight", "size"]]
    out = tmp_path / "new_predictions.csv"
    result = command("predict", folder, written(new, tmp_path), "--out", out)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(out)
    assert list(table.columns) == ["row", "mean", "mean_lower", "mean_upper", "lower", "upper"]
    assert list(table.row) == list(range(1, len(new) + 1))
    for name in ("mean", "mean_lower", "upper"):
        assert table[name].to_numpy() == pytest.approx(expected[name].to_numpy(), rel=1e-5)


def test_saved_regressor_is_the_library_s(fitted: tuple[Path, str]) -> None:
    folder, _ = fitted
    frame = prepare(read_csv(folder.parent / "data.csv"), "y").inputs
    expected = pd.read_csv(folder / "predictions.csv", index_col="row")
    table = ps.SparseRegressor.load(folder / "estimator").predict_table(frame.loc[expected.index])
    assert table["mean"].to_numpy() == pytest.approx(expected["mean"].to_numpy(), rel=1e-5)


def test_predict_prints_wider_intervals_at_a_higher_level(fitted: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = fitted
    frame = rows(1, 3)
    frame.loc[1, "size"] = np.nan
    frame.loc[0, "y"] = np.nan  # no input, so no blank
    frame.loc[2, "weight"] = np.nan  # not selected, so not read
    data = written(frame, tmp_path)
    widths = []
    for prob in (0.5, 0.99):
        result = command("predict", folder, data, f"--prob={prob}")
        table = pd.read_csv(io.StringIO(result.stdout), index_col="row")
        assert table.index.tolist() == [1, 3]
        assert "left out for blanks: 1 row" in result.stderr
        widths.append(float(table["upper"].iloc[0] - table["lower"].iloc[0]))
    assert widths[1] > 3 * widths[0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="size"), "columns of the fit must be there, missing 'size'"),
        (lambda f: f.assign(colour="pink"), "column 'colour' has the unknown level 'pink' in row 1"),
        (lambda f: f.assign(size="big"), "column 'size' must hold finite numbers, got 'big' in row 1"),
        (lambda f: f.assign(size=np.nan), "has no row without blanks"),
    ],
)
def test_predict_refuses_in_one_line(fitted: tuple[Path, str], tmp_path: Path, change: Any, message: str) -> None:
    result = command("predict", fitted[0], written(change(rows(1)), tmp_path))
    assert_refused(result, message)


def test_predict_writes_over_nothing_that_is_read(fitted: tuple[Path, str], tmp_path: Path) -> None:
    data = written(rows(1), tmp_path)
    before = data.read_bytes()
    for out in (data, fitted[0] / "predictions.csv"):
        assert_refused(command("predict", fitted[0], data, "--out", out), "--out must name another file")
    assert data.read_bytes() == before


def test_predict_notes_rows_far_outside(fitted: tuple[Path, str], tmp_path: Path) -> None:
    frame = rows(1, 5)
    assert "far outside" not in command("predict", fitted[0], written(frame, tmp_path)).stderr
    frame.loc[3, "size"] = 1e6
    result = command("predict", fitted[0], written(frame, tmp_path))
    assert (
        "Note: 1 of 5 rows lie far outside of the fitted ones, the first is row 4, where size is 1e+06" in result.stderr
    )


def test_predict_refuses_a_folder_without_a_fit_and_a_level_outside_0_and_1(
    fitted: tuple[Path, str], tmp_path: Path
) -> None:
    data = written(rows(1), tmp_path)
    assert_refused(command("predict", tmp_path, data), "holds no fit")
    assert_refused(command("predict", fitted[0], data, "--prob=1"), "prob must lie in (0, 1), got 1.0")
    assert_refused(command("predict", fitted[0], tmp_path / "none.csv"), "No such file")


def test_predict_reads_selected_inputs_only(fitted: tuple[Path, str], tmp_path: Path) -> None:
    """The other inputs may be missing, or text: the predictions are the same."""
    folder, out, frame = fitted[0], tmp_path / "out.csv", rows(1, 5)
    tables = []
    for change in (frame, frame.drop(columns="weight"), frame.assign(weight="heavy")):
        result = command("predict", folder, written(change, tmp_path), "--out", out)
        assert result.exit_code == 0, result.output
        assert ("has no 'weight': not selected" in result.stderr) == ("weight" not in change)
        tables.append(pd.read_csv(out))
    pd.testing.assert_frame_equal(tables[0], tables[1])
    pd.testing.assert_frame_equal(tables[0], tables[2])


def test_predict_ignores_unknown_levels_of_inputs_that_were_not_selected(
    classified: tuple[Path, str], tmp_path: Path
) -> None:
    new = rows(1, 2).assign(shape="new")
    result = command("predict", classified[0], written(new, tmp_path))
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3, result.output
    assert_refused(
        command("predict", classified[0], written(new.assign(colour="new"), tmp_path)), "unknown level 'new'"
    )


def test_classes_have_their_own_measures_pictures_and_columns(classified: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = classified
    assert printed.startswith("Target 'kind' holds two values (a small one and large): classification\n")
    names = {path.name for path in folder.iterdir()}
    assert "calibration.png" in names and "intervals.png" not in names
    assert isinstance(load(folder / "estimator"), SparseClassifier)
    table, found = pd.read_csv(folder / "predictions.csv"), metrics(folder)
    columns = [f"P({label}){end}" for label in ("a small one", "large") for end in ("", "_lower", "_upper")]
    assert list(table.columns) == ["row", "observed", "predicted", *columns, "set"]
    assert (table["predicted"].eq("large") == (table["P(large)"] > 0.5)).all()
    scores = found["held_out"]["models"]["sparse model"]
    assert scores["accuracy"] == pytest.approx((table.predicted == table.observed).mean())
    assert found["rows"]["held_out"] == 80 and sum(found["classes"].values()) == 320
    out = tmp_path / "new.csv"
    new = rows(count=400).loc[table["row"] - 1]
    result = command("predict", folder, written(new, tmp_path), "--out", out)
    assert result.exit_code == 0, result.output
    again = pd.read_csv(out)
    assert list(again.columns) == ["row", "predicted", *columns, "set"]
    assert again["P(large)"].to_numpy() == pytest.approx(table["P(large)"].to_numpy(), rel=1e-4)


def test_counts_are_a_poisson_response(tmp_path: Path) -> None:
    frame = rows(count=120)
    frame["visits"] = np.random.default_rng(1).poisson(np.exp(frame["y"] / 6 - 1))
    data, out = written(frame.drop(columns="y"), tmp_path), tmp_path / "out"
    result = command("fit", data, "--target=visits", "--out", out, STEPS, "--seeds=1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "Target 'visits' holds counts (whole numbers from 0): a Poisson response; --family normal"
    )
    assert load(out / "estimator").family == "poisson"
    table = pd.read_csv(out / "predictions.csv")
    assert (table["upper"] % 1 == 0).all() and (table["mean"] > 0).all()
    assert set(metrics(out)["held_out"]["models"]["sparse model"]) == {"rmse", "deviance"}


@pytest.mark.parametrize(("mean", "family"), [(19, "poisson"), (21, "normal")])
def test_large_whole_numbers_are_no_counts(mean: int, family: str) -> None:
    """One 0 among sales of a hundred does not make them Poisson."""
    values = [0] * 40 + [2 * mean] * 20 + [2 * mean - 1] * 20
    values[40] += sum([mean * 80, -sum(values)])
    response = prepare(rows().assign(y=values), "y").response
    assert response.family == family and f"--family {'normal' if family == 'poisson' else 'poisson'}" in response.text


def test_family_asked_for_is_the_one_fitted(tmp_path: Path) -> None:
    data, out = written(rows(), tmp_path), tmp_path / "out"
    options = ("--target=y", "--out", out, STEPS, "--seeds=1", "--family=heteroscedastic")
    result = command("fit", data, *options)
    assert result.exit_code == 0, result.output
    assert "noise differs between rows, as asked" in result.stdout and metrics(out)["noise_scale"] is None
    assert load(out / "estimator").family == "heteroscedastic"


def test_load_refuses_other_estimators(tmp_path: Path) -> None:
    (tmp_path / "estimator.json").write_text('{"estimator": "Lasso"}')
    with pytest.raises(ValueError, match="must hold a SparseRegressor or a SparseClassifier, got a Lasso"):
        load(tmp_path)


def assert_refused(result: Any, message: str) -> None:
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def with_blank(frame: pd.DataFrame) -> pd.DataFrame:
    frame.loc[6, "size"] = np.nan
    return frame


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f, ["--target=z"], "there is no column 'z'; the columns are 'size', 'weight'"),
        (lambda f: f, ["--ignore=z"], "there is no column 'z'"),
        (lambda f: f, ["--ignore=wieght"], "there is no column 'wieght', but 'weight'"),
        (lambda f: f.head(19), [], "at least 20 rows without blanks are needed, got 19 of 19"),
        (lambda f: f.assign(size=[1.0, 2.0, *[np.nan] * 78]), [], "got 2 of 80; column 'size' has 78 blanks"),
        (lambda f: f.assign(y=f.colour), ["--family=normal"], "target 'y' must hold numbers, got the text"),
        (lambda f: f, ["--family=poisson"], "must hold counts, whole numbers from 0, got"),
        (lambda f: f, ["--family=classes"], "target 'y' has 80 classes, 20 at most are possible\n"),
        (lambda f: f.assign(y=[f"{v:.9f}%" for v in f["y"]]), [], "holds numbers written as text ('"),
        (
            lambda f: f.assign(size=[f"{v:.9f} €" for v in f["size"]]),
            [],
            "column 'size' holds numbers written as text ('",
        ),
        (lambda f: f.assign(y=["?", *f["y"][1:]]), [], "it holds numbers but for '?' in row 1: leave such cells empty"),
        (
            lambda f: f.assign(size=["1,042", *f["size"][1:]]),
            [],
            "column 'size' holds numbers but for '1,042' in row 1: leave digits and a point only",
        ),
        (
            lambda f: f.assign(**{"colour=red": f.y}),
            [],
            "'colour=red' would stand for two inputs, columns 'colour' and",
        ),
        (lambda f: f.assign(y=3.0), [], "target 'y' is constant (3.0)"),
        (lambda f: f[["unit", "y"]], [], "there is no input: no column but 'y' has two different values"),
        (
            lambda f: f.assign(name=[f"n{i}" for i in range(80)]),
            [],
            "column 'name' holds text with 80 different values",
        ),
        (lambda f: f.assign(size=["?", *f["size"][1:]]), [], "column 'size' holds numbers but for '?' in row 1"),
        (lambda f: f.assign(size=[np.inf, *f["size"][1:]]), [], "must hold finite numbers, got 'inf' in row 1"),
        (with_blank, ["--strict"], "1 of 80 rows have blanks, the first in row 7, column 'size'"),
        (lambda f: f, ["--device=warp"], "--device warp cannot be used"),
        (lambda f: f, ["--device=meta"], "--device meta cannot be used"),
    ],
)
def test_fit_refuses_in_one_line(tmp_path: Path, change: Any, options: list[str], message: str) -> None:
    out = tmp_path / "out"
    data = written(change(rows()), tmp_path)
    assert_refused(command("fit", data, "--target=y", "--out", out, STEPS, *options), message)
    assert not out.exists()


def test_fit_refuses_files_that_are_no_tables(tmp_path: Path) -> None:
    options = ("--target=y", "--out", tmp_path / "out")
    assert_refused(command("fit", tmp_path / "none.csv", *options), "No such file or directory")
    (tmp_path / "empty.csv").write_text("")
    assert_refused(command("fit", tmp_path / "empty.csv", *options), "cannot be read as a CSV file")
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)) * 9)
    assert_refused(command("fit", tmp_path / "binary.csv", *options), "cannot be read as a CSV file")
    (tmp_path / "twice.csv").write_text("a ,a,y\n1,2,3\n")
    assert_refused(command("fit", tmp_path / "twice.csv", *options), "two columns named 'a'")
    (tmp_path / "semicolons.csv").write_text("a;y\n1;2\n")
    assert_refused(command("fit", tmp_path / "semicolons.csv", *options), "is the file separated by commas?")


def test_fit_leaves_a_folder_of_something_else_alone(tmp_path: Path) -> None:
    data = written(rows(), tmp_path)
    result = command("fit", data, "--target=y", "--out", tmp_path, STEPS)
    assert_refused(result, "is not empty and was not made by pyro-sparse")
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]
    assert_refused(command("fit", data, "--target=y", "--out", data, STEPS), "is a file, not a folder")


def test_fit_again_gives_the_same_answer_and_replaces_an_earlier_one(
    classified: tuple[Path, str], tmp_path: Path
) -> None:
    """Bit for bit, but for the seconds it took; without held-out rows there is nothing to measure."""
    first, out, data = classified[0], tmp_path / "out", classified[0].parent / "data.csv"
    command("fit", data, "--target=kind", "--out", out, "--steps=800", "--seeds=1")
    assert contents(out) == contents(first)
    assert metrics(out) | {"seconds": 0} == metrics(first) | {"seconds": 0}
    (out / "mine.txt").write_text("a file of the user's")
    result = command("fit", data, "--target=kind", "--out", out, STEPS, "--seeds=1", "--holdout=0")
    assert result.exit_code == 0 and "none left to measure on" in result.stdout
    assert metrics(out)["held_out"] is None and not (out / "predictions.csv").exists()
    assert (out / "mine.txt").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), MemoryError()])
def test_fit_that_ends_early_leaves_the_earlier_result(
    fitted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder = fitted[0]
    before = contents(folder)

    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr("pyro_sparse.report.study", interrupted)
    arguments = ["fit", str(folder.parent / "data.csv"), "--target=colour", "--out", str(folder)]
    assert CliRunner().invoke(app, arguments).exit_code != 0
    assert contents(folder) == before and metrics(folder)["target"] == "y"
    assert {path.name for path in folder.parent.iterdir()} == {"data.csv", "out"}


def contents(folder: Path) -> dict[Path, bytes]:
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files[Path("metrics.json")]
    return files


def test_numbers_in_a_text_column_stay_text_in_a_new_file(tmp_path: Path) -> None:
    frame = pd.DataFrame({"grade": ["1", "2", "x", "2"] * 10, "y": np.arange(40.0)})
    encoding = prepare(read_csv(written(frame, tmp_path)), "y").encoding
    assert [column.levels for column in encoding.columns] == [("1", "2", "x")]
    again = Encoding.from_json(json.loads(json.dumps(encoding.to_json())))
    assert again == encoding
    new = complete(read_csv(written(pd.DataFrame({"grade": [1, 2]}), tmp_path), again.text_columns))
    assert again.encode(new).to_numpy().tolist() == [[1, 0, 0], [0, 1, 0]]


def test_two_levels_and_truth_values_make_one_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"sex": ["f", "m"] * 20, "smokes": [True, None, False, True] * 10, "y": np.arange(40.0)})
    table = prepare(read_csv(written(frame, tmp_path)), "y")
    assert list(table.inputs.columns) == ["sex=m", "smokes"] and table.encoding.owners == ["sex", "smokes"]
    assert table.inputs.iloc[0].tolist() == [0, 1] and table.inputs.iloc[1].tolist() == [0, 0]
    assert table.num_dropped == 10


def test_spaces_around_text_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('colour , size\nred , 1\n red,2\n"  ",3\n')
    frame = read_csv(tmp_path / "data.csv")
    assert list(frame.columns) == ["colour", "size"] and list(frame.index) == [1, 2, 3]
    assert frame["colour"].tolist()[:2] == ["red", "red"] and frame["colour"].isna().tolist() == [False, False, True]


def test_blank_columns_cost_no_rows(tmp_path: Path) -> None:
    frame = rows().assign(notes=np.nan)
    table = prepare(read_csv(written(frame, tmp_path)), "y", ignore=["weight"])
    assert table.left_out == {"notes": "blank", "unit": "constant"} and table.num_dropped == 0
    assert table.encoding.owners == ["size", "colour", "colour", "colour"]


def test_only_a_few_words_are_blanks(tmp_path: Path) -> None:
    words = ["", " NA ", "NaN", "N/A", "null", "None", "none", "-", "#N/A", "<NA>"]
    (tmp_path / "data.csv").write_text("text,number\n" + "\n".join(f"{word},{n}" for n, word in enumerate(words)))
    assert read_csv(tmp_path / "data.csv")["text"].isna().tolist() == [True] * 5 + [False] * 5
    (tmp_path / "data.csv").write_text("number,other\n1,1\n NA ,2\n2.5,3\n")
    frame = read_csv(tmp_path / "data.csv")
    assert frame["number"].dtype == float and frame["number"].isna().tolist() == [False, True, False]


def target(values: Any, family: str = "auto") -> Table:
    return prepare(pd.DataFrame({"x": np.arange(float(len(values))), "y": values}), "y", family=family)


@pytest.mark.parametrize(
    ("values", "family", "said"),
    [
        (["b", "a", "c"] * 10, "classes", "holds text with 3 values: classification"),
        ([True, False, True] * 10, "classes", "holds two values (False and True): classification"),
        ([0, 1, 1] * 10, "classes", "two values (0 and 1): classification; --family normal to treat it as a number"),
        ([2.0, 5.0, 2.0] * 10, "classes", "two values (2 and 5)"),
        ([0.5, 1.25, 0.5] * 10, "classes", "two values (0.5 and 1.25)"),
        ([0, 1, 2] * 10, "poisson", "holds counts (whole numbers from 0): a Poisson response; --family normal"),
        ([1, 2, 3] * 10, "normal", "holds numbers: a normal response; --family poisson if they are counts"),
        ([1.5, 2, 3] * 10, "normal", "holds numbers: a normal response"),
        ([-1, 0, 3] * 10, "normal", "holds numbers"),
        ([0, 0.5, 3] * 10, "normal", "holds numbers"),
    ],
)
def test_target_says_its_family(values: list[Any], family: str, said: str) -> None:
    response = target(values).response
    assert response.family == family and response.text.startswith("Target 'y' ") and said in response.text


@pytest.mark.parametrize(
    ("values", "family", "expected"),
    [
        ([0, 1, 1] * 10, "normal", [0.0, 1.0, 1.0]),
        ([0, 1, 1] * 10, "poisson", [0.0, 1.0, 1.0]),
        ([7, 1, 3] * 10, "classes", [7, 1, 3]),
        ([True, False, True] * 10, "auto", ["True", "False", "True"]),
        ([0.5, 1.25, 0.5] * 10, "auto", ["0.5", "1.25", "0.5"]),
        ([1e20, 2e20, 7.0] * 10, "classes", ["1e+20", "2e+20", "7"]),
        ([0.1, 0.1 + 1e-14, 0.1] * 10, "auto", ["0.1", "0.10000000000001001", "0.1"]),
    ],
)
def test_target_is_what_the_family_needs(values: list[Any], family: str, expected: list[Any]) -> None:
    assert target(values, family).target.tolist()[:3] == expected


def test_blanks_of_a_column_that_is_left_out_cost_no_rows() -> None:
    frame = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40.0) ** 2, "flag": [1.0, *[np.nan] * 39], "one": 2})
    table = prepare(frame, "y")
    assert len(table.target) == 40 and table.num_dropped == 0
    assert table.left_out == {"flag": "constant but for blanks", "one": "constant"}


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_held_out_rows_leave_every_class_behind_in_its_share(share: float) -> None:
    table = target(["a"] * 200 + ["b"] * 40 + ["c"] * 2 + ["d"])
    for seed in range(20):
        train, test = table.split(share, seed)
        assert set(train.target) == {"a", "b", "c", "d"}
        assert sorted([*train.target.index, *test.target.index]) == list(table.target.index)
        assert abs(len(test.target) - share * 243) <= 1
        for label, count in (("a", 200), ("b", 40)):
            assert abs((test.target == label).sum() - share * count) <= 2
    assert len(target(["a"] * 19 + ["b"]).split(0.5, 0)[1].target) == 10


def test_demo_shows_three_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_sparse.datasets.paper_regression", lambda seed: paper_regression(seed, 300, 6))
    claim(tmp_path / "demo", {"command": "demo"})  # as an interrupted demo leaves it
    result = command("demo", "--out", tmp_path / "demo", STEPS)
    assert result.exit_code == 0, result.output
    assert len(pd.read_csv(tmp_path / "demo" / "diabetes.csv")) == 442
    assert metrics(tmp_path / "demo" / "diabetes")["rows"]["held_out"] == 88
    truth = json.loads((tmp_path / "demo" / "simulated" / "truth.json").read_text())
    _, _, f = paper_regression(2, 300, 6)
    table = pd.read_csv(tmp_path / "demo" / "simulated" / "predictions.csv")
    assert truth["excess_error"] == pytest.approx(((table["mean"] - f) ** 2).mean())
    inside = (table.mean_lower <= f) & (f <= table.mean_upper)
    assert truth["coverage_of_the_true_mean"] == pytest.approx(inside.mean())
    assert f"excess error of the mean: {truth['excess_error']:.3f}" in result.stdout
    assert metrics(tmp_path / "demo" / "breast_cancer")["classes"] == {"benign": 286, "malignant": 169}
    assert_refused(command("demo", "--out", tmp_path / "demo" / "diabetes"), "holds what `pyro-sparse fit` wrote")


def test_paper_regression_is_the_described_stream() -> None:
    x, y, f = paper_regression(1, 10_000, 2_000)
    assert x.shape == (10_000, 2_000)
    assert np.round(x[0, :3], 8).tolist() == [0.71600851, 0.77511179, 0.38988223]
    assert round(float(y[0]), 11) == 5.01193520622
    stream = np.random.RandomState(7)
    x, y, f = paper_regression(7, 3, 5)
    for row in range(3):
        e, *z = (stream.standard_normal() for _ in range(6))
        x1, x2, x3, x4, x5 = ((e + value) / 2**0.5 for value in z)
        mean = 5 * x2 / (1 + x1**2) + 5 * np.sin(x3 * x4) + 2 * x5
        assert x[row] == pytest.approx([x1, x2, x3, x4, x5])
        assert f[row] == pytest.approx(mean) and y[row] == pytest.approx(mean + stream.standard_normal())


@pytest.mark.parametrize(("rows", "inputs", "name"), [(0, 5, "num_rows"), (3, 4, "num_inputs")])
def test_paper_regression_says_which_rule_broke(rows: int, inputs: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= "):
        paper_regression(0, rows, inputs)


def test_help_imports_nothing_heavy() -> None:
    code = """if True:
        import sys
        from pyro_sparse.cli import app
        try:
            app(["fit", "--help"])
        except SystemExit as end:
            assert end.code == 0
        heavy = {"torch", "pyro", "pandas", "matplotlib", "numpy", "xarray", "sklearn", "scipy"} & set(sys.modules)
        assert not heavy, heavy
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--holdout" in result.stdout


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    source = Path(str(ps.__file__)).read_text()
    found = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pyro_sparse.")
        for alias in node.names
        if alias.asname == alias.name
    }
    assert found == {name: f"pyro_sparse.{home}" for name, home in ps._HOME.items()}
    assert set(ps.__all__) <= set(dir(ps)) and ps.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ps.nothing  # noqa: B018
