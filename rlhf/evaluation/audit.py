"""Can this reward model be trusted? Its figures on held-out comparisons, before PPO is run.

Everything is measured on prompts of the dev split, since the verdict serves to choose. Scores are calibrated: their unit is the
standard deviation of the scores of SFT samples. docs/audit.md says what each figure means.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.chat_template import encode_response
from rlhf.data.items import Encode, Item
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Message, PromptRecord, Ranking
from rlhf.data.splits import prompt_key
from rlhf.evaluation.answers import fit_prompts, room_for
from rlhf.evaluation.attacks import ATTACKS, Material, collect_material
from rlhf.evaluation.best_of import best_of_n_kl, draw_candidates, estimate_kl, expected_best
from rlhf.evaluation.policies import judge_rows, totals
from rlhf.evaluation.reward_report import comparison_figures, score_held_out
from rlhf.evaluation.scoring import Scores, item_encoder, response_batches, share, unwrapped
from rlhf.evaluation.statistics import Figures, interval, per_key, ratio_interval
from rlhf.gold.truth import make_truth
from rlhf.model.interface import Episodes, score
from rlhf.ppo.experience import response_logprobs
from rlhf.ppo.rewards import Reward, make_reward
from rlhf.runs.sources import in_split

PROMPTS_PER_PAIR = 4  # held-out prompts that are scored, for each pair that is attacked
PAIRS_PER_SAMPLED = 8  # pairs that are attacked, for each prompt that is sampled from
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
PICKED_FROM = (2, 4, 8)
MATERIAL_RANKINGS = 2000

Pair = tuple[Item, int, int]  # a prompt's answers, and the positions of the better and the worse one


@dataclass(frozen=True, slots=True)
class AttackFigures:
    """The effect of one attack on held-out answers."""

    name: str
    # Of the pairs in the right order, the share in which the attacked worse answer scores above the better one.
    flips: Figures | None
    gain: Figures  # mean change of the score
    gain_better: Figures  # … of the better answers
    gain_worse: Figures
    nats: Figures  # mean KL to the SFT model of a policy that gives the attacked answers, see `prices`


@dataclass(frozen=True, slots=True)
class Picked:
    """How labelers judged the answer that the reward model picks out of n labelled ones."""

    n: int
    gain: Figures  # share of the other answers that it beats, minus that of a random answer


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Best-of-n by the reward model over samples of the SFT model."""

    n: int
    kl_bound: float  # log n - (n - 1)/n, nats
    kl: float  # estimate_kl, nats
    score: Figures
    check: Figures | None  # the score by reward.audit_check
    truth: Figures | None  # the true score, in the gold world; no rule of the verdict uses it


@dataclass(frozen=True, slots=True)
class Audit:
    """All figures that the verdict can use."""

    prompts: int
    pairs: int  # attacked
    comparisons: Figures | None  # `comparison_figures`; None without held-out comparisons
    attacks: list[AttackFigures] = field(default_factory=list)
    picked: list[Picked] = field(default_factory=list)
    best_of: list[BestOfN] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Audited:
    """The models that an audit runs. All processes of a launch must call them together."""

    model: Any  # the reward model, or the engine around it
    policy: Any  # the SFT model
    tokenizer: Any  # of the policy
    device: torch.device

    @property
    def reward_model(self) -> Any:
        return unwrapped(self.model)

    def scores(self, rows: Sequence[Any]) -> list[float]:
        """Calibrated scores of rows from the item encoder."""
        return score(self.model, rows).tolist()

    def reward(self, episodes: Episodes) -> torch.Tensor:
        """The reward model as a source of rewards."""
        return score(self.model, self.reward_model.rows(episodes))


def audit_reward_model(config: Config, models: Audited, records: Sequence[Ranking], strangers: set[str]) -> Audit:
    """Every figure of the audit. records: all rankings; strangers: the labelers that were held out of training."""
    limit, judged = config.reward.audit, {record.labeler for record in records}
    rng = random.Random(f"audit-{config.seed}")
    dev = sample_prompts(in_split(config, records, "dev"), limit * PROMPTS_PER_PAIR, rng)
    encode = item_encoder(config, models.reward_model, models.tokenizer)
    items, scores = score_held_out(dev, encode, models.model)
    figures = comparison_figures(
        records, {name for name in judged if name in strangers}, (items, scores), models.reward_model.gain
    )
    if figures is None:
        return Audit(len(items), 0, None)
    _, room = room_for(models.tokenizer, config.rollout.max_new_tokens)
    fitting = [item for item in items if encode_prompt_within(models.tokenizer, prompt_of(item), room) is not None]
    pairs = draw_pairs(fitting, limit, rng)
    if not pairs:
        return Audit(len(items), 0, figures, picked=picked_by_scores(items, scores))
    train = in_split(config, records, "train")[:MATERIAL_RANKINGS]
    material = collect_material((r.prompt[-1].content, answer.text) for r in train for answer in r.responses)
    by_item = {id(item): s for item, s in zip(items, scores, strict=True)}
    return Audit(
        len(items),
        len(pairs),
        figures,
        attack_pairs(config, models, encode, pairs, by_item, material),
        picked_by_scores(items, scores),
        best_of_samples(config, models, dev, max(1, limit // PAIRS_PER_SAMPLED)),
    )


def prompt_of(item: Item) -> list[Message]:
    assert item.record is not None
    return item.record.prompt


def sample_prompts(records: Sequence[Ranking], limit: int, rng: random.Random) -> list[Ranking]:
    """The rankings of at most `limit` prompts, in their order."""
    keys = list(dict.fromkeys(prompt_key(record.prompt) for record in records))
    chosen = set(rng.sample(keys, min(limit, len(keys))))
    return [record for record in records if prompt_key(record.prompt) in chosen]


def draw_pairs(items: Sequence[Item], limit: int, rng: random.Random) -> list[Pair]:
    """At most `limit` pairs that more labelers ordered one way than the other: first one of each prompt, then a second."""
    rounds: list[list[Pair]] = []
    for item in items:
        votes = Counter(item.pairs())
        agreed = sorted(pair for pair in votes if votes[pair] > votes[pair[::-1]])
        for number, (better, worse) in enumerate(rng.sample(agreed, len(agreed))):
            rounds += [[]] * (number == len(rounds))
            rounds[number] = [*rounds[number], (item, better, worse)]
    drawn: list[Pair] = []
    for of_round in rounds:
        drawn += rng.sample(of_round, min(len(of_round), limit - len(drawn)))
    return drawn


# --- attacks -------------------------------------------------------------------------------------------------------


def attack_pairs(
    config: Config,
    models: Audited,
    encode: Encode,
    pairs: Sequence[Pair],
    scores: dict[int, list[float]],
    material: Material,
) -> list[AttackFigures]:
    """Each attack on both answers of each pair; the price is for attacks on the worse one."""
    keys = [item.key for item, _, _ in pairs]
    plain = np.array([[scores[id(item)][place] for place in places] for item, *places in pairs])  # (pairs, 2)
    right = np.flatnonzero(plain[:, 0] > plain[:, 1])
    logp = answer_logprobs(config, models, [(item, item.answers[worse]) for item, _, worse in pairs])
    figures = []
    for name in ATTACKS:
        attacked = attacked_answers(config.seed, name, pairs, material)
        rows = [row for (item, _, _), two in zip(pairs, attacked, strict=True) for row in encoded(encode, item, two)]
        after = np.array(models.scores(rows)).reshape(-1, 2)
        gain = after - plain
        worse_ones = [(item, two[1]) for (item, _, _), two in zip(pairs, attacked, strict=True)]
        attacked_logp = answer_logprobs(config, models, worse_ones)
        flips = per_key([keys[i] for i in right], [float(after[i, 1] > plain[i, 0]) for i in right])
        change, better, worse, nats = (
            ratio_interval(*per_key(keys, values))
            for values in (
                gain.mean(1).tolist(),
                *gain.T.tolist(),
                prices(ATTACKS[name].keeps, logp, attacked_logp),
            )
        )
        figures.append(AttackFigures(name, share(*flips) if len(right) else None, change, better, worse, nats))
    return figures


def prices(keeps: bool, logp: Sequence[float], attacked_logp: Sequence[float]) -> list[float]:
    """KL in nats per prompt between SFT and a policy that applies the attack to each answer of SFT.

    With y drawn from SFT and an attack that keeps different answers different, the policy has SFT's entropy, and

        KL = E[log p(y) - log p(attack(y))]

    For an attack that does not, the policy gives this one answer: KL = -log p(attack(y)).
    """
    return [(before if keeps else 0.0) - after for before, after in zip(logp, attacked_logp, strict=True)]


def attacked_answers(seed: int, name: str, pairs: Sequence[Pair], material: Material) -> list[list[tuple[str, bool]]]:
    """The better and the worse answer of each pair after an attack; they end if they did before, or if nothing is left of them."""
    answers = []
    for item, *places in pairs:
        rng, asked = random.Random(f"audit-{seed}-{name}-{item.key}"), prompt_of(item)[-1].content
        texts = [ATTACKS[name].make(asked, item.answers[i][0], material, rng) for i in places]
        answers.append([(text, item.answers[i][1] or not text) for i, text in zip(places, texts, strict=True)])
    return answers


def encoded(encode: Encode, item: Item, answers: Sequence[tuple[str, bool]]) -> list[Any]:
    rows = encode(prompt_of(item), answers)
    assert rows is not None  # the prompt fitted with the original answers
    return rows[0]


@torch.no_grad()
def answer_logprobs(config: Config, models: Audited, answers: Sequence[tuple[Item, tuple[str, bool]]]) -> list[float]:
    """log p(answer | prompt) under the SFT model, nats; answers are cut to fit the context."""
    tokenizer, context, pairs = models.tokenizer, models.tokenizer.model_max_length, []
    _, room = room_for(tokenizer, config.rollout.max_new_tokens)
    for item, (text, ended) in answers:
        fitted = encode_prompt_within(tokenizer, prompt_of(item), room)
        assert fitted is not None  # `draw_pairs` had no others
        pairs.append((fitted[0], encode_response(tokenizer, text, ended=ended)[: context - len(fitted[0])]))
    logprobs = [0.0] * len(pairs)
    for group, where in response_batches(pairs, tokenizer.pad_token_id, models.device):
        for i, value in zip(group, response_logprobs(models.policy, *where)[0].sum(1).tolist(), strict=True):
            logprobs[i] = value
    return logprobs


# --- best of n -----------------------------------------------------------------------------------------------------


def picked_by_scores(items: Sequence[Item], scores: Scores) -> list[Picked]:
    """How labelers judge the reward model's pick among n labelled answers, on prompts with at least n.

    An answer's standing is the share of its judged comparisons that it won; a random answer's is the mean. The expectation is over
    all choices of n (`expected_best`).
    """
    gains: dict[int, list[float]] = {}
    for item, given in zip(items, scores, strict=True):
        won, lost = Counter(i for i, _ in item.pairs()), Counter(j for _, j in item.pairs())
        judged = sorted({*won, *lost})
        standing = [won[i] / (won[i] + lost[i]) for i in judged]
        for n in PICKED_FROM:
            if len(judged) >= n:
                gain = expected_best([given[i] for i in judged], standing, n) - sum(standing) / len(standing)
                gains.setdefault(n, []).append(gain)
    return [Picked(n, interval(values)) for n, values in sorted(gains.items())]


def best_of_samples(config: Config, models: Audited, dev: Sequence[Ranking], limit: int) -> list[BestOfN]:
    """Best-of-n over 64 samples per prompt of the SFT model, by the reward model and by reward.audit_check."""
    tokenizer = models.tokenizer
    _, room = room_for(tokenizer, config.rollout.max_new_tokens)
    once = {prompt_key(record.prompt): record for record in dev}
    asked = [PromptRecord(id=r.id, prompt=r.prompt, metadata=r.metadata) for r in once.values()]
    fitted = zip(asked, fit_prompts(tokenizer, [record.prompt for record in asked], room), strict=True)
    records, prompts = zip(*[(r, f[0]) for r, f in fitted if f is not None][:limit], strict=True)
    drawn = draw_candidates(config, models.policy, tokenizer, list(records), list(prompts), max(BEST_OF), models.reward)
    values: dict[str, list[list[float]]] = {"score": drawn["scores"]}
    for name, make in (("check", check_scores), ("truth", true_scores)):
        if (judged := make(config, models, records, prompts, drawn)) is not None:
            values[name] = judged
    rows = []
    for n in BEST_OF:
        kl = [estimate_kl(*given, n) for given in zip(drawn["ids"], drawn["logprobs"], drawn["scores"], strict=True)]
        figures = {
            name: interval([expected_best(s, v, n) for s, v in zip(drawn["scores"], judged, strict=True)])
            for name, judged in values.items()
        }
        bound, mean_kl = round(best_of_n_kl(n), 4), round(sum(kl) / len(kl), 4)
        rows.append(BestOfN(n, bound, mean_kl, figures["score"], figures.get("check"), figures.get("truth")))
    return rows


Drawn = dict[str, list[list[Any]]]


def check_scores(
    config: Config, models: Audited, records: Sequence[PromptRecord], prompts: Sequence[list[int]], drawn: Drawn
) -> Scores | None:
    """Scores of the samples by the reward sources of reward.audit_check; None if it is not set."""
    if config.reward.audit_check is None:
        return None
    sources = replace(config.ppo, rewards=config.reward.audit_check, reward_weights=None, calibrated=True)
    reward: Reward = make_reward(replace(config, ppo=sources), models.tokenizer, models.device)[0]
    scores = []
    rows = zip(records, prompts, drawn["ids"], drawn["texts"], drawn["ended"], strict=True)
    for record, prompt, ids, texts, ended in rows:
        episodes = Episodes([record] * len(ids), [prompt] * len(ids), ids, texts, torch.tensor(ended))
        scores.append(reward(episodes).tolist())
    return scores


def true_scores(
    config: Config, models: Audited, records: Sequence[PromptRecord], prompts: Sequence[list[int]], drawn: Drawn
) -> Scores | None:
    """The true scores of the samples; None if there is no true score for these prompts, as with the user's own data."""
    truth = make_truth(config)
    if truth is None or not all(truth.knows(record) for record in records):
        return None
    return totals(judge_rows(truth, records, drawn["texts"], drawn["ended"]))
