"""The simulated labelling round: who ranks what, and that held-out labelers change nothing for the others."""

from rlhf.data.reading import load_comparisons
from rlhf.gold.people import make_labelers
from rlhf.gold.truth import Requests
from rlhf.stages.label import choose_prompts, rank_all

TRAINED = {labeler.name for labeler in make_labelers()}


def rankings_of(gold_run, *overrides):
    """All rankings of the same responses, by the labelers that the overrides ask for."""
    config = gold_run.config(*overrides)
    found: dict[str, dict] = {}
    for ranking in load_comparisons(str(gold_run.folder / "label" / "comparisons.jsonl"))[0]:
        found[ranking.id.split("-labeler")[0]] = {r.text: r.metadata["ended"] for r in ranking.responses}
    prompts = [p for p in choose_prompts(config) if f"r-{p.id}" in found]
    # more than K may have been drawn; K of them were ranked, and these come out again
    return rank_all(config, Requests(), prompts, [list(found[f"r-{p.id}"].items()) for p in prompts], "x")[0]


def test_held_out_labelers_rank_prompts_that_train_nothing(gold_run):
    rankings = load_comparisons(str(gold_run.folder / "label" / "comparisons.jsonl"))[0]
    by_split: dict[str, set] = {}
    for ranking in rankings:
        by_split.setdefault(ranking.metadata["split"], set()).add(ranking.labeler)
    assert by_split["train"] == TRAINED
    assert by_split["test"] & TRAINED and by_split["test"] - TRAINED == {"labeler-6", "labeler-7"}
    held_out = [r for r in rankings if r.labeler not in TRAINED]
    asked = [r.metadata["split"] for r in held_out]
    assert set(asked) == {"dev", "test"} and len({r.id for r in rankings}) == len(rankings)
    of_others = {(r.prompt[0].content, tuple(x.text for x in r.responses)) for r in rankings if r.labeler in TRAINED}
    assert {(r.prompt[0].content, tuple(x.text for x in r.responses)) for r in held_out} <= of_others


def test_the_others_rank_the_same_with_and_without_them(gold_run):
    many, one, none = (rankings_of(gold_run, f"gold.held_out_labelers={n}") for n in (2, 1, 0))
    assert [r for r in many if r.labeler in TRAINED] == none and len(none) < len(one) <= len(many)
    assert {r.labeler for r in one} - TRAINED == {"labeler-6"}
