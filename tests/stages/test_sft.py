import contextlib
import re

import pytest
import torch
import transformers

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.corpus import PackedCorpus
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.model.fused_loss import NextToken
from rlhf.ppo.experience import load_ppo_prompts
from rlhf.runs.folders import read_stage
from rlhf.runs.metric_table import Sums
from rlhf.stages import sft
from rlhf.training.engine import make_engine
from rlhf.training.setup import load_policy
from tests.oracles import row_logprobs

STILL = ["sft.lr=1e-12", "sft.dropout=0", "sft.epochs=1"]  # the weights stay those of the base


def test_rows_have_at_most_max_tokens_and_what_was_cut_is_counted(copy_until, capsys):
    """Of SFT and PPO's prompts; a demonstration has about 30 tokens."""
    run = copy_until("sft")
    counts = read_stage(run.stage("sft", "data.max_tokens=20", *STILL))["counts"]
    said = capsys.readouterr().out
    assert counts["truncated_responses"] > 0 and "at most 20 tokens" in said
    assert re.search(r"sft: takes about \d+ s for \d+ steps, by .* s of a forward and backward of ", said)
    tokenizer = run.tokenizer()
    prompts, _ = load_ppo_prompts(run.config("data.max_tokens=20", "rollout.max_new_tokens=8"), tokenizer, print)
    assert 10 < max(len(ids) for _, ids in prompts) <= 12 and "cut from the left" in capsys.readouterr().out


def test_the_loss_counts_response_tokens_and_their_end_token_alone(copy_until):
    """Logged once over five steps of unequal size, the last of 40 rows after four of 90, it is what the base model says of each
    demonstration by itself: prompts and other steps' sizes do not count.
    """
    run = copy_until("sft")
    run.stage("sft", *STILL, "sft.batch_size=90", "sft.micro_batch_size=30", "tracking.log_every=5")
    [(_, logged)] = run.values("sft", "sft/loss")
    base, tokenizer = run.policy("pretrain"), run.tokenizer("pretrain")
    nats, count = 0.0, 0
    for record in run.demonstrations():
        if record.split != "train":
            continue
        prompt, response = encode_prompt(tokenizer, record.prompt), encode_response(tokenizer, record.response)
        assert response[-1] == tokenizer.eos_token_id
        whole = {"prompt": prompt, "response": response}
        nats += nats_of(base, whole, len(prompt), len(prompt) + len(response))
        count += len(response)
    assert logged == pytest.approx(nats / count, abs=1e-4)


def test_packing_does_not_multiply_epochs(copy_until):
    """An epoch is one pass over the demonstrations, however many of them a row holds."""
    rows = [{"prompt": [1, 2, 3], "response": [4, 5, 6, 7, 8]}] * 64  # 8 tokens each
    packed = sft.make_rows(rows, 128, pack=True)
    assert sum(len(row["seq_lengths"]) for row in packed) == 64
    assert len(packed) == 4, "sixteen demonstrations in a row"
    assert all(row["labels"] == [-100, -100, -100, 4, 5, 6, 7, 8] * 16 for row in packed)
    text = [{"prompt": [], "response": [5, 6, 7, 8]}] * 2  # pretraining text: nothing comes before its first token
    assert [row["labels"] for row in sft.make_rows(text, 8, pack=True)] == [[-100, 6, 7, 8] * 2]


@pytest.mark.parametrize(
    ("kind", "leaks"), [("llama", False), ("gpt2", False), ("ours", False), ("opt", True), ("bloom", True)]
)
def test_packing_is_refused_if_a_demonstration_reads_the_one_before(gold_run, kind, leaks):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"ffn_dim": 32, "word_embed_proj_dim": 32} if kind == "opt" else {}
    torch.manual_seed(0)
    if kind == "ours":
        model = load_policy(gold_run.folder / "pretrain" / "model")
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    rows = [{"prompt": [5, 9, 7, 30], "response": [41, 42, 1]}, {"prompt": [8, 6], "response": [7, 1]}]
    refused = pytest.raises(UserError, match=f"^sft.pack=true: in a packed row a {kind} model reads")
    with refused if leaks else contextlib.nullcontext():
        sft.check_packing(model, rows, 0)


def loss_of(config, model, rows, count):
    made = sft.make_rows(rows, 128, config.sft.pack)
    engine = make_engine(config, NextToken(model), config.sft, torch.device("cpu"))
    objective = sft.make_objective(config, engine, 0)
    assert sum(map(objective.count, made)) == count
    with torch.no_grad():
        return objective.loss(made, count, Sums())[0].item()


def nats_of(model, row, first, last):
    """-sum of log P of tokens first to last - 1 of one row."""
    return -sum(row_logprobs(model, (row["prompt"] + row["response"])[:last], first))


@pytest.mark.parametrize("pack", ["false", "true"])
def test_the_prompt_counts_with_its_coefficient(gold_run, pack):
    """L2 + 0.5 L1 over the response tokens: 3 of the first row and 2 of the second; a row's first token is not predicted."""
    rows = [{"prompt": [5, 9, 7, 30], "response": [41, 42, 1]}, {"prompt": [8, 6], "response": [77, 1]}]
    model = load_policy(gold_run.folder / "pretrain" / "model")
    loss = loss_of(gold_run.config("sft.lm_coef=0.5", f"sft.pack={pack}"), model, rows, 5)
    response = nats_of(model, rows[0], 4, 7) + nats_of(model, rows[1], 2, 4)
    prompt = nats_of(model, rows[0], 1, 4) + nats_of(model, rows[1], 1, 2)
    assert loss == pytest.approx((response + 0.5 * prompt) / 5, abs=1e-4)


def test_earlier_answers_count_as_the_last_one_does(gold_run):
    """Tokens 2 and 3 of the first row, which an earlier turn gave, and the responses: 2 + 3 + 2 tokens. Held out, the same."""
    rows = [
        {"prompt": [5, 9, 7, 30, 8], "response": [41, 42, 1], "earlier": [0, 0, 1, 1, 0]},
        {"prompt": [8, 6], "response": [77, 1]},
    ]
    model = load_policy(gold_run.folder / "pretrain" / "model")
    spans = ((rows[0], 2, 4), (rows[0], 5, 8), (rows[1], 2, 4))
    wanted = sum(nats_of(model, *span) for span in spans) / 7
    assert loss_of(gold_run.config(), model, rows, 7) == pytest.approx(wanted, abs=1e-4)
    assert sft.response_loss(model, rows, 0) == pytest.approx(wanted, abs=1e-4)


def test_the_loss_is_trls_own(gold_run, tmp_path):
    import datasets
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": [5, 9, 7, 30], "response": [41, 42, 1]}, {"prompt": [8, 6], "response": [77, 1]}]
    folder = gold_run.folder / "pretrain" / "model"
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    made = [{name: row[name] for name in ("input_ids", "labels")} for row in sft.make_rows(rows, 128, False)]
    arguments = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, max_length=None)
    trainer = SFTTrainer(model, arguments, train_dataset=datasets.Dataset.from_list(made), processing_class=tokenizer)
    with torch.no_grad():
        theirs = trainer.compute_loss(model, trainer.data_collator(made), num_items_in_batch=torch.tensor(5)).item()
    assert loss_of(gold_run.config(), load_policy(folder), rows, 5) == pytest.approx(theirs, abs=1e-5)


def test_a_share_of_the_rows_is_pretraining_text(gold_run):
    """0.25 of the rows beside 30 demonstrations: 10 different blocks of the corpus, every token of which is a label."""
    folder = gold_run.folder / "pretrain"
    tokenizer = load_tokenizer(folder / "model")

    def drawn(*settings, share=0.25):
        config = gold_run.config(f"sft.pretrain_fraction={share}", *settings)
        return sft.draw_pretraining_rows(config, tokenizer, 30, 128)

    found = drawn()
    known = {tuple(block["input_ids"].tolist()) for block in PackedCorpus.load(folder / "corpus").blocks("train", 128)}
    assert len({tuple(row["response"]) for row in found} & known) == len(found) == 10
    made = sft.make_rows(found, 128, pack=False)
    assert all(row["labels"][1:] == row["input_ids"][1:] for row in made)
    assert drawn() == found != drawn("seed=1")
    with pytest.raises(UserError, match="lower it"):
        drawn(share=0.999)


def test_dropout_is_residual(copy_until):
    """The blocks' outputs lose a share; embeddings and attention probabilities lose nothing."""
    run = copy_until("sft")
    folder = run.folder / "pretrain" / "model"
    model = sft.load_with_dropout(run.config("sft.dropout=0.25"), folder, torch.device("cpu")).train()
    trunk, x = model.model, torch.ones(1, 4000, model.config.width)
    assert [block.dropout.p for block in trunk.layers] == [0.25] * 2
    share = (trunk.layers[0].dropout(x) == 0).float().mean().item()
    assert share == pytest.approx(0.25, abs=0.005)  # of 256,000: six standard errors
    assert trunk.dropout.p == 0.0 and all(block.attention.dropout == 0.0 for block in trunk.layers)
    assert model.config.dropout == 0.0, "what later stages load"
