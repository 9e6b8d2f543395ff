"""PPO's experience: prompts -> responses, log-probs, values and scores. `Rollout` is the data of one update.

A right-padded row contains prompt and response. Tensors over response tokens are left-aligned in (B, A): column t is
response token t, whatever the prompt's length. The logits of response token t, and the value before it, are computed
one token earlier, at position prompt_length + t - 1.
"""

import functools
import math
import random
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.config import Config
from rlhf.data.chat_template import response_text
from rlhf.data.corpus import PackedCorpus, make_collator
from rlhf.data.encoding import fitting_prompts, row_limit
from rlhf.data.records import PromptRecord
from rlhf.data.splits import prompt_key
from rlhf.engines.choosing import Samples, SamplingEngine
from rlhf.errors import UserError
from rlhf.model.batching import right_pad
from rlhf.model.interface import Episodes, lm, scoring_groups
from rlhf.ops.gae import ESTIMATORS, compute_advantages
from rlhf.ops.masked import wide
from rlhf.ops.ppo import sampler_weights
from rlhf.ppo.rewards import Reward, score_by_token
from rlhf.runs.folders import read_stage, stage_folder
from rlhf.runs.metric_table import Sums
from rlhf.runs.sources import in_split, read_comparisons, read_prompts, sample_prompts
from rlhf.system.plugins import load_named
from rlhf.system.processes import Ranks
from rlhf.training.engine import Engine, check_finite

Prompt = tuple[PromptRecord, list[int]]  # as a record and as tokens


class Rollout(NamedTuple):
    """B episodes with up to T tokens, of which up to A are response tokens."""

    tokens: Tensor  # (B, T) int64, prompt + response, right-padded
    prompt_lengths: Tensor  # (B,) int64
    lengths: Tensor  # (B,) int64, prompt + response
    response_mask: Tensor  # (B, A) bool
    ended: Tensor  # (B,) bool, the response has its end token
    logp_sampled: Tensor  # (B, A) float32 nats, from the sampler; 0 outside the mask
    logp_old: Tensor  # (B, A) float32 nats, of the policy that sampled: see `score_responses`
    logp_ref: Tensor  # (B, A) float32 nats, of ppo.reference, the SFT model by default
    values: Tensor  # (B, A) float32, before each response token was chosen
    scores: Tensor  # (B,) float32, from the reward
    token_scores: Tensor  # (B, A) float32, what each token earns of the score (ppo.score_by_token); else 0

    def rows(self, index: list[int]) -> "Rollout":
        """The episodes of `index`, cut to their own longest row and response."""
        where = torch.tensor(index, device=self.tokens.device)
        picked = Rollout(*(field[where] for field in self))
        width, answer = torch.stack((picked.lengths.max(), picked.response_mask.sum(1).max())).tolist()
        by_token = ("response_mask", "logp_sampled", "logp_old", "logp_ref", "values", "token_scores")
        cut = {name: getattr(picked, name)[:, :answer] for name in by_token}
        return picked._replace(tokens=picked.tokens[:, :width], **cut)


class Experience(NamedTuple):
    """What an update trains on and what its metrics are computed from: B episodes of this rank."""

    records: list[PromptRecord]  # the prompts
    texts: list[str]  # the responses without their end tokens
    rollout: Rollout
    scores: Tensor  # (B,) float32, clipped, and lowered if there is no end token
    rewards: Tensor  # (B, A) float32, KL penalty and score
    # (B, A) float32, whitened unless the estimator compares groups; weighted by ppo.sampler_correction
    advantages: Tensor
    returns: Tensor  # (B, A) float32

    def rows(self, index: list[int]) -> "Experience":
        """The episodes of `index`, cut as `Rollout.rows` cuts them."""
        rollout = self.rollout.rows(index)
        where, answer = torch.tensor(index, device=self.scores.device), rollout.response_mask.shape[1]
        by_token = (x[where, :answer] for x in (self.rewards, self.advantages, self.returns))
        records, texts = [self.records[i] for i in index], [self.texts[i] for i in index]
        return Experience(records, texts, rollout, self.scores[where], *by_token)


class Prompts(NamedTuple):
    """What updates draw from."""

    train: list[Prompt]
    held_out: list[Prompt]  # of the dev split, for evaluations during training
    tokenizer: Any
    blocks: "PretrainingBlocks | None" = None  # of PPO-ptx


@torch.no_grad()
def sample_responses(
    engine: Engine, sampler: SamplingEngine, tokenizer: Any, prompts: list[Prompt], keys: list[tuple]
) -> tuple[Samples, list[str]]:
    """One response to each prompt at temperature 1, determined by (seed, key), however the batch is split; also as text."""
    engine.module.eval()
    with engine.autocast(), engine.whole(engine.module.policy) as whole:
        sampler.wake()
        sampler.load(whole)
        samples = sampler.sample([ids for _, ids in prompts], keys)
        sampler.sleep()
    return samples, [response_text(tokenizer, ids) for ids in samples.responses]


@torch.no_grad()
def score_responses(
    config: Config,
    engine: Engine,
    reference: Callable[[Tensor, Tensor, Tensor], Tensor],
    reward: Reward,
    tokenizer: Any,
    prompts: list[Prompt],
    samples: Samples,
    texts: list[str],
) -> Rollout:
    """Log-probs, values and scores of sampled responses. Without a critic all values are 0.
    engine: of the ActorCritic; it gives log-probs if the sampler's differ from a training forward's. reference: the
    log-probs (B, A) of ppo.reference, by (tokens, prompt_lengths, mask). texts: the responses without their end tokens.
    Raises: NonFinite.
    """
    device, settings, recompute = samples.mask.device, config.ppo, recomputes(config, engine)
    prompt_ids = [ids for _, ids in prompts]
    rows = [p + r for p, r in zip(prompt_ids, samples.responses, strict=True)]
    tokens, lengths = (x.to(device) for x in right_pad(rows, tokenizer.pad_token_id))
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
    logp_old = samples.logprobs.clone()
    logp_ref, values, token_scores = (torch.zeros_like(logp_old) for _ in range(3))
    with engine.autocast():
        for group in scoring_groups(engine.module, lengths.tolist(), 2 * settings.micro_batch_episodes):
            width, answer = int(lengths[group].max()), int(samples.mask[group].sum(1).max())
            part, mask, starts = tokens[group, :width], samples.mask[group, :answer], prompt_lengths[group]
            logp_ref[group, :answer] = reference(part, starts, mask)
            logp, _, of_tokens = engine(part, starts, mask, with_policy=recompute, with_entropy=False)
            if logp is not None:
                logp_old[group, :answer] = logp
            if of_tokens is not None:
                values[group, :answer] = of_tokens
        episodes = Episodes([one for one, _ in prompts], prompt_ids, samples.responses, texts, samples.ended)
        if settings.score_by_token:
            scores, parts = score_by_token(reward, episodes)
            token_scores[:, : parts.shape[1]] = parts
        else:
            scores = reward(episodes)
    mask, ended, sampled = samples.mask.clone(), samples.ended.clone(), samples.logprobs.clone()
    logprobs = (sampled, logp_old, logp_ref)
    rollout = Rollout(tokens, prompt_lengths, lengths, mask, ended, *logprobs, values, scores, token_scores)
    check_finite({"scores": scores, "logp_old": logp_old, "logp_ref": logp_ref, "values": values}, rollout._asdict())
    return rollout


# Nats per token: a larger mean of |logp_old - logp_sampled| is corrected by ppo.sampler_correction=auto.
MOST_MISMATCH = 0.01


def recomputes(config: Config, engine: Engine) -> bool:
    """Whether the old log-probs are a training forward's, since the sampler's may differ from them."""
    return engine.bfloat16 or config.rollout.engine != "native" or not lm(engine.module.policy).native


def weigh_by_sampler(config: Config, rollout: Rollout, ranks: Ranks, sums: Sums) -> Tensor:
    """Weights (B, A) of the policy loss by ppo.sampler_correction; adds the mismatch of trainer and sampler to `sums`.
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008.
    """
    mask, kind = rollout.response_mask, config.ppo.sampler_correction
    gaps = wide((rollout.logp_old - rollout.logp_sampled)[mask])
    count, ratios = gaps.numel(), gaps.exp()
    tokens, total = int(ranks.sum(count)), float(ranks.sum(gaps.abs().sum()))
    if kind == "auto":
        kind = "truncate" if total > MOST_MISMATCH * tokens else "none"
    weights = sampler_weights(rollout.logp_old, rollout.logp_sampled, mask, kind)
    sums.add("rollout/mismatch", gaps.abs().sum(), count)
    sums.add("rollout/mismatch_p99", gaps.abs().kthvalue(math.ceil(0.99 * count)).values)
    sums.add("rollout/mismatch_outside", ((ratios < 0.8) | (ratios > 1.25)).sum(), count)
    sums.add("rollout/mismatch_ess", ratios.sum(), ratios.square().sum(), count)
    sums.add("rollout/corrected", ((weights != 1) & mask).sum(), count)
    return weights


def load_estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The advantage estimator of ppo.advantages: a built-in one, or a function `module:name` or `file.py:name`, called
    and checked as `rlhf.ops.gae.compute_advantages`. Raises: UserError.
    """
    if name in ESTIMATORS:
        return functools.partial(compute_advantages, name)
    what = "advantage estimator"
    function = load_named(what, name, ("rewards", "values", "mask", "gamma=", "lam=", "group_size="))

    @torch.no_grad()
    def estimate(rewards: Tensor, values: Tensor, mask: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        returned = function(rewards, values, mask, **settings)
        is_pair = isinstance(returned, tuple | list) and len(returned) == 2
        for x in returned if is_pair else [returned]:
            if not is_pair or not isinstance(x, Tensor) or x.shape != mask.shape or not x.is_floating_point():
                got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                wanted = f"want two float tensors of shape {tuple(mask.shape)}, advantages and returns"
                raise UserError(f"{what} {name}: returned {got}: {wanted}")
            if not torch.isfinite(x[mask]).all():
                raise UserError(f"{what} {name}: returned values that are not finite: correct the function")
        return torch.where(mask, returned[0].float(), 0.0), torch.where(mask, returned[1].float(), 0.0)

    return estimate


def load_ppo_prompts(
    config: Config, tokenizer: Any, say: Callable[[str], None], count: int | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """The training split's prompts as tokens, all or `count`, and ppo.eval_prompts of the dev split. Raises: UserError."""
    records, limit, length = read_prompts(config, say), row_limit(config, tokenizer), config.rollout.max_new_tokens
    if limit - length < 4:
        raise UserError(f"rollout.max_new_tokens={length}: leaves no room for a prompt in {limit} tokens: lower it")
    wanted, training, dev = config.ppo.prompts, in_split(config, records, "train"), in_split(config, records, "dev")
    if wanted != "all":  # those that the comparisons rank, or the others
        ranked = {prompt_key(ranking.prompt) for ranking in read_comparisons(config)}
        training = [record for record in training if (prompt_key(record.prompt) in ranked) == (wanted == "ranked")]
        if not training:
            raise UserError(f"ppo.prompts={wanted}: no training prompt is {wanted}: add some, or set ppo.prompts=all")
    fitting = fit_prompts(config, tokenizer, training, count, "train", say)
    if not fitting:
        raise UserError("data.prompts: no prompt of the training split fits the context: add shorter prompts")
    return fitting, fit_prompts(config, tokenizer, dev, config.ppo.eval_prompts, "dev", say)


def fit_prompts(
    config: Config, tokenizer: Any, records: list[PromptRecord], n: int | None, split: str, say: Callable[[str], None]
) -> list[Prompt]:
    """The prompts of a split that fit the context beside a response, all or `n` of them drawn by seed."""
    fitting = list(fitting_prompts(tokenizer, records, row_limit(config, tokenizer) - config.rollout.max_new_tokens))
    left_out = len(records) - len(fitting)
    if n is not None:
        fitting = sample_prompts(config, fitting, n, of=itemgetter(0))
    said = f"{split}: {len(fitting):,} prompts"
    if cut := sum(was_cut for _, _, was_cut in fitting):
        said += f", {cut:,} of them cut from the left to fit"
    say(said + (f", {left_out:,} left out, too long" if left_out else ""))
    return [(record, ids) for record, ids, _ in fitting]


class PretrainingBlocks:
    """PPO-ptx: blocks of the corpus that the base was pretrained on (Ouyang et al. 2022, equation 2, last term)."""

    def __init__(self, config: Config, tokenizer: Any):
        """Raises: UserError if the pretraining stage has no packed corpus, or one of another tokenizer."""
        folder = stage_folder(config, "pretrain")
        remedy = "point parents.pretrain at the run that the SFT model comes from"
        corpus = PackedCorpus.load_for("ppo.ptx_coef", folder, tokenizer, remedy)
        settings = (read_stage(folder) or {}).get("settings", {})
        batch = settings.get("pretrain.global_batch_tokens", config.pretrain.global_batch_tokens)
        # an adopted model's context is in its tokenizer
        context = settings.get("model.context_length", min(tokenizer.model_max_length, batch))
        isolate = settings.get("pretrain.isolate_documents", config.pretrain.isolate_documents)
        self.blocks, self.seed = corpus.blocks("train", context), config.seed
        self.collate = make_collator(self.blocks.separator, isolate)  # with positions if documents are isolated

    def draw(self, key: tuple, count: int) -> list[int]:
        """Indices of `count` blocks, which depend only on (seed, key)."""
        chooser = random.Random(f"ptx-{self.seed}-{key}")
        return [chooser.randrange(len(self.blocks)) for _ in range(count)]
