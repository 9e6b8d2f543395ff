"""SFT: which tokens its loss counts."""

import pytest
import torch

from rlhf.chat_template import encode_prompt, encode_response
from rlhf.data.demonstrations import load_demonstrations
from rlhf.tokenizer import load_tokenizer
from rlhf.tracking.writers import read_jsonl
from rlhf.training.setup import load_policy


def test_the_loss_counts_response_tokens_and_their_end_token_alone(copy_until, gold_run):
    """The first step's loss is that of the base model, which the sum over each demonstration by itself gives too."""
    run = copy_until("sft")
    folder = run.stage("sft", "sft.epochs=1", "sft.batch_size=1000", "sft.dropout=0")
    (logged,) = [row["sft/loss"] for row in read_jsonl(folder / "metrics.jsonl") if "sft/loss" in row]

    base = load_policy(gold_run.folder / "pretrain" / "model").eval()
    tokenizer = load_tokenizer(gold_run.folder / "pretrain" / "model")
    records, _ = load_demonstrations(str(gold_run.folder / "world" / "demonstrations.jsonl"))
    nats, count = 0.0, 0
    for record in records:
        if record.split != "train":
            continue
        prompt, response = (
            encode_prompt(tokenizer, record.prompt),
            encode_response(tokenizer, record.response, ended=True),
        )
        assert response[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logp = base(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for t in range(len(prompt), len(prompt) + len(response)):
            nats -= logp[t - 1, (prompt + response)[t]].item()
        count += len(response)
    assert logged == pytest.approx(nats / count, abs=1e-3)
