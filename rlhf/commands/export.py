"""`rlhf export`: a stage's policy or reward model as a folder that plain transformers loads, with a model card."""

from pathlib import Path

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.runs.checkpoints import full_disk
from rlhf.runs.folders import check_output, refuse_inside_stage, run_folder, stage_folder
from rlhf.system.files import check_replaceable, held, replaced, share, writing
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Write the model of `export.stage` to `export.out`. Raises: UserError if the folder exists."""
    source = stage_folder(config, config.export.stage)
    check_output(source)
    out = Path(config.export.out) if config.export.out else run_folder(config) / "export" / config.export.stage
    refuse_inside_stage(out, "export.out")

    from rlhf.commands.model_card import model_card

    write = write_reward if config.export.stage == "reward" else write_policy
    with writing(out), full_disk(out), held(out):
        check_replaceable(
            out, config.overwrite, "export.out", "exported model", lambda p: (p / "config.json").is_file()
        )
        with replaced(out) as folder:
            loading, notes = write(config, source / "model", folder)
            card = model_card(config, config.export.stage, loading.format(out.name), notes)
            (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
            share(folder)
    say(f"export: {source / 'model'} -> {out}: {loading.format(out)} loads it")
    for note in notes:
        say(f"export: {note}")


def write_policy(config: Config, model: Path, folder: Path) -> tuple[str, list[str]]:
    """Write a causal language model; returns how to load it, and a note. Raises: UserError if the model lacks that form."""
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.model.convert import OWN, check_form, export, why_own
    from rlhf.training.setup import load_policy

    check_form(config.export.form)
    policy = load_policy(model)
    form = export(policy, load_tokenizer(model), folder, form=config.export.form)
    loading = "AutoModelForCausalLM.from_pretrained('{}')"
    if form != OWN:
        return loading, []
    because = f": {why}" if config.export.form == "auto" and (why := why_own(policy.config)) else ""
    return loading, [f"It loads after `import rlhf.model`: no class of transformers expresses this model{because}."]


def write_reward(config: Config, model: Path, folder: Path) -> tuple[str, list[str]]:
    """Write a sequence classifier with one label. Raises: UserError if no public class expresses it."""
    import torch

    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.model.classifier import load_reward_model
    from rlhf.model.convert import export_reward
    from rlhf.training.setup import be_quiet

    if config.export.form != "auto":
        raise UserError(
            f"export.form={config.export.form}: a reward model is written in its trunk's architecture: want auto"
        )
    be_quiet()
    loaded = load_reward_model(model, torch.device("cpu"))
    exported = export_reward(loaded, None if loaded.reads_text else load_tokenizer(model), folder)
    form = "rendered with the chat template, read at its last token"
    if loaded.reads_text:
        form = "prompt and response as its tokenizer frames them"
    notes = [f"The logit is the calibrated score of a dialogue: {form}."]
    if exported.offset:
        notes.append(
            f"score = logit {exported.offset:+.6g} (score_offset in config.json): {exported.class_name} has no bias for this "
            "constant, which changes neither an order nor a difference of scores."
        )
    return "AutoModelForSequenceClassification.from_pretrained('{}')", notes
