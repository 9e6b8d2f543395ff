"""PPO: rollouts, rewards, the update, and the checks of its first update."""
