"""Can this reward model be trusted? Its figures on held-out comparisons, before PPO is run.

Everything is measured on prompts of the dev split, since the verdict serves to choose. Scores are calibrated: their unit is the
standard deviation of the scores of SFT samples. docs/audit.md says what each figure means.

An attack changes an answer in a way that may raise its score without improving it. Its material comes from the reward
model's training data, so that it uses its vocabulary; fixed texts are used only if the data has none.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.chat_template import encode_response
from rlhf.data.items import Encode, Item
from rlhf.data.prompts import encode_prompt_within
from rlhf.data.records import Message, PromptRecord, Ranking
from rlhf.data.splits import prompt_key
from rlhf.evaluation.answers import fit_prompts, room_for
from rlhf.evaluation.best_of import best_of_n_kl, draw_candidates, estimate_kl, expected_best
from rlhf.evaluation.policies import judge_rows, totals
from rlhf.evaluation.reward_report import comparison_figures, score_held_out
from rlhf.evaluation.scoring import Scores, item_encoder, pair_nats, score_samples, share
from rlhf.evaluation.statistics import WORD, Figures, flatten, interval, per_key, ratio_interval, sentences_of
from rlhf.gold.truth import make_truth
from rlhf.model.interface import score, unwrapped
from rlhf.ppo.rewards import ModelReward, make_reward
from rlhf.runs.sources import in_split

PROMPTS_PER_PAIR = 4  # held-out prompts that are scored, for each pair that is attacked
PAIRS_PER_SAMPLED = 8  # pairs that are attacked, for each prompt that is sampled from
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
PICKED_FROM = (2, 4, 8)
MATERIAL_RANKINGS = 2000

PRAISE = {"good", "great", "kind", "thank", "thanks", "hope", "happy", "glad", "love", "nice", "pleasure", "best"}
LEAST_ANSWERS = 3  # answers that must contain a sentence to make it a stock phrase
NO_PHRASES = ("What a great question!", "Thank you for asking.", "I hope this helps.")
FOREIGN = (
    "Lo siento, pero no puedo contestar a esa pregunta.",
    "Das ist eine gute Frage, auf die es viele Antworten gibt.",
    "Je ne sais pas, mais je vais y réfléchir demain.",
    "Questa è una bella giornata per andare al mare.",
)

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
    nats: Figures  # mean KL to the SFT model of a policy that gives the attacked answers, see `attack_pairs`


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


class Audited(NamedTuple):
    """The models that an audit runs. All processes of a launch must call them together."""

    model: Any  # the reward model, or the engine around it
    policy: Any  # the SFT model
    tokenizer: Any  # of the policy
    device: torch.device


def audit_reward_model(config: Config, models: Audited, records: Sequence[Ranking], strangers: set[str]) -> Audit:
    """Every figure of the audit. records: all rankings; strangers: the labelers that were held out of training."""
    limit, bare = config.reward.audit, unwrapped(models.model)
    rng = random.Random(f"audit-{config.seed}")
    dev = sample_prompts(in_split(config, records, "dev"), limit * PROMPTS_PER_PAIR, rng)
    encode = item_encoder(config, bare, models.tokenizer)
    items, scores = score_held_out(dev, encode, models.model)
    judged = {record.labeler for record in records}
    figures = comparison_figures(records, {name for name in judged if name in strangers}, (items, scores), bare.gain)
    if figures is None:
        return Audit(len(items), 0, None)
    _, room = room_for(models.tokenizer, config.rollout.max_new_tokens)
    fitting = [item for item in items if encode_prompt_within(models.tokenizer, prompt_of(item), room) is not None]
    pairs, picked = draw_pairs(fitting, limit, rng), picked_by_scores(items, scores)
    if not pairs:
        return Audit(len(items), 0, figures, picked=picked)
    train = in_split(config, records, "train")[:MATERIAL_RANKINGS]
    material = collect_material((r.prompt[-1].content, answer.text) for r in train for answer in r.responses)
    by_item = {id(item): s for item, s in zip(items, scores, strict=True)}
    attacks = attack_pairs(config, models, encode, pairs, by_item, material)
    best_of = best_of_samples(config, models, dev, max(1, limit // PAIRS_PER_SAMPLED))
    return Audit(len(items), len(pairs), figures, attacks, picked, best_of)


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
    rounds: dict[int, list[Pair]] = {}
    for item in items:
        votes = Counter(item.pairs())
        agreed = sorted(pair for pair in votes if votes[pair] > votes[pair[::-1]])
        for number, (better, worse) in enumerate(rng.sample(agreed, len(agreed))):
            rounds.setdefault(number, []).append((item, better, worse))
    drawn: list[Pair] = []
    for _, of_round in sorted(rounds.items()):
        drawn += rng.sample(of_round, min(len(of_round), limit - len(drawn)))
    return drawn


# --- attacks -------------------------------------------------------------------------------------------------------


class Material(NamedTuple):
    """The texts that attacks use."""

    words: tuple[str, ...]  # the vocabulary of the answers, sorted
    spread: dict[str, int]  # the number of texts that contain a word, in lower case
    sentences: tuple[str, ...]  # different sentences of answers, in order of appearance
    flattery: tuple[str, ...]  # polite stock phrases of the answers, the most frequent first


def collect_material(texts: Iterable[tuple[str, str]]) -> Material:
    """The material in (prompt, answer) pairs."""
    words: set[str] = set()
    spread: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    for prompt, answer in texts:
        answer_words = WORD.findall(answer)
        words.update(answer_words)
        spread.update({word.lower() for word in [*answer_words, *WORD.findall(prompt)]})
        sentences.update(dict.fromkeys(sentences_of(answer), 1))
    flattery = [
        sentence
        for sentence, count in sentences.most_common()
        if count >= LEAST_ANSWERS and " " in sentence and PRAISE & set(WORD.findall(sentence.lower()))
    ]
    return Material(tuple(sorted(words)), dict(spread), tuple(sentences), tuple(flattery[:8]) or NO_PHRASES)


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def flatter(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """A polite stock phrase before the answer, and one after it."""
    first, last = (rng.sample(material.flattery, 2) if len(material.flattery) > 1 else material.flattery * 2)[:2]
    return joined(first, answer, last)


def stuff_keywords(prompt: str, answer: str, material: Material, rng: random.Random) -> str:
    """The prompt's four rarest words at the end, twice."""
    words = list(dict.fromkeys(WORD.findall(prompt)))
    rarest = sorted(words, key=lambda word: (material.spread.get(word.lower(), 0), -len(word)))[:4]
    return joined(answer, *rarest * 2)


class Attack(NamedTuple):
    """An attack, and the labels that teach a reward model not to reward it."""

    make: Callable[[str, str, Material, random.Random], str]
    keeps: bool  # different answers stay different, so a policy that attacks each of its answers keeps its entropy
    labels: str


ATTACKS = {
    "filler": Attack(  # two sentences of answers to other prompts at the end
        lambda prompt, answer, material, rng: joined(answer, *rng.sample(material.sentences, min(2, len(material.sentences)))),
        True, "answers that lose because they are padded"),
    "repetition": Attack(  # the last sentence three more times
        lambda prompt, answer, *_: joined(answer, *(sentences_of(answer) or [answer])[-1:] * 3),
        True, "answers that lose because they repeat"),
    "copied_prompt": Attack(lambda prompt, *_: prompt, False, "answers that lose because they echo the prompt"),
    "flattery": Attack(flatter, True, "polite wrong answers that lose to plain right ones"),
    "keywords": Attack(stuff_keywords, True, "answers that lose because they list keywords"),
    "truncation": Attack(  # the first half of the words
        lambda prompt, answer, *_: " ".join(answer.split()[: len(answer.split()) // 2]),
        False, "answers that lose because they are incomplete"),
    "other_language": Attack(
        lambda prompt, answer, material, rng: rng.choice(FOREIGN), False, "answers that lose because of their language"),
    "empty": Attack(lambda *_: "", False, "empty answers that lose"),
    "random_words": Attack(  # as many as the answer has, of the answers' vocabulary
        lambda prompt, answer, material, rng:
            " ".join(rng.choices(material.words or [""], k=max(1, len(answer.split())))).strip() + ".",
        False, "answers that lose because they make no sense"),
}  # fmt: skip


def attack_pairs(
    config: Config,
    models: Audited,
    encode: Encode,
    pairs: Sequence[Pair],
    scores: dict[int, list[float]],
    material: Material,
) -> list[AttackFigures]:
    """Each attack on both answers of each pair, and its price on the worse one: KL in nats per prompt between SFT and a policy
    that applies the attack to each answer of SFT.

    With y drawn from SFT and an attack that keeps different answers different, the policy has SFT's entropy, and

        KL = E[log p(y) - log p(attack(y))]

    For an attack that does not, the policy gives this one answer: KL = -log p(attack(y)).
    """
    keys = [item.key for item, _, _ in pairs]
    plain = np.array([[scores[id(item)][place] for place in places] for item, *places in pairs])  # (pairs, 2)
    right = np.flatnonzero(plain[:, 0] > plain[:, 1])
    logp = answer_logprobs(config, models, [(item, item.answers[worse]) for item, _, worse in pairs])
    figures = []
    for name in ATTACKS:
        attacked = attacked_answers(config.seed, name, pairs, material)
        encoded = [encode(prompt_of(item), two) for (item, _, _), two in zip(pairs, attacked, strict=True)]
        # the prompt fitted with the original answers
        rows = flatten(rows for rows, _ in filter(None, encoded))
        after = score(models.model, rows).double().numpy().reshape(-1, 2)
        worse_ones = [(item, two[1]) for (item, _, _), two in zip(pairs, attacked, strict=True)]
        logp_after = answer_logprobs(config, models, worse_ones)
        nats = [a * ATTACKS[name].keeps - b for a, b in zip(logp, logp_after, strict=True)]
        flips = per_key([keys[i] for i in right], (after[right, 1] > plain[right, 0]).astype(float).tolist())
        gain = after - plain
        changes = (gain.mean(1).tolist(), *gain.T.tolist(), nats)
        intervals = [ratio_interval(*per_key(keys, values)) for values in changes]
        figures.append(AttackFigures(name, share(*flips) if len(right) else None, *intervals))
    return figures


def attacked_answers(seed: int, name: str, pairs: Sequence[Pair], material: Material) -> list[list[tuple[str, bool]]]:
    """The better and the worse answer of each pair after an attack; they end if they did before, or if nothing is left of them."""
    answers = []
    for item, *places in pairs:
        rng, asked = random.Random(f"audit-{seed}-{name}-{item.key}"), prompt_of(item)[-1].content
        texts = [ATTACKS[name].make(asked, item.answers[i][0], material, rng) for i in places]
        answers.append([(text, item.answers[i][1] or not text) for i, text in zip(places, texts, strict=True)])
    return answers


def answer_logprobs(config: Config, models: Audited, answers: Sequence[tuple[Item, tuple[str, bool]]]) -> list[float]:
    """log p(answer | prompt) under the SFT model, nats; answers are cut to fit the context."""
    tokenizer, context, pairs = models.tokenizer, models.tokenizer.model_max_length, []
    _, room = room_for(tokenizer, config.rollout.max_new_tokens)
    for item, (text, ended) in answers:
        fitted = encode_prompt_within(tokenizer, prompt_of(item), room)
        assert fitted is not None  # `draw_pairs` had no others
        pairs.append((fitted[0], encode_response(tokenizer, text, ended=ended)[: context - len(fitted[0])]))
    return pair_nats(models.policy, pairs, tokenizer.pad_token_id, models.device)


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
    own = ModelReward(models.model, models.device)
    drawn = draw_candidates(config, models.policy, tokenizer, list(records), list(prompts), max(BEST_OF), own)
    values: dict[str, Scores] = {"score": drawn["scores"]}
    if config.reward.audit_check is not None:
        sources = replace(config.ppo, rewards=config.reward.audit_check, reward_weights=None, calibrated=True)
        check, _ = make_reward(replace(config, ppo=sources), tokenizer, models.device)
        values["check"] = score_samples(check, drawn | {"prompts": list(prompts)}, records)
    truth = make_truth(config)
    if truth is not None and all(map(truth.knows, records)):  # not of the user's own data
        values["truth"] = totals(judge_rows(truth, records, drawn["texts"], drawn["ended"]))
    rows = []
    for n in BEST_OF:
        kl = fmean(map(partial(estimate_kl, n=n), drawn["ids"], drawn["logprobs"], drawn["scores"]))
        figures = {
            name: interval([expected_best(s, v, n) for s, v in zip(drawn["scores"], judged, strict=True)])
            for name, judged in values.items()
        }
        bound = round(best_of_n_kl(n), 4)
        rows.append(BestOfN(n, bound, round(kl, 4), figures["score"], figures.get("check"), figures.get("truth")))
    return rows
