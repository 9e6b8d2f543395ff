"""The example of docs/extending.md: an architecture from outside the package, adopted natively and written back."""

import json
import re
from pathlib import Path

import torch
import transformers

from rlhf.cli import main
from rlhf.model.architectures import ARCHITECTURES
from tests.model.chats import make_tokenizer
from tests.model.checkpoints import GROUPED

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@torch.no_grad()
def test_an_architecture_from_a_file_runs_natively_and_is_exported(tmp_path, monkeypatch):
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "seed_oss" in block]
    (tmp_path / "seed_oss.py").write_text(code)
    monkeypatch.setitem(ARCHITECTURES, "seed_oss", None)  # removed again at the test's end
    del ARCHITECTURES["seed_oss"]
    torch.manual_seed(1)
    tokenizer = make_tokenizer("chatml")
    ids = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    theirs = transformers.SeedOssForCausalLM(
        transformers.SeedOssConfig(**{**GROUPED, **ids, "vocab_size": 410, "head_dim": 16})
    ).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")

    run = [f"runs_dir={tmp_path}", "run=x", f"plugins={tmp_path}/seed_oss.py:register"]
    adopting = [*run, f"model.pretrained={tmp_path}/hf", "tracking=jsonl", "device=cpu", "threads=1"]
    main(["tokenizer", *adopting])
    main(["pretrain", *adopting, "model.native=true"])
    assert json.loads((tmp_path / "x" / "pretrain" / "model" / "config.json").read_text())["model_type"] == "rlhf_gpt"
    main(["export", *run, "export.stage=pretrain", f"export.out={tmp_path}/out"])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is transformers.SeedOssForCausalLM
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())
