"""`study.kind=transfer`: what pretraining gives a labelled task (Radford et al. 2018, section 5).

    layers       the first 0 … n blocks of the base transferred, and nothing at all
    sizes        with and without the language model's loss, by number of training examples
    models       an LSTM of equal size, pretrained on the same blocks, in place of the Transformer
    zero-shot    the base's own choice among the labels' or choices' words, at each checkpoint that its pretraining kept

Each is one table and picture, runs/<run>/study/transfer-<name>.json.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf.commands.study_cells import Cell, cached, cell_config, mean_interval
from rlhf.commands.study_results import hashes
from rlhf.config import Config
from rlhf.config.compose import compose_config
from rlhf.config.precision import inference
from rlhf.data.tokenizer import encode_texts, load_tokenizer, separator_id
from rlhf.evaluation.labelled_task import columns_of, load_task, option_scores, options_of
from rlhf.model.lstm import LSTMConfig, LSTMForCausalLM
from rlhf.runs.checkpoints import checkpoint_step, checkpoints
from rlhf.runs.folders import is_complete, stage_folder
from rlhf.stages import pretrain
from rlhf.system.files import read_json
from rlhf.system.terminal import say
from rlhf.training.setup import load_policy, set_up
from rlhf.training.state import put_weights

SIZES = (100, 400)  # training examples, besides all of them
DEFAULT, LSTM, NO_LM = "all_layers", "lstm", ("classify.lm_coef=0",)
TITLES = {
    "layers": "Transfer by the number of blocks",
    "sizes": "The auxiliary objective by the number of examples",
    "models": "Transformer and LSTM of equal size",
    "zero-shot": "Zero-shot accuracy along pretraining",
}
# The Transformer's settings that an LSTM cannot use: a mask between documents, and Muon.
OF_LSTM = ("pretrain.isolate_documents=false", "pretrain.optimizer=adamw")


def transfer_choices(parent: Path) -> dict[str, tuple[str, ...]]:
    """{name: the overrides} of the fine-tunings on one base. An adopted base has no LSTM beside it: its text is unknown."""
    shape = read_json(parent / "pretrain" / "model" / "config.json")
    layers = shape.get("n_layer") or shape["num_hidden_layers"]
    sizes = {
        f"examples_{size}{'' if on else '_no_lm'}": (f"classify.examples={size}", *(() if on else NO_LM))
        for size in SIZES
        for on in (True, False)
    }
    return {
        "no_pretraining": ("classify.from_scratch=true",),
        **{f"layers_{n}": (f"classify.layers={n}",) for n in range(layers)},
        DEFAULT: (),
        "all_layers_no_lm": NO_LM,
        **sizes,
        **({} if (parent / "pretrain" / "adopted.json").exists() else {LSTM: ()}),
    }


def pretrain_lstm(cell: Cell) -> None:
    """An LSTM of the size of the parent's base, pretrained on the same blocks with the same settings, under the study's folder."""
    parents = [f"parents.{stage}='{folder}'" for stage, folder in cell.stages.items() if stage != "pretrain"]
    recorded = read_json(cell.parent / "pretrain" / "stage.json")
    settings = [
        f"{key}={value}"
        for key, value in recorded["settings"].items()
        if key.startswith("pretrain.") and value is not None
    ]
    shared = [o for o in cell.overrides if not o.startswith(("run=", "parents.", "pretrain."))]
    config = compose_config([*shared, *settings, *OF_LSTM, f"run={lstm_run(cell.seed)}", *parents])
    if is_complete(stage_folder(config, "pretrain")):
        return

    def make(config: Config, tokenizer: Any) -> LSTMForCausalLM:
        base = load_policy(cell.parent / "pretrain" / "model")
        shape = LSTMConfig.sized(
            sum(p.numel() for p in base.parameters()),
            vocab_size=len(tokenizer),
            context_length=tokenizer.model_max_length,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=base.config.initializer_range,
        )
        return LSTMForCausalLM(shape)

    pretrain.pretrain(config, make)


def lstm_run(seed: int) -> str:
    return f"pretrain-lstm-seed{seed}"


def transfer_results(config: Config, cells: list[Cell]) -> dict[str, dict[str, Any]]:
    """{"transfer-layers": …}: rows of held-out accuracy, mean and interval over seeds, for the cells that were run."""
    figures_by_cell: dict[str, dict[int, dict[str, float]]] = {}
    for cell in cells:
        results = read_json(cell.home / "classify" / "results.json")
        figures = {"accuracy": results["accuracy"]["value"], "macro_f1": results["macro_f1"], "loss": results["loss"]}
        figures_by_cell.setdefault(cell.name, {})[cell.seed] = figures | {"most_frequent_label": results["majority"]}
    parts = {
        "layers": [
            name for name in figures_by_cell if name.startswith("layers_") or name in ("no_pretraining", DEFAULT)
        ],
        "sizes": [name for name in figures_by_cell if name.startswith(("examples_", DEFAULT))],
        "models": [name for name in figures_by_cell if name in (DEFAULT, LSTM, "no_pretraining")],
    }
    tables = {part: {name: figures_by_cell[name] for name in names} for part, names in parts.items()}
    tables["zero-shot"] = zero_shot_rows(cells)
    return {
        f"transfer-{part}": {
            "study": f"transfer-{part}",
            "title": TITLES[part],
            "seeds": sorted({cell.seed for cell in cells}),
            "parents": len({cell.parent for cell in cells}),
            "task": config.classify.data,
            "rows": {
                name: {
                    key: mean_interval([row[key] for row in by_seed.values()]) for key in next(iter(by_seed.values()))
                }
                for name, by_seed in rows.items()
            },
        }
        for part, rows in tables.items()
        if rows
    }


def zero_shot_rows(cells: list[Cell]) -> dict[str, dict[int, dict[str, float]]]:
    """{"step_N": {seed: figures}} of every checkpoint that pretraining kept, and of the base itself."""
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for cell in {cell.seed: cell for cell in cells if cell.name == DEFAULT}.values():
        saved = checkpoints(cell.parent / "pretrain" / "checkpoints")
        if not saved:
            say(
                f"study: {cell.parent.name}: its pretraining kept no checkpoint: zero-shot accuracy is measured only at its end "
                "(checkpoints.keep_every=N keeps some)"
            )
        basis = [hashes({"pretrain": cell.parent / "pretrain", "classify": cell.home / "classify"}), len(saved)]
        figures = cached(cell.folder, f"zero-shot-seed{cell.seed}", basis, lambda c=cell, k=saved: zero_shot(c, k))
        for name, accuracy in figures.items():
            rows.setdefault(name, {})[cell.seed] = {"accuracy": accuracy}
    return rows


def zero_shot(cell: Cell, saved: list[Path]) -> dict[str, float]:
    """{"step_N": held-out accuracy} of the option with the highest mean log-probability per token, without any fine-tuning."""
    config = cell_config(cell)
    device, folder = set_up(config), cell.parent / "pretrain" / "model"
    tokenizer, lm = load_tokenizer(folder), load_policy(folder).to(device)
    columns = columns_of(config)
    _, held_out, classes = load_task(config, columns, cell.folder)
    rows = [options_of(example, columns, classes) for example in held_out]
    contexts = encode_texts(tokenizer, [text for text, _ in rows])
    options = iter(encode_texts(tokenizer, [f" {option}" for _, listed in rows for option in listed]))
    pairs = [
        ([separator_id(tokenizer), *ids], next(options))
        for ids, (_, listed) in zip(contexts, rows, strict=True)
        for _ in listed
    ]
    labels = torch.tensor([classes.index(example.label) for example in held_out])

    def accuracy() -> float:
        with inference(config, device):
            scores = option_scores(lm, pairs, tokenizer.pad_token_id, device).view(len(rows), -1)
        return (scores.argmax(-1) == labels).float().mean().item()

    base, accuracies = accuracy(), {}
    for path in saved:
        put_weights(lm, load_file(str(path / "weights.safetensors")))
        accuracies[f"step_{checkpoint_step(path)}"] = accuracy()
    return accuracies | {"base": base}
