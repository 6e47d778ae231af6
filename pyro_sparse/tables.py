"""CSV files as numbers: text one-hot encoded, rows with blanks dropped, and what cannot be used refused in one sentence.

What the target holds decides the family of the response, unless the caller names one.
"""

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

MIN_ROWS = 20
MAX_CLASSES = 20
# Of counts that are taken as Poisson, on average: larger ones rarely vary as little, and are near a normal law.
MAX_COUNT = 20
BLANKS = ("", "NA", "NaN", "nan", "N/A", "n/a", "null", "NULL")  # pandas would add "None" and others, which may be text


@dataclass(frozen=True)
class Column:
    """One input of the table: numbers as they are, or text as one 0/1 column a level."""

    name: str
    levels: tuple[str, ...] | None = None  # None: numbers

    @property
    def encoded_names(self) -> list[str]:
        return [self.name] if self.levels is None else [f"{self.name}={level}" for level in self.coded_levels]

    @property
    def coded_levels(self) -> tuple[str, ...]:
        """The levels with a column of their own: of two, one says it all."""
        levels = self.levels or ()
        return levels[1:] if len(levels) == 2 else levels

    def encode(self, values: "pd.Series[Any]") -> dict[str, "pd.Series[Any]"]:
        """Its numeric columns by name.

        Raises:
            ValueError: naming the column, the row and the value that is no number or no known level.
        """
        if self.levels is None:
            return {self.name: _numbers(values)}
        unknown = values[~values.isin(self.levels)]
        if len(unknown):
            raise ValueError(
                f"column '{self.name}' has the unknown level '{unknown.iloc[0]}' in row {unknown.index[0]}; "
                f"the fit knows {listed(self.levels)}"
            )
        return {
            name: (values == level).astype(float)
            for name, level in zip(self.encoded_names, self.coded_levels, strict=True)
        }


@dataclass(frozen=True)
class Encoding:
    """How a table becomes numbers: all that a new table needs to be read the same way."""

    target: str
    columns: tuple[Column, ...]

    @property
    def owners(self) -> list[str]:
        """The input that each encoded column belongs to."""
        return [column.name for column in self.columns for _ in column.encoded_names]

    @property
    def text_columns(self) -> list[str]:
        return [column.name for column in self.columns if column.levels is not None]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The columns of each text input."""
        return {column.name: column.encoded_names for column in self.columns if column.levels is not None}

    def encode(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The encoded inputs of a table without blanks.

        Raises:
            ValueError: naming the column or the value that does not fit.
        """
        encoded: dict[str, pd.Series[Any]] = {}
        for column in self.columns:
            encoded |= column.encode(frame[column.name])
        return pd.DataFrame(encoded, index=frame.index)

    def only(self, names: Sequence[str]) -> Self:
        """The encoding of some of the inputs."""
        return replace(self, columns=tuple(column for column in self.columns if column.name in names))

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target, "columns": [{"name": c.name, "levels": c.levels} for c in self.columns]}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Self:
        columns = [Column(c["name"], None if c["levels"] is None else tuple(c["levels"])) for c in settings["columns"]]
        return cls(settings["target"], tuple(columns))


@dataclass(frozen=True)
class Table:
    """Numbers to fit, and what became of the rest.

    Attributes:
        inputs: encoded columns; the index is the row of the file, counted from 1 below the header.
        target: of the same rows: numbers, or labels of classes.
        encoding: how the inputs came about.
        response: the family of the target.
        num_read, num_dropped: rows of the file, and those dropped for blanks.
        most_blanks: the column with the most blanks among those kept, and how many.
        left_out: columns that say nothing, with the reason.
    """

    inputs: pd.DataFrame
    target: "pd.Series[Any]"
    encoding: Encoding
    response: "Response"
    num_read: int
    num_dropped: int = 0
    most_blanks: tuple[str, int] | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def split(self, share: float, seed: int) -> tuple[Self, Self]:
        """The table without a random share of its rows, and those rows; of classes, the same share of each.

        Every class keeps a row in the first part.
        """
        random = np.random.default_rng(seed)
        order = random.permutation(len(self.target))
        count = round(share * len(order))
        if self.response.family == "classes":
            order, most = _by_share_of_class(self.target.to_numpy()[order], order, random)
            count = min(count, most)
        return self._rows(np.sort(order[count:])), self._rows(np.sort(order[:count]))

    def _rows(self, rows: np.ndarray[Any, Any]) -> Self:
        return replace(self, inputs=self.inputs.iloc[rows], target=self.target.iloc[rows])


@dataclass(frozen=True)
class Response:
    """The family of a target, and why.

    Attributes:
        family: "normal", "heteroscedastic", "poisson" or "classes".
        text: the target and its family in one line, with the way out where it was guessed.
    """

    family: str
    text: str


def read_csv(path: Path, text_columns: Sequence[str] = ()) -> pd.DataFrame:
    """A CSV file, its rows counted from 1, text stripped; empty text is blank.

    Raises:
        ValueError: where it is no CSV file with a header.
        OSError: where it cannot be opened.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            header = pd.read_csv(
                path, header=None, nrows=1, dtype=str, skipinitialspace=True, keep_default_na=False
            ).iloc[0]
            frame = pd.read_csv(
                path,
                dtype=dict.fromkeys(text_columns, str),
                skipinitialspace=True,
                low_memory=False,
                index_col=False,
                keep_default_na=False,
                na_values=list(BLANKS),
            )
    except pd.errors.ParserWarning as warning:
        raise ValueError(f"{path} has rows with more fields than its header: are there decimal commas?") from warning
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a CSV file with a header: {str(error).splitlines()[0]}") from error
    if len(header) == len(frame.columns) and header.ne("").all():  # pandas renames a second 'a' to 'a.1'
        frame.columns = pd.Index(header)
    frame.columns = pd.Index([str(name).strip() for name in frame.columns])
    if not frame.columns.is_unique:
        raise ValueError(f"{path} has two columns named '{frame.columns[frame.columns.duplicated()][0]}'")
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    for name in frame.columns:
        if _is_number(frame[name]):
            continue
        text = frame[name].map(lambda value: value.strip() if isinstance(value, str) else value)
        text = text.where(~text.isin(BLANKS))
        numbers = pd.to_numeric(text, errors="coerce")  # where spaces beside a blank had hidden them
        all_numbers = name not in text_columns and text.notna().any() and (numbers.notna() | text.isna()).all()
        frame[name] = numbers if all_numbers and not text.isin([True, False]).any() else text
    return frame


def prepare(
    frame: pd.DataFrame, target: str, strict: bool = False, ignore: Sequence[str] = (), family: str = "auto"
) -> Table:
    """The table that a regression of ``target`` on all other columns needs, or a classification.

    Args:
        frame: from :func:`read_csv`.
        target: name of the column to predict.
        strict: refuse rows with blanks instead of dropping them.
        ignore: columns that are no inputs.
        family: of the response: "normal", "heteroscedastic", "poisson", "classes", or "auto": classes for text, truth values or
            two values, "poisson" for whole numbers from 0 of a mean up to ``MAX_COUNT``, "normal" for other numbers.

    Raises:
        ValueError: one sentence that names the column or the rows in question.
    """
    _check_columns(frame, [target, *ignore])
    num_read = len(frame)
    frame = frame.drop(columns=[name for name in ignore if name != target])
    blank = [str(name) for name in frame.columns[frame.isna().all()] if name != target]
    frame = frame.drop(columns=blank)
    constant = [str(name) for name in frame.columns if name != target and frame[name].nunique() == 1]
    gaps = [name for name in constant if frame[name].isna().any()]
    frame = frame.drop(columns=constant)  # first: their blanks cost no rows
    full = complete(frame, strict)
    if len(full) < MIN_ROWS:
        raise ValueError(_too_few(frame, full))
    response, values = _target(full[target], family)
    full = full.drop(columns=target)
    constant += [str(name) for name in full.columns if full[name].nunique() == 1]
    columns = tuple(_learn(full[name]) for name in full.columns if str(name) not in constant)
    if not columns:
        raise ValueError(f"there is no input: no column but '{target}' has two different values")
    encoding = Encoding(target, columns)
    _check_encoded_names(encoding)
    reasons = dict.fromkeys(blank, "blank") | dict.fromkeys(constant, "constant")
    reasons |= dict.fromkeys(gaps, "constant but for blanks")
    blanks, dropped = frame.isna().sum(), num_read - len(full)
    most = (str(blanks.idxmax()), int(blanks.max())) if dropped else None
    return Table(encoding.encode(full), values, encoding, response, num_read, dropped, most, reasons)


def complete(frame: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
    """The rows without blanks, each column with the type that its values then have.

    Raises:
        ValueError: where ``strict`` and a row has a blank.
    """
    with_blanks = frame.index[frame.isna().any(axis=1)]
    if strict and len(with_blanks):
        column = frame.columns[frame.loc[with_blanks[0]].isna()][0]
        raise ValueError(
            f"{len(with_blanks)} of {len(frame)} rows have blanks, the first in row {with_blanks[0]}, column '{column}'"
        )
    return frame.drop(index=with_blanks).infer_objects()


def select_columns(frame: pd.DataFrame, encoding: Encoding) -> pd.DataFrame:
    """The inputs that the encoding reads.

    Raises:
        ValueError: naming those that are missing.
    """
    names = [column.name for column in encoding.columns]
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"columns of the fit must be there, missing {listed(missing)}; the columns are {listed(frame.columns)}"
        )
    return frame[names]


def _by_share_of_class(labels: Any, rows: Any, random: np.random.Generator) -> tuple[Any, int]:
    """Rows so ordered that every start of them holds the same share of each class; how many a class each can spare."""
    share, spare = np.empty(len(rows)), np.ones(len(rows), dtype=bool)
    for label in pd.unique(labels):
        own = np.flatnonzero(labels == label)
        share[own] = (np.arange(len(own)) + random.uniform(size=len(own))) / len(own)
        share[own[-1]], spare[own[-1]] = np.inf, False
    return rows[np.argsort(share, kind="stable")], int(spare.sum())


def _check_encoded_names(encoding: Encoding) -> None:
    owner: dict[str, str] = {}
    for column in encoding.columns:
        for name in column.encoded_names:
            if name in owner:
                raise ValueError(
                    f"'{name}' would stand for two inputs, columns '{owner[name]}' and '{column.name}': rename one, or "
                    f"leave one out (--ignore)"
                )
            owner[name] = column.name


def _check_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in frame.columns:
            hint = "; is the file separated by commas?" if len(frame.columns) == 1 else ""
            near = difflib.get_close_matches(name, [str(column) for column in frame.columns], 1)
            meant = f", but '{near[0]}'" if near else ""
            raise ValueError(f"there is no column '{name}'{meant}; the columns are {listed(frame.columns)}{hint}")


def _too_few(frame: pd.DataFrame, full: pd.DataFrame) -> str:
    blanks = frame.isna().sum()
    text = f"at least {MIN_ROWS} rows without blanks are needed, got {len(full)} of {len(frame)}"
    return text if not blanks.any() else f"{text}; column '{blanks.idxmax()}' has {blanks.max()} blanks"


def _target(values: "pd.Series[Any]", family: str) -> "tuple[Response, pd.Series[Any]]":
    """The family and the target as it needs it: numbers, or labels."""
    name = values.name
    if values.nunique() == 1:
        raise ValueError(f"target '{name}' is constant ({values.iloc[0]}): there is nothing to explain")
    response = (
        _guessed(values) if family == "auto" else Response(family, f"Target '{name}': {_NAMES[family]}, as asked")
    )
    if response.family == "classes":
        return response, _labels(values)
    if not _is_number(values):
        wrong = values[pd.to_numeric(values, errors="coerce").isna()]
        raise ValueError(f"target '{name}' must hold numbers, got the text '{wrong.iloc[0]}' in row {wrong.index[0]}")
    numbers = _numbers(values)
    if response.family == "poisson":
        wrong = numbers[(numbers < 0) | (numbers % 1 != 0)]
        if len(wrong):
            raise ValueError(
                f"target '{name}' must hold counts, whole numbers from 0, got {wrong.iloc[0]:g} in row {wrong.index[0]}"
            )
    return response, numbers


_NAMES = {
    "normal": "a normal response",
    "heteroscedastic": "a normal response whose noise differs between rows",
    "poisson": "a Poisson response",
    "classes": "classification",
}


def _guessed(values: "pd.Series[Any]") -> Response:
    start, count = f"Target '{values.name}' holds", values.nunique()
    if not _is_number(values) or pd.api.types.is_bool_dtype(values) or count == 2:
        labels = _labels(values)
        if count == 2:
            way_out = "; --family normal to treat it as a number" if _is_number(values) else ""
            low, high = sorted(labels.unique())
            return Response("classes", f"{start} two values ({low} and {high}): classification{way_out}")
        return Response("classes", f"{start} text with {count} values: classification")
    numbers = _numbers(values)
    if (numbers >= 0).all() and (numbers % 1 == 0).all() and (numbers == 0).any():
        if numbers.mean() <= MAX_COUNT:
            text = "counts (whole numbers from 0): a Poisson response; --family normal to treat it as any number"
            return Response("poisson", f"{start} {text}")
        text = "whole numbers from 0, mostly large: a normal response; --family poisson to treat them as counts"
        return Response("normal", f"{start} {text}")
    whole = (numbers > 0).all() and (numbers % 1 == 0).all() and numbers.mean() <= MAX_COUNT
    hint = "; --family poisson if they are counts" if whole else ""
    return Response("normal", f"{start} numbers: a normal response{hint}")


def _labels(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """Whole numbers as they are, all else as text.

    Raises:
        ValueError: for too many classes.
    """
    if values.nunique() > MAX_CLASSES:
        stray, written = _stray(values), None if _is_number(values) else _number_as_text(values)
        why = "" if stray is None else f"; it holds numbers but for {stray}"
        why = (
            why if written is None else f"; it holds numbers written as text ({written}): leave digits and a point only"
        )
        raise ValueError(
            f"target '{values.name}' has {values.nunique()} classes, {MAX_CLASSES} at most are possible{why}"
        )
    whole = _is_number(values) and not pd.api.types.is_bool_dtype(values) and (values % 1 == 0).all()
    if whole and (values.abs() < 2**63).all():
        return values.astype(int)
    short = values.map(lambda value: f"{value:.12g}" if isinstance(value, float) else str(value))
    return short if short.nunique() == values.nunique() else values.map(str)


def _stray(values: "pd.Series[Any]") -> str | None:
    """The first of a few values that are no numbers among many that are, and what to do about it."""
    wrong = values[pd.to_numeric(values, errors="coerce").isna()]
    if not 0 < 2 * wrong.nunique() < values.nunique():
        return None
    remedy = "leave such cells empty" if _number_as_text(wrong[:1]) is None else "leave digits and a point only"
    return f"'{wrong.iloc[0]}' in row {wrong.index[0]}: {remedy}"


def _number_as_text(values: "pd.Series[Any]") -> str | None:
    """The first of values that are numbers but for signs of currency, percent or thousands."""
    digits = pd.to_numeric(values.astype(str).str.replace(r"[%$€£,\s]", "", regex=True), errors="coerce")
    return repr(values.iloc[0]) if digits.notna().all() else None


def _learn(values: "pd.Series[Any]") -> Column:
    """Numbers, or text with its levels."""
    name = str(values.name)
    if _is_number(values):
        return Column(name)
    levels = sorted(str(value) for value in values.unique())
    stray = _stray(values)
    if len(levels) > 10 and stray is not None:
        raise ValueError(f"column '{name}' holds numbers but for {stray}")
    if 2 * len(levels) > len(values):
        written = _number_as_text(values)
        raise ValueError(
            f"column '{name}' holds {'text' if written is None else f'numbers written as text ({written})'} with {len(levels)} "
            f"different values in {len(values)} rows: leave it out (--ignore '{name}') or turn it into numbers"
        )
    return Column(name, tuple(levels))


def _numbers(values: "pd.Series[Any]") -> "pd.Series[Any]":
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    wrong = values[~np.isfinite(numbers)]
    if len(wrong):
        raise ValueError(
            f"column '{values.name}' must hold finite numbers, got '{wrong.iloc[0]}' in row {wrong.index[0]}"
        )
    return numbers


def _is_number(values: "pd.Series[Any]") -> bool:
    return bool(pd.api.types.is_numeric_dtype(values))


def listed(names: Sequence[Any] | pd.Index) -> str:
    shown = ", ".join(f"'{name}'" for name in list(names)[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
