"""What pretraining gives a labelled task (Radford et al. 2018, section 5).

    python scripts/studies/transfer.py --out runs/topic --seeds 0 1 2 --parents runs/base0 runs/base1 runs/base2 \
        --picture docs/img/transfer-blocks.png experiment=gold classify.data=gold:topic classify.examples=50

Each cell fine-tunes the parent's base by `rlhf classify`: with its first 0 … n blocks, and without pretraining; with and without the
language model's loss, by number of examples; and an LSTM of equal size in its place (lstm.py), pretrained on the same text with the same
settings, but with AdamW and without a mask between documents, which an LSTM cannot have. The last table is the base's own choice among the
labels' or choices' words, without any fine-tuning, at each checkpoint that its pretraining kept (checkpoints.keep_every).
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import draw, make_cells, parse, read, run, spaced, table, within
from lstm import write_beside
from safetensors.torch import load_file

import rlhf
from rlhf.config.compose import compose_config
from rlhf.data.tokenizer import encode_texts, separator_id
from rlhf.evaluation.shots import columns_of, load_task, option_scores, options_of

SIZES = (100, 400)  # training examples, besides those of classify.examples
ALL, LSTM, NO_LM = "all_layers", "lstm", ("classify.lm_coef=0",)
TAKEN = ("world", "tokenizer", "pretrain")
PLUGIN = f"plugins='{Path(__file__).resolve().with_name('lstm.py')}:register'"


def make_choices(parent: Path) -> harness.Choices:
    """{name: the overrides} of the fine-tunings of one base."""
    shape = read(parent / "pretrain" / "model" / "config.json")
    layers = shape.get("n_layer") or shape["num_hidden_layers"]
    by_size: dict[str, tuple[str, ...]] = {}
    for size in SIZES:
        examples = f"classify.examples={size}"
        by_size |= {f"examples_{size}": (examples,), f"examples_{size}_no_lm": (examples, *NO_LM)}
    by_layers = {f"layers_{n}": (f"classify.layers={n}",) for n in range(layers)}
    return {"no_pretraining": ("classify.from_scratch=true",), **by_layers, ALL: (), f"{ALL}_no_lm": NO_LM, **by_size}


def lstm_cells(asked: Any) -> list[harness.Cell]:
    """An LSTM beside each parent's base: adopted with random weights, pretrained, and fine-tuned."""
    overrides = [o for o in asked.overrides if not o.startswith(("model.", "model=", "tokenizer."))]

    def choices(seed: int, parent: Path) -> harness.Choices:
        record = read(parent / "pretrain" / "stage.json")
        given = [f"{k}={v}" for k, v in record["settings"].items() if k.startswith("pretrain.") and v is not None]
        start = asked.out / f"lstm-start-seed{seed}"
        if not (start / "model.safetensors").exists():
            write_beside(parent, start, seed)
        unlike = ("pretrain.isolate_documents=false", "pretrain.optimizer=adamw")
        corpus = f"data.corpus='{parent / 'world' / 'corpus.jsonl'}'"
        return {LSTM: (*given, *unlike, f"model.pretrained='{start}'", corpus, PLUGIN)}

    steps = dict.fromkeys(("tokenizer", "pretrain", "classify"), ())
    return make_cells(Namespace(**{**vars(asked), "overrides": overrides}), choices, ("world",), steps)


def figures(cell: harness.Cell) -> dict[str, float]:
    results = cell.results("classify")
    found = {"accuracy": results["accuracy"]["value"], "macro_f1": results["macro_f1"], "loss": results["loss"]}
    return found | {"most_frequent_label": results["majority"]}


def zero_shot(cell: harness.Cell) -> dict[str, float]:
    """{"step_N": held-out accuracy} of the option with the highest mean log-probability per token, at each kept checkpoint."""
    config: Any = compose_config(list(cell.steps[0][1:]))
    loaded = rlhf.load(cell.parent)
    tokenizer, model = loaded.tokenizer, loaded.policy("pretrain")
    columns = columns_of(config)
    _, held_out, classes = load_task(config, columns, cell.home.parent)
    asked = [options_of(example, columns, classes) for example in held_out]
    pairs = []
    for context, (_, options) in zip(encode_texts(tokenizer, [text for text, _ in asked]), asked, strict=True):
        words = encode_texts(tokenizer, [f" {option}" for option in options])
        pairs += [([separator_id(tokenizer), *context], word) for word in words]
    labels = torch.tensor([classes.index(example.label) for example in held_out])

    def accuracy() -> float:
        scores = option_scores(model, pairs, tokenizer.pad_token_id, loaded.device).view(len(asked), -1)
        return (scores.argmax(-1) == labels).float().mean().item()

    base, found = accuracy(), {}
    folders = (cell.parent / "pretrain" / "checkpoints").glob("step-*")
    for step, folder in sorted((int(folder.name.partition("-")[2]), folder) for folder in folders):
        weights = load_file(str(folder / "weights.safetensors"))
        model.load_state_dict(weights, strict=False)  # tied weights are stored once
        found[f"step_{step}"] = accuracy()
    return found | {"base": base}


def main() -> None:
    asked = parse(__doc__)
    choices = make_choices(asked.parents[0])
    wanted = asked.cells or [*choices, LSTM]
    asked.cells = [name for name in wanted if name != LSTM]
    cells = make_cells(asked, choices, TAKEN, {"classify": ()}) if asked.cells else []
    if LSTM in wanted and not (asked.parents[0] / "pretrain" / "adopted.json").exists():
        cells += lstm_cells(asked)  # an adopted base has none beside it: its text is unknown
    found = harness.collect(run(cells, asked), figures)
    means = {name: {k: within(figure) for k, figure in row.items()} for name, row in harness.over_seeds(found).items()}
    names = list(next(iter(means.values())))
    table(["fine-tuned", *map(spaced, names)], [[spaced(name), *row.values()] for name, row in means.items()])
    shown = [name for name in means if name.startswith("layers_") or name in ("no_pretraining", ALL, LSTM)]
    points = [(float(i), means[name]["accuracy"]) for i, name in enumerate(shown)]
    draw(asked.picture, {"accuracy": points}, "", "held-out accuracy", shown, line=False)

    by_step: harness.Found = {}
    for cell in [cell for cell in cells if cell.name == ALL]:
        path = asked.out / f"zero-shot-seed{cell.seed}.json"
        for step, accuracy in harness.cached(path, lambda c=cell: zero_shot(c)).items():
            by_step.setdefault(step, {})[cell.seed] = {"accuracy": accuracy}
    if by_step:
        lines = [[spaced(step), within(row["accuracy"])] for step, row in harness.over_seeds(by_step).items()]
        table(["zero-shot", "accuracy"], lines)


if __name__ == "__main__":
    main()
