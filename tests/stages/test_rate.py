import json
from types import SimpleNamespace

import pytest
import torch

from rlhf.config import Config
from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.records import Ranking
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.best_of import evaluate_ratings
from rlhf.evaluation.policies import Answer, Responses
from rlhf.ppo.rewards import Episodes, Quality, Rater, load_rater
from rlhf.runs.folders import identity_of
from rlhf.runs.run_files import read_jsonl
from rlhf.stages.rate import choose_qualities, ordered_share, rate_all
from rlhf.training import batches
from tests.stages.conftest import stopped_in_second
from tests.stages.test_resume import assert_same_weights
from tests.stages.test_ways import Ways, home, ways  # noqa: F401  fixtures

CPU = torch.device("cpu")


class Digits(torch.nn.Module):
    """The logits of the digits are the logs of `chances`, whatever is read."""

    native = True
    config = SimpleNamespace(hidden_size=8, window=None)

    def __init__(self, chances: list[float]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(chances, dtype=torch.float32))

    def logits(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return self.weight.log().repeat(len(kept), 1)


def fixed_rater(values: dict[str, list[float]], **qualities: Quality) -> Rater:
    """A rater with these values of its candidates."""

    class Fixed(Rater):
        def __init__(self):
            self.qualities = {name: Quality(name) for name in values} | qualities
            self.weights = {name: one.weight for name, one in self.qualities.items()}
            self.least, self.device, self.seen, self.dropped = {}, CPU, 0, 0

        def rate(self, rows, names=None):
            return {name: torch.tensor(values[name][: len(rows)]) for name in names or values}

    return Fixed()


EPISODES = Episodes([], [[1], [1]], [[2], [3]], [], torch.ones(2))


def test_the_value_of_a_rating_by_hand():
    rater = fixed_rater({"safe": [], "helpfulness": []}, helpfulness=Quality("HELPFULNESS", 1, 5))
    rater.model = Digits([1, 3, 2, 3, 4, 8, 100, 100, 100, 100])  # as 0 to 9
    rater.config = Config()
    rater.digits, rater.pad, rater.limit, rater.texts = list(range(10)), 0, 8, {"safe": [5], "helpfulness": [6, 7]}
    values = Rater.rate(rater, [[1, 2], [3]])
    # softmax over 0 and 1 alone: 3 / (1 + 3). Levels 1 to 5 have 3, 2, 3, 4, 8 of 20: (0 + 2 + 6 + 12 + 32) / (4 x 20) = .65
    assert values["safe"].tolist() == pytest.approx([0.75, 0.75])
    assert values["helpfulness"].tolist() == pytest.approx([0.65, 0.65])
    # 8 tokens with the rating: of a longer row the first token stays, and the next ones go
    assert rater.prompt([1, 2, 3, 4, 5, 6, 7], "helpfulness") == [1, 4, 5, 6, 7, 6, 7]


def test_the_order_by_weights_and_the_filter_by_hand():
    values = {"helpful": [0.8, 1.0], "harmless": [0.5, 0.4], "insult": [0.9, 0.6]}
    rater = fixed_rater(values, insult=Quality("", rule=True))
    rater.weights = {"helpful": 1, "harmless": -0.5, "insult": 2}
    # .8 - .25 - 2 x .1 and 1 - .2 - 2 x .4: a rule counts by P(broken)
    assert rater(EPISODES).tolist() == pytest.approx([0.35, 0.0], abs=1e-6)
    assert rater.parts["insult"].tolist() == pytest.approx([0.9, 0.6])
    rater.least = {"harmless": 0.45, "helpful": 0.1}
    # the second lacks .05; the weights' sizes are 3.5, so that no score can be as low
    assert rater(EPISODES).tolist() == pytest.approx([0.35, -3.55])
    assert (rater.seen, rater.dropped) == (2, 1)


def test_pairs_ordered_right_by_hand():
    # levels 3 > 2 > 1: of 0.9 over 0.5, 0.9 over 0.1 and 0.5 over 0.1 all are right; None is not rated
    assert ordered_share(torch.tensor([0.9, 0.5, 0.1, 0.0]), [3, 2, 1, None]) == 1
    # 0.4 of level 2 over 0.9 of level 1 is wrong, over 0.4 a tie
    assert ordered_share(torch.tensor([0.4, 0.9, 0.4]), [2, 1, 1]) == pytest.approx(0.25)
    assert ordered_share(torch.tensor([0.9, 0.4]), [1, 1]) is None


def test_groundedness_counts_what_has_claims():
    """Of a quality in rate.given, sum c v / sum c by hand; of a rule P(broken)."""
    rater = fixed_rater({"claims": [1.0, 0.5], "grounded": [0.8, 0.2], "hate": [0.9, 0.7]}, hate=Quality("", rule=True))
    config, sample = Config(), Answer("x", True, [2], [0.0])
    config.rate.given = {"grounded": "claims"}
    answers = {"sft": Responses([(None, [1])], [[sample, sample]], [])}
    found = evaluate_ratings(config, rater, answers)
    assert found["claims"]["sft"]["value"] == 0.75
    assert found["grounded"]["sft"]["value"] == pytest.approx(0.9 / 1.5)  # (1 x .8 + .5 x .2) / (1 + .5)
    assert (found["grounded"]["sft"]["n"], found["grounded"]["sft"]["of"]) == (2, 2)  # 1.5 of 2, rounded
    assert found["breaks_hate"]["sft"]["value"] == pytest.approx(0.2)


def ranking(name: str, file: str, **more) -> Ranking:
    responses = [{"id": "a", "text": "Yes."}, {"id": "b", "text": "No."}]
    return Ranking(**{"id": name, "prompt": "Hi", "responses": responses} | more).read_from(file)


def test_what_labels_say(gold_run):
    rules = {"hate": "It attacks nobody.", "legal": "It is no lawyer."}
    rankings = [
        ranking("r1", "page", flags={"a": ["breaks_hate", "opinion"]}, ratings={"a": 3}),
        ranking("r2", "page"),
        ranking("r3", "scores", responses=[{"id": "a", "text": "Yes.", "qualities": {"honesty": 4.5}}]),
    ]
    rated = list(rate_all(gold_run.tokenizer(), rankings, rules))
    marked = {"hate": 1, "legal": 1, "opinion": 0}
    assert [one.levels for one in rated] == [
        {"hate": 0, "legal": 1, "opinion": 1, "rating": 3}, marked, marked, marked, {"honesty": 5},
    ]  # fmt: skip
    config = Config()
    assert choose_qualities(config, rated, rankings, rules) == {
        "honesty": Quality("HONESTY", 1, 5),
        "hate": Quality("It attacks nobody.", rule=True),
        "legal": Quality("It is no lawyer.", rule=True),
    }
    config.rate.qualities = ["opinion"]
    assert choose_qualities(config, rated, rankings, {}) == {"opinion": Quality("OPINION", weight=0.0)}
    config.rate.qualities = ["honest"]
    told = r"rate\.qualities, or rate\.rules: honest: is not rated: want some of hate, honesty"
    with pytest.raises(UserError, match=told):
        choose_qualities(config, rated, rankings, rules)
    config.rate.qualities = None
    with pytest.raises(UserError, match="rates no attribute: want qualities of responses"):
        choose_qualities(config, list(rate_all(gold_run.tokenizer(), rankings[1:2], {})), rankings, {})
    bad = ranking("r4", "scores", responses=[{"id": "a", "text": "Yes.", "qualities": {"honesty": 10}}])
    with pytest.raises(UserError, match="scores: ranking r4, response a: honesty is 10: want a number from 0 to 9"):
        list(rate_all(gold_run.tokenizer(), [bad], {}))


def test_the_built_in_worlds_labels_are_qualities(gold_run):
    responses = [response for one in gold_run.comparisons() for response in one.responses]
    assert {tuple(one.metadata["qualities"]) for one in responses} == {("sensible", "specific", "interesting", "safe")}
    assert {level for one in responses for level in one.metadata["qualities"].values()} == {0, 1}


@pytest.mark.parametrize("stage", ["ppo", "rejection"])
def test_a_stage_depends_on_weights_of_ratings_only_if_it_is_paid_by_them(stage):
    config, weighted = Config(), Config()
    weighted.rate.weights = {"honesty": 2}
    assert identity_of(config, stage) == identity_of(weighted, stage)
    config.ppo.rewards = weighted.ppo.rewards = [None, "x/rate"]
    assert identity_of(config, stage) != identity_of(weighted, stage)


RULES = {"insult": "It insults nobody."}


@pytest.fixture
def labelled(ways: Ways) -> Ways:  # noqa: F811
    """Files as of UltraFeedback, of the labelling page with marks of rules, and of rules."""
    folder = ways.folder
    scored = [
        {
            "instruction": f"Say {i} words.",
            "completions": [
                {
                    "response": f"word {j} {i}", "model": "m", "fine-grained_score": j,
                    "annotations": {"helpfulness": {"Rating": str(1 + (i + j) % 5)}, "honesty": {"Rating": "N/A" if i else "2"}},
                }
                for j in range(3)
            ],
        }
        for i in range(20)
    ]  # fmt: skip
    (folder / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    marked = [
        {
            "kind": "ranking", "id": f"r{i}", "prompt": f"Say {i} words.", "labeler": "anna", "ranking": [["a"], ["b"]],
            "responses": [{"id": "a", "text": f"word {i}"}, {"id": "b", "text": "You fool."}],
            "flags": {"b": ["breaks_insult", "opinion"]} if i % 4 else {},
        }
        for i in range(20)
    ]  # fmt: skip
    (folder / "marked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    (folder / "rules.json").write_text(json.dumps(RULES))
    return ways


def test_attributes_of_a_file_of_scores(labelled, capsys):
    words = ["data.comparisons=scored.jsonl", "data.demonstrations=demos.json", "rate.ratings=30", "stages=[rate]"]
    assert labelled("pipeline", "scored", *words)[-1] == "rate"
    said = capsys.readouterr().out
    assert "rate: helpfulness, 1 to 5: " in said and "honesty, 1 to 2: " in said
    stored = json.loads((labelled.folder / "runs/scored/rate/model/qualities.json").read_text())
    assert [stored["helpfulness"][key] for key in ("text", "low", "high", "weight", "rule")] == [
        "HELPFULNESS", 1, 5, 1, False,
    ]  # fmt: skip
    assert "helpfulness" in labelled.record("scored", "rate")["summary"]


def test_rules_are_a_reward_of_ppo_and_a_metric(labelled, capsys):
    words = [
        "data.comparisons=marked.jsonl", "data.demonstrations=demos.json", "rate.ratings=40", "rate.rules=rules.json",
    ]  # fmt: skip
    labelled("pipeline", "marked", *words, "stages=[rate]")
    assert "insult, 0 to 1" in capsys.readouterr().out
    ran = labelled("pipeline", "marked", "stages=[ppo,evaluate]", "ppo.rewards=[rate]", "ppo.critic=sft", fresh=False)
    assert ran == ["ppo", "evaluate"]
    hashes = labelled.record("marked", "ppo")["data"]
    assert hashes["reward:rate"] == labelled.record("marked", "rate")["hash"] and "rate.rules:rules.json" in hashes
    [*_, last] = read_jsonl(labelled.folder / "runs/marked/ppo/metrics.jsonl")
    assert last["objective/scores"] == pytest.approx(last["objective/scores/insult"] - 1), "minus P(broken)"
    found = labelled.results("marked")["ratings"]["breaks_insult"]
    assert set(found) == {"sft", "rate", "ppo"} and found["ppo"]["n"] == found["ppo"]["of"] > 0

    # the value is the model's own: transformers' forward on the same text, over the tokens 0 and 1
    config = Config()
    config.rate.rules = str(labelled.folder / "new.json")
    (labelled.folder / "new.json").write_text(json.dumps({"love": "It is kind."}))
    folder = labelled.folder / "runs/marked/rate"
    tokenizer = load_tokenizer(folder / "model")
    rater = load_rater(config, folder, tokenizer, CPU)
    row = encode_prompt(tokenizer, "Say 3 words.") + encode_response(tokenizer, "You fool.")
    values = rater.rate([row, row[:-2]])
    assert set(values) == {"insult", "love"}, "a rule that no label marks can be asked too"
    for name, text in (RULES | {"love": "It is kind."}).items():
        ids = row + tokenizer(f"{text} ", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = rater.model(torch.tensor([ids])).logits[0, -1]
        chance = logits[tokenizer.convert_tokens_to_ids(["0", "1"])].double().softmax(0)[1].item()
        assert values[name][0].item() == pytest.approx(chance, abs=1e-5)


def test_a_stopped_rate_stage_resumes(copy_until):
    whole, stopped = copy_until("reward", "whole"), copy_until("reward", "stopped")
    words = ["rate.ratings=60", "sft.batch_size=128"]
    whole.stage("rate", *words)
    with stopped_in_second(batches, "train_step"):
        stopped.stage("rate", *words)
    stopped.stage("rate", *words)
    assert_same_weights(whole.folder / "rate", stopped.folder / "rate", "model/model.safetensors")
    one, two = ((run.folder / "rate/model/qualities.json").read_text() for run in (whole, stopped))
    assert one == two
    assert {"sensible", "safe"} <= stopped.record("rate")["summary"].keys()
