"""What `rlhf corpus` takes from a text, and what a small model learns from the rest at equal tokens.

    python scripts/studies/corpus.py --out runs/corpus --texts books.jsonl web.jsonl --reference good.txt \
        --held good-test.txt web-test.jsonl experiment=gold tokenizer.vocab_size=4096 pretrain.tokens=1_000_000 threads=1

The texts are cut into documents of about SIZE characters, with their line breaks inside paragraphs joined. The arms are all of them, what
C4's rules and near duplicates leave, and the same with the quality classifier against --reference. All have one tokenizer, which is
trained on all documents, and as many tokens. Bits per byte are those of the finished models on each file of --held.
"""

import math
import re
from pathlib import Path

import harness
from harness import collect, draw, less, make_cells, parse, print_means, run

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


def clean(raw: Path, out: Path, *more: str) -> Path:
    """The text that `rlhf corpus` leaves, and what it says that went."""
    words = ["corpus", f"path='{raw}'", f"out='{out}'", *more]
    harness.call_once((out / "report.json").exists(), words, out.with_suffix(".log"))
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
    several = {"type": Path, "nargs": "+", "required": True}
    asked = parse(__doc__, texts=several, reference={"type": Path, "required": True}, held=several)
    raw, reference = asked.out / "raw.jsonl", asked.out / "reference.jsonl"
    if not reference.exists():
        harness.write_rows(raw, ({"text": part} for path in asked.texts for part in documents(path)))
        harness.write_rows(reference, ({"text": part} for part in documents(asked.reference)))
    arms = {
        "all": raw,
        "rules": clean(raw, asked.out / "rules"),
        "rules_and_quality": clean(raw, asked.out / "quality", f"reference='{reference}'"),
    }
    for arm in ("rules", "quality"):
        counts = harness.read(asked.out / arm / "report.json")["documents"]
        harness.table([arm, "documents", "characters"], [[name, *row.values()] for name, row in counts.items()])
    base = run(make_cells(asked, lambda *_: {"tokenizer": (f"data.corpus='{raw}'",)}, (), {"tokenizer": ()}), asked)
    asked.parents = [cell.home for cell in base]
    choices = {name: (f"data.corpus='{path}'",) for name, path in arms.items()}
    cells = run(make_cells(asked, choices, ("tokenizer",), {"pretrain": ()}), asked)

    def figures(cell: harness.Cell) -> dict[str, float]:
        return {path.stem: bits_per_byte(cell.home, documents(path)) for path in asked.held}

    found = collect(cells, lambda cell: harness.cached(cell.beside("-bits.json"), lambda: figures(cell)))
    means = print_means("bits per byte of", found)
    print_means("less all, paired over seeds", less(found, "all"), sign="+")
    series = {p.stem: [(i, row[p.stem]) for i, row in enumerate(means.values())] for p in asked.held}
    draw(asked.picture, series, "", "bits per byte", list(means), line=False)


if __name__ == "__main__":
    main()
