"""People as judges of policies (`evaluate.labels`): how often each policy beats each other one, mean ratings, and shares of flags.

The labels rank, rate and flag one response of each policy (`rlhf sample sample.stages=[sft,ppo]`). A prompt is the unit of every
figure: the judgements of one prompt are averaged first. Source: Ouyang et al. 2022, section 3.6 and figures 1, 3 and 4.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

import torch

from rlhf.config import Config
from rlhf.data.agreement import pairwise_agreement
from rlhf.data.encoding import Item
from rlhf.data.reading import load_comparisons
from rlhf.data.records import Ranking
from rlhf.data.splits import prompt_key
from rlhf.errors import UserError
from rlhf.evaluation.scoring import held_out_labelers, load_judge, score_each
from rlhf.evaluation.statistics import Figures, interval, prediction_powered, win

# Two policies, a prompt, and 1 if the first one's response is better, 1/2 for a tie, else 0.
Verdict = tuple[tuple[str, str], str, float]
Points = dict[tuple[str, str], dict[str, float]]  # by pair of policies and prompt: how often the first beats the second


def evaluate_people(config: Config, device: torch.device) -> Figures:
    """The figures of all labelers, and of training and held-out ones apart if there are both; with a judge, corrected win rates.

    Raises: UserError if no label compares two policies.
    """
    records, _ = load_comparisons(config.evaluate.labels, config.data.format, config.data.allow_partial)
    people = [r for r in records if r.ranking is not None or r.pairs is not None or r.ratings]
    names = policy_names(records)
    if not (points := mean_points(verdicts(people, names))):
        wanted = "give labels of tasks of `rlhf sample sample.stages=[sft,ppo]`"
        raise UserError(f"evaluate.labels={config.evaluate.labels}: no label compares two policies: {wanted}")
    held_out = held_out_labelers(config, records) & {str(record.labeler) for record in people}
    groups = {"all labelers": people}
    if held_out:
        groups["training labelers"] = [record for record in people if record.labeler not in held_out]
        groups["held-out labelers"] = [record for record in people if record.labeler in held_out]
    figures: Figures = {name: people_figures(group, names) for name, group in groups.items() if group}
    if config.evaluate.labels_model is not None:
        judged = mean_points(scored(config, records, names, device))
        figures["corrected"] = [
            {"pair": list(pair), **prediction_powered(by_prompt, judged.get(pair, {}))}
            for pair, by_prompt in points.items()
        ]
    return figures


def people_figures(rankings: Sequence[Ranking], names: Mapping[str, str]) -> Figures:
    """agreement, win_rates of each pair of policies, and per policy the mean rating and the share of responses with each flag."""
    kinds = sorted({flag for record in rankings for given in record.flags.values() for flag in given})
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in sorted(names.values())}
    for record, response in [(one, response) for one in rankings for response in one.responses]:
        if response.policy is not None and response.policy in names:
            values = {"rating": record.ratings[response.id]} if response.id in record.ratings else {}
            values |= {flag.replace(" ", "_"): float(flag in record.flags.get(response.id, ())) for flag in kinds}
            for what, value in values.items():
                by_prompt = found[names[response.policy]].setdefault(what, {})
                by_prompt.setdefault(prompt_key(record.prompt), []).append(value)
    return {
        "labelers": len({record.labeler for record in rankings}),
        "judgements": len(rankings),
        "agreement": pairwise_agreement(rankings),
        "win_rates": [
            {"pair": list(pair), "win_rate": interval(list(by_prompt.values()), share=True)}
            for pair, by_prompt in mean_points(verdicts(rankings, names)).items()
        ],
        "policies": {
            name: {what: interval(list(map(fmean, of.values())), share=what != "rating") for what, of in row.items()}
            for name, row in found.items()
        },
    }


def policy_names(records: Iterable[Ranking]) -> dict[str, str]:
    """What each policy is called: run/stage, with its hash if two share that name."""
    policies = sorted({r.policy for record in records for r in record.responses if r.policy})
    short = [policy.partition("@")[0] for policy in policies]
    return {p: p if short.count(name) > 1 else name for p, name in zip(policies, short, strict=True)}


def verdicts(rankings: Iterable[Ranking], names: Mapping[str, str]) -> Iterator[Verdict]:
    """The verdicts of people on each two responses that they both ranked."""
    for record in rankings:
        ordered, ranks = record.pair_list(), record.ranks() if record.pairs is None else []
        told = {pair: 1.0 for pair in ordered} | {(j, i): 0.0 for i, j in ordered}
        places = itertools.permutations(range(len(ranks)), 2)
        told |= {(i, j): 0.5 for i, j in places if ranks[i] == ranks[j] >= 0}
        yield from compared(record, names, told)


def compared(record: Ranking, names: Mapping[str, str], told: Mapping[tuple[int, int], float]) -> Iterator[Verdict]:
    """What is told of two responses by place, if they are of different policies: for the policy whose name comes first."""
    policies = [names.get(response.policy or "") for response in record.responses]
    for (i, j), point in told.items():
        if (a := policies[i]) is not None and (b := policies[j]) is not None and a < b:
            yield (a, b), prompt_key(record.prompt), point


def scored(
    config: Config, records: Sequence[Ranking], names: Mapping[str, str], device: torch.device
) -> Iterator[Verdict]:
    """As `verdicts`, by the scores of evaluate.labels_model on every task once, labelled or not."""
    _, model, encode = load_judge(config, config.evaluate.labels_model, "evaluate.labels_model", device)
    items, tasks = [], {repr((r.prompt, sorted((x.policy or "", x.text) for x in r.responses))): r for r in records}
    for record in tasks.values():
        answers = [(response.text, bool(response.metadata.get("ended", True))) for response in record.responses]
        if (encoded := encode(record.prompt, answers)) is not None:
            items.append(Item(record.id, *encoded, record))
    for item, scores in zip(items, score_each(model, items), strict=True):
        places = itertools.permutations(range(len(scores)), 2)
        assert item.record is not None
        yield from compared(item.record, names, {(i, j): win(scores[i], scores[j]) for i, j in places})


def mean_points(told: Iterable[Verdict]) -> Points:
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for pair, key, point in told:
        found.setdefault(pair, {}).setdefault(key, []).append(point)
    return {pair: {key: fmean(row) for key, row in by.items()} for pair, by in sorted(found.items())}
