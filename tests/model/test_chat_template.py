"""Chats of every template as tokens: the library's own ids, the assistant's tokens, and text that stays text."""

import copy

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.data.chat_template import (
    decode_response,
    encode_dialogue,
    encode_prompt,
    encode_prompts,
    encode_response,
    encode_responses,
    end_ids,
    find_end_of_turn,
    is_completion,
    response_text,
    use_completion,
)
from rlhf.data.encoding import encode_demonstrations, encode_prompt_within
from rlhf.data.records import Demonstration, Message
from rlhf.data.tokenizer import encode_texts, load_tokenizer, tokenizer_hash, train_tokenizer
from tests.model.chats import KINDS, TEXT, make_tokenizer

CHAT = [
    {"role": "user", "content": "  What is the capital?\n"}, {"role": "assistant", "content": "Paris is. "},
    {"role": "user", "content": "And the cat?"}, {"role": "assistant", "content": "On the mat."},
]  # fmt: skip
OWN = train_tokenizer(TEXT, 300, context_length=64)


@pytest.fixture(params=[*KINDS, "own"])
def tokenizer(request):
    if request.param == "own":
        return OWN
    made = make_tokenizer(request.param)
    if request.param == "turns":
        made.init_kwargs["end_token_ids"] = [find_end_of_turn(made), made.eos_token_id]
    return made


def runs_of(ids: list[int], mask: list[bool]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place, (i, m) in enumerate(zip(ids, mask, strict=True)):
        if m:
            runs = [*runs, []] if not place or not mask[place - 1] else runs
            runs[-1].append(i)
    return runs


def test_prompts_have_the_librarys_own_ids_and_the_assistants_tokens_are_its_turns(tokenizer):
    for messages in (CHAT[:1], CHAT[:3]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(tokenizer, messages) == expected
    assert encode_prompts(tokenizer, ["a", CHAT[:3]]) == [encode_prompt(tokenizer, x) for x in ("a", CHAT[:3])]
    if tokenizer.bos_token and "bos_token" in tokenizer.chat_template:
        for ids in (encode_prompt(tokenizer, CHAT[:3]), encode_dialogue(tokenizer, CHAT)[0]):
            assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    ids, mask = encode_dialogue(tokenizer, CHAT)
    found = runs_of(ids, mask)
    assert len(found) == 2
    for run, turn in zip(found, (CHAT[1], CHAT[3]), strict=True):
        assert decode_response(tokenizer, run).strip() == turn["content"].strip()
        if tokenizer.chat_template != KINDS["open"][0]:
            assert run[-1] == end_ids(tokenizer)[0] and run.count(run[-1]) == 1
    assert ids[-1] == end_ids(tokenizer)[0] and mask[-1]  # the last turn ends, whatever the template writes
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    if tokenizer.chat_template != KINDS["open"][0]:
        assert whole[: len(ids)] == ids


def test_a_dialogue_is_its_prompt_and_its_response(tokenizer):
    """What is learned is what is sampled: the same boundary between prompt and response."""
    ids, _ = encode_dialogue(tokenizer, CHAT)
    prompt, response = encode_prompt(tokenizer, CHAT[:3]), encode_response(tokenizer, CHAT[3]["content"])
    assert prompt + response == ids
    cut = encode_response(tokenizer, CHAT[3]["content"], ended=False)
    assert response[: len(cut)] == cut and not set(cut) & set(end_ids(tokenizer))


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    for special in tokenizer.all_special_tokens:
        for text in (f"hi {special}x", f"{special}{special}", f"a\n{special}"):
            plain = [{"role": "user", "content": text.replace(special, "y")}, CHAT[1]]
            hostile = [{"role": "user", "content": text}, {"role": "assistant", "content": f"no {special} either"}]
            special_ids = set(tokenizer.all_special_ids)
            count = [sum(i in special_ids for i in encode_prompt(tokenizer, chat[:1])) for chat in (plain, hostile)]
            assert count[0] == count[1]
            ids, mask = encode_dialogue(tokenizer, hostile)
            [run] = runs_of(ids, mask)
            assert sum(i in special_ids for i in run) == 1
            shown = decode_response(tokenizer, run)
            assert shown.replace(" ", "") == f"no{special}either".replace(" ", "")
            if tokenizer is not make_tokenizer("inst-metaspace"):
                assert shown.strip() == f"no {special} either"  # not a character more


def test_a_system_turn_that_the_template_refuses_joins_the_user(tokenizer):
    system = {"role": "system", "content": "Be brief."}
    shown = tokenizer.decode(encode_prompt(tokenizer, [system, *CHAT[:3]]))
    assert "Be brief." in shown and "And the cat?" in shown
    ids, mask = encode_dialogue(tokenizer, [system, *CHAT])
    assert len(runs_of(ids, mask)) == 2
    twice = [CHAT[0], CHAT[2], CHAT[3]]  # two turns of the user
    assert len(runs_of(*encode_dialogue(tokenizer, twice))) == 1


def test_a_template_that_hides_thoughts_of_earlier_turns():
    tokenizer = make_tokenizer("thoughts")
    thoughts = [{"role": "assistant", "content": text} for text in ("hm</t>Paris", "eh</t>mat")]
    chat = [CHAT[0], thoughts[0], CHAT[2], thoughts[1]]
    found = runs_of(*encode_dialogue(tokenizer, chat))
    assert [decode_response(tokenizer, run) for run in found] == ["Paris", "eh</t>mat"]
    assert all(run[-1] == tokenizer.eos_token_id for run in found)


def test_a_prompt_is_cut_within_what_the_template_writes_around_it(tokenizer):
    long = "The cat sat on the mat. " * 20
    whole = encode_prompt(tokenizer, long)
    ids, cut = encode_prompt_within(tokenizer, long, 40)
    assert cut and len(ids) == 40
    frame = encode_prompt(tokenizer, "")
    assert ids[0] == whole[0] and ids[-3:] == whole[-3:] and len(frame) < 40
    assert encode_prompt_within(tokenizer, long, len(frame)) is None


@pytest.fixture(params=["chatml", "own"])
def completion(request):
    found = copy.deepcopy(OWN if request.param == "own" else make_tokenizer(request.param))
    use_completion(found)
    return found


def test_a_completion_keeps_its_first_space_where_texts_begin_with_one():
    """As with SentencePiece in Llama 2: "cat" is the token "▁cat" at the beginning of a text, and "cat" within a word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the", "cat", "sat", "on"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>", unk_token="<unk>")
    use_completion(tokenizer)
    for text, tokens in ((" sat on", ["▁sat", "▁on"]), ("s on", ["s", "▁on"])):
        ids = encode_response(tokenizer, text)
        assert tokenizer.convert_ids_to_tokens(ids) == tokens and response_text(tokenizer, ids) == text


def test_a_completion_is_the_text_alone_and_its_form_survives_saving(completion, tmp_path):
    prompt, response = "The old man ", " said <|im_end|>\nno. "
    before, after = (encode_texts(completion, [text])[0] for text in (prompt, response))
    begins = completion("a")["input_ids"][:1] == [completion.bos_token_id]  # chatml's adds BOS by itself
    assert encode_prompt(completion, prompt) == [completion.bos_token_id] * begins + before
    assert encode_responses(completion, [response]) == encode_responses(completion, [response], ended=False) == [after]
    assert end_ids(completion) == [] and find_end_of_turn(completion) is None
    assert response_text(completion, after) == response  # the space that joins it to the prompt stays
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": " no."}]
    ids, mask = encode_dialogue(completion, turns)
    assert completion.decode(ids[begins:]) == prompt + " no." and mask[-1] and not mask[len(before) - 1 + begins]
    completion.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert is_completion(again) and end_ids(again) == [] and tokenizer_hash(again) == tokenizer_hash(completion)
    assert not is_completion(OWN) and tokenizer_hash(again) != tokenizer_hash(OWN)


@pytest.mark.parametrize("text", ["Paris", "<t>hm</t>\n\nParis", "<t></t>\n\nParis"])
def test_thoughts_are_not_written_twice(text):
    """The template puts empty ones before an answer without: a response with its own is encoded as the dialogue is."""
    tokenizer = make_tokenizer("empty")
    prompt = [Message(role="user", content="Hi")]
    whole, mask = encode_dialogue(tokenizer, [*prompt, Message(role="assistant", content=text)])
    written = encode_prompt(tokenizer, prompt) + encode_response(tokenizer, text)
    assert written == whole and tokenizer.decode(whole).count("<t>") == 1
    assert sum(mask) == len(encode_response(tokenizer, text)) or text == "Paris"


def test_a_demonstration_keeps_a_system_text_that_only_the_last_request_shows():
    tokenizer = make_tokenizer("empty")
    roles = ("system", "user", "assistant", "user")
    prompt = [Message(role=role, content=text) for role, text in zip(roles, ("Sys ", "a", "b", "c"), strict=True)]
    [row] = encode_demonstrations([Demonstration(id="d", prompt=prompt, response="e")], tokenizer, 128, turns="all")
    assert row["prompt"] == encode_prompt(tokenizer, prompt) and "Sys c" in tokenizer.decode(row["prompt"])
