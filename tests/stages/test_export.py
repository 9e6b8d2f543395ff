"""`rlhf export` on a small gold run: policies and the reward model in plain transformers, each with its model card."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from rlhf.cli import main
from rlhf.commands.export import run
from rlhf.config.checks import check_config
from rlhf.data.chat_template import encode_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import sample
from rlhf.evaluation.scoring import item_encoder
from rlhf.model.classifier import load_reward_model
from rlhf.model.interface import score
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


def test_the_reward_model_scores_alike_in_plain_transformers(gold_run, exported):
    """On padded batches of real comparisons, rendered with the chat template that is in the folder."""
    stage = gold_run.folder / "reward" / "model"
    ours, tokenizer = load_reward_model(stage, torch.device("cpu")), load_tokenizer(stage)
    pairs = [(r.prompt, answer.text) for r in gold_run.comparisons()[:8] for answer in r.responses]
    encode = item_encoder(gold_run.config(), ours, tokenizer)
    rows = [row for prompt, text in pairs for row in encode(prompt, [(text, True)])[0]]
    expected = score(ours, rows)

    theirs = AutoModelForSequenceClassification.from_pretrained(exported["reward"]).eval()
    read = AutoTokenizer.from_pretrained(exported["reward"])
    assert theirs.config.num_labels == 1 and not type(theirs).__module__.startswith("rlhf")
    chats = [[m.model_dump() for m in prompt] + [{"role": "assistant", "content": text}] for prompt, text in pairs]
    texts = [read.apply_chat_template(chat, tokenize=False) for chat in chats]
    batch = read(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        logits = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert expected.std() > 0.1
    assert torch.allclose(logits + theirs.config.score_offset, expected, atol=1e-4)


def test_the_policy_answers_alike_in_plain_transformers(gold_run, exported):
    theirs = AutoModelForCausalLM.from_pretrained(exported["ppo"]).eval()
    assert type(theirs).__module__.startswith("transformers.")
    chat, read = [{"role": "user", "content": "What colour is snow?"}], AutoTokenizer.from_pretrained(exported["ppo"])
    prompt = read.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    drawn = theirs.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    tokenizer = gold_run.tokenizer("ppo")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    encoded = [encode_prompt(tokenizer, chat)]
    [expected] = sample(gold_run.policy("ppo"), encoded, max_new_tokens=16, greedy=True, **ids).responses
    assert drawn.tolist() == expected


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
    gold_run, exported, tmp_path, capsys, monkeypatch, stage, file
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
        with pytest.raises(SystemExit) as ended:
            words = gold_run.words(f"export.stage={stage}", f"export.out={out}", "overwrite=true")
            main(["export", *words, "--shared-settings"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "exports/mine: cannot write: File too large: raise the limit" in line
    assert hash_files(tmp_path) == before
    assert [path.name for path in out.parent.iterdir()] == ["mine"]
