"""Who may import whom: docs/architecture.md, held by reading the imports of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_draft

PACKAGE = Path(__file__).parent.parent / "eagle3pack"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")

# A room may import the rooms of lower rank, its own, and those of its own rank that are named.
RANK = {
    "cli": 5,
    "convert": 4,
    "verify": 4,
    "publish": 4,
    "engine": 3,
    "sources": 2,
    "draft": 2,
    "checkpoint": 2,
    "documents": 1,
    "errors": 0,
}
SAME_RANK = {
    ("sources", "draft"),
    ("sources", "checkpoint"),
    ("draft", "checkpoint"),
    ("checkpoint", "draft"),
}
ONLY_CLI = {"console", "cli"}
HEAVY = {
    "torch",
    "transformers",
    "huggingface_hub",
    "modelscope_hub",
    "modelscope",
    "jsonschema",
    "matplotlib",
}
TORCH_AT_TOP = ("engine/", "convert/merging/", "convert/calibration_sources/", "verify/smoke/reference.py")


def imports(tree: ast.AST, *, top_level: bool) -> set[str]:
    found: set[str] = set()
    nodes = tree.body if top_level and isinstance(tree, ast.Module) else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_arrow_points_up(path: Path) -> None:
    here = room(path)
    for name in imports(ast.parse(path.read_text()), top_level=False):
        if not name.startswith("eagle3pack."):
            continue
        there = name.split(".")[1]
        if there in ONLY_CLI:
            assert here in ONLY_CLI, f"{here} imports {there}"
        elif there in RANK and here in RANK and there != here:
            lower = RANK[there] < RANK[here] or (here, there) in SAME_RANK
            assert lower, f"{here} imports {there}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    inside = path.relative_to(PACKAGE).as_posix()
    if inside.startswith(TORCH_AT_TOP):
        return
    top = {name.split(".")[0] for name in imports(ast.parse(path.read_text()), top_level=True)}
    assert not top & HEAVY
    if inside.startswith(("draft/", "checkpoint/", "cli/")) or "/" not in inside:
        assert "numpy" not in top


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom eagle3pack.cli import main\n"
        "try:\n    main()\nexcept SystemExit as exit_:\n    assert not exit_.code, exit_.code\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.rsplit("LOADED", 1)[1].split())
    assert not loaded & (HEAVY | {"numpy", "safetensors", "yaml", "jinja2", "httpx", "requests"})


def test_pooling_a_draft_imports_neither_torch_nor_a_hub_client(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    code = (
        "import sys\nfrom eagle3pack.cli import main\n"
        "try:\n    main()\nexcept SystemExit as exit_:\n    assert not exit_.code, exit_.code\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "convert",
        str(source),
        str(tmp_path / "gqa"),
        "--num-kv-heads",
        "2",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(run.stdout.rsplit("LOADED", 1)[1].split())
    assert "numpy" in loaded
    assert not loaded & (HEAVY | {"safetensors", "yaml", "jinja2", "httpx", "requests"})
