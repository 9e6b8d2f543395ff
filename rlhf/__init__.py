"""RLHF by the InstructGPT recipe: pretraining, supervised fine-tuning, reward model, PPO."""

__version__ = "0.1.0"
