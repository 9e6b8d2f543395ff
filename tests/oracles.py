"""Slow, plain float64 versions of the recipe's formulas, written from the papers in numpy and loops.

They share no code with rlhf.ops: where the library vectorises or recurses, an oracle writes the sum out.
"""

import numpy as np
import torch


def log_softmax(logits):
    """Over the last dimension; -inf allowed."""
    logits = np.asarray(logits, dtype=np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def token_logprobs(logits, tokens):
    logp = log_softmax(logits)
    out = np.zeros(np.shape(tokens))
    for index in np.ndindex(*np.shape(tokens)):
        out[index] = logp[(*index, tokens[index])]
    return out


def entropy(logits):
    logp = log_softmax(logits)
    p = np.exp(logp)
    return -np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0).sum(-1)


def kept(x, mask):
    """The masked entries in reading order."""
    return np.array([np.float64(x[i]) for i in np.ndindex(*np.shape(mask)) if mask[i]])


def whiten(x, mask):
    values = kept(x, mask)
    mean = values.sum() / len(values)
    var = ((values - mean) ** 2).sum() / len(values)
    out = np.zeros(np.shape(mask))
    out[np.asarray(mask)] = (values - mean) / np.sqrt(var + 1e-8)
    return out


def pairs_of(ranks):
    """All (winner, loser) of one list of ranks: 0 best, equal a tie, -1 absent."""
    present = [i for i in range(len(ranks)) if ranks[i] >= 0]
    return [(i, j) for i in present for j in present if ranks[i] < ranks[j]]


def smoothed_loss(difference, eps):
    """Mitchell 2023, eq. 3: -(1 - eps) log sigmoid(x) - eps log sigmoid(-x)."""
    return (1 - eps) * np.logaddexp(0.0, -difference) + eps * np.logaddexp(0.0, difference)


def ipo_loss(difference, tau):
    """Azar et al. 2023, eq. 17: (h - 1 / (2 tau))^2."""
    return (difference - 1 / (2 * tau)) ** 2


def ranking_loss(scores, pairs, weights=None, of_pair=lambda x: np.logaddexp(0.0, -x)):
    """Ouyang et al. 2022, eq. 1, with one list of (winner, loser) a prompt: loss, accuracy and margin.

    weights: one list a prompt, beside its pairs; 1 unless given. The mean is over prompts that have a pair.
    """
    losses, correct, margin, total = [], 0.0, 0.0, 0.0
    for n, prompt_pairs in enumerate(pairs):
        if not prompt_pairs:
            continue
        loss, norm = 0.0, 0.0
        for k, (w, l) in enumerate(prompt_pairs):  # noqa: E741 (the paper's letters)
            weight = 1.0 if weights is None else weights[n][k]
            difference = np.float64(scores[n][w]) - np.float64(scores[n][l])
            loss += weight * of_pair(difference)  # log sigmoid(x) = -log(exp(0) + exp(-x))
            norm += weight
            correct += weight * (1.0 if difference > 0 else 0.5 if difference == 0 else 0.0)
            margin += weight * difference
            total += weight
        losses.append(loss / norm)
    return sum(losses) / len(losses), correct / total, margin / total


def kl(logp, logp_ref, kind):
    """With the ratio r = p_ref / p of Schulman 2020: -log r, (log r)^2 / 2, (r - 1) - log r."""
    log_r = np.float64(logp_ref) - np.float64(logp)
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": (np.exp(log_r) - 1) - log_r}[kind]


def gae(rewards, values, mask, gamma, lam, last_values=None):
    """Schulman et al. 2016, eq. 16 as the sum that it is: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    B, T = np.shape(mask)
    advantages, returns = np.zeros((B, T)), np.zeros((B, T))
    for b in range(B):
        steps = [t for t in range(T) if mask[b][t]]
        deltas = []
        at_end = 0.0 if last_values is None else np.float64(last_values[b])
        for n, t in enumerate(steps):
            after = np.float64(values[b][steps[n + 1]]) if n + 1 < len(steps) else at_end
            deltas.append(np.float64(rewards[b][t]) + gamma * after - np.float64(values[b][t]))
        for n, t in enumerate(steps):
            advantages[b, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[n:]))
            returns[b, t] = advantages[b, t] + np.float64(values[b][t])
    return advantages, returns


def token_rewards(scores, logp_old, logp_ref, mask, kl_coef):
    B, T = np.shape(mask)
    out = np.zeros((B, T))
    for b in range(B):
        steps = [t for t in range(T) if mask[b][t]]
        for t in steps:
            out[b, t] = -kl_coef * (np.float64(logp_old[b][t]) - np.float64(logp_ref[b][t]))
        out[b, steps[-1]] += np.float64(scores[b])
    return out


def policy_loss(logp, logp_old, advantages, mask, clip_range, high=None):
    """Schulman et al. 2017, eq. 7: minus the mean of min(rho A, clip(rho) A), and the statistics. high: eps_high of DAPO."""
    objective, approxkl, clipped, ratios = 0.0, 0.0, 0, []
    for new, old, A in zip(kept(logp, mask), kept(logp_old, mask), kept(advantages, mask), strict=True):
        rho = np.exp(new - old)
        rho_clipped = min(max(rho, 1 - clip_range), 1 + (clip_range if high is None else high))
        objective += min(rho * A, rho_clipped * A)
        clipped += rho_clipped * A < rho * A
        approxkl += 0.5 * (new - old) ** 2
        ratios.append(rho)
    N = len(ratios)
    return -objective / N, {"approxkl": approxkl / N, "clipfrac": clipped / N, "ratio_max": max(ratios)}


def value_loss(values, values_old, returns, mask, clip_range):
    total, clipped = 0.0, 0
    rows = list(zip(kept(values, mask), kept(values_old, mask), kept(returns, mask), strict=True))
    for V, V_old, R in rows:
        V_clipped = V_old + min(max(V - V_old, -clip_range), clip_range)
        total += max((V - R) ** 2, (V_clipped - R) ** 2)
        clipped += (V_clipped - R) ** 2 > (V - R) ** 2
    return 0.5 * total / len(rows), {"clipfrac": clipped / len(rows)}


def explained_variance(values, returns, mask):
    V, R = kept(values, mask), kept(returns, mask)
    return 1.0 - np.var(R - V) / np.var(R)


def token_values(model, tokens):
    """Values (B, T) of a critic after every token of right-padded tokens (B, T): all of them, not only those that count."""
    raw = model.head(model.trunk(input_ids=tokens, use_cache=False).last_hidden_state).squeeze(-1).float()
    return model.gain * (raw - model.shift)


def row_logprobs(model, row, first=1):
    """Log-probs of the tokens of one row from place `first` on: one plain forward, without padding, cache or other rows."""
    with torch.no_grad():
        logp = model(torch.tensor([row]), use_cache=False).logits[0].double().log_softmax(-1)
    return [logp[t - 1, row[t]].item() for t in range(first, len(row))]


def distillation(student, teacher, temperature):
    """(T^2 times the cross-entropy under the teacher, KL) of one token's logits, Hinton et al. 2015."""
    logp, logq = log_softmax(teacher / temperature), log_softmax(student / temperature)
    ce = -sum(np.exp(p) * q for p, q in zip(logp, logq, strict=True))
    return temperature**2 * ce, sum(np.exp(p) * (p - q) for p, q in zip(logp, logq, strict=True))
