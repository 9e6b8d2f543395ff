"""Fit a reward model's head to the rankings while its trunk is frozen, before any other training.

Gradients through a random head change the trunk's features before the head can use them. With the trunk frozen the best head
is the minimum of a convex function, which takes seconds after one forward of each response.
Source: Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features" (linear probing, then fine-tuning).
"""

from typing import Any

import torch
from torch import Tensor

from rlhf.data.items import Item
from rlhf.errors import UserError
from rlhf.evaluation.scoring import by_item, micro_batches, pad_weights
from rlhf.model.batching import right_pad
from rlhf.model.heads import RewardModel, ScalarHead
from rlhf.ops.ranking import ranking_loss

DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # lambda, tried in turn
FOLDS = 5  # the decay is chosen by cross-validation over this many parts of the prompts
READ_TOGETHER = 64  # responses per forward


@torch.no_grad()
def read_features(model: RewardModel, items: list[Item], pad: int, device: torch.device) -> Tensor:
    """What the head sees of every response of all items in turn, (R, D) float64 on the CPU. Every process reads all of them."""
    model.eval()
    by_item: dict[int, Tensor] = {}
    for part in micro_batches(items, READ_TOGETHER):
        tokens, lengths = right_pad([row for item in part for row in item.rows], pad)
        read = model.features(tokens.to(device), lengths.to(device)).double().cpu()
        by_item |= zip(map(id, part), read.split([len(item.rows) for item in part]), strict=True)
    return torch.cat([by_item[id(item)] for item in items])


def fit_head(head: ScalarHead, features: Tensor, items: list[Item]) -> dict[str, float]:
    """Set the head to the minimum of `ranking_loss` + lambda |w|^2 over standardised features, lambda chosen by cross-validation.

    features: (R, D) float64, of every response of all items in turn. Returns the decay, and the cross-validated loss and
    accuracy. Raises: UserError with fewer than two items.
    """
    if len(items) < 2:
        raise UserError(
            f"reward.fit_head=true: the training split has {len(items)} prompt with a ranking: cross-validation needs 2 or more"
        )
    weights = pad_weights(items, features.device).double()
    scale = features.std(0).clamp(min=1e-8)
    x = (features - features.mean(0)) / scale
    rows = torch.split(torch.arange(len(x)), [len(item.rows) for item in items])

    def loss_of(w: Tensor, chosen: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = by_item([items[i] for i in chosen], x[torch.cat([rows[i] for i in chosen])] @ w)
        return ranking_loss(scores, weights[chosen, : scores.shape[1], : scores.shape[1]])

    def fitted(decay: float, chosen: list[int]) -> Tensor:
        return minimise(lambda w: loss_of(w, chosen)[0] + decay * w @ w, x.shape[1])

    everything, tried = list(range(len(items))), []
    folds = [everything[n::FOLDS] for n in range(min(FOLDS, len(items)))]
    for decay in DECAYS:
        sums = torch.zeros(4, dtype=torch.float64)
        for fold in folds:
            _, figures = loss_of(fitted(decay, sorted(set(everything) - set(fold))), fold)
            sums += torch.stack([figures[name] for name in ("loss_sum", "prompts", "pairs_correct", "pairs")])
        tried.append((float(sums[0] / sums[1]), decay, float(sums[2] / sums[3])))
    loss, decay, accuracy = min(tried)
    w = fitted(decay, everything)
    with torch.no_grad():
        head.weight.copy_((w / scale)[None])
        head.bias.zero_()  # calibration shifts the scores
    return {"decay": decay, "loss": loss, "accuracy": accuracy}


def minimise(objective: Any, width: int) -> Tensor:
    """The minimum (width,) of a smooth convex function of a float64 vector, by L-BFGS from 0."""
    w = torch.zeros(width, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(w)
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()
