"""`rlhf corpus`: pretraining text cleaned as C4's and GPT-3's was, with the reason of every document that goes."""

import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.config.commands import CorpusConfig
from rlhf.data.splits import conversation, hash64
from rlhf.errors import UserError, optional
from rlhf.system.files import check_replaceable, held, replaced, write_json
from rlhf.system.terminal import say

KEPT = "kept"
LINE_ENDS = (".", "!", "?", '"')
FEATURES = 2**16  # of the classifier: hashed words
ALPHA = 9  # of the Pareto distribution that keeps some documents of low quality
GRAM, AROUND = 13, 200  # words of an evaluation n-gram; characters removed on each side of one
PERMUTATIONS = 128  # of MinHash
WORD = re.compile(r"\w+")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?:\s|$)")


def run(config: CorpusConfig) -> None:
    """Write out/corpus.jsonl, rows with `text`; documents.jsonl, what became of each document; report.json, their numbers."""
    out = Path(os.path.abspath(config.out or ""))
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
    from rlhf.data.reading import load_prompts

    words = "" if config.bad_words is None else "".join(read_text(Path(config.bad_words), config.encoding))
    listed = "|".join(sorted({re.escape(word.strip().lower()) for word in words.splitlines() if word.strip()}))
    bad_word = re.compile(rf"(?<!\w)(?:{listed})(?!\w)" if listed else "(?!)")  # not inside a longer word
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

    def judge(number: int, text: str) -> tuple[list[str], str, float | None]:
        """The pieces that stay, why the document goes or KEPT, and its quality if that was looked at."""
        page, reason = text, None
        if config.rules:
            page, reason = apply_page_rules(text, bad_word, config.min_words, config.min_sentences)
        if reason := reason or duplicates.reason(page):
            return [], reason, None
        pieces = cut_grams(page, grams) if grams else [page]
        if not (pieces and quality):
            return pieces, KEPT if pieces else "evaluation", None
        score = round(quality[number % 2].score(page[:PIECE]), 4)
        stays = is_kept(score, random.Random(f"corpus-{config.seed}-{number}"))
        return (pieces, KEPT, score) if stays else ([], "quality", score)

    with (
        (folder / "corpus.jsonl").open("w", encoding="utf-8") as texts,
        (folder / "documents.jsonl").open("w", encoding="utf-8") as rows,
    ):
        for number, text in enumerate(iterate_documents(config.path, config.encoding)):
            pieces, reason, score = judge(number, text)
            left = sum(map(len, pieces))
            documents[reason] += 1
            characters[reason] += len(text)
            written += left
            texts.writelines(json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
            row = {"document": number, "reason": reason, "characters": len(text), "written": left}
            row |= {} if score is None else {"quality": score}
            rows.write(json.dumps(row) + "\n")
    if not documents[KEPT]:
        went = f"none of {documents.total():,} documents is left ({dict(documents)})"
        raise UserError(f"corpus: {went}: set rules=false or other settings")
    reasons = {name: {"documents": count, "characters": characters[name]} for name, count in documents.most_common()}
    return {"documents": reasons, "characters": characters.total(), "written_characters": written}


def apply_page_rules(text: str, bad_word: re.Pattern, min_words: int, min_sentences: int) -> tuple[str, str | None]:
    """The lines of a page that C4's rules keep, and why the page goes, or None.

    A line is kept if it ends in a terminal punctuation mark, has at least `min_words` words and does not contain
    "javascript". A page goes with a bad word, "lorem ipsum" or a curly bracket, or with fewer than `min_sentences`
    sentences left.
    Source: Raffel et al. 2020, section 2.2. Differs: the language is not detected, and repeated spans of three
    sentences stay.
    """
    lower = text.lower()
    if "lorem ipsum" in lower:
        return "", "lorem_ipsum"
    if "{" in text:
        return "", "curly_bracket"
    if bad_word.search(lower):
        return "", "bad_word"
    lines = [line for line in map(str.strip, text.splitlines()) if line.endswith(LINE_ENDS)]
    page = "\n".join(line for line in lines if len(line.split()) >= min_words and "javascript" not in line.lower())
    return page, "few_sentences" if len(SENTENCE_END.findall(page)) < min_sentences else None


class Duplicates:
    """Exact duplicates, without case and space, and those whose sets of 5-word shingles have a Jaccard index of about
    `near` or more.

    Source: Lee et al. 2022, section 4.2 (MinHash); Brown et al. 2020, appendix A (fuzzy deduplication).
    """

    def __init__(self, near: float | None):
        self.seen: set[int] = set()
        self.near = near
        if near is not None:
            datasketch = optional("datasketch", "near", ", or set near=null")
            self.minhash: Any = datasketch.MinHash
            self.made: dict[int, Any] = {}
            self.index = datasketch.MinHashLSH(threshold=near, num_perm=PERMUTATIONS)

    def reason(self, text: str) -> str | None:
        """ "duplicate", "near_duplicate" or None, if no earlier text is like this one; remembers it."""
        words = WORD.findall(text.lower())
        identity = hash64(" ".join(words))
        if identity in self.seen:
            return "duplicate"
        self.seen.add(identity)
        if self.near is None:
            return None
        made = self.minhash(num_perm=PERMUTATIONS)
        made.update_batch({" ".join(words[i : i + 5]).encode() for i in range(max(1, len(words) - 4))})
        if any(made.jaccard(self.made[key]) >= self.near for key in self.index.query(made)):
            return "near_duplicate"
        self.made[identity] = made
        self.index.insert(identity, made)
        return None


class Quality:
    """P(text is of the reference) by logistic regression on hashed word counts; both classes weigh the same.

    Source: Brown et al. 2020, appendix A.
    """

    def __init__(self, reference: Iterable[str], raw: Iterable[str], decay: float = 1e-3):
        from scipy.optimize import minimize
        from scipy.sparse import vstack

        good, bad = ([word_counts(text) for text in texts] for texts in (reference, raw))
        if not good or not bad:
            raise UserError("reference: the classifier needs documents of both the reference and the corpus")
        x = vstack(good + bad).tocsr()
        y = np.array([1.0] * len(good) + [-1.0] * len(bad))
        share = np.where(y > 0, 0.5 / len(good), 0.5 / len(bad))

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            margin = y * (x @ w[:-1] + w[-1])
            slope = -share * y / (1 + np.exp(np.clip(margin, -500, 500)))
            gradient = np.append(x.T @ slope + decay * w[:-1], slope.sum())
            return float(share @ np.logaddexp(0, -margin) + decay / 2 * w[:-1] @ w[:-1]), gradient

        self.w = minimize(loss, np.zeros(FEATURES + 1), jac=True, method="L-BFGS-B").x

    def score(self, text: str) -> float:
        return float(1 / (1 + np.exp(-np.clip((word_counts(text) @ self.w[:-1])[0] + self.w[-1], -500, 500))))


def word_counts(text: str) -> Any:
    """Hashed counts of words over the root of their squares, a sparse row of FEATURES."""
    from scipy.sparse import csr_matrix

    places, counts = np.unique([hash64(word) % FEATURES for word in WORD.findall(text.lower())], return_counts=True)
    values = counts / max(1.0, math.sqrt(float((counts**2).sum())))
    return csr_matrix((values, (np.zeros(len(places), int), places.astype(int))), shape=(1, FEATURES))


def is_kept(score: float, rng: random.Random) -> bool:
    """Whether a Pareto draw exceeds 1 - score: good documents stay, and some of the others (Brown et al. 2020, appendix A)."""
    return rng.paretovariate(ALPHA) - 1 > 1 - score  # numpy's pareto begins at 0, Python's at 1


def evaluation_grams(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """The 13-word sequences of evaluation texts, without case and punctuation; texts that are shorter have none."""
    words = (WORD.findall(text.lower()) for text in texts)
    return {tuple(row[i : i + GRAM]) for row in words for i in range(len(row) - GRAM + 1)}


def cut_grams(text: str, grams: set[tuple[str, ...]]) -> list[str]:
    """The text without `grams` and the 200 characters on each side of one; pieces of fewer than 200 characters go too.

    Source: Brown et al. 2020, appendix C.
    """
    words = list(WORD.finditer(text))
    lower = [match[0].lower() for match in words]
    found = [i for i in range(len(words) - GRAM + 1) if tuple(lower[i : i + GRAM]) in grams]
    if not found:
        return [text]
    pieces, begin = [], 0
    for i in found:
        if words[i].start() - AROUND > begin:
            pieces.append(text[begin : words[i].start() - AROUND])
        begin = max(begin, words[i + GRAM - 1].end() + AROUND)
    return [piece for piece in map(str.strip, [*pieces, text[begin:]]) if len(piece) >= AROUND]
