import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.chat_template import decode_response, encode_prompt, encode_response
from rlhf.data.tokenizer import (
    END,
    ROLES,
    SPECIAL_TOKENS,
    encode_texts,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
    train_tokenizer,
)
from rlhf.errors import UserError

TEXT = ["The cat sat on the mat.", "What is the capital of France? Paris is the capital of France."] * 20
TOKENIZER = train_tokenizer(TEXT, 290, context_length=16)

# Any text that UTF-8 can hold, with the spellings of special tokens mixed in.
texts = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(SPECIAL_TOKENS)), max_size=5
).map("".join)


@given(texts)
def test_any_text_survives_and_gives_no_special_token(text):
    ids = encode_texts(TOKENIZER, [text])[0]
    assert not set(ids) & set(range(6))
    assert TOKENIZER.backend_tokenizer.decode(ids) == text
    assert decode_response(TOKENIZER, encode_response(TOKENIZER, text)) == text


def unbroken(characters: int) -> str:
    return "".join(random.Random(0).choices("abcdefghijklmnop", k=characters))


def test_text_without_spaces_takes_time_in_proportion():
    train_tokenizer([unbroken(1000)], 300, context_length=8)  # what the first call costs
    seconds = []
    for characters in (50_000, 200_000):
        began = time.process_time()
        tokenizer = train_tokenizer([unbroken(characters)], 300, context_length=8)
        seconds.append(time.process_time() - began)
    assert len(tokenizer) == 300
    assert seconds[1] < 9 * seconds[0]  # 4 times as much text; without a bound it takes 16 times as long


def test_a_signal_ends_training_at_once(tmp_path):
    (tmp_path / "text").write_text(unbroken(2_000_000))
    program = """
import sys
from rlhf.system.exits import interrupt_on_signals
from rlhf.data.tokenizer import train_tokenizer

def documents():
    yield open(sys.argv[1]).read()
    print("read", flush=True)

interrupt_on_signals()
train_tokenizer(documents(), 60_000, context_length=8)
print("trained", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "text")], stdout=-1, stderr=-1, text=True)
    assert child.stdout.readline() == "read\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=20)
    assert out == "" and err.rstrip().endswith("KeyboardInterrupt")


def test_a_prompt_is_built_part_by_part():
    cat, mat = encode_texts(TOKENIZER, ["The cat"])[0], encode_texts(TOKENIZER, ["mat"])[0]
    messages = [{"role": "system", "content": "The cat"}, {"role": "user", "content": "mat"}]
    assert encode_prompt(TOKENIZER, messages) == [2, *cat, 5, 3, *mat, 5, 4]
    assert encode_prompt(TOKENIZER, "mat") == [3, *mat, 5, 4]
    assert encode_response(TOKENIZER, "mat") == [*mat, 5]
    assert encode_response(TOKENIZER, "mat", ended=False) == mat


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is\n the capital?"}, {"role": "assistant", "content": "Paris. \n"},
    {"role": "user", "content": "And the cat?"}, {"role": "assistant", "content": " On the mat."},
]  # fmt: skip


def test_a_response_is_decoded_up_to_its_first_end_token():
    ids = [*encode_texts(TOKENIZER, ["mat"])[0], 5, *encode_texts(TOKENIZER, ["cat"])[0], 5, 0, 0]
    assert decode_response(TOKENIZER, ids) == "mat"
    assert decode_response(TOKENIZER, [3, *encode_texts(TOKENIZER, ["mat"])[0]]) == "mat"
    assert decode_response(TOKENIZER, []) == ""
    assert decode_response(TOKENIZER, encode_texts(TOKENIZER, ["é"])[0][:1]) == "�"


@given(texts)
def test_byte_lengths_add_up_to_the_bytes_of_the_text(text):
    lengths = token_byte_lengths(TOKENIZER)
    assert lengths[:6] == [0] * 6
    assert sum(lengths[i] for i in encode_texts(TOKENIZER, [text])[0]) == len(text.encode("utf-8"))


def test_a_saved_tokenizer_is_the_same_and_has_a_hash_of_vocabulary_and_template(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert encode_prompt(loaded, CHAT) == encode_prompt(TOKENIZER, CHAT)
    assert loaded.apply_chat_template(CHAT, return_dict=False) == TOKENIZER.apply_chat_template(CHAT, return_dict=False)
    assert loaded.decode(encode_texts(loaded, ["a cat , isn 't it ."])[0]) == "a cat , isn 't it ."
    assert loaded.clean_up_tokenization_spaces is False
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.model_max_length) == (0, 5, 16)
    assert tokenizer_hash(loaded) == tokenizer_hash(TOKENIZER)
    other = train_tokenizer(TEXT, 289, context_length=16)
    assert tokenizer_hash(other) != tokenizer_hash(TOKENIZER)
    again = train_tokenizer(TEXT, 290, context_length=16)
    again(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(again) == tokenizer_hash(TOKENIZER)
    again.chat_template += " "
    assert tokenizer_hash(again) != tokenizer_hash(TOKENIZER)


def test_a_foreign_tokenizer_without_the_chat_tokens_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match=r"has no chat template: adopt it with model.pretrained"):
        encode_prompt(bare, "hi")
    assert token_byte_lengths(bare) is None


def test_threads_encode_text_and_rendered_text_at_once():
    text, rendered = f"a{END}b" * 500, f"{ROLES['user']}Hi{END}"
    as_text, with_tokens = encode_texts(TOKENIZER, [text])[0], encode_texts(TOKENIZER, [rendered], special=True)
    stop, wrong = threading.Event(), []

    def encode() -> None:
        while not stop.is_set():
            if encode_texts(TOKENIZER, [text])[0] != as_text:
                wrong.append("text")

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        if encode_texts(TOKENIZER, [rendered], special=True) != with_tokens:
            wrong.append("rendered")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and encode_texts(TOKENIZER, [rendered], special=True) == with_tokens


def test_the_byte_pair_example_of_the_textbooks():
    """low 5, lower 2, newest 6, widest 3: ten merges make es, est, lo, low, new, newest, widest; ties are merged in another order."""
    counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    tokenizer = train_tokenizer([word for word, n in counts.items() for _ in range(n)], 256 + 6 + 10, context_length=8)
    learned = {token for token, number in tokenizer.get_vocab().items() if number >= 256 + 6}
    assert len(learned) == 10 and {"es", "est", "lo", "low", "new", "newest", "widest"} <= learned
    assert tokenizer.tokenize("lowest") == ["low", "est"], "which it has not seen"
