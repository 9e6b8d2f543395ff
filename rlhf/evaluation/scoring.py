"""Scores of answers by either kind of reward model, and the accuracy of scores."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.items import Encode, Item, check_labelers, names_of
from rlhf.data.records import PromptRecord, Ranking
from rlhf.evaluation.statistics import ratio_interval
from rlhf.gold.truth import make_truth
from rlhf.model.batching import by_length, right_pad
from rlhf.model.branches import joined_length
from rlhf.model.interface import Episodes, score

Scores = list[list[float]]  # a list per item

RESPONSES_TOGETHER = 64  # rows per forward of a policy's log-probs


def item_encoder(config: Config, model: Any, tokenizer: Any) -> Encode:
    """The encoder of prompts and answers for this model; `tokenizer` is the policy's."""
    return model.answer_encoder(tokenizer, min(config.rollout.max_new_tokens, tokenizer.model_max_length // 2))


def item_length(item: Item) -> int:
    """The tokens that a forward reads of an item's rows together; token rows are joined if that is faster (`LanguageModel.hidden`)."""
    return joined_length(item.rows) if isinstance(item.rows[0], list) else max(map(len, item.rows))


def micro_batches(batch: list[Item], size: int) -> Iterator[list[Item]]:
    """Whole prompts, of similar length, with at most `size` responses together (but at least one prompt)."""
    part: list[Item] = []
    for item in sorted(batch, key=item_length):
        if part and sum(len(i.rows) for i in part) + len(item.rows) > size:
            yield part
            part = []
        part.append(item)
    yield part


def unwrapped(model: Any) -> Any:
    """The model, or the model inside an engine."""
    return getattr(model, "module", model)


def score_items(model: Any, items: list[Item], device: torch.device) -> Tensor:
    """Raw scores (N, K) of items with up to K answers in one forward; 0 if an item has fewer."""
    inputs = unwrapped(model).collate([row for item in items for row in item.rows])
    flat = model(**{name: tensor.to(device) for name, tensor in inputs.items()}, calibrated=False)
    return by_item(items, flat)


def by_item(items: list[Item], flat: Tensor) -> Tensor:
    """(N, K) of one value per row of the items, (R,); 0 if an item has fewer than K rows."""
    most = max(len(item.rows) for item in items)
    places = [i * most + j for i, item in enumerate(items) for j in range(len(item.rows))]
    where = torch.tensor(places, device=flat.device)
    return flat.new_zeros(len(items) * most).index_put((where,), flat).view(len(items), most)


def pad_weights(items: list[Item], device: torch.device) -> Tensor:
    """(N, K, K) pair weights of items, 0 for missing answers."""
    most = max(len(item.rows) for item in items)
    weights = torch.zeros(len(items), most, most)
    for i, item in enumerate(items):
        k = len(item.rows)
        weights[i, :k, :k] = item.weights()
    return weights.to(device)


def response_batches(
    pairs: Sequence[tuple[list[int], list[int]]], pad: int, device: torch.device
) -> Iterator[tuple[list[int], tuple[Tensor, Tensor, Tensor]]]:
    """Prompts with a response each, as tokens, in groups of similar length: (their indices, (tokens (B, T), prompt lengths (B,),
    mask (B, A) of the response tokens))."""
    for group in by_length([len(prompt) + len(response) for prompt, response in pairs], RESPONSES_TOGETHER):
        tokens, lengths = right_pad([pairs[i][0] + pairs[i][1] for i in group], pad)
        starts = torch.tensor([len(pairs[i][0]) for i in group])
        answer = lengths - starts
        mask = torch.arange(int(answer.max())) < answer[:, None]
        yield group, (tokens.to(device), starts.to(device), mask.to(device))


def score_each(model: Any, items: list[Item]) -> Scores:
    """Calibrated scores, a list per item."""
    flat = iter(score(model, [row for item in items for row in item.rows]).tolist())
    return [[next(flat) for _ in item.rows] for item in items]


def score_answers_by(model: Any, answers: dict[str, list[list[Any]]], records: Sequence[PromptRecord]) -> Scores:
    """A reward model's calibrated scores of one policy's {"prompts", "ids", "texts", "ended"}, a list per prompt of `records`."""
    count = len(answers["ids"][0])
    asked, prompts = ([x for x in each for _ in range(count)] for each in (records, answers["prompts"]))
    ids, texts, ended = ([x for row in answers[key] for x in row] for key in ("ids", "texts", "ended"))
    flat = score(model, model.rows(Episodes(asked, prompts, ids, texts, torch.tensor(ended)))).tolist()
    return [flat[i : i + count] for i in range(0, len(flat), count)]


def count_right(items: list[Item], scores: Scores) -> tuple[list[float], list[float]]:
    """Per item, the number of ordered pairs that the scores order as the labelers do (equal scores count half), and of all pairs."""
    right, count = [], []
    for item, s in zip(items, scores, strict=True):
        points = [1.0 if s[i] > s[j] else 0.5 if s[i] == s[j] else 0.0 for i, j in item.pairs()]
        right.append(sum(points))
        count.append(float(len(points)))
    return right, count


def accuracy(items: list[Item], scores: Scores) -> dict[str, Any]:
    """Fraction of the labelers' ordered pairs that the scores order the same way; ties half, a prompt as the interval's unit."""
    return share(*count_right(items, scores))


def share(right: Sequence[float], count: Sequence[float]) -> dict[str, Any]:
    """`ratio_interval` of a share, its interval within [0, 1]."""
    figure = ratio_interval(right, count)
    return figure | {"ci95": [min(1.0, max(0.0, end)) for end in figure["ci95"]]}


def length_scores(items: list[Item]) -> tuple[Scores, bool]:
    """Scores by length alone, and whether longer is better: the direction with the higher accuracy on these items."""
    longer = [[float(n) for n in item.lengths] for item in items]
    right, count = count_right(items, longer)
    if 2 * sum(right) >= sum(count):
        return longer, True
    return [[-n for n in row] for row in longer], False


def length_baseline(items: list[Item]) -> float:
    """The accuracy of length alone."""
    right, count = count_right(items, length_scores(items)[0])
    return sum(right) / sum(count)


def held_out_labelers(config: Config, records: Sequence[Ranking]) -> set[str]:
    """Labelers whose rankings are not trained on: those of data.held_out_labelers, and the gold world's own.

    Raises: UserError if the setting names someone who ranked nothing.
    """
    names = names_of(config.data.held_out_labelers)
    check_labelers("data.held_out_labelers", names, records)
    truth = make_truth(config)
    if truth is not None:
        names += [labeler.name for labeler in truth.held_out_labelers(config.gold.held_out_labelers, 0.0)]
    return set(names)
