"""PPO on prompts whose answers the reward model has seen ranked, and on others.

    python scripts/studies/prompts.py --out runs/halves --seeds 1 2 3 --parents runs/half-1 runs/half-2 runs/half-3 experiment=gold \
        rounds=1 gold.comparison_prompts=2000

For parents that have more prompts than rankings. Tables and picture are those of details.py.
"""

from details import compare
from harness import parse

CHOICES = {"ranked": ("ppo.prompts=ranked",), "unranked": ("ppo.prompts=unranked",)}

if __name__ == "__main__":
    compare(CHOICES, parse(__doc__))
