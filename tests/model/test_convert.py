"""Conversion both ways, and reward models as the sequence classifiers of transformers."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.records import Message
from rlhf.data.tokenizer import train_tokenizer
from rlhf.errors import UserError
from rlhf.model import GPTConfig, GPTForCausalLM, RewardModel
from rlhf.model.architectures import ARCHITECTURES, why_not_native
from rlhf.model.classifier import TextRewardModel
from rlhf.model.convert import (
    export,
    export_reward,
    find_form,
    from_transformers,
    make_native_config,
    misfits,
    to_transformers,
    why_own,
)
from tests.model.checkpoints import CHECKPOINTS, VOCAB, make_checkpoint

from ..presets import preset
from .chats import make_tokenizer
from .classifiers import save_classifier, score_texts
from .test_generate import KINDS

OUR_SIZES = {"vocab_size": VOCAB, "context_length": 24, "n_layer": 2, "n_head": 4, "width": 32}
TOKENS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def make_ours(**kind) -> GPTForCausalLM:
    ids = {"pad_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(5)
    model = GPTForCausalLM(GPTConfig(**{**OUR_SIZES, **kind}, **ids))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


LLAMA_KIND = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
NEOX_KIND = {"positions": "rotary", "block": "parallel", "mlp": "gelu_erf", "rotary_share": 0.5}
OURS = {
    "gpt2": {}, "openai-gpt": {"block": "post"}, "llama": LLAMA_KIND, "mistral": LLAMA_KIND,
    "qwen2": {**LLAMA_KIND, "qkv_bias": True}, "qwen3": {**LLAMA_KIND, "qk_norm": True, "head_dim": 12},
    "cohere": {**LLAMA_KIND, "norm": "layernorm", "block": "one_norm", "n_kv_head": 1, "head_dim": 12},
    "gpt_neox": NEOX_KIND,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_there_and_back(name):
    theirs = make_checkpoint(name)
    ours = from_transformers(theirs)
    form = find_form(ours.config)
    assert form == theirs.config.model_type
    again = to_transformers(ours, form)
    assert type(again) is type(theirs)
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert torch.allclose(again(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    before, after = theirs.config.to_dict(), again.config.to_dict()
    assert {n: v for n, v in after.items() if before[n] != v} == {}  # nothing that the checkpoint says is lost
    for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "eos_token_id"):
        assert getattr(theirs.config, name) == getattr(ours.config, name)
    next(again.parameters()).add_(1.0)  # a copy: the original does not move
    assert torch.equal(next(ours.parameters()), next(from_transformers(theirs).parameters()))


@torch.no_grad()
def test_llama_3_positions_are_transformers_past_the_original_context():
    theirs = make_checkpoint("llama3").double()
    ours = from_transformers(theirs)
    for layer in [theirs.model, *theirs.model.layers]:  # their norms compute in float32
        for name, norm in list(layer.named_children()):
            if "norm" in name:
                exact = torch.nn.RMSNorm(32, norm.variance_epsilon, dtype=torch.float64)
                exact.weight = norm.weight
                setattr(layer, name, exact)
    tokens = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    assert (ours(tokens).logits - theirs(tokens).logits).abs().max() < 1e-12
    unscaled = from_transformers(theirs)
    unscaled.config.rotary_scaling = None
    difference = (unscaled(tokens).logits - theirs(tokens).logits).abs().amax((0, 2))
    assert difference[16:].min() > 1e-3  # 16 tokens are the original context
    assert "rotary_scaling is set, unlike cohere" in misfits(ours.config, "cohere")


@torch.no_grad()
@pytest.mark.parametrize("form", OURS)
def test_ours_untied_and_in_bfloat16(form):
    assert set(OURS) == set(ARCHITECTURES)
    ours = make_ours(tie_word_embeddings=False, **OURS[form])
    theirs = to_transformers(ours, form)
    assert theirs.get_output_embeddings().weight.data_ptr() != theirs.get_input_embeddings().weight.data_ptr()
    assert torch.allclose(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert to_transformers(ours.to(torch.bfloat16), form).dtype == torch.bfloat16


def test_a_window_limits_the_context_and_comes_back():
    theirs = make_checkpoint("mistral", sliding_window=20)
    ours = from_transformers(theirs)
    assert (theirs.config.max_position_embeddings, ours.config.context_length) == (48, 20)
    tokens = torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():  # within the window both see the same, one token further they do not
        difference = (ours(tokens).logits - theirs(tokens).logits).abs().amax((0, 2))
    assert difference[:20].max() < 1e-5 and difference[20] > 1e-3
    again = to_transformers(ours, "mistral").config
    assert (again.sliding_window, again.max_position_embeddings) == (20, 48)
    layers = {"use_sliding_window": True, "sliding_window": 20}
    assert make_native_config(make_checkpoint("qwen2", **layers, max_window_layers=1).config).context_length == 20
    assert make_native_config(make_checkpoint("qwen2", **layers, max_window_layers=2).config).context_length == 48


def test_what_has_no_form_is_refused():
    for name, overrides, said in (
        ("gpt2", {"activation_function": "relu"}, "'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True, wanted False"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e2}}, "rope_type is 'linear'"),
    ):  # fmt: skip
        assert said in "; ".join(why_not_native(make_checkpoint(name, **overrides).config))
    for kind, form, said in (
        (LLAMA_KIND, "gpt2", "positions is 'rotary'"),
        (LLAMA_KIND, "gpt2", "bias is False"),
        ({"n_kv_head": 2}, "gpt2", "n_kv_head is 2"),
        ({**LLAMA_KIND, "qk_norm": True}, "llama", "qk_norm is True"),
    ):
        assert said in "; ".join(misfits(make_ours(**kind).config, form))
    assert find_form(make_ours(**LLAMA_KIND, block="post").config) == "rlhf"
    for kind, why in (
        ({"window": 4}, "window is 4"),
        ({"positions": "sinusoidal", "block": "post"}, "positions is 'sinusoidal'"),
    ):
        config = GPTConfig(**{**OUR_SIZES, **kind})
        assert find_form(config) == "rlhf" and why in why_own(config)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["what colour is the sky? blue, of course. " * 20], 290, context_length=64)


def test_export_in_the_form_that_came_in_or_our_own(tokenizer, tmp_path):
    assert export(from_transformers(make_checkpoint("mistral")), tokenizer, tmp_path / "in") == "mistral"
    assert json.loads((tmp_path / "in" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert export(make_ours(window=4), tokenizer, tmp_path / "own") == "rlhf"
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "rlhf_gpt" and "auto_map" not in config and not list(tmp_path.rglob("*.py"))
    assert config["eos_token_id"] == tokenizer.eos_token_id and (tmp_path / "own" / "chat_template.jinja").exists()
    assert export(make_checkpoint("gpt2"), tokenizer, tmp_path / "theirs") == "gpt2"


LLAMA_LIKE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA_LIKE["max_position_embeddings"] = 64
SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    **{name: LLAMA_LIKE for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")},
}
GROUPED = ("llama", "mistral", "qwen2", "qwen3")
TEXTS = [("red?", "of course"), ("what colour is the sky, and why is that so?", "blue"), ("a", "b " * 9)]


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
    _, offset = export_reward(model, tokenizer, tmp_path)
    assert torch.allclose(their_scores(str(tmp_path)) + offset, our_scores(model, tokenizer), atol=1e-4)


@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize("name", SIZES)
def test_plain_transformers_gives_the_same_scores(name, native, tokenizer, tmp_path):
    model = reward_model(name, tokenizer, native)
    class_name, offset = export_reward(model, tokenizer, tmp_path)
    expected = our_scores(model, tokenizer)
    assert expected.std() > 0.1
    assert torch.allclose(their_scores(str(tmp_path)) + offset, expected, atol=1e-4)
    assert offset == pytest.approx(3.0 * (0.7 + 1.4), abs=1e-5)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path).config
    assert saved.score_offset == offset and class_name in saved.architectures
    assert model.gain == 3.0 and torch.allclose(our_scores(model, tokenizer), expected), "the model is left as it was"


def test_a_pad_token_that_is_the_end_token_gets_a_place_of_its_own(tokenizer, tmp_path):
    """Else transformers' classes would read the token before the end."""
    model = reward_model("llama", tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    same = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    same.pad_token = same.eos_token
    _, offset = export_reward(model, same, tmp_path / "out")
    assert same.pad_token == same.eos_token
    theirs = their_scores(str(tmp_path / "out")) + offset
    assert torch.allclose(theirs, our_scores(model, tokenizer), atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
def test_a_text_classifier_exports_with_its_calibration(name, tmp_path):
    model = TextRewardModel.from_base(save_classifier(tmp_path / "base", name)).eval()
    model.calibrate(gain=2.0, shift=0.5)
    _, offset = export_reward(model, None, tmp_path / "out")
    loaded = TextRewardModel.from_pretrained(tmp_path / "out")
    asked = ([[{"role": "user", "content": "what colour is snow ?"}]] * 2, ["white .", "a dog"], [True, True])
    prompts = [[Message(**turn) for turn in prompt] for prompt in asked[0]]
    ours = score_texts(model, prompts, *asked[1:])
    theirs = score_texts(loaded, prompts, *asked[1:])
    assert loaded.gain == 1.0 and torch.allclose(theirs + offset, ours, atol=1e-4)
    assert offset == (pytest.approx(-1.0) if name == "llama" else 0.0)


@pytest.mark.parametrize(("kind", "why"), [
    ("sinusoidal", "expresses this model: positions is 'sinusoidal'"),
    ("one_norm", "has no sequence classifier of a cohere"),
])  # fmt: skip
def test_a_trunk_without_a_public_classifier_is_refused_in_one_line(kind, why, tokenizer, tmp_path):
    policy = GPTForCausalLM(preset("tiny", vocab_size=len(tokenizer), n_layer=2, n_head=4, width=32, **KINDS[kind]))
    with pytest.raises(UserError, match=f"^export: .*{why}") as refused:
        export_reward(RewardModel.from_causal_lm(policy), tokenizer, tmp_path / "out")
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
