"""The gold world's files: pretraining text, demonstrations and prompts, in the import format."""

from rlhf.config import Config
from rlhf.gold.corpus import demonstration_rows, documents, prompt_rows, write_jsonl
from rlhf.runs.stage import open_stage


def run(config: Config) -> None:
    """Write runs/<run>/world: corpus.jsonl, demonstrations.jsonl, prompts.jsonl."""
    gold, seed = config.gold, config.seed
    with open_stage(config, "world") as stage:
        counts = {"train": gold.train_prompts, "dev": gold.dev_prompts, "test": gold.test_prompts}
        texts = ({"text": text} for text in documents(seed, seed, gold.documents))
        written = {
            "documents": write_jsonl(stage.folder / "corpus.jsonl", texts),
            "demonstrations": write_jsonl(
                stage.folder / "demonstrations.jsonl", demonstration_rows(seed, seed, gold.demonstrations)
            ),
            "prompts": write_jsonl(stage.folder / "prompts.jsonl", prompt_rows(seed, seed, counts)),
        }
        stage.say(", ".join(f"{count:,} {name}" for name, count in written.items()))
        stage.finish({name: float(count) for name, count in written.items()})
