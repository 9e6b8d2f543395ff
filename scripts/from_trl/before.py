"""PPO with TRL 1.12.0: a policy, a reward classifier and a file of prompts. after.py is the same script with rlhf.

python before.py POLICY REWARD PROMPTS.jsonl OUT
"""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

POLICY, REWARD, PROMPTS, OUT = sys.argv[1:]
LENGTH = 24  # tokens of a response

settings = PPOConfig(
    output_dir=OUT,
    seed=0,
    learning_rate=1e-4,
    total_episodes=2560,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=1,
    num_mini_batches=1,
    num_ppo_epochs=4,
    response_length=LENGTH,
    stop_token="eos",
    missing_eos_penalty=1.0,
    temperature=1.0,
    kl_coef=0.05,
    vf_coef=0.1,
    cliprange=0.2,
    gamma=1.0,
    lam=0.95,
    logging_steps=1,
    num_sample_generations=0,
    report_to=[],
    use_cpu=True,
    bf16=False,
)
tokenizer = AutoTokenizer.from_pretrained(POLICY, padding_side="left", trust_remote_code=False)


def tokens(row):
    turns = [{"role": "user", "content": row["prompt"]}]
    return {"input_ids": tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)}


prompts = load_dataset("json", data_files=PROMPTS, split="train")
prompts = prompts.map(tokens, remove_columns=prompts.column_names)
policy = AutoModelForCausalLM.from_pretrained(POLICY, trust_remote_code=False)
reference = AutoModelForCausalLM.from_pretrained(POLICY, trust_remote_code=False)
critic = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1, trust_remote_code=False)
reward = AutoModelForSequenceClassification.from_pretrained(REWARD, num_labels=1, trust_remote_code=False)

trainer = PPOTrainer(
    args=settings,
    processing_class=tokenizer,
    model=policy,
    ref_model=reference,
    reward_model=reward,
    value_model=critic,
    train_dataset=prompts.select(range(64, len(prompts))),
    eval_dataset=prompts.select(range(64)),
)
trainer.train()
trainer.save_model(OUT)
print(trainer.state.log_history[-1])
