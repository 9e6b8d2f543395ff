"""How near is the critic to the true value? Values by Monte Carlo, along runs of steadier.py.

    python scripts/studies/exact_values.py --out runs/steadier --seeds 0 1 2 3 4 --parents runs/seed-0 … experiment=gold threads=1

The cells must have kept checkpoints (steadier.py does). At a checkpoint the policy answers test prompts, each response is cut after
every EVERY-th token, and the rest is sampled AGAIN times from there: the mean return of the rests is the value of the policy that sampled
them, with a known error, which is subtracted from the variances. The critic is that of the same checkpoint: the one whose values the
next update uses.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from harness import Cell, cached, draw, make_cells, mean_interval, parse, read, rows, table
from steadier import BEFORE, CRITICS

from rlhf.data.chat_template import encode_prompts
from rlhf.data.records import Message
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import sample
from rlhf.model.classifier import load_reward_model
from rlhf.model.heads import RewardModel
from rlhf.model.interface import score
from rlhf.ppo.models import ActorCritic, Reference
from rlhf.ppo.rewards import adjust_scores
from rlhf.training.adapters import share_weights
from rlhf.training.setup import load_policy
from rlhf.training.state import put_weights, read_state

PROMPTS, EVERY, AGAIN = 48, 6, 48
UPDATES = (4, 16)


def settings_of(cell: Cell) -> Any:
    """The settings of PPO's record that values depend on, as fields: ppo, kl, rollout."""
    groups = {name: SimpleNamespace() for name in ("ppo", "kl", "rollout")}
    for name, value in read(cell.home / "ppo" / "stage.json")["settings"].items():
        group, _, key = name.partition(".")
        if group in groups:
            setattr(groups[group], key, value)
    return SimpleNamespace(**groups)


@torch.no_grad()
def values_at(cell: Cell, update: int) -> dict[str, float]:
    """Figures of the critic after this update, against the values of the policy after it."""
    config, device = settings_of(cell), torch.device("cpu")
    sft = cell.parent / "sft" / "model"
    tokenizer = load_tokenizer(sft)
    reference = load_policy(sft)
    given = dict(text.partition("=")[::2] for text in cell.steps[0][1:])
    reward = load_reward_model(given["ppo.rewards"].strip("[]'") + "/model", device)
    policy = load_policy(sft)
    from_sft = config.ppo.critic == "sft"
    critic = (
        RewardModel.from_causal_lm(policy) if from_sft else share_weights(reward, torch.nn.Module()).fold_calibration()
    )
    trained = ActorCritic(policy, critic).eval()
    put_weights(trained, read_state(cell.home / "ppo" / "checkpoints" / f"step-{update}")[0]["weights"])

    test = [row for row in rows(cell.parent / "world" / "prompts.jsonl") if row["metadata"]["split"] == "test"]
    prompts = encode_prompts(tokenizer, [[Message(role="user", content=row["prompt"])] for row in test[:PROMPTS]])
    how = {"max_new_tokens": config.rollout.max_new_tokens, "eos_token_id": tokenizer.eos_token_id}
    how["pad_token_id"] = tokenizer.pad_token_id
    first = sample(policy, prompts, [("value", update, i) for i in range(len(prompts))], **how)
    means, errors, said = [], [], []
    for i, (prompt, response) in enumerate(zip(prompts, first.responses, strict=True)):
        for at in range(0, len(response), EVERY):
            start = prompt + response[:at]
            left = {**how, "max_new_tokens": config.rollout.max_new_tokens - at}
            rest = sample(policy, [start] * AGAIN, [("rest", update, i, at, n) for n in range(AGAIN)], **left)
            whole = [start + ids for ids in rest.responses]
            longest = max(map(len, whole))
            tokens = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in whole])
            starts = torch.full((AGAIN,), len(start))
            drift = rest.logprobs - Reference(reference)(tokens, starts, rest.mask)
            paid = adjust_scores(config, score(reward, whole), rest.ended)
            returns = (paid - config.kl.coef * (drift * rest.mask).sum(1)).double()
            means.append(returns.mean())
            errors.append(returns.var() / AGAIN)
            values = trained(torch.tensor([start + response[at:]]), torch.tensor([len(start)]),
                             torch.ones(1, len(response) - at, dtype=torch.bool), with_policy=False)[2]  # fmt: skip
            said.append(values[0, 0].double())
    exact, noise, critics = torch.stack(means), torch.stack(errors).mean(), torch.stack(said)
    off = critics - exact
    return {
        "explained": float(1 - (off.square().mean() - noise) / (exact.var() - noise)),
        "explained_less_bias": float(1 - (off.var() - noise) / (exact.var() - noise)),
        "bias": float(off.mean()),
        "correlation": float(torch.corrcoef(torch.stack((exact, critics)))[0, 1]),
        "states": len(said),
    }


def main() -> None:
    asked = parse(__doc__)
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    for cell in make_cells(asked, dict.fromkeys(CRITICS, ()), BEFORE, {"ppo": ()}):
        known = replace(cell, steps=tuple(map(tuple, read(cell.beside(".json")))))
        for update in UPDATES:
            figures = cached(cell.beside(f"-values-{update}.json"), lambda c=known, u=update: values_at(c, u))
            found.setdefault(cell.name, {}).setdefault(update, []).append(figures)
            print(cell.name, cell.seed, update, figures, flush=True)
    lines, series = [], {}
    for name, by_update in found.items():
        for update, figures in by_update.items():
            means = [mean_interval([f[key] for f in figures]) for key in ("explained", "bias", "correlation")]
            lines.append([name, str(update), *means])
            series.setdefault(name, []).append((update, means[0]))
    table(["critic", "after update", "explained variance of the true value", "bias", "correlation"], lines)
    draw(asked.picture, series, "update", "explained variance of the true value")


if __name__ == "__main__":
    main()
