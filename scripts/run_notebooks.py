"""Run the notebooks of docs/notebooks in an empty folder, one after the other, and write them back with their outputs.

Consecutive outputs of one stream are joined, and metadata that names the machine or the time is removed. The second notebook
reads the files that the first one writes.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
IN_ORDER = ("gold_world.ipynb", "reading_a_run.ipynb")
SECONDS = 3000  # at most, for a cell


def execute(name: str, folder: Path) -> Any:
    """Run a notebook in a working folder with this checkout's code."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=place)
    client.execute(env=os.environ | paths)
    return cleaned(notebook)


def cleaned(notebook: Any) -> Any:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        joined: list[Any] = []
        for output in cell.get("outputs", []):
            if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        if "outputs" in cell:
            cell.outputs = joined
    return notebook


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in IN_ORDER:
            nbformat.write(execute(name, Path(folder)), FOLDER / name)
            print(f"{name}: written")


if __name__ == "__main__":
    main()
