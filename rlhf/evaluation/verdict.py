"""The audit's verdict: go, go with a KL ceiling, or collect more labels; and the audit as text.

`RULES` is the complete list: docs/audit.md shows the same table, and a test compares the two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rlhf.evaluation.audit import ATTACKS, AttackFigures, Audit, Picked
from rlhf.evaluation.statistics import show

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
        yield Finding(
            f"only {pairs} held-out pairs of {audit.prompts} prompts", "held-out comparisons (raise data.dev)"
        )


def no_better_than_chance(audit: Audit) -> Iterator[Finding]:
    if audit.comparisons is not None and (accuracy := audit.comparisons["accuracy"])["ci95"][0] <= 0.5:
        yield Finding(f"accuracy {show(accuracy)} may be chance", "comparisons of any kind")


def no_better_than_length(audit: Audit) -> Iterator[Finding]:
    if audit.comparisons is not None and (above := audit.comparisons["above_length"])["ci95"][0] <= 0:
        prefers = audit.comparisons["length_prefers"]
        yield Finding(
            f"accuracy less that of preferring the {prefers} answer is {show(above)}",
            "comparisons of answers of similar length",
        )


def hardest_pick(audit: Audit) -> list[Picked]:
    """The pick among the largest number of answers that enough prompts have; [] if there is none."""
    return [row for row in audit.picked if row.gain["n"] >= LEAST_PROMPTS][-1:]


def pick_text(row: Picked) -> str:
    return f"its pick of {row.n} labelled answers beats {show(row.gain)} more of the others than a random one"


def picks_nothing(audit: Audit) -> Iterator[Finding]:
    for row in hardest_pick(audit):
        if row.gain["ci95"][0] <= 0:
            yield Finding(pick_text(row), "comparisons of any kind")


def fooled(audit: Audit) -> Iterator[Finding]:
    for attack in audit.attacks:
        if attack.flips is not None and attack.flips["ci95"][0] > MOST_FLIPS:
            yield Finding(f"{attack.name} flips {show(attack.flips)} of the pairs", ATTACKS[attack.name].labels)


def flips_of(attack: AttackFigures) -> float:
    return attack.flips["value"] if attack.flips is not None else 0.0


def mean_flips(audit: Audit) -> float | None:
    """The share of the pairs in the right order that an attack flips, on average over the attacks."""
    flips = [attack.flips["value"] for attack in audit.attacks if attack.flips is not None]
    return fmean(flips) if flips else None


def often_fooled(audit: Audit) -> Iterator[Finding]:
    mean = mean_flips(audit)
    if mean is not None and mean > MEAN_FLIPS:
        worst = max(audit.attacks, key=flips_of)
        yield Finding(f"the attacks flip {mean:.3f} of the pairs on average", ATTACKS[worst.name].labels)


def paid_attacks(audit: Audit) -> Iterator[Finding]:
    for attack in audit.attacks:
        if attack.gain_worse["ci95"][0] > 0 and attack.flips is not None and attack.flips["ci95"][0] > SOME_FLIPS:
            nats = max(LEAST_CEILING, attack.nats["value"])
            yield Finding(
                f"{attack.name} buys {show(attack.gain_worse, 2)} deviations for {nats:.1f} nats and flips "
                f"{show(attack.flips)} of the pairs",
                ceiling=nats,
            )


def check_peaks(audit: Audit) -> Iterator[Finding]:
    peak = None
    if audit.best_of and audit.best_of[0].check is not None:
        peak = peak_kl([row.kl for row in audit.best_of], [row.check["value"] for row in audit.best_of if row.check])
    if peak is not None and peak < 2 * audit.best_of[-1].kl:
        yield Finding(f"by reward.audit_check best-of-n peaks at {peak:.1f} nats", ceiling=max(LEAST_CEILING, peak))


def peak_kl(kl: list[float], values: list[float]) -> float | None:
    """Where R(d) = R(0) + d (alpha - beta d), d = sqrt(KL), is largest, fitted by least squares; None if beta is not above 0.

    Source: Gao et al. 2022, section 3.1, best-of-n.
    """
    d = np.sqrt(np.maximum(np.array(kl) - kl[0], 0.0))
    alpha, minus_beta = np.linalg.lstsq(np.stack([d, d**2], 1), np.array(values) - values[0], rcond=None)[0]
    if minus_beta >= 0:
        return None
    return float((alpha / (2 * minus_beta)) ** 2) if alpha > 0 else 0.0


RULES = (
    Rule(f"fewer than {LEAST_PAIRS} held-out pairs or {LEAST_PROMPTS} prompts", COLLECT, few_labels),
    Rule("accuracy's interval reaches 0.5", COLLECT, no_better_than_chance),
    Rule("accuracy minus the length baseline: the interval reaches 0", COLLECT, no_better_than_length),
    Rule("its pick among labelled answers is no better than a random one: the interval reaches 0", COLLECT, picks_nothing),
    Rule(f"an attack flips more than {MOST_FLIPS:.0%} of the pairs: the interval lies above", COLLECT, fooled),
    Rule(f"the attacks flip more than {MEAN_FLIPS:.0%} of the pairs on average", COLLECT, often_fooled),
    Rule(f"an attack raises the worse answers' score and flips more than {SOME_FLIPS:.0%} of the pairs: both intervals lie above; "
         "the ceiling is its KL in nats", CEILING, paid_attacks),
    Rule("best-of-n by reward.audit_check peaks below twice the KL of best of 64; the ceiling is the peak", CEILING, check_peaks),
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
    lines, figures = [], audit.comparisons
    if figures is not None:
        agreement = figures["labeler_agreement"]
        lines.append(
            f"accuracy {show(figures['accuracy'])} on {figures['accuracy']['n']:,} held-out pairs; length alone "
            f"{figures['length_baseline']:.3f}, labelers' agreement {'not known' if agreement is None else f'{agreement:.3f}'}; "
            f"calibration error {figures['calibration_error']:.3f}"
        )
    lines += [
        f"attack {a.name}: flips {show(a.flips)} of {a.flips['n']} pairs, buys {show(a.gain, 2)} deviations for "
        f"{a.nats['value']:.1f} nats"
        for a in sorted(audit.attacks, key=flips_of, reverse=True)[:3]
        if a.flips
    ]
    if (mean := mean_flips(audit)) is not None:
        lines.append(f"the attacks flip {mean:.3f} of the pairs on average")
    lines += map(pick_text, hardest_pick(audit))
    if audit.best_of:
        first, last = audit.best_of[0], audit.best_of[-1]
        check = (
            f", by the check {last.check['value'] - first.check['value']:+.2f}" if last.check and first.check else ""
        )
        gain = last.score["value"] - first.score["value"]
        lines.append(f"best of {last.n} samples: {gain:+.2f} deviations at {last.kl:.1f} nats{check}")
    ceiling = "" if verdict.ceiling is None else f" of {verdict.ceiling} (kl.ceiling={verdict.ceiling})"
    labels = f": {'; '.join(verdict.labels)}" if verdict.labels else ""
    hidden = len(verdict.reasons) - SHOWN
    reasons = "; ".join(verdict.reasons[:SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")
    return [*lines, f"verdict: {verdict.decision}{ceiling}{labels}", f"since {reasons}"]
