"""The study of transfer: its cells, zero-shot scores by hand, and the whole at a tiny size."""

import pytest
import torch

from rlhf.commands import study_transfer
from rlhf.commands.study import make_cells
from rlhf.config.compose import compose_config
from rlhf.evaluation.labelled_task import option_scores
from rlhf.report.evaluation import make_evaluation, make_pictures
from rlhf.runs.folders import stage_folder
from rlhf.runs.run_files import read_run
from rlhf.system.files import read_json
from rlhf.training.setup import load_policy

SMALL = [
    "study.kind=transfer",
    "study.seeds=[0]",
    "classify.data=gold:choice",
    "classify.epochs=1",
    "classify.examples=64",
]


def test_cells_fine_tune_on_one_base(gold_run):
    config = gold_run.config(*SMALL, "study.seeds=[1]", "run=study")
    config.study.parents = ["gold"]
    config.study.cells = ["no_pretraining", "layers_1", "all_layers", "examples_100", "examples_400_no_lm"]
    found = make_cells(config, [*gold_run.overrides, *SMALL])
    composed = {cell.name: compose_config(list(cell.overrides)) for cell in found}
    assert composed["layers_1"].classify.layers == 1 and composed["all_layers"].classify.layers is None
    assert composed["no_pretraining"].classify.from_scratch and not composed["all_layers"].classify.from_scratch
    assert [composed[name].classify.lm_coef for name in ("examples_100", "examples_400_no_lm")] == [0.5, 0.0]
    assert [composed[name].classify.examples for name in ("examples_100", "examples_400_no_lm", "all_layers")] == [
        100,
        400,
        64,
    ]
    assert all(c.seed == 1 and stage_folder(c, "pretrain") == gold_run.folder / "pretrain" for c in composed.values())


def test_an_adopted_base_is_compared_with_no_lstm(gold_run, tmp_path):
    """Its text is unknown, and the study would adopt it once more in the LSTM's place."""
    parent = gold_run.copy(tmp_path, "sft").folder
    assert "lstm" in study_transfer.transfer_choices(parent)
    (parent / "pretrain" / "adopted.json").write_text("{}")
    assert set(study_transfer.transfer_choices(parent)) >= {"no_pretraining", "layers_0", "all_layers"}
    assert "lstm" not in study_transfer.transfer_choices(parent)


@torch.no_grad()
def test_zero_shot_scores_by_hand(gold_run):
    lm = load_policy(gold_run.folder / "pretrain" / "model")
    pairs = [([1, 40, 41], [50, 51]), ([1, 40], [60]), ([1], [61, 62, 63])]
    found = option_scores(lm, pairs, 0, torch.device("cpu"))
    for (context, option), score in zip(pairs, found.tolist(), strict=True):
        logp = lm(torch.tensor([context + option])).logits[0].log_softmax(-1)
        wanted = sum(logp[len(context) + i - 1, token].item() for i, token in enumerate(option)) / len(option)
        assert score == pytest.approx(wanted, abs=1e-4)


@pytest.mark.long
def test_the_whole_study_at_a_tiny_size(gold_run, tmp_path, monkeypatch, capfd):
    run = gold_run.copy(tmp_path, "sft", "gold")
    more = [*SMALL, "study.cells=[all_layers,lstm]"]
    monkeypatch.setattr("rlhf.commands.study.forwarded_overrides", lambda: [*run.overrides, *more])
    run.stage("study", *more)
    assert "2 fine-tunings, 0 done" in capfd.readouterr().out
    found = {part: read_json(run.folder / "study" / f"transfer-{part}.json") for part in study_transfer.TITLES}
    assert set(found["models"]["rows"]) == {"all_layers", "lstm"} and set(found["zero-shot"]["rows"]) == {"base"}
    for study in found.values():
        assert all(0 < row["accuracy"]["mean"] <= 1 for row in study["rows"].values())
    files = read_run(run.folder)
    assert {table["title"] for table in make_evaluation(files)["studies"]} == set(study_transfer.TITLES.values())
    assert [picture.title for picture in make_pictures([files])] == [
        f"{study_transfer.TITLES['models']}: held-out accuracy"
    ]
