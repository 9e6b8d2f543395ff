"""Pretraining: what is refused before the work."""

import pytest

from rlhf.checks import check_config
from rlhf.errors import UserError


@pytest.mark.parametrize("setting", ["data.held_out=0", "pretrain.eval_sequences=0"])
def test_nothing_to_measure_the_held_out_loss_on_is_refused(gold_run, setting):
    with pytest.raises(UserError, match=setting):
        check_config(gold_run.config(setting), "pretrain")
