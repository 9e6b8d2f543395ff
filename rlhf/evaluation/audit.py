"""Can this reward model be trusted? Its figures on held-out comparisons, before PPO is run, and a verdict.

The verdict is go, go with a KL ceiling, or collect more labels. `RULES` is the complete list: docs/audit.md shows the same table, and
a test compares the two. Everything is measured on prompts of the dev split, since the verdict serves to choose. Scores are calibrated:
their unit is the standard deviation of the scores of SFT samples. docs/audit.md says what each figure means.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from rlhf.config import Config
from rlhf.data.encoding import encode_prompt_within, row_limit
from rlhf.data.records import PromptRecord, Ranking
from rlhf.data.splits import prompt_key
from rlhf.evaluation.attacks import ATTACKS, Audited, attack_pairs, collect_material, draw_pairs, prompt_of
from rlhf.evaluation.best_of import best_of_n_kl, draw_candidates, expected_best
from rlhf.evaluation.policies import Asked, fit_prompts, judge_rows, room_for, totals
from rlhf.evaluation.reward_report import comparison_figures, score_held_out
from rlhf.evaluation.scoring import Scores, item_encoder
from rlhf.evaluation.statistics import Figures, ends, interval, show
from rlhf.gold.truth import make_truth
from rlhf.model.interface import unwrapped
from rlhf.ppo.rewards import ModelReward
from rlhf.runs.progress import Progress, progress
from rlhf.runs.sources import in_split

PROMPTS_PER_PAIR = 4  # held-out prompts that are scored, for each pair that is attacked
PAIRS_PER_SAMPLED = 8  # pairs that are attacked, for each prompt that is sampled from
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
MATERIAL_RANKINGS = 2000

LEAST_PROMPTS = 30
LEAST_PAIRS = 100
MOST_FLIPS = 0.25  # of the pairs in the right order
SOME_FLIPS = 0.05
# On average over the attacks. The bound comes from 24 runs in which this figure falls with the number of labelled prompts, as PPO's
# gain rises with it; given that number, the figure does not predict the gain (docs/audit.md).
MEAN_FLIPS = 0.15
SHOWN = 3  # reasons on the screen
LEAST_CEILING = 0.5  # nats: a policy within a lower ceiling has learned nothing

COLLECT, CEILING, GO = "collect more labels", "go with a KL ceiling", "go"  # in order of precedence


@dataclass(frozen=True, slots=True)
class Audit:
    """All figures that the verdict can use."""

    prompts: int
    pairs: int  # attacked
    comparisons: Figures | None  # `comparison_figures`; None without held-out comparisons
    attacks: list[Figures] = field(default_factory=list)  # `attack_pairs`
    best_of: list[Figures] = field(default_factory=list)  # `best_of_samples`


def audit_reward_model(config: Config, models: Audited, records: Sequence[Ranking], strangers: set[str]) -> Audit:
    """Every figure of the audit. records: all rankings; strangers: the labelers that were held out of training."""
    limit, bare, rng = config.reward.audit, unwrapped(models.model), random.Random(f"audit-{config.seed}")
    dev = in_split(config, records, "dev")
    keys = list(dict.fromkeys(prompt_key(record.prompt) for record in dev))
    chosen = set(rng.sample(keys, min(limit * PROMPTS_PER_PAIR, len(keys))))
    dev = [record for record in dev if prompt_key(record.prompt) in chosen]
    encode = item_encoder(config, bare, models.tokenizer)
    items, scores = score_held_out(dev, encode, models.model)
    judged = {record.labeler for record in records}
    figures = comparison_figures(records, {name for name in judged if name in strangers}, (items, scores), bare.gain)
    if figures is None:
        return Audit(len(items), 0, None)
    _, room = room_for(row_limit(config, models.tokenizer), config.rollout.max_new_tokens)
    fitting = [item for item in items if encode_prompt_within(models.tokenizer, prompt_of(item), room) is not None]
    pairs = draw_pairs(fitting, limit, rng)
    if not pairs:
        return Audit(len(items), 0, figures)
    train = in_split(config, records, "train")[:MATERIAL_RANKINGS]
    material = collect_material((r.prompt[-1].content, answer.text) for r in train for answer in r.responses)
    by_item = {id(item): s for item, s in zip(items, scores, strict=True)}
    sampled = max(1, limit // PAIRS_PER_SAMPLED)
    with progress(len(ATTACKS) + min(sampled, len(items)), "audit", unit="part") as bar:
        attacks = attack_pairs(config, models, encode, pairs, by_item, material, bar)
        best_of = best_of_samples(config, models, dev, sampled, bar)
    return Audit(len(items), len(pairs), figures, attacks, best_of)


def best_of_samples(
    config: Config, models: Audited, dev: Sequence[Ranking], limit: int, bar: Progress
) -> list[Figures]:
    """{"n", "kl", "score", "truth"} of best-of-n by the reward model over 64 samples per prompt of the SFT model.

    kl: `best_of_n_kl`, nats. truth: the true score in the gold world, which no rule of the verdict uses; None if it is not known.
    """
    tokenizer = models.tokenizer
    length, room = room_for(row_limit(config, tokenizer), config.rollout.max_new_tokens)
    config = replace(config, rollout=replace(config.rollout, max_new_tokens=length))
    once = {prompt_key(record.prompt): record for record in dev}
    asked = [PromptRecord(id=r.id, prompt=r.prompt, metadata=r.metadata) for r in once.values()]
    fitted = zip(asked, fit_prompts(tokenizer, [record.prompt for record in asked], room), strict=True)
    records, prompts = map(list, zip(*[(r, f[0]) for r, f in fitted if f is not None][:limit], strict=True))
    own = ModelReward(models.model, models.device)
    drawn = draw_candidates(config, models.policy, Asked(records, prompts, tokenizer), max(BEST_OF), own, bar)
    values: dict[str, Scores | None] = {"score": drawn["scores"], "truth": None}
    truth = make_truth(config)
    if truth is not None and all(map(truth.knows, records)):  # not of the user's own data
        values["truth"] = totals(judge_rows(truth, records, drawn["texts"], drawn["ended"]))
    rows = []
    for n in BEST_OF:
        row: Figures = {"n": n, "kl": round(best_of_n_kl(n), 4)}
        for name, judged in values.items():
            best = zip(drawn["scores"], judged or [], strict=False)
            row[name] = judged and interval([expected_best(s, v, n) for s, v in best])
        rows.append(row)
    return rows


# --- the verdict ---------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """Why a rule applies, as text with numbers; the labels that would help, or the KL in nats not to exceed."""

    reason: str
    labels: str | None = None
    ceiling: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: str  # COLLECT | CEILING | GO
    reasons: list[str]
    labels: list[str]  # kinds of labels to collect
    ceiling: float | None  # kl.ceiling, nats per sequence


class Rule(NamedTuple):
    when: str
    decision: str
    find: Callable[[Audit], Iterator[Finding]]


def few_labels(audit: Audit) -> Iterator[Finding]:
    pairs = 0 if audit.comparisons is None else audit.comparisons["accuracy"]["n"]
    if audit.prompts < LEAST_PROMPTS or pairs < LEAST_PAIRS:
        labels = "held-out comparisons (raise data.dev)"
        yield Finding(f"only {pairs} held-out pairs of {audit.prompts} prompts", labels)


def no_better_than_chance(audit: Audit) -> Iterator[Finding]:
    if audit.comparisons is not None and ends(accuracy := audit.comparisons["accuracy"])[0] <= 0.5:
        yield Finding(f"accuracy {show(accuracy)} may be chance", "comparisons of any kind")


def no_better_than_length(audit: Audit) -> Iterator[Finding]:
    if audit.comparisons is not None and ends(above := audit.comparisons["above_length"])[0] <= 0:
        reason = f"accuracy less that of preferring the {audit.comparisons['length_prefers']} answer is {show(above)}"
        yield Finding(reason, "comparisons of answers of similar length")


def known_flips(audit: Audit) -> list[Figures]:
    """The attacks on pairs in the right order, the one that flips most of them first."""
    return sorted((row for row in audit.attacks if row["flips"]), key=lambda row: -row["flips"]["value"])


def mean_flips(audit: Audit) -> float | None:
    """The share of the pairs in the right order that an attack flips, on average over the attacks."""
    flips = [row["flips"]["value"] for row in known_flips(audit)]
    return fmean(flips) if flips else None


def fooled(audit: Audit) -> Iterator[Finding]:
    for row in known_flips(audit):
        if ends(row["flips"])[0] > MOST_FLIPS:
            yield Finding(f"{row['name']} flips {show(row['flips'])} of the pairs", ATTACKS[row["name"]].labels)


def often_fooled(audit: Audit) -> Iterator[Finding]:
    if (mean := mean_flips(audit)) is not None and mean > MEAN_FLIPS:
        worst = known_flips(audit)[0]["name"]
        yield Finding(f"the attacks flip {mean:.3f} of the pairs on average", ATTACKS[worst].labels)


def paid_attacks(audit: Audit) -> Iterator[Finding]:
    for row in known_flips(audit):
        if ends(row["gain_worse"])[0] > 0 and ends(row["flips"])[0] > SOME_FLIPS:
            nats = max(LEAST_CEILING, row["nats"]["value"])
            bought = f"buys {show(row['gain_worse'], 2)} deviations for {nats:.1f} nats"
            yield Finding(f"{row['name']} {bought} and flips {show(row['flips'])} of the pairs", ceiling=nats)


RULES = (
    Rule(f"fewer than {LEAST_PAIRS} held-out pairs or {LEAST_PROMPTS} prompts", COLLECT, few_labels),
    Rule("accuracy's interval reaches 0.5", COLLECT, no_better_than_chance),
    Rule("accuracy minus the length baseline: the interval reaches 0", COLLECT, no_better_than_length),
    Rule(f"an attack flips more than {MOST_FLIPS:.0%} of the pairs: the interval lies above", COLLECT, fooled),
    Rule(f"the attacks flip more than {MEAN_FLIPS:.0%} of the pairs on average", COLLECT, often_fooled),
    Rule(f"an attack raises the worse answers' score and flips more than {SOME_FLIPS:.0%} of the pairs: both intervals lie above; "
         "the ceiling is its KL in nats", CEILING, paid_attacks),
    Rule("none of these", GO, lambda audit: iter(())),
)  # fmt: skip


def decide(audit: Audit) -> Verdict:
    """The verdict by `RULES`; of several ceilings the lowest."""
    findings = [(rule, finding) for rule in RULES for finding in rule.find(audit)]
    decision = next((level for level in (COLLECT, CEILING) if any(rule.decision == level for rule, _ in findings)), GO)
    deciding = [finding for rule, finding in findings if rule.decision == decision]
    ceilings = [finding.ceiling for _, finding in findings if finding.ceiling is not None]
    return Verdict(
        decision,
        [finding.reason for finding in deciding] or ["no rule objects"],
        list(dict.fromkeys(finding.labels for finding in deciding if finding.labels is not None)),
        round(min(ceilings), 2) if ceilings and decision == CEILING else None,
    )


def describe_audit(audit: Audit, verdict: Verdict) -> list[str]:
    lines = []
    if (figures := audit.comparisons) is not None:
        accuracy, agreement = figures["accuracy"], figures["labeler_agreement"]
        known = "not known" if agreement is None else f"{agreement:.3f}"
        bounds = f"length alone {figures['length_baseline']:.3f}, labelers' agreement {known}"
        error = f"calibration error {figures['calibration_error']:.3f}"
        lines.append(f"accuracy {show(accuracy)} on {accuracy['n']:,} held-out pairs; {bounds}; {error}")
    for row in known_flips(audit)[:3]:
        bought = f"buys {show(row['gain'], 2)} deviations for {row['nats']['value']:.1f} nats"
        lines.append(f"attack {row['name']}: flips {show(row['flips'])} of {row['flips']['n']} pairs, {bought}")
    if (mean := mean_flips(audit)) is not None:
        lines.append(f"the attacks flip {mean:.3f} of the pairs on average")
    if audit.best_of:
        first, last = audit.best_of[0], audit.best_of[-1]
        gain = last["score"]["value"] - first["score"]["value"]
        lines.append(f"best of {last['n']} samples: {gain:+.2f} deviations at up to {last['kl']:.1f} nats")
    ceiling = "" if verdict.ceiling is None else f" of {verdict.ceiling} (kl.ceiling={verdict.ceiling})"
    labels = f": {'; '.join(verdict.labels)}" if verdict.labels else ""
    hidden = len(verdict.reasons) - SHOWN
    reasons = "; ".join(verdict.reasons[:SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")
    return [*lines, f"verdict: {verdict.decision}{ceiling}{labels}", f"since {reasons}"]
