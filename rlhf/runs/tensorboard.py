"""The same numbers for TensorBoard (optional): scalars against the step, samples as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.runs.background import Rows, Sink


def require_tensorboard() -> None:
    """Raises: UserError if the package is missing."""
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "tracking=tensorboard: the package tensorboard is not installed: run pip install 'rlhf-recipe[tensorboard]', "
            "or set tracking=jsonl"
        )


class TensorboardSink(Sink):
    """Event files under folder/tensorboard. A resumed stage makes TensorBoard drop the steps that are written again."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        home = folder / "tensorboard"
        if resume_step == 0 and home.is_dir():
            for old in home.glob("events.out.tfevents.*"):
                old.unlink()
        purge = {"purge_step": resume_step + 1} if resume_step > 0 else {}
        self._writer: Any = SummaryWriter(str(home), **purge)
        lines = [f"    {key}: {value}" for key, value in config.items() if not isinstance(value, Mapping)]
        self._writer.add_text("config", "\n".join(lines), resume_step)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            if name != "progress/step":
                self._writer.add_scalar(name, value, step)

    def samples(self, rows: Rows, step: int) -> None:
        for number, row in enumerate(rows):
            # Four spaces make a block of code in Markdown, so that model output is shown unchanged.
            text = "\n\n".join(f"{key}\n\n" + indent(row.get(key)) for key in ("prompt", "response", "score", "kl"))
            self._writer.add_text(f"samples/{number}", text, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = ["\t".join(columns), *("\t".join(map(str, row)) for row in rows)]
        self._writer.add_text(name, indent("\n".join(lines)), 0)

    def summary(self, values: Mapping[str, float]) -> None:
        lines = [f"{name}\t{value:.6g}" for name, value in values.items()]
        self._writer.add_text("summary", indent("\n".join(lines)), 0)

    def finish(self, failed: bool) -> None:
        self._writer.close()


def indent(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
