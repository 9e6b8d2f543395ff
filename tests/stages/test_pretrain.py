"""Pretraining: what is refused before the work."""

import math

import pytest

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.data.corpus import PackedCorpus
from rlhf.errors import UserError
from rlhf.stages.pretrain import make_schedule

from .test_resume import assert_same_weights, interrupt


@pytest.mark.parametrize("setting", ["data.held_out=0", "pretrain.eval_sequences=0"])
def test_nothing_to_measure_the_held_out_loss_on_is_refused(gold_run, setting):
    with pytest.raises(UserError, match=setting):
        check_config(gold_run.config(setting), "pretrain")


def test_the_schedules_of_the_papers():
    settings = ["pretrain.global_batch_tokens=1024", "pretrain.warmup_tokens=102_400"]  # 100 steps
    gpt3 = make_schedule(compose_config([*settings, "pretrain.decay_fraction=0.8"]), 1000)
    # half of the cosine from step 100 to 800 is at 450: 0.1 + 0.9 / 2
    assert [gpt3(step) for step in (0, 49, 100, 450, 800, 999)] == pytest.approx([0.01, 0.5, 1.0, 0.55, 0.1, 0.1])
    gpt1 = make_schedule(compose_config([*settings, "pretrain.final_lr_fraction=0"]), 1000)
    assert [gpt1(step) for step in (100, 550, 1000)] == pytest.approx([1.0, 0.5, 0.0])
    transformer = make_schedule(compose_config([*settings, "pretrain.schedule=inverse_sqrt"]), 1000)
    assert [transformer(step) for step in (0, 99, 399, 999)] == pytest.approx([0.01, 1.0, 0.5, math.sqrt(0.1)])


def test_a_mixture_by_weight_resumes_to_the_same_weights(gold_run, tmp_path, capsys):
    rows = (gold_run.folder / "world" / "corpus.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("large.jsonl", rows[:1500]), ("small.jsonl", rows[1500:1560])):
        (tmp_path / name).write_text("".join(part))
    settings = [
        f"data.corpus=['{tmp_path}/large.jsonl','{tmp_path}/small.jsonl']", "data.corpus_weights=[3,1]", "pretrain.tokens=16384",
        "pretrain.eval_sequences=4", "model.n_layer=1", "model.width=16", "data.held_out=0.1",
    ]  # fmt: skip
    whole, stopped = (gold_run.copy(tmp_path, "pretrain", name) for name in ("whole", "stopped"))
    whole.stage("pretrain", *settings)
    told = capsys.readouterr().out
    sources = PackedCorpus.load(whole.folder / "pretrain" / "corpus").meta["sources"]
    assert [source["drawn"] for source in sources] == [12288, 4096] and sources[1]["epochs"] > 1
    for source in sources:
        assert f"{source['name']}: {source['share']:.1%} of them, {source['epochs']:.2f} epochs of its" in told
    interrupt(stopped, "pretrain", 5, *settings)
    stopped.stage("pretrain", *settings)
    assert_same_weights(whole.folder / "pretrain", stopped.folder / "pretrain", "model/model.safetensors")
