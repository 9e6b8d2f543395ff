"""The stages of the recipe, one file each, in the order of the pipeline."""
