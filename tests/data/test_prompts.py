"""Prompts: cut to the context, with every answer of a dialogue learned; splits and samples of them."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from rlhf.config import Config
from rlhf.config.stages import DataConfig
from rlhf.data.chat_template import encode_prompt
from rlhf.data.encoding import encode_demonstrations, encode_prompt_within, labels_of
from rlhf.data.reading import load_prompts
from rlhf.data.records import Demonstration, Message
from rlhf.data.tokenizer import encode_texts
from rlhf.runs.sources import in_split, read_comparisons, read_demonstrations, read_prompts, sample_prompts

SYSTEM, USER, ASSISTANT, END = 2, 3, 4, 5


def test_prompts_come_from_any_record_once(write_jsonl):
    path = write_jsonl([
        {"kind": "prompt", "id": "p", "prompt": "Who?", "user": "u", "metadata": {"gold": 1}},
        {"kind": "demonstration", "id": "d1", "prompt": "who? ", "response": "x"},
        {"kind": "demonstration", "id": "d2", "prompt": "When?", "response": "x", "split": "dev",
         "metadata": {"group": "g", "other": 1}},
        {"kind": "ranking", "id": "r", "prompt": "Where?", "responses": [{"id": "a", "text": "x"}]},
    ])  # fmt: skip
    prompts, info = load_prompts(path)
    assert [(p.id, p.kind, p.metadata) for p in prompts] == [
        ("p", "prompt", {"gold": 1}),
        ("d2", "prompt", {"group": "g", "split": "dev", "reference": "x"}),
        ("r", "prompt", {}),
    ]
    assert prompts[0].user == "u" and sum(file.rows for file in info) == 4
    [form] = load_prompts(write_jsonl([{"prompt": "Who?", "metadata": "of a form"}]))[0]
    assert form.metadata == {"metadata": "of a form"}


CHAT = [
    Message(role="system", content="Be brief"),
    Message(role="user", content="Hi there"),
    Message(role="assistant", content="Yes?"),
    Message(role="user", content="The cat sat on the mat"),
]


def test_a_prompt_loses_old_turns_then_the_system_turn_then_text(tokenizer):
    whole = encode_prompt(tokenizer, CHAT)
    assert encode_prompt_within(tokenizer, CHAT, len(whole)) == (whole, False)
    without_old = encode_prompt(tokenizer, [CHAT[0], CHAT[3]])
    assert encode_prompt_within(tokenizer, CHAT, len(whole) - 1) == (without_old, True)
    last = encode_prompt(tokenizer, CHAT[3:])
    assert encode_prompt_within(tokenizer, CHAT, len(without_old) - 1) == (last, True)
    text = encode_texts(tokenizer, [CHAT[3].content])[0]
    cut = [USER, *text[-3:], END, ASSISTANT]
    assert encode_prompt_within(tokenizer, CHAT, 6) == (cut, True)
    assert encode_prompt_within(tokenizer, CHAT[3].content, 6) == (cut, True)
    assert encode_prompt_within(tokenizer, CHAT, 3) is None


def test_cutting_at_any_room_keeps_the_frame(tokenizer):
    for room in range(4, 60):
        ids, _ = encode_prompt_within(tokenizer, CHAT, room)
        assert len(ids) <= room and ids[0] in (SYSTEM, USER) and ids[-2:] == [END, ASSISTANT]


def test_demonstrations_fit_the_context(tokenizer):
    prompt = encode_prompt(tokenizer, "cat")
    text = encode_texts(tokenizer, ["The dog sat"])[0]
    record = Demonstration(id="d", prompt="cat", response="The dog sat")
    full = len(prompt) + len(text) + 1

    def encoded(context):
        counts = Counter()
        return encode_demonstrations([record], tokenizer, context, counts=counts), dict(counts)

    assert encoded(full) == ([{"prompt": prompt, "response": [*text, END]}], {"kept": 1})
    # one token short: the text is whole, but its end is not shown
    assert encoded(full - 1) == ([{"prompt": prompt, "response": text}], {"kept": 1, "truncated_responses": 1})
    assert encoded(4) == ([], {"skipped": 1})


def test_cut_prompts_leave_a_quarter_of_the_context(tokenizer):
    records = [
        Demonstration(id="d", prompt="the mat and the dog " * 20, response="The cat sat on the mat. " * 20),
        Demonstration(id="e", prompt="the mat and the dog " * 20, response="Blue"),
    ]
    counts = Counter()
    long, short = encode_demonstrations(records, tokenizer, 32, counts=counts)
    assert (len(long["prompt"]), len(long["response"])) == (24, 8) and END not in long["response"]
    assert len(short["prompt"]) + len(short["response"]) == 32 and short["response"][-1] == END
    assert counts == {"kept": 2, "cut_prompts": 2, "truncated_responses": 1}


def dialogue(*answers, weights=(), system="Be brief"):
    """A demonstration whose assistant gave these answers, with a loss_weight each."""
    prompt = [{"role": "system", "content": system}] if system else []
    for i, answer in enumerate(answers):
        prompt += [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": answer}]
    for turn, weight in zip([t for t in prompt if t["role"] == "assistant"], weights, strict=False):
        turn["loss_weight"] = weight
    return Demonstration(id="d", prompt=prompt[:-1], response=answers[-1])


def learned(rows):
    """What is learned in each run of labels, as tokens."""
    runs = []
    for row in rows:
        before = -100
        for label in labels_of(row, -100):
            if label != -100:
                runs += [[]] if before == -100 else []
                runs[-1].append(label)
            before = label
    return runs


def test_every_answer_of_a_dialogue_is_learned_but_for_those_of_weight_0(tokenizer):
    record = dialogue("The cat", "The dog", "The mat")
    wanted = [[*encode_texts(tokenizer, [text])[0], END] for text in ("The cat", "The dog", "The mat")]
    counts = Counter()
    rows = encode_demonstrations([record], tokenizer, 200, turns="all", counts=counts)
    assert len(rows) == 1 and learned(rows) == wanted
    assert {name: n for name, n in counts.items() if n} == {"kept": 1, "earlier_turns": 2}
    [last] = encode_demonstrations([record], tokenizer, 200, turns="last")
    assert learned([last]) == wanted[2:]
    assert last["prompt"] + last["response"] == rows[0]["prompt"] + rows[0]["response"]
    rows = encode_demonstrations([dialogue("a", "b", "c", weights=(1, 0))], tokenizer, 200, turns="all")
    assert [run[:-1] for run in learned(rows)] == [encode_texts(tokenizer, [text])[0] for text in "ac"]


@pytest.mark.parametrize("system", ["Be brief", None])
def test_a_dialogue_too_long_for_the_context_makes_rows_that_learn_each_answer_once(tokenizer, system):
    record = dialogue(*"abcdefg", system=system)
    whole = encode_demonstrations([record], tokenizer, 500, turns="all")
    context = len(whole[0]["prompt"] + whole[0]["response"]) // 2
    counts = Counter()
    rows = encode_demonstrations([record], tokenizer, context, turns="all", counts=counts)
    assert 1 < len(rows) == 1 + counts["further_rows"] and counts["kept"] == 1
    assert all(len(row["prompt"] + row["response"]) <= context for row in rows)
    assert sorted(learned(rows)) == sorted(learned(whole)) and len(learned(rows)) == 7
    assert all(row["prompt"][0] == (SYSTEM if system else USER) for row in rows)
    # a turn that is too long alone: as the last answer of any demonstration, cut from the left
    counts.clear()
    long = dialogue("yes", "no").model_copy(update={"response": "The cat sat on the mat. " * 50})
    [row] = encode_demonstrations([long], tokenizer, 24, turns="all", counts=counts)
    assert len(row["prompt"] + row["response"]) == 24 and counts["truncated_responses"] == 1


PREAMBLE = "A conversation between User and Assistant. The Assistant first thinks about the reasoning process. " * 3


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def demonstrations(count, start=""):
    return [{"kind": "demonstration", "prompt": f"{start}Name town {i}.", "response": "x"} for i in range(count)]


def rankings(count, start=""):
    responses = [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]
    row = {"kind": "ranking", "responses": responses, "ranking": [["a"], ["b"]]}
    return [row | {"prompt": f"{start}Name river {i}."} for i in range(count)]


def config_of(**data):
    return replace(Config(), data=DataConfig(**data))


def test_a_shared_preamble_leaves_every_split_its_prompts_and_a_prompt_one_split(tmp_path):
    """Rankings hold the preamble too rarely to notice it alone; the demonstrations decide for them too."""
    both = rankings(4, PREAMBLE)
    config = config_of(
        demonstrations=write(tmp_path / "d.jsonl", demonstrations(1000, PREAMBLE)),
        comparisons=write(tmp_path / "c.jsonl", [*rankings(200), *both]),
    )
    records = read_demonstrations(config)
    sizes = [len(in_split(config, records, split)) for split in ("train", "dev", "test")]
    assert sizes == [pytest.approx(850, abs=40), pytest.approx(50, abs=25), pytest.approx(100, abs=30)]
    for split in ("train", "dev", "test"):
        ranked = {r.prompt[0].content for r in in_split(config, read_comparisons(config), split)}
        asked = {r.prompt[0].content for r in in_split(config, read_prompts(config), split)}
        assert ranked == asked & {r.prompt[0].content for r in read_comparisons(config)}


def test_small_splits_are_said_with_their_numbers(tmp_path):
    config, lines = config_of(demonstrations=write(tmp_path / "d.jsonl", demonstrations(40))), list[str]()
    records = read_demonstrations(config, lines.append)
    counts = [len(in_split(config, records, split)) for split in ("train", "dev", "test")]
    few = f"{counts[1]} dev and {counts[2]} test"
    assert lines[-1] == f"warning: data.demonstrations has {few} prompts: too few for figures to mean much: add prompts"
    config.data.dev = 0.0  # not wanted, not missed
    read_demonstrations(config, lines.append)
    assert " test prompts: too few" in lines[-1] and "dev" not in lines[-1]
    config = config_of(demonstrations=write(tmp_path / "more.jsonl", demonstrations(400)))
    lines.clear()
    read_demonstrations(config, lines.append)
    assert lines and not any("warning" in line for line in lines)


def test_a_sample_of_prompts_does_not_follow_the_files(tmp_path):
    files = [write(tmp_path / f"{n}.jsonl", demonstrations(n, f"{n}: ")) for n in (600, 300, 1)]
    config = config_of(prompts=files)
    records = read_prompts(config)
    chosen = sample_prompts(config, records, 90)
    counts = Counter(record.file for record in chosen)
    assert len(chosen) == 90 and counts[files[2]] == 1, "each file is represented"
    # hypergeometric: mean 59, standard deviation 4.2; the first 90 in file order would all be of the first file
    assert counts[files[0]] == pytest.approx(59, abs=17)
    assert sample_prompts(config, records, 2000) == records, "all: in their order"
    assert set(map(id, sample_prompts(config, records, 30))) < set(map(id, chosen)), "a smaller sample is part of it"
    turned = sample_prompts(config, records[::-1], 90)
    assert turned == chosen[::-1], "the order of the data does not matter"
    config.data.split_seed = 1
    assert sample_prompts(config, records, 90) != chosen
