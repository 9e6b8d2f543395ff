"""A run for notebooks: its models, its tokenizer, answers and scores. This module only reads the run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.config.setting import settings_in
from rlhf.errors import UserError
from rlhf.recipe import POLICY_STAGES
from rlhf.runs.folders import check_output, is_complete, read_stage, stages_of
from rlhf.runs.run_files import entry_at, stage_places

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from rlhf.model.classifier import TextRewardModel
    from rlhf.model.heads import RewardModel

Prompt = str | Sequence[dict[str, str]]  # a user's message, or a dialogue of {"role", "content"}


class LoadedRun:
    """The models of one run folder. Each is loaded on first use, after its files have been checked against the run's
    record.

    device: auto, cpu or cuda. precision: auto, float32 or bfloat16, as in training. Raises: UserError if no stage is
    finished there.
    """

    def __init__(self, run: str | Path, device: str = "auto", precision: str = "auto"):
        _check(device=("device", device), precision=("precision", precision))
        self.folder = folder = Path(run)
        self._config = Config(run=folder.name, runs_dir=str(folder.parent), device=device, precision=precision)
        if not stages_of(folder):
            raise UserError(f"{folder}: no stage of a run in it: want the folder of a run, such as runs/demo")
        self._places = stage_places(folder)
        self._models: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<run {self.folder}: {', '.join(self.policies) or 'no policy yet'}>"

    @property
    def policies(self) -> tuple[str, ...]:
        """The finished stages that have a policy."""
        return tuple(stage for stage in POLICY_STAGES if is_complete(self._places[stage]))

    @property
    def device(self) -> "torch.device":
        """Where the models are."""
        from rlhf.training.setup import choose_device

        return choose_device(self._config)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The run's tokenizer, with its chat template."""
        from rlhf.data.tokenizer import load_tokenizer

        return load_tokenizer(self._model_folder(self.policies[-1] if self.policies else "tokenizer"))

    def policy(self, stage: str = "ppo") -> "PreTrainedModel":
        """The model of a stage (pretrain, sft, ppo, …) in float32, in eval mode."""
        if stage not in POLICY_STAGES:
            raise UserError(f"stage={stage}: want one of {', '.join(POLICY_STAGES)}")
        if stage not in self._models:
            from rlhf.training.setup import load_policy

            self._models[stage] = load_policy(self._model_folder(stage)).to(self.device)
        return self._models[stage]

    def reward_model(self) -> "RewardModel | TextRewardModel":
        """The reward model, calibrated, in eval mode."""
        if "reward" not in self._models:
            from rlhf.model.classifier import load_reward_model
            from rlhf.training.setup import be_quiet

            be_quiet()
            self._models["reward"] = load_reward_model(self._model_folder("reward"), self.device)
        return self._models["reward"]

    def sample(
        self,
        prompts: Sequence[Prompt],
        stage: str = "ppo",
        *,
        seed: int = 0,
        temperature: float = 1.0,
        greedy: bool = False,
        max_new_tokens: int | None = None,
    ) -> list[str]:
        """One answer per prompt. It depends only on the model, the prompt, its position in the list and the seed.

        max_new_tokens: maximum length of an answer; None: as in the run. Raises: UserError if a prompt does not fit the
        context.
        """
        length = self.max_new_tokens(stage) if max_new_tokens is None else max_new_tokens
        _check(seed=("seed", seed), temperature=("chat.temperature", temperature))
        _check(max_new_tokens=("rollout.max_new_tokens", length))
        dialogues = _dialogues(prompts)
        from rlhf.data.chat_template import end_ids
        from rlhf.data.encoding import encode_prompt_within
        from rlhf.engines.sampling import make_sampler
        from rlhf.evaluation.policies import draw_answers, room_for

        policy, tokenizer = self.policy(stage), self.tokenizer
        length, room = room_for(tokenizer.model_max_length, length)
        prompt_ids = []
        for i, dialogue in enumerate(dialogues):
            if (fitted := encode_prompt_within(tokenizer, dialogue, room)) is None:
                context = f"the context of {tokenizer.model_max_length} tokens"
                raise UserError(f"prompt {i}: does not fit {context}: shorten it")
            prompt_ids.append(fitted[0])
        with inference(self._config, self.device):
            how = {"seed": seed, "max_new_tokens": length, "temperature": temperature, "greedy": greedy}
            ends = end_ids(tokenizer, base=stage == "pretrain")
            engine = make_sampler(self._config, policy, tokenizer, batch_size=None, eos_token_id=ends, **how)
            answers = draw_answers(engine, tokenizer, prompt_ids, [("api", i) for i in range(len(prompt_ids))])
        return [answer.text for answer in answers]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], ended: Sequence[bool] = ()) -> list[float]:
        """The reward model's calibrated score of each response to the prompt at the same position.

        ended: whether each has its end token, as all have unless it is given. Raises: UserError if the lengths differ,
        or a prompt does not fit the context.
        """
        dialogues = _dialogues(prompts)
        if isinstance(responses, str) or not all(isinstance(response, str) for response in responses):
            raise UserError("score: responses: want a list of texts, one for each prompt")
        if len(prompts) != len(responses):
            raise UserError(f"score: {len(prompts)} prompts for {len(responses)} responses: give one per prompt")
        from rlhf.data.encoding import row_limit
        from rlhf.evaluation.scoring import item_encoder
        from rlhf.model.interface import score
        from rlhf.system.terminal import say

        model, rows, counts = self.reward_model(), [], Counter[str]()
        self._config.rollout.max_new_tokens = self.max_new_tokens("reward")
        recorded = entry_at(self.record("reward"), "config", "data", "max_tokens")
        self._config.data.max_tokens = recorded or self._config.data.max_tokens
        encode = item_encoder(self._config, model, self.tokenizer, counts)
        for i, (prompt, response) in enumerate(zip(dialogues, responses, strict=True)):
            encoded = encode(prompt, [(response, i >= len(ended) or ended[i])])
            if encoded is None:
                raise UserError(f"prompt {i}: does not fit the reward model's context: shorten it")
            rows += encoded[0]
        if cut := counts.total():
            limit = f"{row_limit(self._config, self.tokenizer)} tokens (data.max_tokens and the context)"
            say(f"score: {cut} prompts or responses were cut to {limit}")
        with inference(self._config, self.device):
            return score(model, rows).tolist()

    def _model_folder(self, stage: str) -> Path:
        check_output(self._places[stage], stage)
        return self._places[stage] / "model"

    def record(self, stage: str) -> dict[str, Any]:
        """The stage's record (settings, hash, …); empty if it was not run."""
        return read_stage(self._places[stage]) or {}

    def max_new_tokens(self, stage: str) -> int:
        """The maximum length of a response in the stage's record."""
        recorded = entry_at(self.record(stage), "config", "rollout", "max_new_tokens")
        return recorded or self._config.rollout.max_new_tokens


load = LoadedRun


def _check(**given: tuple[str, Any]) -> None:
    """Raises: UserError for an argument, {name: (setting, value)}, that its setting would refuse."""
    for name, (key, value) in given.items():
        stated = settings_in(Config)[key]
        if not isinstance(value, (int, float) if isinstance(stated.default, float) else type(stated.default)):
            raise UserError(f"{name}={value!r}: want {stated.wanted()}")
        if problem := stated.problem(name, value):
            raise UserError(problem)


def _dialogues(prompts: Sequence[Prompt]) -> list[list[Any]]:
    """Prompts as lists of messages. Raises: UserError for one that is no prompt."""
    from rlhf.data.records import PromptRecord
    from rlhf.system.schemas import check_value

    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise UserError(f"prompts: got a {type(prompts).__name__}: want a list of prompts")
    rows, wanted = [{"id": str(i), "prompt": one} for i, one in enumerate(prompts)], "want a text, or a list of turns"
    return [check_value(row, PromptRecord, f"prompt {row['id']}", wanted).prompt for row in rows]
