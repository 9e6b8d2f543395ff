"""`rlhf corpus`: pretraining text cleaned as C4's and GPT-3's was, with the reason of every document that goes."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from rlhf.config.commands import CorpusConfig
from rlhf.errors import UserError
from rlhf.system.files import check_replaceable, held, replaced, write_json
from rlhf.system.terminal import say

KEPT = "kept"


def run(config: CorpusConfig) -> None:
    """Write out/corpus.jsonl, rows with `text`; documents.jsonl, what became of each document; report.json, their numbers.

    Raises: UserError if a source cannot be read or written, or no document is left.
    """
    assert config.out is not None
    out = Path(os.path.abspath(config.out))
    with held(out):
        check_replaceable(out, config.overwrite, "out", "corpus", lambda folder: (folder / "documents.jsonl").is_file())
        with replaced(out) as folder:
            report = clean(config, folder)
            write_json(folder / "report.json", report)
    for reason, row in report["documents"].items():
        say(f"corpus: {reason:<15} {row['documents']:>9,} documents, {row['characters']:>13,} characters")
    say(f"corpus: {report['written_characters']:,} of {report['characters']:,} characters -> {out / 'corpus.jsonl'}")


def clean(config: CorpusConfig, folder: Path) -> dict[str, Any]:
    """The report: {"documents": {reason: {"documents", "characters"}}, "characters", "written_characters"}."""
    from rlhf.data.corpus import PIECE, cut_text, iterate_documents, read_text
    from rlhf.data.filtering import Duplicates, Quality, apply_page_rules, cut_grams, evaluation_grams, is_kept
    from rlhf.data.reading import load_prompts
    from rlhf.data.splits import conversation

    words = "" if config.bad_words is None else "".join(read_text(Path(config.bad_words), config.encoding))
    bad_words = frozenset(word.strip().lower() for word in words.splitlines() if word.strip())
    prompts = [] if config.evaluation is None else load_prompts(config.evaluation)[0]
    grams = evaluation_grams(conversation(record.prompt) for record in prompts)
    quality: list[Quality] = []  # by a document's parity: each was fitted without the documents that it judges
    if config.reference is not None:
        texts = iterate_documents(config.reference, config.encoding)
        reference = [piece for text in texts for piece in cut_text(text, PIECE)]
        for parity in (0, 1):
            raw = enumerate(iterate_documents(config.path, config.encoding))
            quality.append(Quality(reference, (text[:PIECE] for number, text in raw if number % 2 != parity)))
    duplicates, documents, characters, written = Duplicates(config.near), Counter[str](), Counter[str](), 0

    def judge(number: int, text: str) -> tuple[list[str], str, dict[str, Any]]:
        """The pieces that stay, why the document goes or KEPT, and what else is recorded."""
        page, reason, more = text, None, dict[str, Any]()
        if config.rules:
            page, reason = apply_page_rules(text, bad_words, config.min_words, config.min_sentences)
        if reason := reason or duplicates.reason(page):
            return [], reason, more
        pieces = cut_grams(page, grams) if grams else [page]
        if not pieces:
            return [], "evaluation", more
        if quality:
            more["quality"] = round(quality[number % 2].score(page[:PIECE]), 4)
            if not is_kept(more["quality"], random.Random(f"corpus-{config.seed}-{number}")):
                return [], "quality", more
        return pieces, KEPT, more

    with (
        (folder / "corpus.jsonl").open("w", encoding="utf-8") as texts,
        (folder / "documents.jsonl").open("w", encoding="utf-8") as rows,
    ):
        for number, text in enumerate(iterate_documents(config.path, config.encoding)):
            pieces, reason, more = judge(number, text)
            left = sum(map(len, pieces))
            documents[reason] += 1
            characters[reason] += len(text)
            written += left
            texts.writelines(json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
            row = {"document": number, "reason": reason, "characters": len(text), "written": left} | more
            rows.write(json.dumps(row) + "\n")
    if not documents[KEPT]:
        raise UserError(
            f"corpus: none of {documents.total():,} documents is left ({dict(documents)}): set rules=false or other settings"
        )
    reasons = {name: {"documents": count, "characters": characters[name]} for name, count in documents.most_common()}
    return {"documents": reasons, "characters": characters.total(), "written_characters": written}
