"""The reward model's loss on ranked answers, and the pair weights of a ranking."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.ops.masked import resolve_denominator, upcast


def pair_weights(ranks: Tensor) -> Tensor:
    """The weights of "i beats j" by the ranks of K answers: all pairs of one ranking.

    pair_weights[..., i, j] = 1 where 0 <= ranks[..., i] < ranks[..., j], else 0

    ranks (…, K) integer: 0 best, equal is a tie (no pair), -1 absent or unranked (no pair). Returns (…, K, K) float32.
    The reward stage adds these up per labeler, see `Item.weights`; a loop of your own can pass them to `ranking_loss`.
    Source: Ouyang et al. 2022, section 3.5.
    Differs: ties are dropped; the paper does not say how it treats them.
    """
    better, worse = ranks[..., :, None], ranks[..., None, :]  # (…, K, 1), (…, 1, K)
    return ((better >= 0) & (better < worse)).float()


def ranking_loss(
    scores: Tensor,
    pair_weights: Tensor,
    denominator: float | Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    target: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the labelers' comparisons, one prompt with all its pairs being one element.

    m_ij   = scores_ni - scores_nj
    loss_n = sum_ij w_nij * -log sigmoid(m_ij) / sum_ij w_nij
    loss   = sum_n loss_n / denominator        denominator: the prompts that have a pair, unless given

    label_smoothing eps, the share of judgements that are taken as wrong:
    -(1 - eps) log sigmoid(m_ij) - eps log sigmoid(-m_ij).
    target: (m_ij - target)^2 in place of the logarithm.

    A prompt without a pair adds nothing and is not counted. With the global number of prompts that have a pair as
    `denominator`, the losses of the parts of a batch add up to that of the whole.

    scores (N, K) in any float type, pair_weights (N, K, K), 0 or more, diagonal 0; the score of an absent answer (no
    weight) is never read. Returns the scalar loss in nats and statistics, in which a pair counts by its weight (one per
    labeler): sums to reduce over batches and ranks `prompts`, `loss_sum`, `pairs`, `pairs_correct` (equal scores count
    half), `margin_sum` (of scores_ni - scores_nj); ready for this call `loss`, `accuracy`, `margin` (the last two NaN
    if a part of a batch has no pair).
    Source: Ouyang et al. 2022, eq. 1; label_smoothing: Mitchell 2023 ("A note on DPO with noisy preferences"), eq. 3;
    target: Azar et al. 2023 (IPO), eq. 17.
    Differs: divides by the prompt's own number of pairs instead of C(K, 2), so that ties, K that varies, and several
    labelers (whose weights add) leave each prompt with weight 1.
    """
    scores = upcast(scores)
    weights = pair_weights.to(scores.dtype)
    margins = scores[:, :, None] - scores[:, None, :]  # (N, K, K), [n, i, j] = score of i over j
    margins = torch.where(weights > 0, margins, 0.0)
    prompt_weights = weights.sum((1, 2))  # (N,)
    has_pair = prompt_weights > 0
    # -log sigmoid(-m) = m - log sigmoid(m)
    pair_losses = F.softplus(-margins) + label_smoothing * margins if target is None else (margins - target) ** 2
    prompt_losses = (weights * pair_losses).sum((1, 2)) / torch.where(has_pair, prompt_weights, 1.0)
    loss_sum = prompt_losses.sum()
    divisor = resolve_denominator("ranking_loss", has_pair.sum(), denominator, "prompt with an ordered pair")
    loss = loss_sum / divisor

    won = (margins > 0).to(weights.dtype) + 0.5 * (margins == 0)
    pairs, correct, margin_sum = weights.sum(), (weights * won).sum(), (weights * margins).sum()
    statistics = {
        "prompts": has_pair.sum(),
        "loss_sum": loss_sum,
        "pairs": pairs,
        "pairs_correct": correct,
        "margin_sum": margin_sum,
        "loss": loss,
        "accuracy": correct / pairs,
        "margin": margin_sum / pairs,
    }
    return loss, {name: value.detach() for name, value in statistics.items()}
