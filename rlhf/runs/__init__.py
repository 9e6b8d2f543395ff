"""Run folders: what each stage wrote, its lineage, checkpoints and data sources."""
