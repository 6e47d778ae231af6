"""The command line: fit a CSV file, predict another, and a demo; a thin shell over the estimators."""

# PyTorch, pandas and matplotlib are imported inside the commands only, so that `--help` answers at once.
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pyro_sparse.estimators import SparseClassifier, SparseRegressor
    from pyro_sparse.report import Study
    from pyro_sparse.tables import Table

app = typer.Typer(
    help="Sparse Bayesian networks for a table: the few inputs that matter, and intervals that hold.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MIN_STEPS = 400


class Family(StrEnum):
    """How `fit` takes the target."""

    auto = "auto"
    normal = "normal"
    heteroscedastic = "heteroscedastic"
    poisson = "poisson"
    classes = "classes"


Out = Annotated[Path, typer.Option(help="Folder for everything that is written.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the held-out rows and of the run.")]
Device = Annotated[str, typer.Option(help="Device that PyTorch computes on, such as cpu or cuda.")]
Threads = Annotated[
    int, typer.Option(min=1, help="Threads on the CPU; on one machine, the same number, the same answer.")
]
Steps = Annotated[
    int | None,
    typer.Option(min=MIN_STEPS, help="Steps of one annealing, of which there are several.", show_default="10000"),
]


@app.command()
def fit(
    data: Annotated[Path, typer.Argument(help="CSV file with a header.", show_default=False)],
    target: Annotated[str, typer.Option(help="Column to predict; all others are inputs.", show_default=False)],
    out: Out,
    holdout: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of rows kept aside to measure on.")] = 0.2,
    seed: Seed = 0,
    device: Device = "cpu",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse rows with blanks, instead of dropping them.")
    ] = False,
    family: Annotated[Family, typer.Option(help="Law of the target: by what it holds, or one of these.")] = Family.auto,
    ignore: Annotated[list[str] | None, typer.Option(help="Column that is no input; may be given again.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Independent runs: how often each chooses an input.",
            show_default="3, from 5,000 rows on 1",
        ),
    ] = None,
    steps: Steps = None,
    threads: Threads = 1,
) -> None:
    """Fit a sparse network to a CSV file: what it selects, and how sure it is.

    Text columns become one input each; rows with blanks are dropped and counted. A target of text, truth values or two
    values is classified, one of whole numbers from 0 counted (Poisson), any other is a number with normal noise. OUT gets
    the fitted estimator, trace.zarr, structure.json, effects.csv, predictions.csv (held-out rows), metrics.json, summary.txt
    and pictures; what an earlier fit left there goes only when the new one is ready.
    """
    with one_line_errors():
        from pyro_sparse.tables import prepare, read_csv

        table = prepare(read_csv(data), target, strict, ignore or [], family)
        train, test = table.split(holdout, seed)
        _use(device, threads)
        _fit_and_report(data.name, train, test, _estimator(train, seed, device, seeds, steps), out)


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="Folder that `fit` wrote.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="CSV file with the selected inputs.", show_default=False)],
    prob: Annotated[float, typer.Option(help="Probability content of intervals and sets, in (0, 1).")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="CSV file to write instead of printing.", show_default=False)] = None,
    threads: Threads = 1,
) -> None:
    """Predict the rows of a CSV file, with intervals: a table on a terminal, CSV where the output is redirected.

    The columns: row of the file, counted from 1; mean; mean_lower and mean_upper, the interval of the mean; lower and
    upper, that of a new observation. Of classes: the most probable one; for each class its probability and its interval; the
    set of classes that holds the true one with probability PROB. Inputs that were not selected may be missing.
    """
    with one_line_errors():
        if out is not None and out.exists() and (out.samefile(data) or folder.resolve() in out.resolve().parents):
            raise ValueError(f"--out must name another file than the one that is read or those of the fit, got {out}")
        table, dropped, notes = _predictions(folder, data, prob, threads)
        if dropped:
            typer.echo(f"left out for blanks: {dropped} row{'s' * (dropped != 1)}", err=True)
        for note in notes:
            typer.echo(f"Note: {note}", err=True)
        if out is None and sys.stdout.isatty():
            typer.echo(table.to_string(float_format="%.6g", index_names=False))
        elif out is None:
            typer.echo(table.to_csv(), nl=False)
        else:
            table.to_csv(out)
            typer.echo(f"{len(table):,} row{'s' * (len(table) != 1)} predicted: {out}")


@app.command()
def demo(out: Out, seed: Seed = 0, steps: Steps = None, threads: Threads = 1) -> None:
    """Show the whole way in a few minutes: on real data, where the truth is known, and with classes.

    First the diabetes data that come with scikit-learn, written to OUT and fitted as `fit` does. Then the simulated
    regression of the paper: 100 inputs of which five act, 10,000 rows. Then scikit-learn's breast cancer data: is a tumour
    benign or malignant?
    """
    with one_line_errors():
        from pyro_sparse.folders import claim

        claim(out, {"command": "demo"})
        _use("cpu", threads)
        csv, folder = _diabetes(out / "diabetes.csv"), out / "diabetes"
        typer.echo(f"1. Real data: pyro-sparse fit {csv} --target progression --out {folder}\n")
        fit(csv, "progression", folder, seed=seed, steps=steps, threads=threads)
        typer.echo("\n\n2. Simulated data: the paper's regression, whose truth is known\n")
        _simulated(out / "simulated", seed, steps)
        csv, folder = _breast_cancer(out / "breast_cancer.csv"), out / "breast_cancer"
        typer.echo(f"\n\n3. Classes: pyro-sparse fit {csv} --target diagnosis --out {folder}\n")
        fit(csv, "diagnosis", folder, seed=seed, steps=steps, threads=threads)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can mend is said in one line, with exit code 2."""
    try:
        yield
    except (ValueError, ArithmeticError, OSError) as error:
        text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        typer.echo(f"Error: {' '.join(text.split())}", err=True)
        raise typer.Exit(2) from error


def _use(device: str, threads: int) -> None:
    """Raises a ValueError for a device that PyTorch does not know or have."""
    import torch

    torch.set_num_threads(threads)
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error


def _estimator(
    train: "Table", seed: int, device: str, seeds: int | None, steps: int | None
) -> "SparseRegressor | SparseClassifier":
    from pyro_sparse.estimators import SparseClassifier, SparseRegressor

    settings: Any = {
        "num_runs": seeds,
        "random_state": seed,
        "device": device,
        "progress": sys.stderr.isatty(),
        "steps": 10_000 if steps is None else steps,
    }
    family = train.response.family
    return SparseClassifier(**settings) if family == "classes" else SparseRegressor(family, **settings)


def _fit_and_report(
    name: str, train: "Table", test: "Table", estimator: "SparseRegressor | SparseClassifier", out: Path
) -> "Study":
    from pyro_sparse import report
    from pyro_sparse.folders import replacing
    from pyro_sparse.summary import WIDTH

    with replacing(out, {"command": "fit", **train.encoding.to_json()}) as new:
        typer.echo(f"{train.response.text}\n")
        study = report.study(name, train, test, estimator)
        report.write(study, new)
    typer.echo(study.summary)
    pictures = ", ".join(sorted(picture.name for picture in out.glob("*.png")))
    typer.echo("\n" + textwrap.fill(f"Everything is in {out}, the pictures too: {pictures}", WIDTH))
    return study


def _predictions(folder: Path, data: Path, prob: float, threads: int) -> tuple[Any, int, list[str]]:
    """The table of predictions, the number of rows left out for blanks, and what the user should know."""
    from pyro_sparse.folders import ESTIMATOR, SETTINGS
    from pyro_sparse.tables import Encoding, complete, listed, read_csv, select_columns

    if not (folder / SETTINGS).is_file() or not (folder / ESTIMATOR).is_dir():
        raise ValueError(f"{folder} holds no fit: make one with `pyro-sparse fit ... --out {folder}`")
    encoding = Encoding.from_json(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    _use("cpu", threads)
    from pyro_sparse.report import collected_warnings, load, predicted, selected_inputs

    estimator = load(folder / ESTIMATOR)
    read = encoding.only(selected_inputs(estimator, encoding))
    file = read_csv(data, read.text_columns)
    frame = select_columns(file, read)
    full = complete(frame)
    if full.empty and len(full.index) == 0:
        raise ValueError(f"{data} has no row without blanks")
    inputs = read.encode(full).reindex(columns=estimator.feature_names_in_)
    inputs = inputs.fillna(dict(zip(inputs.columns, estimator.x_mean_, strict=True)))  # what the network does not read
    missing = [column.name for column in encoding.columns if column.name not in file.columns]
    with collected_warnings() as notes:
        table = predicted(estimator, inputs, prob)
    if missing:
        notes.insert(0, f"{data} has no {listed(missing)}: not selected, so filled with the mean of the fitted rows")
    return table, len(frame) - len(full), notes


def _diabetes(path: Path) -> Path:
    """The diabetes data in their units, as a CSV file."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame.rename(columns={"target": "progression"}).to_csv(path, index=False)
    return path


def _breast_cancer(path: Path) -> Path:
    """The breast cancer data with the diagnosis as text, as a CSV file."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    frame = data.data.assign(diagnosis=data.target_names[data.target.to_numpy()])
    frame.to_csv(path, index=False)
    return path


def _simulated(out: Path, seed: int, steps: int | None) -> None:
    import pandas as pd

    from pyro_sparse.datasets import PAPER_INPUTS, paper_regression
    from pyro_sparse.folders import write_json
    from pyro_sparse.report import truth
    from pyro_sparse.tables import prepare

    def table(seed: int) -> tuple["Table", Any]:
        x, y, f = paper_regression(seed)
        frame = pd.DataFrame(x, columns=[f"x{number}" for number in range(1, x.shape[1] + 1)])
        return prepare(frame.assign(y=y), "y"), f

    (train, _), (test, f) = table(1), table(2)
    study = _fit_and_report("simulated", train, test, _estimator(train, seed, "cpu", 1, steps), out)
    known = truth(study, [f"x{number}" for number in PAPER_INPUTS], f)
    write_json(out / "truth.json", known.metrics)
    typer.echo(f"\n{known.text}")
