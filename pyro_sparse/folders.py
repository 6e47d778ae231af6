"""Folders of results: a new result takes an earlier one's place when it is ready, and foreign files stay."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = "pyro_sparse.json"  # by it a later command knows the folder
ESTIMATOR, TRACE = "estimator", "trace.zarr"
FILES = ("structure.json", "effects.csv", "predictions.csv", "metrics.json", "summary.txt")
PICTURES = (
    *("schedule.png", "annealing.png", "inclusion.png", "effects.png", "intervals.png", "calibration.png"),
    "network.png",
)


def check_free(folder: Path, name: str) -> None:
    """Whether the command of this name may write to the folder: a new one, or one that it wrote earlier.

    Raises:
        ValueError: where the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / SETTINGS).is_file():
        raise ValueError(f"{folder} is not empty and was not made by pyro-sparse: name another folder")
    other = json.loads((folder / SETTINGS).read_text(encoding="utf-8")).get("command")
    if other != name:
        raise ValueError(f"{folder} holds what `pyro-sparse {other}` wrote: name another folder")


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or takes over one that the same command made earlier.

    Raises:
        ValueError: where the folder holds something else.
        OSError: where it cannot be written.
    """
    check_free(folder, settings["command"])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)


@contextmanager
def replacing(folder: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """A folder to write to, whose files take the place of an earlier command's once the block ends without error.

    Until then the earlier files stay; other files in the folder stay in any case.

    Raises:
        ValueError: where the folder holds something else.
        OSError: where it cannot be written.
    """
    check_free(folder, settings["command"])
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        new, old = Path(beside) / "new", Path(beside) / "old"
        new.mkdir()
        old.mkdir()
        write_json(new / SETTINGS, settings)
        yield new
        _swap(new, folder, old)


def _swap(new: Path, folder: Path, old: Path) -> None:
    """Moves the results of the folder to ``old`` and those of ``new`` to the folder; back again if that fails."""
    folder.mkdir(exist_ok=True)
    earlier = [name for name in (SETTINGS, ESTIMATOR, TRACE, *FILES, *PICTURES) if (folder / name).exists()]
    moves = [(folder / name, old / name) for name in earlier]
    moves += [(path, folder / path.name) for path in sorted(new.iterdir())]
    done = []
    try:
        for source, to in moves:
            done.append((source, to))
            shutil.move(source, to)
    except BaseException:  # an interrupt too
        for source, to in reversed(done):
            if to.exists():
                shutil.move(to, source)
        raise


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
