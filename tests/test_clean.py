"""`rlhf clean`: what can go of a run, and what stays."""

import shutil

import pytest

from rlhf.cli import main
from rlhf.config import Config
from rlhf.runs.checkpoints import latest_checkpoint
from rlhf.runs.folders import check_output
from rlhf.runs.stage import open_stage
from rlhf.system.files import beside

from .test_checkpoints import change_a_byte, checkpoint, sealed
from .tiny_stages import changed, interrupt, run_stage


@pytest.fixture
def words(tmp_path) -> list[str]:
    """The words for a run with a complete tokenizer, which kept a checkpoint, and an interrupted world and SFT."""
    config = Config(run="demo", runs_dir=str(tmp_path))
    with open_stage(changed(config, checkpoints__keep_every=1), "tokenizer") as stage:
        (stage.folder / "output").write_text("x")
        sealed(stage.checkpoints, 1, None, changed(config, checkpoints__keep_every=1).checkpoints)
        stage.finish()
    run_stage(config, "pretrain")
    folder = interrupt(config, "sft")
    change_a_byte(checkpoint(folder / "checkpoints", 2))
    (folder / ".stage.json.1.tmp").write_text("{")
    beside(tmp_path / "demo" / "pretrain").mkdir()
    return ["clean", "run=demo", f"runs_dir={tmp_path}"]


def test_what_nothing_reads_goes_only_if_asked_for(words, tmp_path, capsys):
    run = tmp_path / "demo"
    going = ["tokenizer/checkpoints/step-1", "sft/checkpoints/step-2", "sft/.stage.json.1.tmp", ".pretrain.new"]
    main(words)
    listed = capsys.readouterr().out
    assert all(f"{run / name}: " in listed and (run / name).exists() for name in going)
    main([*words, "yes=true"])
    out = capsys.readouterr().out
    assert not any((run / name).exists() for name in going) and "is deleted" in out
    assert latest_checkpoint(run / "sft" / "checkpoints").name == "step-1"
    assert all(check_output(run / name, name) for name in ("tokenizer", "pretrain"))
    main(words)
    assert "0 MB  can go\n" in capsys.readouterr().out


def test_a_damaged_stage_and_a_running_one_lose_nothing(words, tmp_path, capsys):
    run = tmp_path / "demo"
    (run / "tokenizer" / "output").write_text("y")
    main([*words, "yes=true"])
    assert (run / "tokenizer" / "checkpoints" / "step-1").exists()
    assert "cut short or changed" in capsys.readouterr().out
    shutil.rmtree(run / "sft")
    with open_stage(Config(run="demo", runs_dir=str(tmp_path)), "sft"), pytest.raises(SystemExit) as ended:
        main([*words, "yes=true"])
    assert ended.value.code == 2 and "another process is working on it" in capsys.readouterr().err
