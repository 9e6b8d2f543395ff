"""What `rlhf corpus` takes from a text, and what a small model learns from the rest at equal tokens.

    python scripts/studies/corpus.py --out runs/corpus --texts books.jsonl web.jsonl --reference good.txt \
        --held good-test.txt web-test.jsonl experiment=gold tokenizer.vocab_size=4096 pretrain.tokens=1_000_000 threads=1

The texts are cut into documents of about SIZE characters, with their line breaks inside paragraphs joined. The arms are all of them, what
C4's rules and near duplicates leave, and the same with the quality classifier against --reference. All have one tokenizer, which is
trained on all documents, and as many tokens. Bits per byte are those of the finished models on each file of --held.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from harness import (
    Cell,
    cached,
    call,
    draw,
    make_cells,
    mean_interval,
    over_seeds,
    parse,
    read,
    run,
    show,
    spaced,
    table,
)

SIZE = 4000
SENTENCES = re.compile(r"(?<=[.!?])\s")


def documents(path: Path) -> list[str]:
    """Parts of each text of SIZE characters and up to the end of a sentence; its end is a part too. Line breaks end paragraphs alone."""
    from rlhf.data.corpus import iterate_documents

    parts = []
    for text in iterate_documents([str(path)], "utf-8"):
        part = ""
        for paragraph in text.split("\n\n"):
            for sentence in SENTENCES.split(" ".join(paragraph.split())):
                part += f"{sentence} "
                if len(part) >= SIZE:
                    parts.append(part)
                    part = ""
            part = part.rstrip() + "\n"
        parts.append(part)
    return [part for part in parts if part.strip()]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def clean(raw: Path, out: Path, *more: str) -> Path:
    """The text that `rlhf corpus` leaves, and what it says that went."""
    if not (out / "report.json").exists():
        with out.with_suffix(".log").open("a", encoding="utf-8") as log:
            if call(["corpus", f"path='{raw}'", f"out='{out}'", *more], log):
                sys.exit(f"{out.with_suffix('.log')}: the corpus could not be cleaned")
    return out / "corpus.jsonl"


def bits_per_byte(home: Path, texts: list[str]) -> float:
    """Of blocks of the model's context; the first token of each follows the end token."""
    import torch
    from torch.nn.functional import cross_entropy

    import rlhf

    loaded = rlhf.load(home)
    model, tokenizer = loaded.policy("pretrain"), loaded.tokenizer
    joined = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    length, nats = model.config.context_length - 1, 0.0
    for start in range(0, len(joined), length):
        ids = torch.tensor([[tokenizer.eos_token_id, *joined[start : start + length]]])
        with torch.no_grad():
            nats += float(cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def main() -> None:
    asked = parse(__doc__, texts={"type": Path, "nargs": "+", "required": True},
                  reference={"type": Path, "required": True}, held={"type": Path, "nargs": "+", "required": True})  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    raw, reference = asked.out / "raw.jsonl", asked.out / "reference.jsonl"
    if not reference.exists():
        write_texts(raw, [part for path in asked.texts for part in documents(path)])
        write_texts(reference, documents(asked.reference))
    arms = {
        "all": raw,
        "rules": clean(raw, asked.out / "rules"),
        "rules_and_quality": clean(raw, asked.out / "quality", f"reference='{reference}'"),
    }
    for arm in ("rules", "quality"):
        rows = read(asked.out / arm / "report.json")["documents"]
        table([arm, "documents", "characters"], [[name, *row.values()] for name, row in rows.items()])
    base = make_cells(asked, {"tokenizer": (f"data.corpus='{raw}'",)}, (), {"tokenizer": ()})
    run(base, asked.processes)
    asked.parents = [cell.home for cell in base]
    cells = make_cells(
        asked, {name: (f"data.corpus='{path}'",) for name, path in arms.items()}, ("tokenizer",), {"pretrain": ()}
    )
    run(cells, asked.processes)

    def figures(cell: Cell) -> dict[str, float]:
        return {path.stem: bits_per_byte(cell.home, documents(path)) for path in asked.held}

    found: dict[str, dict[int, Any]] = {}
    for cell in cells:
        found.setdefault(cell.name, {})[cell.seed] = cached(cell.beside("-bits.json"), lambda c=cell: figures(c))
    names = [path.stem for path in asked.held]
    means = over_seeds(found)
    table(["bits per byte of", *names], [[spaced(arm), *row.values()] for arm, row in means.items()])
    less = [
        [spaced(arm), *(show(mean_interval([by[s][n] - found["all"][s][n] for s in by]), sign="+") for n in names)]
        for arm, by in found.items()
        if arm != "all"
    ]
    table(["less all, paired over seeds", *names], less)
    series = {n: [(i, means[arm][n]) for i, arm in enumerate(means)] for n in names}
    draw(asked.picture, series, "", "bits per byte", list(means), line=False)


if __name__ == "__main__":
    main()
