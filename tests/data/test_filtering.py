import json
import random
import re

import numpy as np
import pytest

from rlhf.cli import main
from rlhf.commands.corpus import GRAM, Duplicates, Quality, apply_page_rules, cut_grams, evaluation_grams, is_kept

GOOD = "The cat sat on the mat today. It was a very warm day! Was it not so warm outside?"


@pytest.mark.parametrize("text, page, reason", [
    (GOOD, GOOD, None), (f"{GOOD}\nA line without an end\nToo short.", GOOD, None),
    (f"{GOOD}\nPlease enable Javascript to see this page.", GOOD, None),
    ("The cat sat on the mat.", "The cat sat on the mat.", "few_sentences"), (f"{GOOD} {{x}}", "", "curly_bracket"),
    (f"{GOOD} Lorem ipsum dolor sit amet.", "", "lorem_ipsum"),
    (f"{GOOD} What a Darn thing to say here.", "", "bad_word"),
    (f"{GOOD} He was darned unlucky that day.", f"{GOOD} He was darned unlucky that day.", None),
])  # fmt: skip
def test_c4s_rules(text, page, reason):
    assert apply_page_rules(text, re.compile(r"\bdarn\b"), 5, 3) == (page, reason)


def test_exact_and_near_duplicates():
    pytest.importorskip("datasketch", reason="needs the extra `corpus`")
    rng = random.Random(0)
    words = [f"w{rng.randrange(1000)}" for _ in range(300)]
    near, far = [*words[:299], "other"], [*words[:150], *(f"v{i}" for i in range(150))]
    found = Duplicates(0.8)
    texts = [words, near, far, [w.upper() for w in words]]
    assert [found.reason(" ".join(t)) for t in texts] == [None, "near_duplicate", None, "duplicate"]


def test_evaluation_text_is_cut_with_200_characters_around():
    secret = " ".join(f"secret{i}" for i in range(GRAM))
    before, after = "a " * 300, "b " * 300
    pieces = cut_grams(f"{before}{secret.upper()}! {after}", evaluation_grams([secret]))
    assert pieces == [("a " * 300)[:400].strip(), ("b " * 300)[198:].strip()]  # "! " are 2 of the 200 after it
    assert cut_grams(f"short {secret} short", evaluation_grams([secret])) == []
    assert cut_grams(before, evaluation_grams([secret])) == [before]


def test_the_classifier_is_the_minimum_of_its_loss_and_tells_texts_apart():
    good = [f"science and the theory of number {i}" for i in range(20)]
    bad = [f"buy cheap pills now {i}" for i in range(40)]
    model = Quality(good, bad)
    assert min(map(model.score, good)) > 0.7 and max(map(model.score, bad)) < 0.3
    # both classes weigh the same: at the minimum the mean scores of the two add up to 1 (the bias has no decay)
    assert np.mean(list(map(model.score, good))) + np.mean(list(map(model.score, bad))) == pytest.approx(1, abs=1e-3)


def test_paretos_draw_keeps_the_share_of_gpt3():
    rng = random.Random(0)
    kept = np.mean([is_kept(0.4, rng) for _ in range(40_000)])
    share = 1.6**-9  # P(Lomax > 0.6) = (1 + 0.6)^-9
    assert kept == pytest.approx(share, abs=4 * (share / 40_000) ** 0.5)


def test_every_document_is_accounted_for(tmp_path, refused):
    secret = " ".join(f"secret{i}" for i in range(GRAM))
    texts = [
        GOOD, GOOD.upper(), "A page {with code}.", f"{GOOD} {secret} is the end.", "No end", GOOD.replace("cat", "dog"),
    ]  # fmt: skip
    source, out = tmp_path / "text.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": secret, "id": "1"}) + "\n")
    given = ["corpus", f"path={source}", f"out={out}", "near=null", f"evaluation={tmp_path / 'prompts.jsonl'}"]
    main(given)
    rows = [json.loads(line) for line in (out / "documents.jsonl").read_text().splitlines()]
    wanted = ["kept", "duplicate", "curly_bracket", "evaluation", "few_sentences", "kept"]
    assert [row["reason"] for row in rows] == wanted
    kept = [json.loads(line)["text"] for line in (out / "corpus.jsonl").read_text().splitlines()]
    assert kept == [texts[0], texts[5]]
    report = json.loads((out / "report.json").read_text())
    assert sum(row["documents"] for row in report["documents"].values()) == 6
    assert report["characters"] == sum(map(len, texts)) and report["written_characters"] == sum(map(len, kept))
    assert "exists: choose another out=" in refused(*given)


def test_documents_of_low_quality_go_by_a_classifier_that_has_not_seen_them(tmp_path):
    rng = random.Random(0)

    def page(words):
        return " ".join(rng.choice(words) for _ in range(60)) + "."

    good, bad = [f"good{i}" for i in range(50)], [f"bad{i}" for i in range(50)]
    (tmp_path / "reference.jsonl").write_text("".join(json.dumps({"text": page(good)}) + "\n" for _ in range(40)))
    texts = [page(good if i % 4 < 2 else bad) for i in range(80)]  # half of each parity is good
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main(["corpus", f"path={tmp_path / 'text.jsonl'}", f"reference={tmp_path / 'reference.jsonl'}", f"out={tmp_path / 'out'}",
          "near=null", "rules=false"])  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out" / "documents.jsonl").read_text().splitlines()]
    kept = [row["reason"] == "kept" for row in rows]
    of_good, of_bad = ([k for i, k in enumerate(kept) if (i % 4 < 2) == side] for side in (True, False))
    assert sum(of_good) > 2 * sum(of_bad) and not all(kept)
    assert min(row["quality"] for i, row in enumerate(rows) if i % 4 < 2) > max(
        row["quality"] for i, row in enumerate(rows) if i % 4 > 1
    )
