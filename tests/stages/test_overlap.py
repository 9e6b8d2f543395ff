"""Overlap of evaluation prompts with the pretraining text: by hand, planted in a corpus, and on the small gold run."""

import json

from rlhf.evaluation.benchmarks import find_overlap, words_of
from rlhf.report.sections import make_evaluation
from rlhf.runs.run_files import read_run
from rlhf.stages import evaluate as external
from rlhf.system.files import read_json

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


def test_n_is_the_5th_percentile_between_8_and_13():
    def n_of(*lengths: int) -> int:
        return find_overlap({str(i): "w " * length for i, length in enumerate(lengths)}, [])["n"]

    assert [n_of(*[n] * 20) for n in (3, 8, 11, 40)] == [8, 8, 11, 13]
    assert n_of(9, *[40] * 30) == 13 and n_of(9, 9, *[40] * 18) == 9
    assert words_of("It's RED, number-4.") == ["it", "s", "red", "number", "4"]


def test_shares_by_hand():
    other = LONG.replace("thirteen", "x")  # its first 12 words are those of LONG: no 13-gram
    half = f"{LONG.split(' two')[0]} two {' '.join('abcdefghijk')} z"
    prompts = {"whole": LONG, "none": other, "half": half, "short": "one two"}
    prompts |= {f"fill{i}": " ".join(f"w{i}x{j}" for j in range(20)) for i in range(40)}
    found = find_overlap(prompts, ["Before. " + LONG.upper().replace(" ", ", ") + " after"])
    assert found["n"] == 13 and found["prompts"] == 44 and found["too_short"] == 1
    assert found["contaminated"] == found["near_duplicates"] and found["contaminated"]["value"] == round(1 / 43, 4)
    assert found["near_duplicate_prompts"] == ["whole"]
    assert len(found["ngrams"]) == 4 and all(row["prompts"] == 1 for row in found["ngrams"])
    # 20 words have 8 13-grams; the first 15 words in a text are 3 of them: contaminated, no near-duplicate
    part = find_overlap(prompts, [" ".join(f"w7x{j}" for j in range(15))])
    assert part["contaminated"]["value"] == round(1 / 43, 4) and part["near_duplicate_prompts"] == []
    assert find_overlap({"a": "b c"}, [LONG])["contaminated"] is None


def test_planted_prompts_are_found_in_the_corpus_of_a_run(gold_run, tmp_path, capsys):
    run = gold_run.copy(tmp_path, "tokenizer")
    external.run_external(run.config("evaluate.overlap=true", "classify.data=gold:choice"))
    clean = read_json(run.folder / "evaluations" / "overlap.json")
    assert list(clean) == ["test prompts", "gold:choice"]
    rows = [json.loads(row) for row in (run.folder / "world" / "prompts.jsonl").read_text().splitlines()]
    tested = [row for row in rows if row["metadata"]["split"] == "test"]
    longest = sorted(tested, key=lambda row: len(row["prompt"].split()))[-5:]
    with (run.folder / "world" / "corpus.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"He said: {row['prompt']}"}) + "\n" for row in longest)
    capsys.readouterr()
    external.run_external(run.config("evaluate.overlap=true"))
    found = read_json(run.folder / "evaluations" / "overlap.json")["test prompts"]
    assert {row["id"] for row in longest} <= set(found["near_duplicate_prompts"])
    assert len(found["near_duplicate_prompts"]) - len(clean["test prompts"]["near_duplicate_prompts"]) <= 5
    assert f"overlap: test prompts: n {found['n']}, " in capsys.readouterr().out
    tables = make_evaluation(read_run(run.folder))["sections"][-1].tables
    assert tables[0].caption == "Overlap with the pretraining text: test prompts"
