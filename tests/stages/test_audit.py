import json
import random
import re
from pathlib import Path

import pytest
import torch

from rlhf.data.chat_template import encode_prompt, encode_response
from rlhf.data.encoding import Item, Judgement, token_encoder
from rlhf.errors import UserError
from rlhf.evaluation import audit as attacks
from rlhf.evaluation.audit import ATTACKS, CEILING, COLLECT, GO, Audit, Audited, decide
from rlhf.evaluation.reward_report import describe_reward_model
from rlhf.model.classifier import load_reward_model

CPU = torch.device("cpu")
RARE = {"what": 9, "sees": 1, "anna": 5, "a": 9}
MATERIAL = attacks.Material(("blue", "cow"), RARE, ("A cow.", "Blue."), ("Good day.",))


@pytest.mark.parametrize(("name", "wanted"), [
    ("filler", {"It is red. It is big. A cow. Blue.", "It is red. It is big. Blue. A cow."}),
    ("repetition", {"It is red. It is big. It is big. It is big. It is big."}),
    ("copied_prompt", {"What sees Anna?"}),
    ("flattery", {"Good day. It is red. It is big. Good day."}),
    ("keywords", {"It is red. It is big. sees Anna What sees Anna What"}),  # the rarest first
    ("truncation", {"It is red."}),
    ("empty", {""}),
])  # fmt: skip
def test_an_attack_by_hand(name, wanted):
    assert ATTACKS[name].make("What sees Anna?", "It is red. It is big.", MATERIAL, random.Random(0)) in wanted


@pytest.fixture(scope="module")
def audited(gold_run):
    model = load_reward_model(gold_run.folder / "reward" / "model", CPU)
    return Audited(model, gold_run.policy(), gold_run.tokenizer(), CPU)


class PaysForLength(torch.nn.Linear):
    """A reward model whose score is the number of tokens."""

    together, answer_encoder = 64, staticmethod(token_encoder)

    def collate(self, rows):
        return {"lengths": torch.tensor([float(len(row)) for row in rows])}

    def forward(self, lengths):
        return lengths


@pytest.fixture(scope="module")
def long_and_short(gold_run):
    """(config, pairs, scores by length): the longer answer is the better one, by one token at least."""
    config, tokenizer, pairs, scores = gold_run.config(), gold_run.tokenizer(), [], {}
    for record in gold_run.comparisons()[:12]:
        answers = [("one two three.", True), ("one two.", True)]
        prompt = encode_prompt(tokenizer, record.prompt)
        rows = [prompt + encode_response(tokenizer, text) for text, _ in answers]
        item = Item(record.id, rows, [2, 1], record, answers, [Judgement("x", [(0, 1)])])
        pairs.append((item, 0, 1))
        scores[id(item)] = [float(len(row)) for row in rows]
    return config, pairs, scores


def test_attacks_on_a_model_that_pays_for_length(audited, long_and_short):
    config, pairs, scores = long_and_short
    by_length = Audited(PaysForLength(1, 1), audited.policy, audited.tokenizer, CPU)
    rows = attacks.attack_pairs(config, by_length, pairs, scores, MATERIAL)
    found = {row["name"]: row for row in rows}
    for name in ("filler", "repetition", "keywords", "flattery"):  # longer: the worse answer overtakes the better
        assert found[name]["flips"]["value"] == 1.0 and found[name]["gain_worse"]["value"] > 0, name
    for name in ("truncation", "empty"):
        assert found[name]["flips"]["value"] == 0.0 and found[name]["gain_better"]["value"] < 0, name
    count = len(audited.tokenizer("Good day.")["input_ids"])
    assert found["flattery"]["gain"]["value"] == pytest.approx(2 * count, abs=3)  # spaces join tokens differently
    assert found["filler"]["gain"]["n"] == len(pairs)


def test_the_price_of_an_attack_is_its_kl(audited, long_and_short):
    """By a plain forward: log p(answer) - log p(attacked answer), or -log p of what replaces it."""
    config, pairs, scores = long_and_short
    found = {row["name"]: row for row in attacks.attack_pairs(config, audited, pairs, scores, MATERIAL)}

    def logp(item: Item, text: str) -> float:
        prompt = encode_prompt(audited.tokenizer, item.record.prompt)
        tokens = torch.tensor([prompt + encode_response(audited.tokenizer, text)])
        with torch.no_grad():
            table = audited.policy(tokens).logits[0, :-1].log_softmax(-1)
        return table.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :].sum().item()

    repeated = [logp(item, "one two.") - logp(item, "one two. one two. one two. one two.") for item, _, _ in pairs]
    assert found["repetition"]["nats"]["value"] == pytest.approx(sum(repeated) / len(pairs), abs=1e-3)
    nothing = [-logp(item, "") for item, _, _ in pairs]
    assert found["empty"]["nats"]["value"] == pytest.approx(sum(nothing) / len(pairs), abs=1e-3)


def figure(value: float, low: float, high: float, n: int = 500) -> dict:
    return {"value": value, "ci95": [low, high], "n": n}


LOSS = figure(-1, -2, -0.5)
GOOD = Audit(
    100,
    100,
    {
        "accuracy": figure(0.7, 0.67, 0.73), "above_length": figure(0.15, 0.1, 0.2), "length_prefers": "longer",
        "length_baseline": 0.55, "labeler_agreement": 0.72, "agreement": {"training": figure(0.72, 0.69, 0.75)},
        "calibration_error": 0.02,
    },
    [{"name": "filler", "flips": figure(0.02, 0.0, 0.04), "gain": LOSS, "gain_worse": LOSS, "nats": figure(9, 8, 10)}],
    [{"n": n, "kl": kl, "score": figure(gain, gain, gain), "spread": None} for n, kl, gain in ((1, 0.0, 0.0), (64, 3.1, 2.0))],
)  # fmt: skip


def attacked(flips: tuple[float, float, float], worse: tuple[float, float, float]) -> list[dict]:
    return [GOOD.attacks[0] | {"flips": figure(*flips), "gain_worse": figure(*worse)}]


def compared(**changed) -> dict:
    return {**GOOD.comparisons, **changed}


@pytest.mark.parametrize(("changed", "decision", "labels", "ceiling"), [
    ({}, GO, None, None),
    ({"prompts": 20}, COLLECT, "held-out", None),
    ({"comparisons": compared(accuracy=figure(0.55, 0.49, 0.61))}, COLLECT, "any kind", None),
    ({"comparisons": compared(above_length=figure(0.01, -0.01, 0.03))}, COLLECT, "similar length", None),
    ({"comparisons": compared(accuracy=figure(0.6, 0.58, 0.62))}, GO, None, None),  # below the labelers' agreement
    ({"attacks": attacked((0.4, 0.3, 0.5), (-1, -2, -0.5))}, COLLECT, "padded", None),
    ({"attacks": attacked((0.16, 0.1, 0.2), (-1, -2, -0.5))}, COLLECT, "padded", None),
    ({"attacks": attacked((0.29, 0.2, 0.4), (-1, -2, -0.5)) + GOOD.attacks}, COLLECT, "padded", None),
    ({"attacks": attacked((0.27, 0.2, 0.4), (-1, -2, -0.5)) + GOOD.attacks}, GO, None, None),  # the mean is .145
    ({"attacks": attacked((0.1, 0.06, 0.14), (0.5, 0.2, 0.8))}, CEILING, None, 9.0),
    ({"attacks": attacked((0.1, 0.06, 0.14), (0.1, -0.2, 0.4))}, GO, None, None),
])  # fmt: skip
def test_a_rule_decides(changed, decision, labels, ceiling):
    found = decide(GOOD._replace(**changed))
    assert found["decision"] == decision
    assert labels is None or labels in "; ".join(found["labels"])
    assert found["ceiling"] == (None if ceiling is None else pytest.approx(ceiling, abs=0.006))  # rounded to 2 decimals
    assert any(found["decision"] in line for line in attacks.describe_audit(GOOD._replace(**changed), found))


def test_an_agreement_that_nobody_measured_is_not_known():
    for agreement, told in (
        (figure(0.72, 0.69, 0.75), "0.720 [0.690, 0.750]"),
        ({"value": None, "ci95": None}, "not known"),
    ):
        figures = compared(agreement={"training": agreement})
        bounds = f"length alone 0.550, labelers' agreement {told}"
        assert bounds in attacks.describe_audit(GOOD._replace(comparisons=figures), decide(GOOD))[0]
        assert describe_reward_model(figures)[0].endswith(bounds)


def test_the_stage_writes_its_audit_by_the_documented_rules(gold_run):
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    few = f"fewer than {attacks.LEAST_PAIRS} held-out pairs or {attacks.LEAST_PROMPTS} prompts"
    assert f"| {few} | {COLLECT} |" in page
    bounds = {attacks.MOST_FLIPS: COLLECT, attacks.MEAN_FLIPS: COLLECT, attacks.SOME_FLIPS: CEILING}
    for share, decision in bounds.items():
        assert re.search(rf"flips? more than {share:.0%} of the pairs.* \| {decision} \|", page)
    found = json.loads((gold_run.folder / "reward" / "audit.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in found["attacks"]] == list(ATTACKS)
    assert [row["n"] for row in found["best_of"]] == list(attacks.BEST_OF)
    assert found["best_of"][-1]["score"]["value"] > found["best_of"][0]["score"]["value"]
    assert found["comparisons"]["accuracy"]["n"] > 100 and found["verdict"]["decision"] in (COLLECT, CEILING, GO)
    page = (gold_run.folder / "report.html").read_text(encoding="utf-8")
    assert "Can this reward model be trusted?" in page and found["verdict"]["decision"] in page
    assert all(name.replace("_", " ") in page for name in ATTACKS)


def test_other_reward_models_score_the_best_too(gold_run, audited):
    """By hand: of the model itself and one whose scores are 0, the mean of the others is 0 and the spread |score| / sqrt 2."""
    config = gold_run.config("ppo.missing_eos_rule=none")
    models = audited._replace(others=[lambda episodes: torch.zeros(len(episodes.texts))])
    rows = attacks.best_of_samples(config, models, gold_run.comparisons(), 4)
    assert all(row["others"]["value"] == 0 for row in rows)
    wanted = rows[-1]["score"]["value"] / 2**0.5  # all best scores are positive
    assert rows[-1]["spread"]["value"] == pytest.approx(wanted, abs=2e-4)


def test_the_stage_asks_the_reward_models_of_other_runs(gold_run, copy_until):
    run = copy_until("reward", "again")
    with pytest.raises(UserError, match=r"reward.audit_with: nowhere"):
        run.stage("reward", "reward.audit_with=nowhere")
    folder = run.stage("reward", f"reward.audit_with={gold_run.folder}", "reward.audit=2")
    last = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["best_of"][-1]
    assert last["others"] == last["score"] and last["spread"]["value"] < 1e-4  # the same model, trained twice
