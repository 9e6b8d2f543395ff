import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import rlhf
from rlhf import cli
from rlhf.commands import chat, pipeline, report
from rlhf.config import Config, commands, compose
from rlhf.config.setting import settings_in
from rlhf.errors import UserError
from rlhf.system.files import write_json


@pytest.fixture
def runs(monkeypatch) -> list:
    """The configurations that `rlhf report` was run with; it does nothing else here."""
    seen: list = []
    monkeypatch.setattr(report, "run", seen.append)
    return seen


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    indented = [line for line in out.splitlines() if line.startswith("  ") and not line.startswith("  rlhf")]
    assert [line.split()[0] for line in indented] == list(cli.COMMANDS)


def test_a_commands_help_shows_the_values_of_the_preset_and_of_the_run(call, tmp_path):
    (tmp_path / "kept").mkdir()
    write_json(tmp_path / "kept" / "settings.json", {"ppo.lam": "0.9"})
    code, out, err = call("ppo", "--help", "experiment=gold", "run=kept", f"runs_dir={tmp_path}", "kl.coef=0.25")
    assert (code, err) == (0, "")
    for start, end in (
        ("ppo.lam=0.9 ", "(default 0.95)"), ("ppo.epochs=2 ", "(default 1)"), ("kl.coef=0.25 ", ")"),
    ):  # fmt: skip
        assert any(line.startswith(f"  {start}") and line.endswith(end) for line in out.splitlines()), start
    code, out, err = call("pipeline", "--help")
    assert (code, err) == (0, "") and all(f"\n  {x}." in out for x in ("pretrain", "sft", "reward", "ppo", "evaluate"))


def test_which_settings_a_run_remembers(call, tmp_path, monkeypatch):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "named.yaml").write_text("# @package _global_\nrun: kept\n", encoding="utf-8")
    (tmp_path / "kept").mkdir()
    write_json(tmp_path / "kept" / "settings.json", {"ppo.lam": "0.9", "tracking.kind": "off"})
    place = [f"runs_dir={tmp_path}", "--config-dir", str(tmp_path / "conf"), "experiment=named", "--cfg", "job"]

    def composed(*words: str) -> dict:
        return yaml.safe_load(call("ppo", *place, *words)[1])

    assert composed()["run"] == "kept" and composed()["ppo"]["lam"] == 0.9, "a preset names the run"
    assert composed("tracking=wandb")["tracking"]["kind"] == "wandb", "a group stands for its members"
    monkeypatch.setattr(cli, "parent_process", object)
    assert composed()["ppo"]["lam"] == 0.95, "a pipeline tells its processes everything"


def test_version(call):
    assert call("--version") == call("-V") == (0, f"rlhf {rlhf.__version__}\n", "")


def test_help_and_mistakes_import_nothing_heavy():
    # torch and transformers cost seconds: help, a misspelt key, a plan and a finished pipeline do without them.
    script = (
        "import sys, rlhf.cli as cli\n"
        "cli.main(['--help']); cli.main(['ppo', '--help']); assert 'hydra' not in sys.modules\n"
        "cli.main(['plan', 'model=gpt3-xl', 'deepspeed=zero3', 'gpus=8', 'gpu_memory_gb=40'])\n"
        "assert 'numpy' not in sys.modules; import rlhf.commands.pipeline, rlhf.commands.report, rlhf.config.compose\n"
        "import rlhf.report.page, rlhf.runs.trackers; rlhf.config.compose.compose_config(['experiment=gold'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'wandb', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["ppi"], "unknown command 'ppi' (did you mean 'ppo'?): `rlhf --help` lists them"),
    (["ppo", "ppo.lrr=1"], "unknown setting 'ppo.lrr' (did you mean 'ppo.lr'?): `rlhf <command> --cfg job` shows all"),
    (["ppo", "+ppo.lrr=1"], "unknown setting 'ppo.lrr' (did you mean 'ppo.lr'?)"),
    (["ppo", "learning_rate=1"], "(did you mean 'ppo.lr'?)"), (["ppo", "use_peft=1"], "(did you mean 'lora.rank'?)"),
    (["ppo", "clip_range=0.1"], "unknown setting 'clip_range' (did you mean 'ppo.clip_range'?)"),
    (["ppo", "experiment=golt"], "experiment=golt: want one of align, align-laptop, dialogue, gold, gold-dialogue, real, sentiment "
     "(did you mean 'gold'?)"),
    (["ppo", "kl.coef"], "'kl.coef': want key=value: write `kl.coef=…`"),
    (["ppo", "a=[1"], "'a=[1': not an override: write"), (["sft", "seed=1,"], "'seed=1,': not an override: take out the comma"),
    (["ppo", "kl.coef=much"], "kl.coef=much; Value 'much' of type 'str' could not be converted to Float"),
    (["ppo", "data=here"], "data=here: data is a group of settings: write data.<setting>=…"),
    (["ppo", "kl.coef=-1", "device=tpu"], "device=tpu: want one of auto, cpu, cuda, mps; kl.coef=-1.0: want 0 or more"),
    (["report", "run=a/b"], "run='a/b': want letters, digits"), (["report", "--config-dir", "none"], "--config-dir none: no such folder"),
    (["report", "run=none"], "runs/none: no such run: check run=… and runs_dir=…"),
    (["report", "--config-path", "x"], "unknown option '--config-path' (did you mean '--config-dir'?)"),
    (["report", "--multirum"], "unknown option '--multirum' (did you mean '--multirun'?)"),
    (["ppo", "--kl.coef=1"], "'--kl.coef': write settings"), (["report", "--", "some", "text"], "unknown option '--'"),
    (["rejection", "lora.rank=8"], "lora.rank: `rlhf rejection` does not use it; sft, reward, dpo, ppo do: leave it out"),
    (["evaluate", "chat.temperature=2"], "chat.temperature: `rlhf evaluate` does not use it"),
    (["ppo", "rollout.temperature=2"], "unknown setting 'rollout.temperature': PPO samples at temperature 1"),
    (["next", "run=x"], "`rlhf next` is gone: `rlhf generate"), (["ppo", "seed=null"], "seed=null; field 'seed' is not Optional"),
    (["study", "study.kind=details"], "`rlhf study` is gone: use `python scripts/studies/<kind>.py`, such as"),
    (["ppo", "study.kind=details"], "unknown setting 'study.kind': use the options of `python scripts/studies/"),
    (["import", "path=x", "out=y", "columns.prompt=q"], "columns.prompt=q: only format=table uses columns.* and words.*: add"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(call, arguments, said):
    code, out, err = call(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("rlhf: error: ") and err.count("\n") == 1 and said in err


def test_a_command_gets_the_composed_configuration(call, runs):
    assert call("report", "--shared-settings", "experiment=gold", "kl.coef=0.5", "run=x") == (0, "", "")
    (config,) = runs
    assert (config.kl.coef, config.run, config.gold.enabled) == (0.5, "x", True)
    assert not any(Path.cwd().iterdir())  # Hydra leaves no folder and no log behind


@pytest.mark.parametrize("arguments", [("-m", "seed=3,4", "run=x"), ("seed=3,4", "run=x", "-m")])
def test_a_sweep_runs_the_command_for_each_value_and_leaves_no_files(call, runs, arguments):
    code, _, err = call("report", *arguments)
    assert (code, err) == (0, "") and [config.seed for config in runs] == [3, 4]
    assert not any(Path.cwd().iterdir())


@pytest.fixture
def own_files(tmp_path):
    """A user's folder of YAML files: an experiment, a model, a mistake, and a whole configuration."""
    folder = tmp_path / "mine"
    for name, text in {
        "experiment/mine.yaml": "# @package _global_\nkl:\n  coef: 0.75\n",
        "experiment/typo.yaml": "# @package _global_\nppo:\n  lrr: 1\n",
        "model/mine.yaml": "n_layer: 3\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_own_yaml_files_work_and_a_typo_in_one_is_told_as_on_the_command_line(call, runs, own_files):
    assert call("report", "--config-dir", str(own_files), "+experiment=mine", "model=mine") == (0, "", "")
    assert (runs[-1].kl.coef, runs[-1].model.n_layer) == (0.75, 3)
    assert call("report", f"hydra.searchpath=[file://{own_files}]", "experiment=mine") == (0, "", "")
    assert runs[-1].kl.coef == 0.75
    assert [path.name for path in Path.cwd().iterdir()] == ["mine"]
    code, _, err = call("report", "--config-dir", str(own_files), "experiment=typo")
    told = "unknown setting 'ppo.lrr' (did you mean 'ppo.lr'?): `rlhf <command> --cfg job` shows all"
    assert (code, err) == (2, f"rlhf: error: experiment/typo.yaml: {told}\n")


def test_text_for_chat_needs_no_quotes(call, monkeypatch):
    seen: list = []
    monkeypatch.setattr(chat, "run", lambda config: seen.append((config.chat.message, config.chat.system)))
    assert call("chat", "run=x", "--", "What's 2+2,", "${x} [a]=b?") == (0, "", "")
    assert call("chat", "run=x", "chat.message=It's [a]=b, ${x}? \\${y}", "chat.system=You're brief,\nkind.")[0] == 0
    assert call("chat", "run=x", "chat.message='Hydra, quoted'", "chat.system=null") == (0, "", "")
    second = ("It's [a]=b, ${x}? \\${y}", "You're brief,\nkind.")
    assert seen == [("What's 2+2, ${x} [a]=b?", None), second, ("Hydra, quoted", None)]


def test_cfg_job_prints_the_configuration_and_runs_nothing(call, runs):
    code, out, err = call("report", "--cfg", "job", "kl.coef=0.5", "experiment=real")
    assert (code, err, runs) == (0, "", [])
    printed = yaml.safe_load(out)
    assert (printed["kl"]["coef"], printed["model"]["width"], printed["gold"]["enabled"]) == (0.5, 192, False)


def test_settings_of_labelling_need_no_group():
    assert compose.read_words(["seed=1", "labelers=[x,y]"], "serve").overrides == ["seed=1", "serve.labelers=[x,y]"]
    with pytest.raises(UserError, match=r"unknown option '--figures'.*: write settings as key=value"):
        compose.read_words(["--figures", "x"], "report")


@pytest.mark.parametrize(("command", "told"), [
    (pipeline, "interrupted: run the same command again, it resumes from the last checkpoint, or begins anew if there is none yet"),
    (report, "interrupted"), (chat, "interrupted"),
])  # fmt: skip
def test_an_interrupted_command_says_how_to_go_on_if_it_can(call, monkeypatch, command, told):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    code, _, err = call(command.__name__.rpartition(".")[2], "experiment=gold")
    assert (code, err) == (130, f"\nrlhf: {told}\n")


@pytest.mark.parametrize("way", ["--config-dir={}", "hydra.searchpath=['file://{}']"])
@pytest.mark.parametrize("sweep", [False, True])
def test_the_pipeline_gets_its_overrides_and_may_compose_its_stages_settings(call, monkeypatch, tmp_path, sweep, way):
    """Also of a sweep, and with the user's folder of YAML files, which its stages need too."""
    seen: list = []

    def run(config, overrides):
        other = compose.compose_config(["experiment=gold", "kl.coef=0.5"])
        seen.append((config.kl.coef, other.kl.coef, overrides))

    monkeypatch.setattr(pipeline, "run", run)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - gold\n  - _self_\nsft:\n  lr: 0.5\n"
    )
    given, stated = ["experiment=mine", "kl.coef=0.25"], f"hydra.searchpath=['file://{tmp_path}']"
    said = "pipeline: job 1 of 2: run=a\npipeline: job 2 of 2: run=b\n" if sweep else ""
    assert call("pipeline", way.format(tmp_path), *given, *(["-m", "run=a,b"] if sweep else [])) == (0, said, "")
    jobs = [[*given, f"run={name}"] for name in "ab"] if sweep else [given]
    assert seen == [(0.25, 0.5, [stated, *job]) for job in jobs]
    stages: list = []
    monkeypatch.setattr(cli, "module_of", lambda _: SimpleNamespace(run=stages.append))
    assert call("world", "--shared-settings", *seen[-1][2]) == (0, "", "") and stages[0].sft.lr == 0.5


def test_every_setting_is_used_by_some_command_and_refused_by_all_others():
    alone = [name for name in cli.COMMANDS if name not in ("pipeline", "plan", "import", "corpus")]
    for key in settings_in(Config):
        users = [name for name in alone if commands.uses(name, key)]
        assert users or commands.uses("pipeline", key)
        compose.check_used([f"{key}=1"], users[0] if users else "pipeline")
        for command in set(alone) - set(users):
            with pytest.raises(UserError, match=rf"^{key}: `rlhf {command}` does not use it; .*: leave it out, or add"):
                compose.check_used([f"{key}=1"], command)
