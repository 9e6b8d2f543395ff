"""Commands that are not stages of the recipe."""
