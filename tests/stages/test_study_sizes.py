"""The study of sizes: its cells, its figures by hand, few-shot prompts, and the answers of real models at a tiny size."""

import pytest

from rlhf.commands import study_sizes
from rlhf.commands.study import make_cells
from rlhf.commands.study_cells import cell_config
from rlhf.config.checks import check_config
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.gold.measures import MEASURES
from rlhf.report.studies import make_study_pictures
from rlhf.runs.folders import stage_folder

GIVEN = ["study.kind=sizes", "study.seeds=[0]", "study.parents=[gold]", "evaluate.prompts=10", "evaluate.samples=2"]


def cells_of(gold_run, tmp_path):
    config = gold_run.config(*GIVEN, "run=sizes")
    config.runs_dir, config.run = str(gold_run.runs_dir), "sizes"
    cells = {cell.name: cell for cell in make_cells(config, [*gold_run.overrides, *GIVEN])}
    return config, cells


def test_cells_are_three_widths_and_ppo_ptx_on_each(gold_run, tmp_path):
    _, cells = cells_of(gold_run, tmp_path)
    assert list(cells) == ["width_16", "width_32", "width_64", "width_16_ptx", "width_32_ptx", "width_64_ptx"]
    half, whole, mixed = (cell_config(cells[name]) for name in ("width_32", "width_64", "width_32_ptx"))
    assert (half.model.width, half.model.n_head) == (32, 1) and cells["width_32"].commands == ("pretrain", "sft", "ppo")
    assert cells["width_64"].commands == ("ppo",) and stage_folder(whole, "sft") == gold_run.folder / "sft"
    assert mixed.ppo.ptx_coef == 1.0 and whole.ppo.ptx_coef == 0.0
    assert cells["width_32_ptx"].stages["sft"] == cells["width_32"].folder / "width_32-seed0" / "sft"
    assert cells["width_32_ptx"].builds_on_cell and not cells["width_32"].builds_on_cell
    # one reward model pays all sizes: the parent's
    assert {cell_config(cell).ppo.rewards for cell in cells.values()} == {str(gold_run.folder / "reward")}


@pytest.mark.parametrize("other", ["gold.truth=vader", "model.pretrained=folder", "gold.conversations=0.5"])
def test_sizes_need_the_built_in_world(gold_run, other):
    with pytest.raises(UserError, match=r"^study\.kind=sizes: pretrains on the built-in world"):
        check_config(gold_run.config(*GIVEN, other), "study")


def test_preference_and_means_by_hand():
    def values(totals, truthful):
        return {"totals": totals} | {name: [1.0, 1.0] for name in MEASURES} | {"truthful": truthful}

    reference = {0: values([[0.5, 0.5], [0.2, 0.4]], [None, 0.0])}
    ours = {0: values([[0.9, 0.5], [0.2, 0.3]], [None, 0.5]), 1: values([[0.1, 0.3], [0.0, 0.0]], [0.0, 1.0])}
    found = study_sizes.figures(ours, reference)
    # seed 0 alone has a reference: (1 + 1 + .5 + .5)/4 = .75; .2: half and lost, .3: won and lost: 1.5/4 = .375
    assert found["win_rate"]["value"] == pytest.approx((0.75 + 0.375) / 2, abs=1e-4) and found["win_rate"]["n"] == 2
    assert found["gold"]["value"] == pytest.approx((0.7 + 0.25 + 0.2 + 0.0) / 4, abs=1e-4) and found["gold"]["n"] == 4
    assert found["truthful"]["value"] == 0.5 and found["truthful"]["n"] == 3, "the prompt is the unit, of its kind"


def test_few_shot_prompts_are_demonstrations_that_fit(gold_run):
    config, world = gold_run.config(), gold_run.folder / "world"
    tokenizer = load_tokenizer(gold_run.folder / "sft" / "model")
    records = [r for r in load_prompts(str(world / "prompts.jsonl"))[0] if r.metadata["split"] == "test"]
    found = study_sizes.few_shot_prompts(config, world, records, tokenizer)
    texts = [tokenizer.decode(ids) for ids in found]
    asked = {record.prompt[-1].content for record in records}
    for record, ids, text in zip(records, found, texts, strict=True):
        assert len(ids) <= tokenizer.model_max_length - config.rollout.max_new_tokens
        *shots, last, _ = [part.split("\nAnswer:\n")[0] for part in text.split("Question:\n")[1:]] + [""]
        assert last == record.prompt[-1].content and not asked & set(shots)
        assert text.endswith("\nAnswer:\n")
    counts = [text.count("Question:") - 1 for text in texts]
    assert min(counts) >= 1 and len(set(texts)) == len(texts)
    assert found == study_sizes.few_shot_prompts(config, world, records, tokenizer)
    assert found != study_sizes.few_shot_prompts(gold_run.config("seed=1"), world, records, tokenizer)


def test_the_answer_of_a_base_ends_before_the_next_question():
    for text in ("Rome.", "Will:\nRome.", "Rome.\nQuestion:\nWho?", "Will:\nRome.\nQuestion:\nWho?\nAnswer:\nEva."):
        assert study_sizes.first_answer(text) == "Rome."


def test_real_answers_make_a_table_and_a_picture(gold_run, tmp_path):
    """The whole width needs no training here: the parent's own PPO model stands for the cell's."""
    run = gold_run.copy(tmp_path, None, "gold")
    given = [*GIVEN, "study.cells=[width_64]"]
    config = run.config(*given)
    config.runs_dir = str(tmp_path)
    (cell,) = make_cells(config, [*run.overrides, *given])
    cell.ppo.parent.mkdir(parents=True)
    (run.folder / "ppo").rename(cell.ppo)
    found = study_sizes.size_results(config, [cell])
    assert list(found["rows"]) == [f"width_64 {name}" for name in ("base", "few_shot", "sft", "ppo")]
    assert found["rows"]["width_64 sft"]["win_rate"]["value"] == 0.5, "over itself"
    assert found["reference"] == "width_64 sft" and found["small_ppo_over"]["width_64 ppo"]["value"] == 0.5
    assert all(1 <= row["rating"]["value"] <= 7 and row["gold"]["n"] == 10 for row in found["rows"].values())
    (picture,) = make_study_pictures(found, "")
    assert [one.label for one in picture.curve.series] == ["base", "few_shot", "sft", "ppo"]
    assert picture.curve.series[2].ys == [0.5] and picture.curve.names[0].endswith("parameters")
