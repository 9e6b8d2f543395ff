"""`rlhf export` on a small gold run: the model cards, and a full disk. Scores: tests/model/test_convert.py, test_adopted.py."""

import json
import resource
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf.commands.export import run
from rlhf.config.checks import check_config
from rlhf.runs.folders import hash_of, read_stage
from rlhf.system.files import hash_files, read_json, write_json


@pytest.fixture(scope="module")
def exported(gold_run, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("export")
    for stage in ("ppo", "reward"):
        config = gold_run.config(f"export.stage={stage}", f"export.out='{folder / stage}'")
        check_config(config, "export")
        run(config)
    return {stage: folder / stage for stage in ("ppo", "reward")}


def test_the_card_says_what_the_records_say(gold_run, exported):
    card = (exported["ppo"] / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [rlhf, ppo]\n---\n")
    assert "None: pretrained from random weights" in card and "base_model" not in card
    for stage in ("pretrain", "sft", "reward", "ppo"):
        record = read_stage(gold_run.folder / stage)
        assert f"### {stage}\n\nHash `{record['hash']}`" in card
        for key, value in record["settings"].items():
            assert f"\n    {key}={json.dumps(value)}" in card
    results = read_json(gold_run.folder / "evaluate" / "results.json")
    found = results["gold"]["win_rate_vs_sft"]
    assert f"| gold.win_rate_vs_sft | {found['value']} | {found['ci95'][0]} to {found['ci95'][1]} |" in card
    assert f"| kl_to_sft_nats | {results['kl_to_sft_nats']} |  |" in card
    assert "## Not measured\n\n- whether people prefer its answers" in card
    reward = (exported["reward"] / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained('reward')" in reward and "### ppo" not in reward
    assert "read at its last token" in reward


def test_the_card_of_an_adopted_model_names_it_and_its_licence(copy_until, tmp_path):
    """And where evaluate measured another model, the card says that there are no figures."""
    run_ = copy_until("evaluate")
    local = tmp_path / "models" / "mine.gguf"
    adopted = {"source": "someone/model", "revision": "abc", "licence": "apache-2.0"}
    write_json(run_.folder / "pretrain" / "adopted.json", adopted | {"sha256": {"model.safetensors": "f" * 64}})
    run(run_.config("export.stage=sft", f"export.out='{tmp_path / 'out'}'"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: apache-2.0\nbase_model: "someone/model"\n' in card
    assert f"- someone/model, revision abc\n- licence: apache-2.0\n- `model.safetensors` {'f' * 64}" in card
    assert "None: `rlhf evaluate` has not run." in card
    write_json(run_.folder / "pretrain" / "adopted.json", adopted | {"source": str(local), "sha256": {}})
    record = read_stage(run_.folder / "sft")
    settings = {"data.demonstrations": [str(local.with_suffix(".csv")), "owner/name"], "ppo.rewards": f"{local}:score"}
    changed = record | {"settings": record["settings"] | settings}
    write_json(run_.folder / "sft" / "stage.json", changed | {"hash": hash_of(changed)})
    run(run_.config("export.stage=sft", f"export.out='{tmp_path / 'out'}'", "overwrite=true"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card and "base_model" not in card and "- mine.gguf, revision abc" in card
    assert 'data.demonstrations=["mine.csv", "owner/name"]' in card and 'ppo.rewards="mine.gguf:score"' in card


@pytest.mark.parametrize(("stage", "file"), [("ppo", "weights"), ("ppo", "tokenizer"), ("reward", "weights")])
def test_a_full_disk_leaves_what_was_there_and_nothing_half_made(
    gold_run, exported, tmp_path, refused, monkeypatch, stage, file
):
    """No room for a file of more than 10 kB: for the first such file, or for the tokenizer's after the weights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = PreTrainedTokenizerFast.save_pretrained

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", lambda *given: (fill_the_disk(), save(*given)))
    out = tmp_path / "exports" / "mine"
    shutil.copytree(exported[stage], out)
    before = hash_files(tmp_path)
    try:
        if file == "weights":
            fill_the_disk()
        words = gold_run.words(f"export.stage={stage}", f"export.out={out}", "overwrite=true")
        line = refused("export", *words, "--shared-settings")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "exports/mine: cannot write: File too large: raise the limit" in line
    assert hash_files(tmp_path) == before
    assert [path.name for path in out.parent.iterdir()] == ["mine"]
