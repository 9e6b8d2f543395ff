"""The models: importing this package registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.model.gpt import GPTConfig, GPTForCausalLM, GPTForSequenceClassification, GPTModel
from rlhf.model.heads import RewardConfig, RewardModel

AutoConfig.register(GPTConfig.model_type, GPTConfig, exist_ok=True)
AutoModel.register(GPTConfig, GPTModel, exist_ok=True)
AutoModelForCausalLM.register(GPTConfig, GPTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GPTConfig, GPTForSequenceClassification, exist_ok=True)
AutoConfig.register(RewardConfig.model_type, RewardConfig, exist_ok=True)
AutoModel.register(RewardConfig, RewardModel, exist_ok=True)

__all__ = ["GPTConfig", "GPTForCausalLM", "GPTModel", "RewardConfig", "RewardModel"]
