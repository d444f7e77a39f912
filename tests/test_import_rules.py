"""Who may import whom: the rooms stay apart, and the store stays free of models."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSEMBLIES = {"run.py", "run_parts.py", "cli.py", "evaluate.py", "check.py", "selftest.py"}


def imported(path: Path) -> set[str]:
    """Top-level package names that a file imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_prefix_store_knows_neither_models_nor_the_other_rooms():
    files = list((ROOT / "prefix_store").rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & {"torch", "transformers", "deepspeed", "mopd", "teachers"}, path


def test_only_the_assemblies_of_mopd_import_teachers():
    files = list((ROOT / "mopd").rglob("*.py"))
    assert files
    for path in files:
        if path.parent.name != "mopd" or path.name not in ASSEMBLIES:
            assert "teachers" not in imported(path), path


def test_teachers_do_not_import_the_assemblies():
    for path in (ROOT / "teachers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                full = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert not full & {f"mopd.{name[:-3]}" for name in ASSEMBLIES}, path


def test_the_store_and_the_command_line_load_without_torch():
    code = "import sys, prefix_store, mopd.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
