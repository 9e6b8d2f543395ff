from types import SimpleNamespace

import pytest
import torch

from rlhf.config import Config
from rlhf.data.records import PromptRecord
from rlhf.errors import UserError
from rlhf.model.heads import RewardModel
from rlhf.model.interface import Episodes
from rlhf.ppo.rewards import CombinedReward, FunctionReward, ModelReward, make_reward, score_by_token, spread_of
from rlhf.runs.sources import hash_sources

CPU = torch.device("cpu")
# Two sources, three responses.
SCORES = torch.tensor([[1.0, -2.0, 0.5], [3.0, 2.0, 0.5]])


def episodes(*texts: str) -> Episodes:
    records = [PromptRecord(id=str(i), prompt=f"question {i}", metadata={"n": i}) for i in range(len(texts))]
    return Episodes(records, [[1]] * len(texts), [[2]] * len(texts), list(texts), torch.ones(len(texts)).bool())


def test_scores_combine_by_hand():
    sources = {"one": lambda episodes: SCORES[0], "two": lambda episodes: SCORES[1]}
    reward = CombinedReward(sources, [2.0, -0.5])
    # 2 * 1 - .5 * 3;  2 * -2 - .5 * 2;  2 * .5 - .5 * .5
    assert reward(episodes("a", "b", "c")).tolist() == pytest.approx([0.5, -5.0, 0.75])
    assert reward.parts["one"].tolist() == SCORES[0].tolist()
    assert spread_of(reward.parts) is None


def test_the_spread_of_the_reward_models_by_hand():
    sources = {"model_0": lambda e: SCORES[0], "model_1": lambda e: SCORES[1], "function_2": lambda e: 100 * SCORES[0]}
    reward = CombinedReward(sources, [1.0, 0.0, 1.0])
    assert reward(episodes("a", "b", "c")).tolist() == [101, -202, 50.5], "the second model only watches"
    # half the differences 1 - 3, -2 - 2 and .5 - .5, times the root of 2
    assert spread_of(reward.parts).tolist() == pytest.approx([2**0.5, 2 * 2**0.5, 0.0])


class Countdown(torch.nn.Module):
    """Reads the last three tokens: each term is the token's number, the last one's first."""

    reads_text, together, config = False, 2, SimpleNamespace(read_tokens=3)
    rows, collate = RewardModel.rows, RewardModel.collate

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, lengths, by_token=False, calibrated=True):
        read = [row[max(0, n - 3) : n].flip(0).float() for row, n in zip(tokens, lengths.tolist(), strict=True)]
        terms = torch.stack([torch.nn.functional.pad(row, (0, 3 - len(row))) for row in read])
        return terms if by_token else terms.sum(1)


def test_what_each_response_token_earns():
    rows = episodes("a", "b", "c")._replace(prompts=[[1, 2], [3], [4, 5]], responses=[[10, 20], [30, 40, 50, 60], [70]])
    reward = ModelReward(Countdown(), CPU)
    scores, parts = score_by_token(reward, rows)
    # the first row reads 2, 10, 20, of which 2 is the prompt's; the second 40, 50, 60; the third 4, 5, 70
    assert parts.tolist() == [[12, 20, 0, 0], [0, 40, 50, 60], [79, 0, 0, 0]]
    assert scores.tolist() == reward(rows).tolist() == [32, 150, 79]

    both = CombinedReward({"tokens": reward, "whole": lambda e: torch.tensor([1.0, 2.0, 3.0])}, [0.5, 10.0])
    scores, parts = score_by_token(both, rows)
    assert scores.tolist() == both(rows).tolist() == [26, 95, 69.5]
    assert parts.tolist() == [[6, 10, 0, 0], [0, 20, 25, 30], [39.5, 0, 0, 0]], "what is whole is in no token's part"
    assert both.parts["tokens"].tolist() == [32, 150, 79]


def count_words(prompts, responses, metadata):
    assert [p[-1]["role"] for p in prompts] == ["user"] * len(prompts)
    return [len(r.split()) + m["n"] for r, m in zip(responses, metadata, strict=True)]


def with_tokens(prompts, responses, metadata, tokens, scale, ended=None):
    assert len(ended) == len(responses)
    return {"tokens": [scale * len(ids) for ids in tokens], "one": [1] * len(tokens)}


def test_a_function_gets_what_it_has_arguments_for():
    reward = FunctionReward(f"{__name__}:with_tokens", CPU, {"scale": 3, "other": 1})
    assert reward.function.takes == ["ended", "tokens", "scale"]
    assert reward(episodes("a", "b")).tolist() == [4.0, 4.0] and reward.parts["one"].tolist() == [1.0, 1.0]
    with pytest.raises(UserError, match=r"takes .*missing a required argument: 'scale'"):
        FunctionReward(f"{__name__}:with_tokens", CPU)
    config = Config()
    config.ppo.rewards, config.ppo.reward_parameters = [f"{__name__}:count_words"], {"scale": 3}
    with pytest.raises(UserError, match=r"ppo.reward_parameters: scale: no function of ppo.rewards has an argument"):
        make_reward(config, None, CPU)


def test_a_function_is_named_by_module_in_the_working_directory_too(tmp_path, monkeypatch):
    assert FunctionReward(f"{__name__}:count_words", CPU)(episodes("a b", "c")).tolist() == [2.0, 2.0]
    (tmp_path / "pays_by_length.py").write_text("def reward(p, r, m):\n    return [len(x) for x in r]\n")
    monkeypatch.chdir(tmp_path)
    assert FunctionReward("pays_by_length:reward", CPU)(episodes("abc")).tolist() == [3.0]


def test_a_function_in_a_file_is_found_by_its_path(tmp_path):
    path = tmp_path / "pays.py"
    path.write_text("def reward(p, r, m):\n    return [len(x) for x in r]\n")
    assert FunctionReward(f"{path}:reward", CPU)(episodes("abc")).tolist() == [3.0]
    path.write_text("def reward(p, r):\n    return [len(x) for x in r]\n")
    told = r"pays.py:reward: takes \(p, r\) .* is called as f\(prompts, responses, metadata"
    with pytest.raises(UserError, match=told):
        FunctionReward(f"{path}:reward", CPU)
    path.write_text("def reward(p, r, m):\n    return [1 / len(x) for x in r]\n")
    with pytest.raises(UserError, match=r"reward: raised ZeroDivisionError: division by zero \(pays.py:2\)"):
        FunctionReward(f"{path}:reward", CPU)(episodes(""))
    path.write_text("def reward(p, r, m:\n")
    with pytest.raises(UserError, match=r"cannot be imported \(SyntaxError"):
        FunctionReward(f"{path}:reward", CPU)


def test_a_functions_code_is_part_of_a_stages_data(tmp_path):
    path = tmp_path / "pays.py"
    path.write_text("def reward(p, r, m):\n    return [len(x) for x in r]\n")
    config = Config()
    config.ppo.rewards = [f"{path}:reward", "json:dumps"]
    before = hash_sources(config, "ppo")
    assert set(before) == {f"reward:{path}:reward", "reward:json:dumps"}
    assert hash_sources(config, "rejection") == hash_sources(config, "evaluate") == before
    assert not hash_sources(config, "sft")
    path.write_text("def reward(p, r, m):\n    return [-len(x) for x in r]\n")
    assert hash_sources(config, "ppo") != before
