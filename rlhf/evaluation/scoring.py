"""Scores of answers by either kind of reward model, the accuracy of scores, and the best head on a frozen trunk."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_matrix

from rlhf.config import Config
from rlhf.data.encoding import Encode, Item, check_labelers, names_of, row_limit
from rlhf.data.records import Ranking
from rlhf.data.splits import uniform
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import UserError
from rlhf.evaluation.statistics import Figures, flatten, mean_by, split_like, win
from rlhf.gold.truth import make_truth
from rlhf.model.batching import by_length, joined_length, joins_rows, right_pad, scoring_tokens
from rlhf.model.classifier import load_reward_model
from rlhf.model.fused_loss import response_logprobs
from rlhf.model.heads import LayerMix, RewardModel, ScalarHead
from rlhf.model.interface import score
from rlhf.model.linear import hold_frozen
from rlhf.ops.ranking import ranking_loss
from rlhf.runs.folders import check_output
from rlhf.runs.progress import Progress
from rlhf.runs.sources import reward_folder, reward_model_folder
from rlhf.training.setup import set_up

Scores = list[list[float]]  # a list per item or prompt

RESPONSES_TOGETHER = 64  # rows per forward of a policy's log-probs, or of features
DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # lambda of `fit_head`
# Of the mix's weights, which otherwise settle on one layer; chosen on one seed of docs/studies/sentiment.md
MIX_DECAY = 0.01
FOLDS = 5  # the decay is chosen by cross-validation over this many parts of the prompts


def item_encoder(config: Config, model: Any, tokenizer: Any, counts: Counter[str] | None = None) -> Encode:
    """The encoder of prompts and answers for a model, or a class; `tokenizer` is the policy's. counts: see `RewardModel.answer_encoder`."""
    limit = row_limit(config, tokenizer)
    return model.answer_encoder(tokenizer, limit, min(config.rollout.max_new_tokens, limit // 2), counts)


def load_judge(config: Config, name: str | None, setting: str, device: torch.device) -> tuple[Path, Any, Encode]:
    """The reward model that a setting names (None: the run's own) with its folder and its encoder. Raises: UserError."""
    folder = reward_folder(config, name, setting)
    if name is None:
        check_output(folder, "reward")
    files = reward_model_folder(folder)
    model = hold_frozen(config, load_reward_model(files, device), device)
    return folder, model, item_encoder(config, model, model.tokenizer if model.reads_text else load_tokenizer(files))


def item_length(item: Item) -> int:
    """The tokens that a forward reads of an item's rows together; token rows are joined if that is faster (`LanguageModel.hidden`)."""
    return joined_length(item.rows) if isinstance(item.rows[0], list) else max(map(len, item.rows))


def by_item(items: list[Item], flat: Tensor) -> Tensor:
    """(N, K) of one value per row of the items, (R,); 0 if an item has fewer than K rows."""
    most = max(len(item.rows) for item in items)
    places = [i * most + j for i, item in enumerate(items) for j in range(len(item.rows))]
    where = torch.tensor(places, device=flat.device)
    return flat.new_zeros(len(items) * most).index_put((where,), flat).view(len(items), most)


def pad_weights(items: list[Item], device: torch.device) -> Tensor:
    """(N, K, K) pair weights of items, 0 for missing answers."""
    weights = [item.weights() for item in items]
    most = max(map(len, weights))
    return torch.stack([pad_matrix(x, (0, most - len(x), 0, most - len(x))) for x in weights]).to(device)


def collate_answers(rows: Sequence[Sequence[int]], answers: Sequence[int], pad: int) -> dict[str, Tensor]:
    """R rows, each a prompt and an answer of so many tokens, as arguments of `Reference`: tokens (R, T), right-padded;
    starts (R,), the prompts' lengths; mask (R, A) of the answers' tokens.
    """
    tokens, lengths = right_pad(rows, pad)
    counts = torch.tensor(answers)
    mask = torch.arange(int(counts.max())) < counts[:, None]
    return {"tokens": tokens, "starts": lengths - counts, "mask": mask}


@torch.no_grad()
def pair_nats(model: Any, pairs: Sequence[tuple[list[int], list[int]]], pad: int, device: torch.device) -> list[float]:
    """The log-prob in nats of each response under a model, of pairs (prompt, response) as tokens."""
    nats = torch.zeros(len(pairs))
    widths = [len(prompt) + len(response) for prompt, response in pairs]
    for group in by_length(widths, RESPONSES_TOGETHER, scoring_tokens(model)):
        rows, answers = [pairs[i][0] + pairs[i][1] for i in group], [len(pairs[i][1]) for i in group]
        tokens, starts, mask = (x.to(device) for x in collate_answers(rows, answers, pad).values())
        logprobs, _ = response_logprobs(model, tokens, starts, mask)
        nats[group] = logprobs.sum(1).cpu()
    return nats.tolist()


def score_each(model: Any, rows: Sequence[Sequence[Any]], calibrated: bool = True) -> Scores:
    """A reward model's scores of rows in lists, such as `Item.rows` of a prompt."""
    return split_like(score(model, flatten(rows), calibrated=calibrated).tolist(), rows)


class JudgedPair(NamedTuple):
    """One labeler's judgement of two answers to one prompt."""

    item: int  # the prompt
    labeler: str | None
    rank_gap: int | None  # None if the judgements are pairs without ranks
    margin: float  # the better answer's score minus the worse one's

    @property
    def won(self) -> float:
        """1 if the scores agree with the labeler, 1/2 if they are equal, else 0."""
        return win(self.margin, 0.0)


def judged_pairs(items: Sequence[Item], scores: Sequence[Sequence[float]]) -> list[JudgedPair]:
    """Every pair that a labeler ordered."""
    return [
        JudgedPair(n, judgement.labeler, judgement.gap_of.get((better, worse)), s[better] - s[worse])
        for n, (item, s) in enumerate(zip(items, scores, strict=True))
        for judgement in item.judgements
        for better, worse in judgement.pairs
    ]


def accuracy(pairs: Sequence[JudgedPair]) -> Figures:
    """Fraction of the pairs that the scores order as the labelers do; ties half, a prompt as the interval's unit."""
    return mean_by([pair.item for pair in pairs], [pair.won for pair in pairs], share=True)


def pairs_by_length(items: Sequence[Item]) -> tuple[list[JudgedPair], bool]:
    """`judged_pairs` with length as the score, and whether longer is better: the direction with the higher accuracy on these items."""
    pairs = judged_pairs(items, [item.lengths for item in items])
    longer = 2 * sum(pair.won for pair in pairs) >= len(pairs)
    return [pair if longer else pair._replace(margin=-pair.margin) for pair in pairs], longer


def held_out_labelers(config: Config, records: Sequence[Ranking] | None = None) -> set[str]:
    """Labelers whose rankings are not trained on: those of data.held_out_labelers, and the gold world's own.

    Raises: UserError if the setting names someone who ranked nothing.
    """
    names = names_of(config.data.held_out_labelers)
    if records is not None:  # else of other labels than those that were trained on
        check_labelers("data.held_out_labelers", names, records)
    if (truth := make_truth(config)) is not None:
        names += [labeler.name for labeler in truth.held_out_labelers(config.gold.held_out_labelers, 0.0)]
    return set(names)


# --- the head on a frozen trunk ------------------------------------------------------------------------------------


@torch.no_grad()
def read_features(model: RewardModel, items: list[Item], pad: int, device: torch.device) -> Tensor:
    """`RewardModel.features` of every response of all items in turn, (L, R, D) float64 on the CPU. Every process reads all of them."""
    model.eval()
    read: dict[int, Tensor] = {}
    sizes, rows = list(map(item_length, items)), [len(item.rows) for item in items]
    for group in by_length(sizes, RESPONSES_TOGETHER, scoring_tokens(model), rows, joins_rows(model)):
        tokens, lengths = right_pad([row for i in group for row in items[i].rows], pad)
        features = model.features(tokens.to(device), lengths.to(device)).double().cpu()
        read |= zip(group, features.split([rows[i] for i in group], 1), strict=True)
    return torch.cat([read[i] for i in range(len(items))], 1)


def fit_head(head: ScalarHead, features: Tensor, items: list[Item], layers: LayerMix | None = None) -> dict[str, float]:
    """Set the head, and the mix of layers that it reads, to the minimum of `ranking_loss` + lambda |w|^2 over
    standardised features, lambda chosen by cross-validation. With a mix its weights s add MIX_DECAY |s|^2.

    Gradients through a random head change the trunk's features before the head can use them; on the frozen trunk the
    best head is the minimum of a convex function.

    features: (L, R, D) float64, of every response of all items in turn; without a mix L is 1. With a mix the minimum is
    a local one, from equal weights on. Returns the decay, and the cross-validated loss and accuracy. Raises: UserError
    with fewer than two items.
    Source: Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features" (linear probing, then fine-tuning).
    """
    if len(items) < 2:
        raise UserError(f"reward.fit_head=true: {len(items)} training prompt with a ranking: cross-validation needs 2")
    weights, scale = pad_weights(items, features.device).double(), features.mean(0).std(0).clamp(min=1e-8)
    rows = ((features - features.mean(1, keepdim=True)) / scale).split([len(item.rows) for item in items], 1)

    def loss_of(fit: list[Tensor], chosen: list[int], part: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        part, (w, mix) = torch.cat([rows[i] for i in chosen], 1) if part is None else part, fit
        scores = by_item([items[i] for i in chosen], mix.softmax(0) @ (part @ w))
        return ranking_loss(scores, weights[chosen, : scores.shape[1], : scores.shape[1]])

    def path(chosen: list[int], least: float) -> Iterator[tuple[float, list[Tensor]]]:
        """The fits for the decays down to the least one; each starts from the one before, which saves most of the steps."""
        w = torch.zeros(features.shape[2], dtype=torch.float64, requires_grad=True)
        mix = torch.zeros(len(features), dtype=torch.float64, requires_grad=len(features) > 1)
        free, part = [x for x in (w, mix) if x.requires_grad], torch.cat([rows[i] for i in chosen], 1)
        for decay in (d for d in reversed(DECAYS) if d >= least):
            optimizer = torch.optim.LBFGS(free, max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

            def closure(decay: float = decay, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of([w, mix], chosen, part)[0] + decay * w @ w + MIX_DECAY * mix @ mix
                loss.backward()
                return loss

            optimizer.step(closure)
            yield decay, [w.detach(), mix.detach()]

    everything, totals = list(range(len(items))), defaultdict[float, Counter[str]](Counter)
    for fold in (everything[n::FOLDS] for n in range(min(FOLDS, len(items)))):
        for decay, fit in path(sorted(set(everything) - set(fold)), min(DECAYS)):
            totals[decay].update({name: float(figure) for name, figure in loss_of(fit, fold)[1].items()})
    validated = ((t["loss_sum"] / t["prompts"], d, t["pairs_correct"] / t["pairs"]) for d, t in totals.items())
    loss, decay, right = min(validated)
    *_, (_, (w, mix)) = path(everything, decay)
    with torch.no_grad():
        head.weight.copy_((w / scale)[None])
        head.bias.zero_()  # calibration shifts the scores
        if layers is not None:
            layers.weight.copy_(mix)
    return {"decay": decay, "loss": loss, "accuracy": right}


# --- which prompts to label next -------------------------------------------------------------------------------------


Value = float | None  # of a prompt; none: its responses do not fit the reward model


def value_of(how: str, scores: Sequence[Sequence[float]]) -> float:
    """What labels of one prompt may teach. scores: a list over the K responses per reward model, without calibration.

    With p(i over j) = sigmoid(r_i - r_j) (Ouyang et al. 2022, equation 1), the mean over pairs of responses of
    p (1 - p), averaged over the models ("uncertain"), or of the variance of p over the models ("disagreement").
    """
    places = combinations(range(len(scores[0])), 2)
    pairs = [[1 / (1 + math.exp(min(700.0, r[j] - r[i]))) for r in scores] for i, j in places]
    return fmean(pvariance(p) if how == "disagreement" else fmean(one * (1 - one) for one in p) for p in pairs)


def choose_prompts_by(
    values: Sequence[Value], keys: Sequence[str], count: int, random_part: float, seed: int
) -> dict[int, bool]:
    """The positions of `count` prompts, and whether each was drawn at random: `random_part` of them are, by (seed,
    key), and the others have the largest values.
    """
    drawn = sorted(range(len(values)), key=lambda i: uniform(f"choose {keys[i]}", seed))
    chosen = dict.fromkeys(drawn[: round(random_part * min(count, len(values)))], True)
    rest = [i for i in drawn if i not in chosen and values[i] is not None]
    rest.sort(key=lambda i: -(values[i] or 0.0))
    return chosen | dict.fromkeys(rest[: count - len(chosen)], False)


def value_tasks(config: Config, tasks: Sequence[Ranking], how: str, rewards: Sequence[str | None]) -> list[Value]:
    """The value of each task by reward models (None: the run's own). Raises: UserError if a model is missing."""
    device = set_up(config)
    by_model = []
    with Progress(len(tasks) * len(rewards), "sample.rewards", unit="prompt") as bar:
        for name in rewards:
            _, model, encode = load_judge(config, name, "sample.rewards", device)
            encoded = [encode(task.prompt, [one.answer for one in task.responses]) for task in tasks]
            by_model.append(score_each(model, [found[0] if found else [] for found in encoded], calibrated=False))
            bar.update(len(tasks))
    return [value_of(how, each) if all(each) else None for each in zip(*by_model, strict=True)]
