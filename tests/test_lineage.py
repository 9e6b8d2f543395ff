"""Parents of a stage: their hashes, where they are, and refusals of those that do not fit; the hashes of its data."""

import json

import pytest
import yaml

from rlhf.config import Config
from rlhf.config.commands import uses
from rlhf.config.compose import compose_config
from rlhf.config.setting import NOTHING, RESULT, ROUNDING, settings_in
from rlhf.errors import UserError
from rlhf.recipe import STAGES
from rlhf.runs import folders as runs
from rlhf.runs.folders import identity_of
from rlhf.runs.sources import hash_sources
from rlhf.runs.stage import misfit, open_stage
from rlhf.system.files import sha256_file

from .tiny_stages import chain, changed, interrupt, run_stage


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(run="demo", runs_dir=str(tmp_path / "runs"))


def test_a_stage_records_the_hashes_of_its_parents_and_the_worlds_where_it_is_enabled(config, capsys):
    folders = chain(config, "tokenizer", "pretrain", "sft")
    hashes = {name: runs.read_stage(folder)["hash"] for name, folder in folders.items()}
    assert runs.read_stage(folders["pretrain"])["parents"] == {"tokenizer": hashes["tokenizer"]}
    assert runs.read_stage(folders["sft"])["parents"] == {"pretrain": hashes["pretrain"]}
    said = f"sft: starting, built on {folders['pretrain']} ({hashes['pretrain'][:8]})\n"
    assert said in capsys.readouterr().out
    with pytest.raises(UserError, match="no finished world there: run `rlhf world run=demo`"):
        runs.collect_parents(changed(config, gold__enabled=True), "pretrain")
    assert list(runs.collect_parents(config, "pretrain")) == ["tokenizer"]
    assert runs.is_needed(config, "sft") and not runs.is_needed(config, "label")


def test_the_hash_covers_settings_parents_data_and_output(config):
    record = runs.read_stage(run_stage(config, "tokenizer"))
    for part in ("settings", "parents", "data", "files"):
        assert runs.hash_of(record | {part: {"x": "y"}}) != record["hash"]
    assert runs.hash_of(record | {"seconds": 1e9, "versions": {}, "summary": {}}) == record["hash"]
    again = runs.read_stage(run_stage(changed(config, run="again"), "tokenizer"))
    assert again["hash"] == record["hash"]  # the run's name is no part of it


def test_a_parent_that_is_missing_not_finished_or_changed(config):
    with pytest.raises(UserError, match=r"no finished pretrain there: run `rlhf pretrain run=demo` .*, or name one w"):
        run_stage(config, "sft")
    assert not runs.stage_folder(config, "sft").exists()
    interrupt(config, "tokenizer")
    with pytest.raises(UserError, match="tokenizer is not finished: run `rlhf tokenizer` again, it resumes"):
        run_stage(config, "pretrain")
    weights = run_stage(config, "tokenizer") / "model" / "weights.txt"
    weights.write_text("weight")
    with pytest.raises(UserError, match=r"weights.txt: cut short or changed since tokenizer wrote it"):
        run_stage(config, "pretrain")
    weights.unlink()
    with pytest.raises(UserError, match=r"weights.txt: missing, tokenizer wrote it: run `rlhf tokenizer over"):
        run_stage(config, "pretrain")


@pytest.mark.parametrize("edit", ["settings", "weights"])
def test_a_parent_whose_record_was_edited(config, edit):
    folder = run_stage(config, "tokenizer")
    record = runs.read_stage(folder)
    if edit == "settings":
        record["settings"]["tokenizer.vocab_size"] = 1
    else:
        (folder / "model" / "weights.txt").write_text("other")
        record["files"]["model/weights.txt"] = sha256_file(folder / "model" / "weights.txt")
    (folder / "stage.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"stage.json: changed since tokenizer wrote it"):
        run_stage(config, "pretrain")


def test_parents_that_do_not_fit_each_other(config):
    chain(config, "tokenizer", "pretrain", "sft", "reward")
    run_stage(changed(config, overwrite=True), "sft", "other weights")
    with pytest.raises(UserError, match=r"reward: built on another sft \(.{8}\) than .*sft \(.{8}\): run `rlhf"):
        run_stage(config, "ppo")
    run_stage(changed(config, overwrite=True), "reward")
    run_stage(config, "ppo")


def test_an_interrupted_stage_is_not_resumed_on_another_parent(config):
    chain(config, "tokenizer")
    interrupt(config, "pretrain")
    run_stage(changed(config, overwrite=True), "tokenizer", "other")
    with pytest.raises(UserError, match="pretrain was "):
        run_stage(config, "pretrain")


def test_a_parent_by_run_name_by_run_folder_and_by_stage_folder(config):
    folders = chain(config, "tokenizer", "pretrain")
    for i, given in enumerate(("demo", str(folders["pretrain"].parent), str(folders["pretrain"]))):
        child = changed(config, run=f"child-{i}", parents__pretrain=given)
        assert runs.stage_folder(child, "pretrain") == folders["pretrain"]
        assert runs.read_stage(run_stage(child, "sft"))["parents"].keys() == {"pretrain"}
    stray = changed(config, parents__pretrain="nowhere")
    with pytest.raises(UserError, match=r"parents.pretrain=nowhere: neither a run nor a stage folder"):
        runs.stage_folder(stray, "pretrain")


def test_an_evaluation_is_of_the_baselines_and_of_the_runs_it_compares(config):
    given = changed(config, evaluate__compare=["other"])
    chain(changed(config, run="other"), "tokenizer", "pretrain", "sft")
    before = hash_sources(given, "evaluate")
    assert list(before) == ["other/sft"]
    chain(config, "tokenizer", "pretrain", "sft", "dpo")
    after = hash_sources(given, "evaluate")
    assert set(after) == {"other/sft", "demo/dpo"} and after["other/sft"] == before["other/sft"]


def test_a_file_that_moves_prompts_between_splits_changes_every_stage_that_reads_raw_prompts(config, tmp_path):
    """What prompts share at their beginning is found in all files of the run together."""
    preamble = "You are a helpful assistant who answers every question in one short and friendly sentence, says so if the answer is "
    preamble += "not known, never invents a source, and keeps to the language of the question whatever it is about. "

    def write(name: str, prompts: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": p, "completion": "x"}) + "\n" for p in prompts))
        return str(path)

    shown = write("d.jsonl", [f"{preamble}Question {i}?" for i in range(60)] + [f"Other {i}?" for i in range(400)])
    alone = changed(config, data__demonstrations=shown)
    more = changed(alone, data__prompts=write("p.jsonl", [f"Something else {i}?" for i in range(1500)]))
    assert hash_sources(alone, "sft") != hash_sources(more, "sft")
    imported = changed(config, data__prompts=write("q.jsonl", ["A?", "B?"]))
    assert list(hash_sources(imported, "ppo")) == ["prompts:q.jsonl"], "nothing is shared"


def test_data_that_the_user_named_is_hashed_and_files_of_one_name_are_kept_apart(config, tmp_path):
    files = [tmp_path / folder / "text.txt" for folder in ("a", "b")]
    for path in files:
        path.parent.mkdir()
        path.write_text("one")
    given = changed(config, data__corpus=[str(path) for path in files])
    before = hash_sources(given, "pretrain")
    assert list(before) == ["corpus:text.txt", "corpus:text.txt#1"] and len(set(before.values())) == 1
    files[0].write_text("two")
    assert hash_sources(given, "pretrain") != before
    assert hash_sources(given, "sft") == hash_sources(config, "pretrain") == {}


def test_only_files_that_a_stage_can_read_count_as_its_data(config, tmp_path):
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.jsonl").write_text("{}\n")
    (tmp_path / "labels" / "README.md").write_text("about")
    (tmp_path / "labels" / "notes.txt").write_text("about")
    given = changed(config, data__demonstrations=str(tmp_path / "labels"))
    assert list(hash_sources(given, "sft")) == ["demonstrations:a.jsonl"]
    with pytest.raises(UserError, match=r"notes.txt: got a file of another kind, want .jsonl, .json"):
        hash_sources(changed(config, data__demonstrations=str(tmp_path / "labels" / "notes.txt")), "sft")


def test_the_record_of_an_earlier_version_is_read_and_settings_that_are_gone_do_not_count(config, tmp_path):
    """stage.json as an earlier version wrote it, with rollout.temperature and without settings that came later."""
    write = run_stage(config, "tokenizer")
    record = json.loads((write / "stage.json").read_text())
    folder = runs.stage_folder(config, "ppo")
    folder.mkdir()
    (folder / "model.txt").write_text("weights")
    settings = {"seed": 0, "precision": "float32", "ppo.episodes": 4096, "kl.coef": 0.07, "rollout.temperature": 1.0}
    old = record | {"stage": "ppo", "settings": settings, "files": {"model.txt": sha256_file(folder / "model.txt")}}
    rollout = {"temperature": 1.0, "max_new_tokens": 40}
    old["config"] = {"run": "demo", "rollout": rollout, "study": {"kind": "frontier"}}
    old["hash"] = runs.hash_of(old)
    (folder / "stage.json").write_text(json.dumps(old))
    assert runs.check_output(folder, "ppo")["hash"] == old["hash"], "its hash covers the settings that are gone"
    wanted = runs.identity_of(changed(config, precision="float32", ppo__episodes=4096, kl__coef=0.07), "ppo")
    assert "rollout.temperature" not in wanted and runs.changed_settings(settings, wanted) == ""
    assert runs.changed_settings(settings, wanted | {"kl.coef": 0.1}) == "kl.coef 0.07 -> 0.1"


@pytest.fixture
def compose(tmp_path):
    return lambda *overrides: compose_config([f"runs_dir='{tmp_path}'", "run=demo", "device=cpu", *overrides])


WITH_MODELS = tuple(stage for stage in STAGES if stage not in ("world", "tokenizer"))


def test_precision_is_part_of_what_models_compute(compose):
    half, full = compose("precision=bfloat16"), compose("precision=float32")
    for stage in STAGES:
        assert (identity_of(half, stage) != identity_of(full, stage)) == (stage in WITH_MODELS)
    reason = misfit(half, "sft", {"settings": identity_of(full, "sft")}, {}, {})
    assert "precision 'float32' -> 'bfloat16'" in str(reason)


def test_adapters_are_part_of_what_they_change_and_another_engine_for_ppo_leaves_the_stages_before_it(compose):
    plain, other = compose(), compose("lora.target_modules=[qkv]", "lora.dropout=0.1")
    assert all(identity_of(plain, stage) != identity_of(other, stage) for stage in ("sft", "reward", "dpo", "ppo"))
    sampled = compose("rollout.engine=vllm")
    assert [stage for stage in STAGES if identity_of(plain, stage) != identity_of(sampled, stage)] == ["ppo"]


@pytest.mark.parametrize(("commands", "settings"), [
    ("sft reward dpo ppo", "lora.target_modules lora.dropout"), ("rejection evaluate ppo", "ppo.reward_key"),
    ("label reward rejection distill judge evaluate ppo sample generate", "rollout.engine rollout.tensor_parallel"),
    ("classify label generate sample sft ppo", "memory.budget_gb"),
])  # fmt: skip
def test_what_a_stage_reads_can_be_set(commands, settings):
    assert all(uses(command, setting) for command in commands.split() for setting in settings.split())


def test_what_only_rounds_is_no_part_of_a_stages_identity(compose):
    stated = {key: found.changes for key, found in settings_in(type(compose())).items()}
    assert {key for key, changes in stated.items() if changes == ROUNDING} == {
        "device", "threads", "gradient_checkpointing", "deepspeed", "launcher.processes", "sharding.bucket_elements", "rollout.batch_size",
        "sharding.file", "rollout.vllm_memory", "rollout.tensor_parallel",
        "memory.budget_gb", "sharding.overlap", "distill.micro_batch_size",
        "sharding.persistence_threshold", "pretrain.micro_batch_sequences", "sft.micro_batch_size", "reward.micro_batch_responses",
        "ppo.micro_batch_episodes", "dpo.micro_batch_prompts", "classify.micro_batch_size", "judge.micro_batch_responses",
    }  # fmt: skip
    assert {stated[key] for key in ("tracking.kind", "checkpoints.keep", "run", "ppo.eval_every")} == {NOTHING}
    for stage, row in STAGES.items():
        assert {stated[key] for key in identity_of(compose(), stage)} <= {RESULT}, row


def test_a_resumed_stage_says_which_settings_change_its_rounding(compose, capsys):
    interrupt(compose("ppo.micro_batch_episodes=8"), "tokenizer")
    capsys.readouterr()
    interrupt(compose("threads=2", "deepspeed=zero1", "ppo.micro_batch_episodes=16"), "tokenizer")
    said = capsys.readouterr().out
    changes = "threads=2, was 0; deepspeed=zero1, was none: same computation, different rounding\n"
    assert f"tokenizer: resumes with {changes}" in said  # and nothing of PPO's settings, which this stage does not read
    interrupt(compose("threads=2", "deepspeed=zero1"), "tokenizer")
    assert "different rounding" not in capsys.readouterr().out


def test_what_comes_from_the_environment_is_stored_by_its_name(compose, monkeypatch):
    monkeypatch.setenv("SECRET_PLACE", "s3cret-9271")
    it = "${oc.env:SECRET_PLACE}"
    given = [f"tracking.entity={it}", f"data.demonstrations=['{it}',b.jsonl]", f"ppo.reward_parameters={{k: '{it}'}}"]
    config = compose(*given, "reward.model=prefix/${tracking.entity}")
    assert config.tracking.entity == "s3cret-9271" and config.reward.model == "prefix/s3cret-9271"
    assert config.data.demonstrations == ["s3cret-9271", "b.jsonl"]
    with open_stage(config, "tokenizer") as stage:
        stage.finish()
    for path in (folder := stage.folder).rglob("*"):
        assert not path.is_file() or b"s3cret-9271" not in path.read_bytes(), path
    record = json.loads((folder / "stage.json").read_text())
    assert record["config"]["tracking"]["entity"] == "${oc.env:SECRET_PLACE}"
    assert record["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    for name in STAGES:
        assert "s3cret" not in json.dumps(identity_of(config, name))
