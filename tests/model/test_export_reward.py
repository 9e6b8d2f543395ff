"""Reward models as transformers' sequence classifiers: the same scores on padded batches, loaded by transformers alone."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.records import Message
from rlhf.data.tokenizer import train_tokenizer
from rlhf.errors import UserError
from rlhf.model import RewardModel
from rlhf.model.architectures import ARCHITECTURES
from rlhf.model.classifier import TextRewardModel
from rlhf.model.convert import export_reward, make_native_config
from rlhf.model.gpt import GPTForCausalLM

from ..presets import preset
from .chats import make_tokenizer
from .classifiers import save_classifier, score_texts
from .test_generate import KINDS

LLAMA_LIKE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA_LIKE["max_position_embeddings"] = 64
SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    **{name: LLAMA_LIKE for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")},
}
GROUPED = ("llama", "mistral", "qwen2", "qwen3")
TEXTS = [("red?", "of course"), ("what colour is the sky, and why is that so?", "blue"), ("a", "b " * 9)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["what colour is the sky? blue, of course. " * 20], 290, context_length=64)


def reward_model(name: str, tokenizer: PreTrainedTokenizerFast, native: bool = True) -> RewardModel:
    torch.manual_seed(1)
    architecture, sizes = ARCHITECTURES[name], SIZES[name]
    more = {"num_key_value_heads": 2} if name in GROUPED else {}
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    config = architecture.config_class(vocab_size=len(tokenizer), **sizes, **more, **ids)
    policy = GPTForCausalLM(make_native_config(config)) if native else architecture.model_class(config)
    model = RewardModel.from_causal_lm(policy)
    with torch.no_grad():
        model.head.bias.fill_(0.7)
    model.calibrate(gain=3.0, shift=-1.4)
    return model


def our_scores(model: RewardModel, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    rows = [encode_prompt(tokenizer, prompt) + encode_response(tokenizer, answer) for prompt, answer in TEXTS]
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row]), torch.tensor([len(row)])) for row in rows])


def their_scores(folder: str) -> torch.Tensor:
    """As others use it: the chat template, a padded batch, one logit."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": a}] for p, a in TEXTS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel(), "rows of unequal length"
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]


@pytest.mark.parametrize("kind", ["chatml", "inst", "thoughts"])
def test_a_dialogue_rendered_with_the_exported_template_ends_where_the_score_is_read(kind, tmp_path):
    """Templates write a newline after the last turn's end token (SmolLM2, Qwen), where no reward model of ours reads."""
    tokenizer = make_tokenizer(kind)
    model = reward_model("llama", tokenizer)
    told = export_reward(model, tokenizer, tmp_path)
    assert torch.allclose(their_scores(str(tmp_path)) + told.offset, our_scores(model, tokenizer), atol=1e-4)


@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize("name", SIZES)
def test_plain_transformers_gives_the_same_scores(name, native, tokenizer, tmp_path):
    model = reward_model(name, tokenizer, native)
    told = export_reward(model, tokenizer, tmp_path)
    expected = our_scores(model, tokenizer)
    assert expected.std() > 0.1
    assert torch.allclose(their_scores(str(tmp_path)) + told.offset, expected, atol=1e-4)
    own_norm = native and name in ("gpt2", "openai-gpt", "gpt_neox")
    assert told.offset == (0.0 if own_norm else pytest.approx(3.0 * (0.7 + 1.4), abs=1e-5))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path).config
    assert saved.score_offset == told.offset and told.class_name in saved.architectures
    assert model.gain == 3.0 and torch.allclose(our_scores(model, tokenizer), expected), "the model is left as it was"


def test_a_pad_token_that_is_the_end_token_gets_a_place_of_its_own(tokenizer, tmp_path):
    """Else transformers' classes would read the token before the end."""
    model = reward_model("llama", tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    same = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    same.pad_token = same.eos_token
    told = export_reward(model, same, tmp_path / "out")
    assert same.pad_token == same.eos_token
    theirs = their_scores(str(tmp_path / "out")) + told.offset
    assert torch.allclose(theirs, our_scores(model, tokenizer), atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
def test_a_text_classifier_exports_with_its_calibration(name, tmp_path):
    model = TextRewardModel.from_base(save_classifier(tmp_path / "base", name)).eval()
    model.calibrate(gain=2.0, shift=0.5)
    told = export_reward(model, None, tmp_path / "out")
    loaded = TextRewardModel.from_pretrained(tmp_path / "out")
    asked = ([[{"role": "user", "content": "what colour is snow ?"}]] * 2, ["white .", "a dog"], [True, True])
    prompts = [[Message(**turn) for turn in prompt] for prompt in asked[0]]
    ours = score_texts(model, prompts, *asked[1:])
    theirs = score_texts(loaded, prompts, *asked[1:])
    assert loaded.gain == 1.0 and torch.allclose(theirs + told.offset, ours, atol=1e-4)
    assert told.offset == (pytest.approx(-1.0) if name == "llama" else 0.0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sinusoidal", "expresses this reward model's trunk: positions is 'sinusoidal'"),
        ("one_norm", "has no sequence classifier of a cohere"),
    ],
)
def test_a_trunk_without_a_public_classifier_is_refused_in_one_line(kind, why, tokenizer, tmp_path):
    policy = GPTForCausalLM(preset("tiny", vocab_size=len(tokenizer), n_layer=2, n_head=4, width=32, **KINDS[kind]))
    with pytest.raises(UserError, match=f"^export: .*{why}") as refused:
        export_reward(RewardModel.from_causal_lm(policy), tokenizer, tmp_path / "out")
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
