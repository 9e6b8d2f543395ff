"""Rollouts: where log-probs, values and scores are read, and what a batch's composition may not change."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.engines import decoder
from rlhf.engines.sampling import sample
from rlhf.errors import UserError
from rlhf.model import RewardModel
from rlhf.model.fused_loss import before_responses, response_logprobs
from rlhf.model.heads import ScalarHead
from rlhf.ops import fast
from rlhf.ppo.experience import Rollout, score_responses
from rlhf.ppo.models import ActorCritic, Reference
from rlhf.ppo.rewards import ModelReward
from rlhf.ppo.update import check_first_rollout, check_sampler
from tests.oracles import row_logprobs, token_values
from tests.presets import make_gpt

VOCAB, EOS, PAD = 29, 5, 0
PROMPTS = [[1, 7, 8, 9, 2], [1, 2], [1, 11, 12, 2], [1, 13, 14, 15, 16, 17, 18, 2], [1, 20, 2]]
# wide weights, so that log-probs differ from token to token
make_policy = partial(make_gpt, vocab_size=VOCAB, initializer_range=0.3)


def make_reward_model(seed: int) -> RewardModel:
    model = RewardModel.from_causal_lm(make_policy(seed))
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.fixture(scope="module")
def models() -> dict:
    reward = make_reward_model(2)
    reward.calibrate(gain=2.0, shift=-0.5)
    critic = make_reward_model(3)
    return {"policy": make_policy(0), "reference": make_policy(1), "critic": critic, "reward_model": reward}


class Direct:
    """An engine on one process, which recomputes log-probs as in bfloat16 on request."""

    def __init__(self, module: ActorCritic, recompute: bool):
        self.module, self.bfloat16 = module, recompute

    def __call__(self, *arguments, **keywords):
        return self.module(*arguments, **keywords)

    def autocast(self):
        return nullcontext()


def scored(engine, reference, reward, prompts, samples, micro: int) -> Rollout:
    """micro: half of the episodes per forward."""
    config, tokenizer = Config(), SimpleNamespace(pad_token_id=PAD)
    config.ppo.micro_batch_episodes = micro
    given = config, engine, Reference(reference), reward, tokenizer, prompts, samples, [""] * len(prompts)
    return score_responses(*given)


def collect(models: dict, decode_batch: int = 5, micro: int = 3, rows: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Rollout:
    prompts = [(PromptRecord(id=str(i), prompt="any"), PROMPTS[i]) for i in rows]
    drawn = {"keys": [("test", i) for i in rows], "batch_size": decode_batch, "seed": 4, "max_new_tokens": 12}
    tokens = [tokens for _, tokens in prompts]
    samples = sample(models["policy"], tokens, eos_token_id=EOS, pad_token_id=PAD, **drawn)
    reward = ModelReward(models["reward_model"], torch.device("cpu"))
    engine = Direct(ActorCritic(models["policy"], models["critic"]), recompute=False)
    return scored(engine, models["reference"], reward, prompts, samples, micro)


@pytest.fixture(scope="module")
def rollout(models) -> Rollout:
    found = collect(models)
    lengths = found.response_mask.sum(1)
    assert lengths.unique().numel() > 1, "the tests below need responses of unequal lengths"
    assert found.ended.any() and not found.ended.all(), "and some without an end token"
    return found


def response(rollout: Rollout, row: int) -> list[int]:
    return rollout.tokens[row, int(rollout.prompt_lengths[row]) : int(rollout.lengths[row])].tolist()


@pytest.mark.parametrize(("field", "model"), [("logp_old", "policy"), ("logp_ref", "reference")])
def test_logprobs_are_those_of_a_plain_forward(rollout, models, field, model):
    for row in range(len(PROMPTS)):
        start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        wanted = torch.tensor(row_logprobs(models[model], rollout.tokens[row, :end].tolist(), start))
        found = getattr(rollout, field)[row]
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)
        assert not found[len(wanted) :].any(), "log-probs outside the mask are 0"


@torch.no_grad()
def test_values_are_read_before_each_token_and_scores_at_the_last(rollout, models):
    for row in range(len(PROMPTS)):
        start, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        tokens = rollout.tokens[row : row + 1, :end]
        values = token_values(models["critic"], tokens)[0]
        assert torch.allclose(rollout.values[row, : end - start], values[start - 1 : end - 1], atol=1e-5)
        assert not rollout.values[row, end - start :].any()
        score = token_values(models["reward_model"], tokens)[0, -1]
        assert torch.allclose(rollout.scores[row], score, atol=1e-5)


def test_mask_counts_response_tokens_the_end_token_included(rollout):
    assert torch.equal(rollout.response_mask.sum(1), rollout.lengths - rollout.prompt_lengths)
    for row in range(len(PROMPTS)):
        tokens = response(rollout, row)
        assert bool(rollout.ended[row]) == (tokens[-1] == EOS)
        assert EOS not in tokens[:-1]
        assert rollout.tokens[row, : len(PROMPTS[row])].tolist() == PROMPTS[row]
        assert (rollout.tokens[row, int(rollout.lengths[row]) :] == PAD).all()


@pytest.mark.parametrize(("decode_batch", "micro"), [(1, 1), (2, 3), (5, 1)])
def test_how_a_batch_is_split_changes_nothing(rollout, models, decode_batch, micro):
    other = collect(models, decode_batch, micro)
    for name, one, two in zip(Rollout._fields, rollout, other, strict=True):
        assert torch.allclose(one.float(), two.float(), atol=1e-5), name


@torch.no_grad()
def test_a_shared_trunk_gives_logprobs_and_values_in_one_forward(rollout, models):
    head = ScalarHead(models["policy"].config.width).initialise()
    model = ActorCritic(models["policy"], head)
    where = rollout.tokens, rollout.prompt_lengths, rollout.response_mask
    logp, _, values = model(*where)
    assert torch.allclose(logp, response_logprobs(models["policy"], *where)[0], atol=1e-5)
    assert torch.allclose(values, model(*where, with_policy=False)[2], atol=1e-5)


# Two rows of prompts of 3 and 1 tokens, responses of 2 and 3:
#   row 0: p p p a b .      a is chosen at position 2, b at 3
#   row 1: p a b c . .      a is chosen at position 0, b at 1, c at 2
TOKENS = torch.tensor([[10, 11, 12, 20, 21, PAD], [10, 22, 23, 24, PAD, PAD]])
STARTS = torch.tensor([3, 1])
MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_positions_by_hand():
    assert before_responses(STARTS, 6, MASK).tolist() == [2, 3, 6 + 0, 6 + 1, 6 + 2]


class Ruler(torch.nn.Module):
    """A critic of tokens (B, 6): after each token its position plus 0.5."""

    def values_at(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept % 6 + 0.5


def test_value_of_a_token_is_read_one_token_earlier():
    *_, values = ActorCritic(None, Ruler())(TOKENS, STARTS, MASK, with_policy=False)
    assert values.tolist() == [[2.5, 3.5, 0.0], [0.5, 1.5, 2.5]]


def test_a_value_by_share_is_the_critics_output_times_the_share_of_tokens_left():
    *_, values = ActorCritic(None, Ruler(), scale_values=True)(TOKENS, STARTS, MASK, with_policy=False)
    # left before each token: 2/2, 1/2 and 3/3, 2/3, 1/3
    torch.testing.assert_close(values, torch.tensor([[2.5, 3.5 / 2, 0.0], [0.5, 1.5 * 2 / 3, 2.5 / 3]]))
    *_, none = ActorCritic(None, Ruler(), scale_values=True)(TOKENS, STARTS, MASK & False, with_policy=False)
    assert not none.any(), "an episode whose tokens do not count"


class Successor(torch.nn.Module):
    """A policy over 29 tokens that gives the successor of each token, u + 1, the probability 1/2; others share the rest."""

    base_model = property(lambda self: self._trunk)
    logits_are = "product"

    def _trunk(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids + 1, VOCAB).float())

    def get_output_embeddings(self):
        # softmax(log(28) one_hot): 28 / (28 + 28) = 1/2 for the successor, 1/56 for each other
        return lambda hidden: hidden * torch.tensor(28.0).log()


def test_logprob_of_a_token_is_read_one_token_earlier():
    logp, spread = response_logprobs(Successor(), TOKENS, STARTS, MASK, with_entropy=True)
    half, other = -torch.tensor(2.0).log(), -torch.tensor(56.0).log()
    # 12 -> 20 no, 20 -> 21 yes; 10 -> 22 no, 22 -> 23 yes, 23 -> 24 yes
    assert torch.allclose(logp, torch.tensor([[other, half, 0.0], [other, half, half]]), atol=1e-6)
    # 1/2 log 2 + 28 * 1/56 log 56 at every response token
    wanted = 0.5 * (torch.tensor(2.0).log() + torch.tensor(56.0).log())
    assert torch.allclose(spread, torch.where(MASK, wanted, 0.0), atol=1e-6)


def rollout_of_four_layers(spread: float, fault: str = "", layers: int = 4) -> Rollout:
    """1280 tokens of a model whose weights have a deviation, sampled and recomputed in bfloat16; with a fault in between."""
    sizes = {"vocab_size": 1024, "context_length": 128, "n_layer": layers, "n_head": 4, "width": 128}
    policy = make_gpt(initializer_range=spread, **sizes)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 64, (40,), generator=generator).tolist()
    asked = [torch.randint(1, 1024, (n,), generator=generator).tolist() for n in lengths]
    prompts = [(PromptRecord(id=str(i), prompt="any"), tokens) for i, tokens in enumerate(asked)]
    drawn = {"seed": 4, "max_new_tokens": 32, "eos_token_id": 1023, "pad_token_id": 0, "keys": list(range(40))}
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        if fault == "temperature":
            drawn["temperature"] = 1.3
        if fault == "padding":
            patch.setattr(fast, "can_attend", lambda cache: False)  # torch's attention has the mask
            attend = decoder._attend
            patch.setattr(decoder, "_attend", lambda q, k, v, mask: attend(q, k, v, torch.zeros_like(mask)))
        samples = sample(policy, asked, **drawn)
        if fault == "position":
            samples = samples._replace(logprobs=samples.logprobs.roll(1, dims=1) * samples.mask)
        engine = Direct(ActorCritic(policy, None), recompute=True)
        return scored(engine, policy, lambda episodes: torch.zeros(len(episodes.prompts)), prompts, samples, 4)


def check(rollout: Rollout) -> None:
    scores = torch.zeros(len(rollout.tokens))
    check_first_rollout(rollout, torch.zeros_like(rollout.logp_old), scores, 0.0, half=True)


@pytest.mark.parametrize(("spread", "layers"), [(0.02, 4), (0.1, 8)])
def test_a_sound_sampler_in_bfloat16_passes(spread, layers):
    found = rollout_of_four_layers(spread, layers=layers)
    assert not torch.equal(found.logp_sampled, found.logp_old), "they are rounded differently"
    check(found)


@pytest.mark.parametrize(("spread", "fault"), [(0.02, "padding"), (0.1, "temperature"), (0.1, "position")])
def test_a_wrong_sampler_in_bfloat16_is_refused(spread, fault):
    with pytest.raises(UserError, match="invariant 1 fails on the first update: the sampler's log-probs differ"):
        check(rollout_of_four_layers(spread, fault))


@pytest.mark.parametrize("share", [0.01, 1.0], ids=["much on a few tokens", "a little on all"])
def test_a_sampler_is_refused_by_its_mean_or_by_its_quantile(rollout, share):
    """1 in 100 tokens off by 1 spread: mean 0.01 (at most 0.06), quantile 1 (at most 0.3). All off by 0.1: the reverse."""
    many = rollout._replace(**{name: getattr(rollout, name).repeat(40, 1) for name in ("response_mask", "logp_old")})
    spread = many.logp_old[many.response_mask].std(correction=0).item()
    off = torch.zeros(int(many.response_mask.sum()))
    off[: round(share * len(off))] = spread if share < 1 else 0.1 * spread
    gap = torch.zeros_like(many.logp_old).masked_scatter(many.response_mask, off)
    wrong = many._replace(logp_sampled=many.logp_old + gap)
    with pytest.raises(UserError, match="the sampler's log-probs differ"):
        check_sampler(wrong)
    check_sampler(many._replace(logp_sampled=many.logp_old + 0.01 * spread * many.response_mask))
