"""Text classifiers of many architectures as reward models: what they read, that they learn, and what they carry."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf.data.records import Message, shown_prompt
from rlhf.errors import UserError
from rlhf.model.classifier import TextEncoder, TextRewardModel, load_reward_model
from rlhf.model.interface import score

from .classifiers import ARCHITECTURES, make_tokenizer, save_classifier, score_texts

CPU = torch.device("cpu")
NAMES = list(ARCHITECTURES)


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


DIALOGUE = [
    Message(role="system", content="good"), *user("snow"), Message(role="assistant", content="white"), *user("coal"),
]  # fmt: skip
PROMPTS = [user("what colour is blood ?"), user("colour ?"), user("what colour is the sky ? " * 3), DIALOGUE]
RESPONSES = ["red .", "", "blue blue blue .", "of course : black"]
ENDED = [True, False, True, False]


@pytest.fixture(params=NAMES)
def model(request, tmp_path) -> TextRewardModel:
    return TextRewardModel.from_base(save_classifier(tmp_path / "base", request.param))


def test_padding_order_and_dropout_change_no_score(model):
    together = score_texts(model, PROMPTS, RESPONSES, ENDED)
    assert together.shape == (4,) and together.dtype == torch.float32 and len(set(together.tolist())) == 4
    alone = [score_texts(model, [p], [r], [e])[0] for p, r, e in zip(PROMPTS, RESPONSES, ENDED, strict=True)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-6)
    turned = score_texts(model, PROMPTS[::-1], RESPONSES[::-1], ENDED[::-1])
    assert torch.allclose(turned.flip(0), together, atol=1e-6)
    model.train()
    inputs = model.collate([model.encoder.encode(p, r, e) for p, r, e in zip(PROMPTS, RESPONSES, ENDED, strict=True)])
    assert torch.allclose(model(**inputs), together, atol=1e-6), "every dropout is 0"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# DeBERTa's attention writes float32's least number into bfloat16, which transformers refuses; heads without bias
# cannot be moved.
@pytest.mark.parametrize("model", sorted({*NAMES} - {"deberta", "gpt2", "llama"}), indirect=True)
@torch.no_grad()
def test_scores_in_bfloat16_are_not_rounded(model):
    """A raw score near 40 in bfloat16 has steps of 1/4."""
    head = next(m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1)
    head.bias.add_(40.1)
    exact = score_texts(model, PROMPTS, RESPONSES, ENDED)
    with torch.autocast("cpu", torch.bfloat16):
        found = score_texts(model, PROMPTS, RESPONSES, ENDED)
    assert (found - exact).abs().max() < 0.05


def test_what_is_saved_comes_back_with_tokenizer_and_calibration(model, tmp_path):
    model.calibrate(gain=2.0, shift=0.25)
    raw = score_texts(model, PROMPTS, RESPONSES, ENDED, calibrated=False)
    scores = score_texts(model, PROMPTS, RESPONSES, ENDED)
    assert torch.allclose(scores, 2.0 * (raw - 0.25))
    model.save_pretrained(tmp_path / "kept")
    again = load_reward_model(tmp_path / "kept", CPU)
    assert isinstance(again, TextRewardModel) and (again.gain, again.shift) == (2.0, 0.25) and not again.training
    assert torch.equal(score_texts(again, PROMPTS, RESPONSES, ENDED), scores)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept").config.num_labels == 1, "by itself"


def test_what_is_too_long_loses_the_beginning_of_the_prompt(model):
    """The longest input is 40 tokens in each that counts positions (RoBERTa counts from after its pad id); XLNet counts none."""
    if model.encoder.limit == float("inf"):
        model.encoder.limit = 40
    assert model.encoder.limit == 40
    row = model.encoder.encode(user("coal " * 100), "red")
    assert len(row) == 40
    assert torch.isfinite(score(model, [row])).all()
    whole, open_end = (model.encoder.encode(PROMPTS[0], "red", e).ids for e in (True, False))
    seen = not model.network.config.is_encoder_decoder  # which reads the score at the end, and so closes every row
    assert len(whole) == len(open_end) + seen, "whether the author ended is seen"
    model.encoder.limit = limit = 24
    tokenizer = model.tokenizer
    row = model.encoder.encode(user("coal " + "what colour is the sky ? " * 20 + "snow dog"), "red white")
    text = tokenizer.decode(row.ids)
    assert len(row) == limit and "snow dog" in text and "red white" in text and "coal" not in text
    full = model.encoder.encode(user("dog"), "red")
    kept = [i for i in full.ids if i in set(tokenizer.all_special_ids)]
    assert [i for i in row.ids if i in set(tokenizer.all_special_ids)] == kept, "every special token stays"
    long = model.encoder.encode(user("what colour is the sky ? snow"), "red " * 60 + "white")
    assert len(long) == limit and "snow" in tokenizer.decode(long.ids)
    assert "white" not in tokenizer.decode(long.ids), "the response loses its end"
    assert long.ids.count(kept[-1]) <= kept.count(kept[-1])
    assert torch.isfinite(score(model, [row, long])).all()


def test_forms_of_input():
    cls, none = make_tokenizer("cls"), make_tokenizer("none")
    row = TextEncoder(cls).encode(PROMPTS[0], "red .")
    assert " ".join(cls.convert_ids_to_tokens(row.ids)) == "[CLS] what colour is blood ? [SEP] red . [SEP]"
    assert row.types == [0] * 7 + [1] * 3
    row = TextEncoder(none).encode(PROMPTS[0], "red .")
    assert none.decode(row.ids).startswith("<unk> : what colour is blood ?") and row.ids[-1] == none.eos_token_id
    assert shown_prompt(PROMPTS[0]) == "what colour is blood ?"
    assert shown_prompt(DIALOGUE) == "System: good\n\nUser: snow\n\nAssistant: white\n\nUser: coal"


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = make_tokenizer("cls")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{{ m['role'] + ' : ' + m['content'] + ' [SEP] ' }}{% endfor %}"
    )
    encoder = TextEncoder(tokenizer)
    row = encoder.encode(PROMPTS[0], "red .")
    tokens = tokenizer.convert_ids_to_tokens(row.ids)
    assert " ".join(tokens) == "user : what colour is blood ? [SEP] assistant : red . [SEP]"
    assert row.ids[:-1] == encoder.encode(PROMPTS[0], "red .", ended=False).ids
    assert row.types == [0] * len(row.ids)
    # cut off in a word that the template itself writes later on, or that the prompt spells as a special token
    tokenizer.chat_template = tokenizer.chat_template.replace("[SEP] ", "[SEP] of course ")
    row = TextEncoder(tokenizer).encode(user("a [SEP] dog"), "of course", ended=False)
    told = " ".join(tokenizer.convert_ids_to_tokens(row.ids))
    assert told.startswith("user : a") and told.endswith("dog [SEP] of course assistant : of course")
    assert row.ids.count(tokenizer.sep_token_id) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace("[SEP] of course ", "[SEP] ")
    # a system turn that the template refuses goes before the first user turn
    told = " ".join(tokenizer.convert_ids_to_tokens(encoder.encode(DIALOGUE, "black").ids))
    assert told == "user : good snow [SEP] assistant : white [SEP] user : coal [SEP] assistant : black [SEP]"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match=r"chat template refuses a dialogue .*never"):
        TextEncoder(tokenizer).encode(PROMPTS[0], "red")


@pytest.mark.parametrize("frame", ["cls", "double", "none"])
def test_text_that_spells_a_special_token_stays_text(frame):
    tokenizer = make_tokenizer(frame)
    encoder = TextEncoder(tokenizer)
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    plain = [i for i in encoder.encode(user("dog"), "cat").ids if i in special]
    for token in tokenizer.all_special_tokens:
        row = encoder.encode(user(f"dog {token} dog"), f"cat {token}{token} cat")
        assert [i for i in row.ids if i in special] == plain, token


def test_a_classifier_of_others_scores_as_it_is_and_a_head_for_other_labels_is_replaced_or_refused(tmp_path):
    source = save_classifier(tmp_path / "theirs", "bert")
    found = load_reward_model(source, CPU)
    assert isinstance(found, TextRewardModel) and (found.gain, found.shift) == (1.0, 0.0)
    theirs = AutoModelForSequenceClassification.from_pretrained(source).eval()
    inputs = found.tokenizer("what colour is blood ?", "red .", return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(**inputs).logits[0, 0]
    assert score_texts(found, [PROMPTS[0]], ["red ."], [True])[0] == pytest.approx(wanted.item(), abs=1e-6)
    source = save_classifier(tmp_path / "theirs", "bert", num_labels=3)
    assert score_texts(TextRewardModel.from_base(source), [PROMPTS[0]], ["red"], [True]).shape == (1,)
    with pytest.raises(UserError, match="a bert with 3 labels is no reward model"):
        load_reward_model(source, CPU)
