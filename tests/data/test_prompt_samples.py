"""Which prompts stages take: the splits of a run's data, said if they are small, and samples of prompts."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from rlhf.config import Config
from rlhf.config.stages import DataConfig
from rlhf.runs.sources import count_files, in_split, read_comparisons, read_demonstrations, read_prompts, sample_prompts

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
    assert lines[-1] == (
        f"warning: data.demonstrations has {counts[0]} train, {counts[1]} dev, {counts[2]} test prompts: too few in dev and "
        "test for figures to mean much: raise data.dev and data.test, or add prompts"
    )
    config.data.dev = 0.0  # not wanted, not missed
    read_demonstrations(config, lines.append)
    assert "too few in test for" in lines[-1]
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
    assert count_files(chosen) == f", {counts[files[0]]} of 600.jsonl, {counts[files[1]]} of 300.jsonl, 1 of 1.jsonl"
    assert count_files(records[:600]) == "", "one file needs no count"
    assert sample_prompts(config, records, 2000) == records, "all: in their order"
    assert set(map(id, sample_prompts(config, records, 30))) < set(map(id, chosen)), "a smaller sample is part of it"
    turned = sample_prompts(config, records[::-1], 90)
    assert turned == chosen[::-1], "the order of the data does not matter"
    config.data.split_seed = 1
    assert sample_prompts(config, records, 90) != chosen
