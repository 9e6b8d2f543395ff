"""Tokenizers with chat templates of every kind that checkpoints bring."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["The cat sat on the mat.", "user system assistant Hello Paris is the capital of France."] * 10

# Adds a system prompt of its own; no generation markers; a newline follows the end of a turn (SmolLM2, Qwen).
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Strips text, requires alternating roles, begins with BOS, has no generation prompt (Llama 2).
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Ends a turn with a token that is not the tokenizer's end token, and has no system role (Gemma).
TURNS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)
# Drops the thoughts of every turn but the last (Qwen 3).
THOUGHTS = (
    "{% for message in messages %}{% set text = message['content'] if loop.last else message['content'].split('</t>')[-1] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes empty thoughts before an answer that has none, and the system text before the last request only (Qwen 3; Mistral v0.3).
EMPTY = (
    "{% set told = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|im_start|>user\n' + (told if loop.last else '') + m['content'] + '<|im_end|>\n' }}{% elif m['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + ('' if m['content'].startswith('<t>') else '<t></t>\n\n') + m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes no end token at all.
OPEN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)

# template, special tokens (pad = eos, the second; the first begins), model
KINDS: dict[str, tuple[str, list[str], str]] = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "bytes"),
    "inst": (INST, ["<s>", "</s>"], "bytes"),
    "inst-metaspace": (INST, ["<s>", "</s>"], "metaspace"),
    "turns": (TURNS, ["<bos>", "<eos>", "<start>", "<end_of_turn>"], "bytes"),
    "thoughts": (THOUGHTS, ["<|im_start|>", "<|im_end|>"], "bytes"),
    "open": (OPEN, ["<s>", "</s>"], "bytes"),
}


@cache
def make_tokenizer(kind: str) -> Any:
    """One whose pad token is its end token and which adds BOS by itself."""
    template, special, model = {**KINDS, "empty": (EMPTY, KINDS["chatml"][1], "bytes")}[
        kind
    ]  # whose answers are not its text alone
    backend = Tokenizer(models.BPE(byte_fallback=model == "metaspace"))
    alphabet = []
    if model == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(i) for i in range(32, 127)] + ["\n"]
    more = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, **more))
    backend.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    ids = {
        "bos_token": special[0], "eos_token": special[1], "pad_token": special[1], "extra_special_tokens": special[2:],
    }  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **ids)
