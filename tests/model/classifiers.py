"""Small random classifiers of many architectures, each with a tokenizer of the form that its kind has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.model.interface import score

WORDS = "what colour is blood snow coal the sky a dog cat red white black blue good bad of course user assistant system . ? :"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PLACES = {"max_position_embeddings": 40}

# architecture: (model class, settings, how its tokenizer frames two texts)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForSequenceClassification", SMALL | PLACES, "cls"),
    "roberta": ("RobertaForSequenceClassification", SMALL | PLACES | {"type_vocab_size": 1}, "double"),
    "albert": ("AlbertForSequenceClassification", SMALL | PLACES | {"embedding_size": 16}, "cls"),
    "electra": ("ElectraForSequenceClassification", SMALL | PLACES | {"embedding_size": 16}, "cls"),
    "deberta": ("DebertaForSequenceClassification",
                SMALL | PLACES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "cls"),
    "deberta-v2": ("DebertaV2ForSequenceClassification",
                   SMALL | PLACES | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "cls"),
    "distilbert": ("DistilBertForSequenceClassification",
                   {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32} | PLACES, "cls"),
    "xlnet": ("XLNetForSequenceClassification", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}, "cls"),
    "big_bird": ("BigBirdForSequenceClassification", SMALL | PLACES | {"attention_type": "original_full"}, "cls"),
    "t5": ("T5ForConditionalGeneration",
           {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "n_positions": 40, "decoder_start_token_id": 0}, "ends"),
    "bart": ("BartForConditionalGeneration",
             {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32} | PLACES, "double"),
    "gpt2": ("GPT2ForSequenceClassification", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}, "none"),
    "llama": ("LlamaForSequenceClassification", SMALL | PLACES, "none"),
}  # fmt: skip


def make_tokenizer(frame: str, text: Sequence[str] = (WORDS,)) -> PreTrainedTokenizerFast:
    """A word tokenizer trained here that frames texts as BERT (cls), RoBERTa (double), T5 (ends) or GPT-2 do."""
    names = {
        "cls": {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
        "double": {"pad_token": "<pad>", "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
                   "unk_token": "<unk>"},
        "ends": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        "none": {"eos_token": "<|endoftext|>", "unk_token": "<unk>"},
    }[frame]  # fmt: skip
    backend = Tokenizer(models.WordLevel(unk_token=names["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = list(dict.fromkeys(names.values()))
    backend.train_from_iterator(text, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    forms = {
        "cls": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "double": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "ends": ("$A </s>", "$A </s> $B </s>"),
    }
    if frame in forms:
        single, pair = forms[frame]
        ids = [(token, backend.token_to_id(token)) for token in special]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_classifier(folder: Path, name: str, *, text: Sequence[str] = (WORDS,), seed: int = 0, **more: Any) -> str:
    """Write a random classifier with its tokenizer, as one would find it on a hub; returns its folder."""
    class_name, settings, frame = ARCHITECTURES[name]
    tokenizer = make_tokenizer(frame, text)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos", "sep")}
    model_class = getattr(transformers, class_name)
    places = {"max_position_embeddings": 40 + tokenizer.pad_token_id + 1} if name == "roberta" else {}
    config = model_class.config_class(vocab_size=len(tokenizer), **(settings | ids | places | more))
    if "Classification" in class_name and "num_labels" not in more:
        config.num_labels = 1
    torch.manual_seed(seed)
    model_class(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def score_texts(model: Any, prompts: Any, responses: Any, ended: Any, calibrated: bool = True) -> torch.Tensor:
    """A text reward model's scores (B,) of responses."""
    return score(
        model, [model.encoder.encode(*x) for x in zip(prompts, responses, ended, strict=True)], calibrated=calibrated
    )
