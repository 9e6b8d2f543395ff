"""`rlhf export`: a stage's model as a folder that plain transformers loads."""

from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.files import disk_error
from rlhf.runs.folders import check_output, run_folder, stage_folder
from rlhf.terminal import say


def run(config: Config) -> None:
    """Write the model of `export.stage` to `export.out`. Raises: UserError where the folder is taken."""
    source = stage_folder(config, config.export.stage)
    check_output(source)
    out = Path(config.export.out) if config.export.out else run_folder(config) / "export" / config.export.stage
    if out.exists() and any(out.iterdir()) and not config.overwrite:
        raise UserError(f"{out}: exists and is not empty: choose another export.out=…, or add overwrite=true")

    from rlhf.model.convert import OWN, export
    from rlhf.tokenizer import load_tokenizer
    from rlhf.training.setup import load_policy

    try:
        form = export(load_policy(source / "model"), load_tokenizer(source / "model"), out, form=config.export.form)
    except OSError as error:
        raise disk_error(error, out) from error
    except ValueError as error:
        raise UserError(f"export.form={config.export.form}: {error}") from error
    first = " (after `import rlhf.model`: no class of transformers expresses this model)" if form == OWN else ""
    say(f"export: {source / 'model'} -> {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it{first}")
