"""The files of the package whose functions run during one PPO update."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import rlhf

from .ppo_trainer import open_trainer

PACKAGE = Path(rlhf.__file__).parent
RECIPE = {"stages", "ppo", "ops"}  # the algorithm; the rest samples, runs the models, takes steps and writes


def test_one_update_is_in_twelve_files(copy_until):
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            ran.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    settings = ["ppo.episodes_per_update=8", "ppo.episodes=16", "ppo.minibatches=1", "ppo.critic_warmup_updates=0"]
    with open_trainer(copy_until("ppo"), *settings) as trainer:
        sys.setprofile(note)
        try:
            trainer.update(1)
        finally:
            sys.setprofile(None)
    folders = Counter(name.split("/")[0] for name in ran)
    print(f"one update: {len(ran)} files:", dict(folders), *sorted(ran))
    assert {"stages/ppo.py", "ppo/update.py", "ops/ppo.py", "ops/gae.py"} <= ran
    assert sum(folders[name] for name in RECIPE) <= 12, sorted(ran)
    assert len(ran) <= 45, sorted(ran)
