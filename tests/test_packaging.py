"""The package is what the checkout says, imports run one way, and what is public is documented."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyro_sparse as ps

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FOLDERS = {"models": "pyro_sparse.models", "inference": "pyro_sparse.inference", "pyro_sparse": "pyro_sparse"}

# From the ground floor up: a module imports earlier ones only.
ORDER = {
    "models": ["spike_slab", "annealed", "defaults", "layers", "glm", "resnet", "images"],
    "inference": [
        "warning",
        "calibration",
        "layout",
        "minibatch",
        "family",
        "checks",
        "inspection",
        "program",
        "potential",
        "schedule",
        "sghmc",
        "keeping",
        "kernel",
        "step",
        "structure",
        "channels",
        "trace",
        "moments",
        "store",
        "run",
        "sampler",
        "selection",
        "matching",
        "compaction",
        "intervals",
        "response",
        "conversion",
        "descent",
        "refit",
        "prediction",
        "effects",
        "diagnostics",
    ],
    "pyro_sparse": ["datasets", "estimators", "tables", "folders", "measures", "summary", "plots", "report", "cli"],
}
RANK = {
    name: rank
    for rank, name in enumerate(
        f"{FOLDERS[folder]}.{module}".removesuffix(".__init__")
        for folder, modules in ORDER.items()
        for module in [*modules, "__init__"]
    )
}


def python_files() -> Iterator[tuple[str, Path]]:
    """Each module of the library under its installed name."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            yield f"{package}.{inner}".removesuffix(".__init__"), path


MODULES = dict(python_files())


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; a relative import with its dots."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in RANK else base


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def test_every_folder_with_python_files_is_packaged() -> None:
    inside = {path.parent for _, path in python_files()}
    beside = {path.parent for path in ROOT.glob("*/__init__.py") if not path.parent.name.startswith(".")}
    folders = {folder.relative_to(ROOT) for folder in inside | beside}
    packages = {
        ".".join([FOLDERS.get(folder.parts[0], folder.parts[0]), *folder.parts[1:]]): folder.as_posix()
        for folder in folders
    }
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == set(packages)
    assert setuptools["package-dir"] == packages


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way(name: str) -> None:
    assert name in RANK, f"{name} has no place in ORDER yet"
    for imported in imports(MODULES[name]):
        assert not imported.startswith("."), f"{name} has a relative import; write the full name"
        assert imported.split(".")[0] not in {"models", "inference"}, f"{name} imports the bare folder {imported}"
        if imported.split(".")[0] != "pyro_sparse":
            continue
        assert imported not in FOLDERS.values(), f"{name} imports the package {imported}, not the module it needs"
        assert imported in RANK, f"{name} imports {imported}, which is not a module of ORDER"
        assert RANK[imported] < RANK[name], f"{name} imports {imported}, which stands above it"


@pytest.mark.parametrize("folder", ["models", "inference"])
def test_bare_folder_cannot_be_imported(folder: str) -> None:
    result = run_python(f"import {folder}", cwd=ROOT)
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError") and FOLDERS[folder] in last_line


def test_import_stays_light(tmp_path: Path) -> None:
    """What `import pyro_sparse` brings beyond its three ground dependencies."""
    code = """if True:
        import sys
        import torch, pyro, xarray
        before = set(sys.modules)
        import pyro_sparse
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    result = run_python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    brought = set(result.stdout.split())
    assert "pyro_sparse" in brought
    assert not brought & {"arviz", "zarr", "matplotlib", "sklearn", "pandas", "typer", "scipy", "torchvision"}


@pytest.mark.parametrize("name", ps.__all__)
def test_public_name_is_documented(name: str) -> None:
    public = getattr(ps, name)
    doc = public.__doc__ or ""
    assert doc.strip(), f"{name} has no docstring"
    assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass writes"
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    mention = re.compile(rf"(?<![\w.])(?:`|ps\.|pyro_sparse\.){re.escape(name)}\b")
    assert any(mention.search(page.read_text()) for page in pages), f"neither README.md nor docs/ speaks of {name}"


def test_documented_names_are_public() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for name in re.findall(r"(?<![\w.])ps\.(\w+)", page.read_text()):
            assert hasattr(ps, name), f"{page.name} speaks of ps.{name}, which is not there"


def test_public_names_are_listed_once() -> None:
    assert len(ps.__all__) == len(set(ps.__all__))


def test_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert importlib.metadata.version("pyro-sparse") == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_its_reason() -> None:
    optional = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *optional["dev"], *optional["benchmarks"]]
    names = [re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in required]
    explained = re.findall(r"^- `([\w-]+)`: \S", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert sorted(names) == sorted(explained)
