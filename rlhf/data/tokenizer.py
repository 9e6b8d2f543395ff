"""The tokenizer: byte-level BPE trained on the pretraining text, or an adopted one; and ordinary text as ids."""

import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rlhf.errors import UserError, reading
from rlhf.system.files import check_regular
from rlhf.system.schemas import Schema, check_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
SEPARATOR = "<|endoftext|>"  # between documents; also bos
END = "<|end|>"  # of a turn; also eos
MASK = "<|mask|>"  # of an encoder's tokenizer only, where pretraining adds it
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [PAD, SEPARATOR, *ROLES.values(), END]  # ids 0..5 of a tokenizer trained here

_encoding = threading.Lock()  # a call changes the tokenizer's settings, and a server encodes in several threads
LONGEST_WORD = 512  # the longest run (bytes) of letters, digits, signs or spaces that training takes as one word

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% elif message['role'] in ['system', 'user'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ': want system, user, assistant') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, *, context_length: int, single_digits: bool = False
) -> "PreTrainedTokenizerFast":
    """Learn a byte-level BPE (GPT-2's pre-tokenisation) of `vocab_size` entries, special tokens included.

    The 256 bytes are always in the vocabulary, so every text can be encoded and decoded without loss. A small text may
    have fewer merges than requested. `context_length` (tokens) becomes `model_max_length`. With `single_digits` no
    token has more than one digit (Chowdhery et al. 2022, section 2). The time of training is proportional to the text
    times the longest word, so runs longer than LONGEST_WORD are split.

    Source: Radford et al. 2019, section 2.2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if single_digits:
        words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    backend.decoder = decoders.ByteLevel()
    known: Any = {"special_tokens": SPECIAL_TOKENS, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **known)
    _train(backend, documents, trainer)
    backend.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=SEPARATOR,
        eos_token=END,
        extra_special_tokens=list(ROLES.values()),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,  # cleaning would rewrite " ." and " n't" when decoding
        chat_template=CHAT_TEMPLATE,
    )


def _train(backend: Any, documents: Iterable[str], trainer: Any) -> None:
    """Train in a thread, since the library does not return to Python for signals."""
    done: Future[None] = Future()

    def train() -> None:
        try:
            done.set_result(backend.train_from_iterator(documents, trainer))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=train, daemon=True).start()  # a signal ends it with the process
    done.result()


def encode_texts(
    tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str], *, special: bool = False
) -> list[list[int]]:
    """Encode each text, in parallel; no special token is added, and those that are spelt in a text are recognised only if `special`."""
    backend = tokenizer.backend_tokenizer
    with _encoding:
        before = backend.encode_special_tokens
        backend.encode_special_tokens = not special  # a spelling is split like any other text
        backend.no_truncation()  # an earlier padded or truncated call leaves its settings behind
        backend.no_padding()
        try:
            with reading("the tokenizer cannot encode a text", "restore tokenizer.json"):
                return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        finally:
            backend.encode_special_tokens = before


def separator_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """The id between documents: `<|endoftext|>`, or of an adopted tokenizer without one its end token."""
    separator = tokenizer.backend_tokenizer.token_to_id(SEPARATOR)
    return tokenizer.eos_token_id if separator is None else separator  # type: ignore[return-value]


def token_byte_lengths(tokenizer: "PreTrainedTokenizerFast") -> list[int] | None:
    """Bytes of text that each token id represents, (V,): 0 for special tokens. None if the tokenizer is not byte-level,
    since its tokens then have no fixed number of bytes.

    Bits per byte of any stretch of tokens = nats of its text tokens / (ln 2 * sum of these lengths).
    """
    from tokenizers import decoders

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    # Byte-level BPE writes each byte of a token as one character of its alphabet.
    return [0 if i in special else len(backend.id_to_token(i) or "") for i in range(len(tokenizer))]


class Loaded(Schema):  # what the package reads of a tokenizer
    model_max_length: Annotated[float, Field(ge=1)]  # many files say 1e30
    chat_template: str | dict[str, str] | None


def open_tokenizer(loader: Any, what: str, remedy: str, **source: Any) -> Any:
    """`loader.from_pretrained(…)`, which must encode a word. Raises: UserError "<what> (…): <remedy>"."""
    check_regular(Path(source["pretrained_model_name_or_path"]))
    with reading(what, remedy):
        tokenizer = loader.from_pretrained(trust_remote_code=False, **source)
        tokenizer("a word, and 1 more.\n", add_special_tokens=True)
    if not tokenizer.is_fast:
        raise UserError(f"{what} (it has no tokenizer.json): save it as a fast one")
    check_value({name: getattr(tokenizer, name, None) for name in Loaded.model_fields}, Loaded, what, remedy)
    tokenizer.model_max_length = int(tokenizer.model_max_length)
    return tokenizer


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerFast":
    """Read a tokenizer from a folder that `save_pretrained` wrote. Pad and end token may be the same, as in many
    adopted ones: masks come from lengths. Raises: UserError if the folder is missing or contains no tokenizer with a
    pad token.
    """
    from transformers import PreTrainedTokenizerFast

    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: no tokenizer.json there: want a tokenizer's folder, as `rlhf tokenizer` writes it")
    what, source = f"{folder}/tokenizer.json: not a readable tokenizer", {"pretrained_model_name_or_path": str(folder)}
    tokenizer = open_tokenizer(PreTrainedTokenizerFast, what, "make it again", local_files_only=True, **source)
    if tokenizer.pad_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no pad token: adopt it with model.pretrained, which gives it one")
    return tokenizer


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """SHA-256 (hex) of everything that determines ids: the tokenizer.json and the chat template. The same before saving
    and after loading. Padding and truncation are left out, since calls change them.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    canonical = json.dumps([state, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
