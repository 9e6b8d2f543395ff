"""The files of a world with a known true score: pretraining text, demonstrations and prompts, in the import format."""

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf.config import Config
from rlhf.data.corpus import iterate_documents
from rlhf.gold.corpus import Ends, demonstration_rows, documents, make_passages, prompt_rows, word_ends
from rlhf.runs.sources import need_source
from rlhf.runs.stage import open_stage
from rlhf.system.files import write_jsonl


def run(config: Config) -> None:
    """Write runs/<run>/world: demonstrations.jsonl and prompts.jsonl; of the built-in world also corpus.jsonl."""
    with open_stage(config, "world") as stage:
        gold, seed, share = config.gold, config.seed, config.gold.conversations
        counts = {"train": gold.train_prompts, "dev": gold.dev_prompts, "test": gold.test_prompts}
        files: Mapping[str, Iterable[dict[str, Any]]]
        if gold.truth == "judge":
            files = {
                "corpus": ({"text": text} for text in documents(seed, seed, gold.documents, share)),
                "demonstrations": demonstration_rows(seed, seed, gold.demonstrations, share),
                "prompts": prompt_rows(seed, seed, counts, share),
            }
        else:
            files = passage_files(config, counts)
        written = {name: write_jsonl(stage.folder / f"{name}.jsonl", rows) for name, rows in files.items()}
        written = {"documents" if name == "corpus" else name: count for name, count in written.items()}
        stage.say(", ".join(f"{count:,} {name}" for name, count in written.items()))
        stage.finish({name: float(count) for name, count in written.items()})


def passage_files(config: Config, counts: dict[str, int]) -> Mapping[str, Iterable[dict[str, Any]]]:
    """Openings of passages of data.corpus as prompts, and their continuations as demonstrations."""
    gold = config.gold
    cut = gold.passage_min_tokens, gold.passage_max_tokens, gold.continuation_tokens
    counts = dict(reversed(counts.items()))  # more training prompts do not change the others
    texts = iterate_documents(need_source(config, "corpus"), config.data.encoding)
    files: dict[str, list[dict[str, Any]]] = {"demonstrations": [], "prompts": []}
    passages = list(make_passages(texts, counts, cut, token_ends(config), config.data.split_seed))
    for split in ("train", "dev", "test"):
        for i, (_, prompt, continuation) in enumerate(p for p in passages if p[0] == split):
            asked = {"kind": "prompt", "id": f"p-{split}-{i}", "prompt": prompt, "metadata": {"split": split}}
            files["prompts"].append(asked)
            if split == "dev" or (split == "train" and i < gold.demonstrations):
                shown = {"kind": "demonstration", "id": f"d-{split}-{i}", "prompt": prompt, "response": continuation}
                files["demonstrations"].append(shown | {"source": "data.corpus", "split": split})
    return files


def token_ends(config: Config) -> Ends:
    """The ends of tokens: of the adopted model's tokenizer; words and punctuation if the tokenizer is trained later."""
    if config.model.pretrained is None:
        return word_ends
    from rlhf.model.adopt import adopt_tokenizer
    from rlhf.model.checkpoint import read_checkpoint

    backend = adopt_tokenizer(read_checkpoint(config.model.pretrained), config.data.form)[0].backend_tokenizer
    return lambda text: [end for _, end in backend.encode(text, add_special_tokens=False).offsets]
