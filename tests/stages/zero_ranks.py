"""What one rank does in test_zero.py: five steps of the reward model and of PPO, plainly or under each ZeRO stage; whole updates.

Run as `zero_ranks.py <recorded.safetensors> <out folder> <runs_dir> <run> <ways, by commas> <overrides …>`. A way is a setting of
deepspeed=…, and what the first rank finds goes to <out folder>/<way>.pt and <way>-*.safetensors; `zero2=<folder>` resumes from
that folder's state of the third step instead of its own. `updates` are three whole updates; `average` checks its own results.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf.config.compose import compose_config
from rlhf.config.stages import SftConfig
from rlhf.data.reading import load_comparisons
from rlhf.data.tokenizer import load_tokenizer
from rlhf.engines.sampling import sample
from rlhf.evaluation.scoring import by_item, item_encoder
from rlhf.ppo import update as ppo_update
from rlhf.ppo.experience import Rollout
from rlhf.runs.metric_table import Sums
from rlhf.runs.stage import open_stage
from rlhf.stages import ppo, reward
from rlhf.system.exits import leave
from rlhf.system.processes import disconnect, gather, is_first, wait_for_all
from rlhf.training.batches import put
from rlhf.training.ema import Ema
from rlhf.training.engine import Engine, ZeroEngine, make_engine
from rlhf.training.setup import set_up
from rlhf.training.state import gathered_state, read_state, write_state
from tests.stages.ppo_trainer import experience, make_trainer
from tests.stages.recorder import one_step

STEPS, SAVED_AT = 5, 3
WARM = {"policy": 1.0, "critic": 1.0}


def share_held(engine: Engine) -> dict[str, float]:
    """Elements of weights and of the optimizer's first moment on this rank, over those of the module."""
    parameters = list(engine.module.parameters())
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    weights = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in parameters)
    if isinstance(engine, ZeroEngine):
        moments = sum(state["exp_avg"].numel() for _, state in engine.whole_state.flat_states())
    else:
        moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    return {"weights": weights / whole, "moments": moments / whole}


def ppo_steps(trainer: Any, tensors: dict, steps: int, sums: list) -> None:
    places = ppo.episodes_of_rank(trainer.config, trainer.engine.ranks)
    mine = {name: value[places] for name, value in tensors.items()}
    advantages, returns = mine.pop("advantages"), mine.pop("returns")
    given = experience(Rollout(**mine), advantages, returns)
    for _ in range(steps):
        sums.append(Sums())
        chosen = [i for i, place in enumerate(places) if place < 13]  # 7 on one rank, 6 on the other
        ppo_update.train_minibatch(trainer.config, given, chosen, trainer.state, sums[-1])
        for name, value in trainer.engine.step(WARM).items():
            sums[-1].add(name, value)


def run_ppo(config: Any, tensors: dict, out: Path, way: str, source: str) -> dict[str, Any]:
    with open_stage(config, "ppo") as stage:
        found: list[Sums] = []
        trainer = make_trainer(config, stage)
        ppo_steps(trainer, tensors, 1, found)
        once = copy.deepcopy(trainer.engine.state())  # the first moment after one step is a tenth of the gradient
        ppo_steps(trainer, tensors, SAVED_AT - 1, found)
        state = trainer.engine.state()
        if state is not None:
            (out / f"{way}-state").mkdir()
            write_state(out / f"{way}-state", state, {})
        ppo_steps(trainer, tensors, STEPS - SAVED_AT, found)
        metrics = [trainer.engine.ranks.merge(sums).reduce() for sums in found]
        shares = share_held(trainer.engine)
        weights = gathered_state(trainer.actor_critic)
        policy = trainer.actor_critic.policy
        average = {"ema": trainer.engine.ema.state_dict()}
        with trainer.engine.ema.applied(), trainer.engine.whole(policy) as answering:
            average["applied"] = {n: p.detach().clone() for n, p in answering.named_parameters()}
        with trainer.engine.whole(policy) as answering:
            average["after"] = {n: p.detach().clone() for n, p in answering.named_parameters()}
            ids = {"eos_token_id": trainer.tokenizer.eos_token_id, "pad_token_id": trainer.tokenizer.pad_token_id}
            prompts = [tokens for _, tokens in trainer.prompts.train[:8]]
            greedy = sample(answering, prompts, max_new_tokens=16, greedy=True, **ids).responses
        live = trainer.collect(trainer.prompts.train[:4], [("live", i) for i in range(4)])
        # Back to the third step, in an engine of its own, and on from there
        wait_for_all()
        again = make_trainer(config, stage)
        again.engine.restore(read_state(Path(source or out / f"{way}-state"))[0])
        ppo_steps(again, tensors, STEPS - SAVED_AT, [])
        resumed = gathered_state(again.actor_critic)
        if weights is not None and resumed is not None and once is not None:
            gradient = {n: 10 * t for n, t in once["exp_avg"].items()}
            parts = {"ppo": weights, "resumed": resumed, "gradient": gradient, **average}
            tensors = {f"{kind}/{n}": t.contiguous() for kind, part in parts.items() for n, t in part.items()}
            save_file(tensors, out / f"{way}-ppo.safetensors")
        return {"ppo": metrics, "ppo_shares": shares, "greedy": greedy, "live": live.scores.tolist()}


def run_reward(config: Any, out: Path, way: str) -> dict[str, Any]:
    device = set_up(config)
    folder = Path(config.runs_dir) / config.run
    tokenizer = load_tokenizer(folder / "sft" / "model")
    model = reward.make_model(config, device)
    torch.manual_seed(0)  # under ZeRO-3 the trunk was not drawn before its weights were read
    model.head.initialise()
    records, _ = load_comparisons(str(folder / "label" / "comparisons.jsonl"), "auto", False)
    items, _ = reward.join_rankings(records, item_encoder(config, model, tokenizer), None)
    engine = make_engine(config, model, SftConfig(lr=1e-3, max_grad_norm=1e9), device)
    objective = reward.make_objective(config, engine)
    metrics = []
    for step in range(STEPS):
        batch = items[7 * step : 7 * step + 7]  # 4 prompts on one rank, 3 on the other
        metrics.append(engine.ranks.merge(one_step(engine, batch, objective)).reduce())
    shares = share_held(engine)
    weights = gathered_state(engine.module)
    inputs = put(engine.module.collate([row for item in items[:3] for row in item.rows]), device)
    scores = by_item(items[:3], engine.eval()(**inputs, calibrated=False)).tolist()
    if weights is not None:
        save_file(weights, out / f"{way}-reward.safetensors")
    return {"reward": metrics, "reward_shares": shares, "scores": scores}


def whole_updates(config: Any) -> dict[str, Any]:
    """The first sampled tokens of all ranks, by the episode's place, and the metrics of three updates."""
    with open_stage(config, "ppo") as stage:
        trainer = make_trainer(config, stage)
        places = ppo.episodes_of_rank(config, trainer.engine.ranks)
        index = ppo.choose_prompts(config, len(trainer.prompts.train), 1)
        asked = [trainer.prompts.train[index[place]] for place in places]
        live = trainer.collect(asked, [("ppo", 1, place) for place in places])
        rows = [row[:end].tolist() for row, end in zip(live.tokens, live.lengths, strict=True)]
        everything = gather(dict(zip(places, rows, strict=True)))
        tokens = {place: row for part in everything for place, row in part.items()}
        return {"tokens": tokens, "updates": [trainer.update(number) for number in (1, 2, 3)]}


def check_average() -> None:
    """Under each ZeRO stage in bfloat16: the average of five steps of 1e-5, which bfloat16 weights near 0.3 do not show."""
    from deepspeed.utils import safe_get_full_fp32_param

    decay, steps = 0.9, 5
    for way in ("zero1", "zero2", "zero3"):
        config = compose_config(["experiment=gold", f"deepspeed={way}", "precision=bfloat16", "device=cpu"])
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        groups, settings = [{"params": list(model.parameters()), "lr": 1e-5}], SftConfig(max_grad_norm=1e9)
        engine = make_engine(config, model, settings, torch.device("cpu"), groups=groups)
        engine.keep_average("", engine.module, decay)
        seen = []
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
            engine.step()
            seen.append(safe_get_full_fp32_param(engine.module.weight).clone())
        shares = torch.tensor([decay ** (steps - 1 - i) for i in range(steps)])
        wanted = sum(share * x for share, x in zip(shares / shares.sum(), seen, strict=True))
        found = engine.ema.state_dict()
        assert (seen[0] - seen[-1]).abs().min() > 3e-5, "the weights moved"
        assert torch.allclose(found["weight"].view_as(wanted), wanted, rtol=0, atol=1e-7), way
        again = Ema(engine.module, decay, engine.ema.rank, engine.ema.ranks)
        again.load_state_dict(found, steps)
        assert torch.equal(again.state_dict()["weight"], found["weight"]), way


def main(arguments: list[str]) -> None:
    recorded, out, runs_dir, run, ways, *overrides = arguments
    tensors = load_file(recorded)
    for given in ways.split(","):
        way, _, source = given.partition("=")
        if way == "average":
            check_average()
            continue
        words = [*overrides, f"runs_dir={runs_dir}", f"run={run}-{way}"]
        if way == "updates":
            found = whole_updates(compose_config(words))
        else:
            config = compose_config([*words, f"deepspeed={way}"])
            config.ppo.critic_warmup_updates, config.ppo.ema_decay = 0, 0.9
            config.ppo.lr = config.ppo.critic_lr = 1e-3
            # ZeRO clips the joint norm, we each model's own
            config.ppo.max_grad_norm = config.reward.max_grad_norm = 1e9
            found = run_reward(config, Path(out), way) | run_ppo(config, tensors, Path(out), way, source)
        if is_first():
            torch.save(found, Path(out) / f"{way}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
    if disconnect():
        leave(0)
