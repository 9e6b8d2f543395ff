"""Settings of the worlds whose truth is known: the built-in one, and book passages under a sentiment lexicon."""

from dataclasses import dataclass

from rlhf.config.setting import NOTHING, setting


@dataclass(slots=True)
class GoldConfig:
    """A world with a known true score: the built-in one, with its right answers, or sentiment by a lexicon."""

    enabled: bool = setting(False, "use the world's files for data.… settings that are not set")
    truth: str = setting(
        "judge", "right answers, or a lexicon's sentiment of continuations of data.corpus", choices=("judge", "vader")
    )
    documents: int = setting(96_000, "documents of pretraining text", min=1)
    conversations: float = setting(0.0, "share of requests of two to four turns (truth=judge)", min=0, max=1)
    demonstrations: int = setting(3000, "demonstrations", min=1)
    train_prompts: int = setting(4000, "prompts of the training split", min=1)
    dev_prompts: int = setting(256, "prompts for choosing settings", min=1)
    test_prompts: int = setting(512, "prompts for the final figures", min=1)
    passage_min_tokens: int = setting(32, "least tokens of a passage's opening (truth=vader)", min=1)
    passage_max_tokens: int = setting(64, "most tokens of a passage's opening (truth=vader)", min=1)
    continuation_tokens: int = setting(24, "tokens of the text's own continuation of a passage (truth=vader)", min=1)
    comparison_prompts: int = setting(3000, "prompts whose responses are ranked, over all rounds", min=1)
    rounds: int = setting(1, "labelling rounds; from the second on the previous PPO model answers", min=1)
    early_episodes: int | None = setting(None, "episodes of earlier rounds; none: ppo.episodes", min=1, changes=NOTHING)
    later_reward_epochs: int | None = setting(
        None, "in later rounds the reward model goes on for these passes; none: it starts anew", min=1
    )
    comparison_dev_prompts: int = setting(100, "ranked dev prompts, for held-out figures of training", min=0)
    comparison_test_prompts: int = setting(300, "ranked test prompts, for held-out accuracy", min=0)
    responses_min: int = setting(4, "fewest responses per prompt, K", min=2, max=100)
    responses_max: int = setting(9, "most responses per prompt", min=2, max=100)
    second_labeler: float = setting(0.25, "fraction of prompts that a second labeler also ranks", min=0, max=1)
    held_out_labelers: int = setting(2, "additional labelers who rank only dev and test prompts: 0 to 2", min=0, max=2)
    labeler_noise: float = setting(1.4, "standard deviation of a judgement; the gold score's range is 10", min=0)
    labeler_agreement: float | None = setting(
        None, "tune the noise to this share of equal verdicts on pairs; none: labeler_noise", above=0.5, below=1
    )
    spare_responses: int = setting(3, "samples per prompt beyond K, to replace duplicates", min=0)
