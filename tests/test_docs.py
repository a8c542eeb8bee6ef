"""Documents that must not fall behind the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_kernel_page_is_the_tables() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "kernel_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(1, 32, 128) (5, 32, 128) 1028 ")


def test_the_page_on_sequences_runs(tmp_path: Path) -> None:
    pieces = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sequences.md").read_text(), re.DOTALL)
    assert len(pieces) > 5
    program = tmp_path / "sequences.py"
    program.write_text("\n\n".join(pieces))
    done = subprocess.run([sys.executable, "-W", "error", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, _, last = done.stdout.splitlines()
    tokens, passes = map(int, re.findall(r"(\d+) tokens in (\d+) passes", first)[0])
    assert passes < tokens, "no draft was ever right"
    assert last == "(3, 1, 4, 16) (3, 5, 4, 16) (66, 203, 90) 76"


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_the_documents_name_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`((?:cortiq_o1|shaders|scripts|bench|tests)/[\w/.]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
