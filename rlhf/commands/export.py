"""`rlhf export`: a stage's model as a folder that plain transformers loads."""

from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.files import held, replaced, share
from rlhf.runs.checkpoints import checkpoint_error
from rlhf.runs.folders import check_output, refuse_inside_stage, run_folder, stage_folder
from rlhf.terminal import say


def run(config: Config) -> None:
    """Write the model of `export.stage` to `export.out`. Raises: UserError if the folder is taken."""
    source = stage_folder(config, config.export.stage)
    check_output(source)
    out = Path(config.export.out) if config.export.out else run_folder(config) / "export" / config.export.stage
    refuse_inside_stage(out, "export.out")
    check_free(out, config.overwrite)

    from safetensors import SafetensorError

    from rlhf.model.convert import OWN, export
    from rlhf.tokenizer import load_tokenizer
    from rlhf.training.setup import load_policy

    try:
        with held(out), replaced(out) as folder:
            form = export(
                load_policy(source / "model"), load_tokenizer(source / "model"), folder, form=config.export.form
            )
            share(folder)
    except (OSError, SafetensorError) as error:
        raise checkpoint_error(error, out) from error
    except ValueError as error:
        raise UserError(f"export.form={config.export.form}: {error}") from error
    first = " (after `import rlhf.model`: no class of transformers expresses this model)" if form == OWN else ""
    say(f"export: {source / 'model'} -> {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it{first}")


def check_free(out: Path, overwrite: bool) -> None:
    """Raises: UserError if `out` is a file, or holds anything but a model that overwrite=true may replace."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file, want a folder: choose another export.out=…")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{out}: exists and is not empty: choose another export.out=…, or add overwrite=true")
    if not (out / "config.json").is_file():
        raise UserError(f"{out}: is not empty and holds no exported model: choose another export.out=…")
