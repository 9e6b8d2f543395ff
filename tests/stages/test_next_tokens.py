"""`rlhf next` on the small gold run: its lines against a forward of the model, and what it refuses."""

import pytest
import torch

from rlhf.commands.next_tokens import document_tokens, likeliest, run, show
from rlhf.data.tokenizer import encode_text, load_tokenizer
from rlhf.training.setup import load_policy

TEXT = "The colour of <|end|> the"


def test_the_likeliest_tokens_are_the_models(gold_run, capsys):
    folder = gold_run.folder / "pretrain" / "model"
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    row = [end, *encode_text(tokenizer, TEXT)]
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in row, "what the text spells stays text"
    wanted = torch.softmax(model(torch.tensor([row])).logits[0, -1].double(), -1)
    tokens = document_tokens(tokenizer, TEXT, tokenizer.model_max_length)
    found = likeliest(model, tokens, 5)
    assert [token for token, _ in found] == wanted.topk(5).indices.tolist()
    assert [p for _, p in found] == pytest.approx(wanted.topk(5).values.tolist(), abs=1e-6)
    assert sum(p for _, p in likeliest(model, tokens, 10**6)) == pytest.approx(1, abs=1e-5)

    run(gold_run.config(f"next.text='{TEXT}'", "next.count=5"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{p:.4f}" for _, p in found]
    assert lines[-1].split()[1] == f"{sum(p for _, p in found):.3f}"
    assert lines[0].endswith(show(tokenizer, found[0][0]))
    assert show(tokenizer, end) == "<|endoftext|>" and show(tokenizer, encode_text(tokenizer, " the")[0]) == "' the'"
