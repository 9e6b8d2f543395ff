from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.config.checks import check_config
from rlhf.config.compose import compose_config
from rlhf.errors import UserError
from rlhf.model.fused_loss import response_logprobs
from rlhf.model.heads import RewardModel
from rlhf.ppo import update as ppo_update
from rlhf.ppo.rewards import CombinedReward, adjust_scores
from rlhf.runs.metric_table import Sums, check_names
from rlhf.runs.run_files import read_jsonl
from rlhf.runs.stage import open_stage
from rlhf.stages import ppo
from rlhf.training.loop import open_loop
from rlhf.training.setup import load_policy
from rlhf.training.state import Ema

from .conftest import Run
from .ppo_trainer import Trainer, make_trainer, weights

SMALL = [
    "ppo.critic_warmup_updates=0", "ppo.warmup_fraction=0", "ppo.episodes_per_update=32", "ppo.episodes=32", "ppo.minibatches=2",
    "ppo.epochs=1", "kl.target=null",
]  # fmt: skip
PTX = ["ppo.ptx_coef=0.5", "ppo.ptx_blocks_per_episode=0.1"]
RLOO = ["ppo.advantages=rloo", "ppo.responses_per_prompt=4"]


@pytest.fixture
def open_trainer(copy_until) -> Callable[..., Any]:
    run: Run = copy_until("ppo")

    @contextmanager
    def opened(*settings: str) -> Iterator[Trainer]:
        config = run.config(*SMALL, *settings, "overwrite=true")
        with open_stage(config, "ppo") as stage:
            yield make_trainer(config, stage)

    return opened


def gradients(trainer: Trainer, shift: float = 0.1) -> dict[str, torch.Tensor]:
    """Gradients of one minibatch of fresh rollouts whose ratios are exp(-shift A): with shift below 0 most are clipped."""
    trainer.config.ppo.max_grad_norm = 1e9
    rollout = trainer.rollout()
    noise = torch.randn(rollout.logp_old.shape, generator=torch.Generator().manual_seed(0))
    advantages = torch.where(rollout.response_mask, noise, 0.0)
    shifted = rollout._replace(logp_old=rollout.logp_old + shift * advantages)
    trainer.engine.module.train(trainer.config.gradient_checkpointing)
    trainer.train(shifted, advantages, rollout.values + advantages, list(range(16)))
    return {n: p.grad.clone() for n, p in trainer.engine.module.named_parameters() if p.grad is not None}


def test_the_critic_starts_from_what_is_asked_for(open_trainer, gold_run):
    sft = load_policy(gold_run.folder / "sft" / "model").base_model.state_dict()
    reward = RewardModel.from_pretrained(str(gold_run.folder / "reward" / "model")).trunk.state_dict()
    distances = {}
    for start in ("reward", "sft", "random"):
        with open_trainer(f"ppo.critic={start}") as trainer:
            trunk = trainer.actor_critic.critic.trunk.state_dict()
            distances[start] = [sum((trunk[n] - w[n]).norm() for n in w).item() for w in (reward, sft)]
    assert distances["reward"][0] == 0 and distances["reward"][1] > 0.1
    assert distances["sft"][1] == 0 and distances["sft"][0] > 0.1
    assert min(distances["random"]) > 1


def test_a_shared_trunk_has_one_forward_and_gets_the_value_loss_at_a_tenth(open_trainer):
    with open_trainer("ppo.shared_critic=true") as trainer:
        model = trainer.actor_critic
        assert ppo_update.SHARED_VALUE_COEF == 0.1 and model.shared
        assert sum(p.numel() for p in model.critic.parameters()) == 64 + 1
        metrics = trainer.update()
        assert abs(metrics["val/explained_var"]) < 1e-6, "random values would be noise in every advantage"
        assert metrics["loss/value_avg"] > 0 and metrics["optim/critic_grad_norm"] > 0
        with_values = gradients(trainer)
        trainer.config.ppo.value_coef = 1e-9
        without = gradients(trainer)
        trained = {n for n in without if not torch.allclose(with_values[n], without[n])}
        assert any(n.startswith("policy") for n in trained), "the value loss trains the trunk too"


def test_groups_need_no_critic_and_learn(open_trainer):
    sizes = ["ppo.episodes=384", "ppo.episodes_per_update=64"]
    with open_trainer(*RLOO, *sizes, "ppo.lr=3e-3", "ppo.missing_eos_rule=none", "kl.coef=0.001") as trainer:
        assert trainer.actor_critic.critic is None
        chosen = ppo.choose_prompts(trainer.config, len(trainer.prompts.train), 1)
        assert [chosen[i : i + 4].count(chosen[i]) for i in range(0, 64, 4)] == [4] * 16
        # even ids pay
        trainer.reward = lambda e: torch.tensor([sum(t % 2 == 0 for t in r) / len(r) for r in e.responses])
        found = [trainer.update(number) for number in range(1, 7)]
    assert found[-1]["objective/scores"] > found[0]["objective/scores"] + 0.05
    assert "loss/value_avg" not in found[0] and "val/explained_var" not in found[0]


def test_without_a_clip_range_every_token_has_a_gradient(open_trainer):
    """Null is as a range that no ratio leaves; with a narrow one most tokens have none."""
    found = {}
    with open_trainer() as trainer:
        for clip in (0.01, None, 1e9):
            trainer.config.ppo.clip_range = clip
            trainer.engine.optimizer.zero_grad()
            of_policy = [g for n, g in gradients(trainer, -0.1).items() if n.startswith("policy")]
            found[clip] = torch.cat([g.flatten() for g in of_policy])
    assert torch.equal(found[None], found[1e9])
    assert found[0.01].norm() < 0.3 * found[None].norm()


def test_reinforce_has_no_critic_and_whitens_the_reward_to_go(open_trainer, monkeypatch):
    given = []
    monkeypatch.setattr(ppo, "optimize", lambda config, number, experience, *more: given.append(experience))
    with open_trainer("ppo.advantages=reinforce", "kl.coef=0") as trainer:
        assert trainer.actor_critic.critic is None
        trainer.update()
        (experience,) = given
        rollout, advantages = experience.rollout, experience.advantages
        mask, scores = rollout.response_mask, adjust_scores(trainer.config, rollout.scores, rollout.ended)
    # without a KL penalty each token's reward to go is its response's score; whitened over the tokens
    plain = scores[:, None].expand(mask.shape)[mask]
    wanted = (plain - plain.mean()) / (plain.var(correction=0) + 1e-8).sqrt()
    assert torch.allclose(advantages[mask], wanted, atol=1e-4) and wanted.std() > 0.9


def test_a_shared_trunk_stands_still_while_the_head_learns_alone(open_trainer):
    """And such an update does not count in the average."""
    with open_trainer("ppo.shared_critic=true", "ppo.critic_warmup_updates=1", "ppo.ema_decay=0.9") as trainer:
        policy, head = weights(trainer.actor_critic.policy), weights(trainer.actor_critic.critic)
        trainer.update(1)
        assert all(value.equal(policy[n]) for n, value in trainer.actor_critic.policy.named_parameters())
        assert any(not value.equal(head[n]) for n, value in trainer.actor_critic.critic.named_parameters())
        assert trainer.engine.ema.steps == 0
        trainer.update(2)
        assert trainer.engine.ema.steps == 2


def test_scores_without_calibration_are_the_heads_own(open_trainer):
    with open_trainer() as trainer:
        calibrated = trainer.rollout().scores
        gain, shift = trainer.reward.model.config.gain, trainer.reward.model.config.shift
    with open_trainer("ppo.calibrated=false") as trainer:
        raw = trainer.rollout().scores
        assert trainer.actor_critic.critic.config.gain == 1.0
    assert gain != 1.0 and torch.allclose(gain * (raw - shift), calibrated, atol=1e-4)


def test_the_run_ends_above_the_ceiling_and_keeps_the_policy(copy_until, capsys):
    run = copy_until("ppo")
    settings = [*SMALL, "ppo.episodes=320", "ppo.lr=5e-3", "kl.coef=0", "kl.ceiling=0.5", "ppo.eval_every=100"]
    run.stage("ppo", *settings)
    kls = run.values("ppo", "objective/kl")
    assert "above kl.ceiling=0.5" in capsys.readouterr().out
    assert len(kls) < 10 and kls[-1][1] > 0.5 and all(kl <= 0.5 for _, kl in kls[:-1])
    assert len(run.values("ppo", "loss/policy_avg")) == len(kls) - 1, "nothing was trained above the ceiling"
    assert run.policy("ppo") is not None
    evaluated = [step for step, _ in run.values("ppo", "eval/dev/kl")]
    assert evaluated == [0, kls[-1][0]], "the last update is evaluated, whatever ppo.eval_every is"
    assert {row["step"] for row in read_jsonl(run.folder / "ppo" / "samples.jsonl")} == set(evaluated)


def test_the_entropy_bonus_raises_entropy(open_trainer):
    entropies = {}
    for coef in (0.0, 0.3):
        with open_trainer(f"ppo.entropy_coef={coef}", "ppo.lr=3e-3", "kl.coef=0") as trainer:
            entropies[coef] = [trainer.update(n)["policy/entropy_avg"] for n in range(1, 4)][-1]
    assert entropies[0.3] > entropies[0.0] + 0.1


def test_tied_groups_have_no_advantage_in_grpo(open_trainer):
    """With the KL among the rewards their only difference would be the KL, blown up to one standard deviation."""
    grpo = ["ppo.advantages=grpo", "ppo.responses_per_prompt=4"]
    with open_trainer(*grpo, "ppo.lr=1e-3", "kl.coef=0.5", "ppo.missing_eos_rule=none") as trainer:
        trainer.update(1)
        tied = replace(trainer, reward=lambda episodes: torch.ones(len(episodes.texts)))
        found = tied.update(2)
    assert abs(found["objective/kl"]) > 1e-3 and found["loss/policy_avg"] == 0.0
    with pytest.raises(UserError, match=r"kl\.penalty=reward: ppo\.advantages=grpo would normalise the KL"):
        settings = ["experiment=gold", "ppo.critic_warmup_updates=0", *grpo, "kl.penalty=reward"]
        check_config(compose_config(settings), "ppo")


def test_the_look_at_held_out_prompts_is_at_the_average(open_trainer):
    settings = ("ppo.lr=1e-3", "ppo.eval_every=1", "kl.target=null")
    with open_trainer("ppo.ema_decay=null", *settings) as trainer:
        alone = [trainer.update(n) for n in (1, 2)][-1] | trainer.evaluate()[0]
    with open_trainer("ppo.ema_decay=0.999999", *settings) as trainer:
        averaged = [trainer.update(n) for n in (1, 2)][-1]
        averaged |= trainer.evaluate()[0]
        with trainer.engine.ema.applied():
            ema, trainer.engine.ema = trainer.engine.ema, None
            at_average, _ = trainer.evaluate()
            trainer.engine.ema = ema
    assert averaged["objective/kl"] == alone["objective/kl"], "training goes on from the weights themselves"
    assert averaged["eval/dev/kl"] == at_average["eval/dev/kl"] != alone["eval/dev/kl"]


def test_the_penalty_in_the_loss_is_k2(open_trainer):
    """Without advantages the gradient on the policy is kl.coef times that of the mean over tokens of d^2 / 2."""
    with open_trainer("kl.penalty=loss", "kl.coef=2.0", *RLOO) as trainer:
        rollout, policy = trainer.rollout(), trainer.policy
        rollout = rollout._replace(logp_ref=rollout.logp_ref - 0.3 * rollout.response_mask)
        nothing, chosen = torch.zeros_like(rollout.logp_old), list(range(16))
        trainer.train(rollout, nothing, nothing, chosen)
        found = {n: p.grad.clone() for n, p in policy.named_parameters()}
        policy.zero_grad()
        part = rollout.rows(chosen)
        mask = part.response_mask
        d = (response_logprobs(policy, part.tokens, part.prompt_lengths, mask)[0] - part.logp_ref)[mask]
        (2.0 * (d**2 / 2).mean()).backward()
    assert max(gradient.norm() for gradient in found.values()) > 0.01
    assert all(torch.allclose(found[n], p.grad, atol=1e-6) for n, p in policy.named_parameters())


def test_ptx_gradient_is_that_of_the_pretraining_loss(open_trainer):
    """With advantages and value loss of nothing, the gradient is ptx_coef times that of a plain next-token loss."""
    with open_trainer("ppo.ptx_coef=0.5", "ppo.ptx_blocks_per_episode=0.25", *RLOO) as trainer:
        rollout = trainer.rollout()
        nothing = torch.zeros_like(rollout.logp_old)
        trainer.train(rollout, nothing, nothing, list(range(16)))
        ppo_update.add_pretraining_gradient(trainer.config, trainer.state, trainer.prompts.blocks, (1, 0, 0), Sums())
        policy = trainer.actor_critic.policy
        found = {n: p.grad.clone() for n, p in policy.named_parameters()}
        policy.zero_grad()
        blocks = trainer.prompts.blocks
        batch = blocks.collate([blocks.blocks[i] for i in blocks.draw((1, 0, 0), 4)])
        labels = batch.pop("labels")
        logits = policy(**batch, use_cache=False).logits[:, :-1]
        (0.5 * nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())).backward()
        for name, p in policy.named_parameters():
            assert torch.allclose(found[name], p.grad, atol=1e-6), name


def test_the_average_by_hand():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    ema = Ema(layer, decay=0.75)
    with ema.applied() as averaged:
        assert averaged.weight.item() == 1.0, "before the first step"
    nn.init.constant_(layer.weight, 5.0)
    ema.update()
    with ema.applied() as averaged:
        assert averaged.weight.item() == 5.0, "what it started from does not count"
    nn.init.constant_(layer.weight, 12.0)
    ema.update()  # (.75 * 5 + 12) / (.75 + 1) = 9
    with ema.applied() as averaged:
        assert averaged.weight.item() == pytest.approx(9.0)
    assert layer.weight.item() == 12.0


def test_the_model_is_the_average_and_the_last_weights_stand_beside_it(copy_until, gold_run):
    folder = copy_until("ppo").stage("ppo", *SMALL, "ppo.ema_decay=0.9", "ppo.lr=1e-3")
    start = weights(load_policy(gold_run.folder / "sft" / "model"))
    last, average = (weights(load_policy(folder / name)) for name in ("last", "model"))
    moved = [(last[n] - start[n]).norm() for n in start]
    followed = [(average[n] - start[n]).norm() for n in start]
    # two steps of much the same length: (.9 * 1 + 2) / (.9 + 1) = 1.53 of the 2
    assert max(moved) > 1e-3 and 0.65 * sum(moved) < sum(followed) < 0.9 * sum(moved)


def pays_two(prompts, responses, metadata):
    return {"Two": [2.0] * len(responses), "none": [0.0] * len(responses)}


def pays_infinity(prompts, responses, metadata):
    return [float("inf")] * len(responses)


def test_several_sources_with_weights(open_trainer, gold_run):
    sources = f"ppo.rewards=['{gold_run.folder}','{__name__}:pays_two']"
    with open_trainer(sources, "ppo.reward_weights=[0.5,3]", "ppo.missing_eos_rule=none") as trainer:
        assert isinstance(trainer.reward, CombinedReward)
        metrics = trainer.update()
    assert metrics["objective/scores/function_1"] == metrics["objective/scores/function_1/Two"] == 2.0
    check_names(metrics)
    wanted = 0.5 * metrics["objective/scores/model_0"] + 6.0
    assert metrics["objective/scores"] == pytest.approx(wanted, abs=1e-5)
    cut = adjust_scores(compose_config(["ppo.score_clip=0.1"]), torch.tensor([-2.0, 0.05, 3.0]), torch.ones(3).bool())
    assert cut.tolist() == pytest.approx([-0.1, 0.05, 0.1])


def test_a_reward_that_is_not_finite_stops_the_run_before_any_step(open_trainer):
    with open_trainer(f"ppo.rewards='{__name__}:pays_infinity'") as trainer:
        before = weights(trainer.engine.module)
        stopped = pytest.raises(UserError, match="scores not finite: stopped before the step")
        with stopped, open_loop(trainer.stage, trainer.engine, 1):
            trainer.update()
        assert all(value.equal(before[name]) for name, value in trainer.engine.module.named_parameters())
        assert (trainer.stage.folder / "offending_batch.safetensors").exists()


ALL_AT_ONCE = [*PTX, "lora.rank=2", "ppo.ema_decay=0.9", "gradient_checkpointing=true"]


@pytest.mark.parametrize(
    "settings", [["ppo.shared_critic=true"], RLOO, ALL_AT_ONCE], ids=["shared", "rloo", "all at once"]
)
def test_a_checkpoint_holds_all_that_trains(open_trainer, settings):
    def all_that_trains(trainer: Trainer) -> dict[str, torch.Tensor]:
        return weights(trainer.engine.module) | dict(trainer.engine.ema.average if trainer.engine.ema else {})

    with open_trainer(*settings, "ppo.lr=1e-3") as trainer:
        trainer.update(1)
        with open_loop(trainer.stage, trainer.engine, 2) as loop:
            loop.save(1)
        trainer.update(2)
        wanted = all_that_trains(trainer)
        restarted = make_trainer(trainer.config, trainer.stage)
        with open_loop(restarted.stage, restarted.engine, 2):
            restarted.update(2)
        found = all_that_trains(restarted)
    assert found.keys() == wanted.keys() and all(found[n].equal(wanted[n]) for n in wanted)


def test_tied_groups_are_dropped(open_trainer):
    rloo = ["ppo.missing_eos_rule=none", "ppo.minibatches=1", "kl.penalty=loss", "kl.coef=0.5", *RLOO]

    def scores(episodes):
        return torch.tensor([float(i) * (i >= 20) for i in range(32)])

    found = {}
    for dropped in (False, True):
        with open_trainer(*rloo, f"ppo.drop_tied_groups={str(dropped).lower()}") as trainer:
            tokens = trainer.rollout().response_mask.sum(1)
            found[dropped] = replace(trainer, reward=scores).update(1)
    assert found[True]["rollout/dropped"] == 20 / 32 and "rollout/dropped" not in found[False]
    # the losses are means over the tokens that count; tied groups have no part in the policy's
    gradients = [found[dropped]["optim/policy_grad_norm"] for dropped in (True, False)]
    factor = (tokens.sum() / tokens[20:].sum()).item()
    assert gradients[0] == pytest.approx(gradients[1] * factor, rel=1e-4) and factor > 1.5
    with open_trainer(*rloo, "ppo.drop_tied_groups=true") as trainer:
        found = replace(trainer, reward=lambda episodes: torch.ones(32)).update(1)
        assert found["rollout/dropped"] == 1.0 and found["optim/policy_grad_norm"] == 0.0
