"""Whether evaluation prompts occur in the pretraining text: overlap of word n-grams (`evaluate.overlap`).

    contaminated      an n-gram of the prompt occurs in the text
    near-duplicate    at least 70% of them do

Words are compared without case and punctuation. n is the 5th percentile of the prompts' lengths, at least 8 and at most 13 words; prompts
of fewer words are counted, not checked.

Source: Brown et al. 2020, appendix C (n-grams and their n); Chowdhery et al. 2022, section 8 (70%).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rlhf.config import Config
from rlhf.data.corpus import iterate_documents
from rlhf.data.prompts import load_prompts
from rlhf.data.splits import conversation
from rlhf.errors import UserError
from rlhf.evaluation.labelled_task import columns_of, load_task
from rlhf.evaluation.statistics import Figures, ngrams, wilson
from rlhf.runs.folders import run_folder
from rlhf.runs.sources import data_source, in_split, need_source

WORD = re.compile(r"\w+")
LEAST, MOST, NEAR = 8, 13, 0.7
SHOWN = 5  # number of listed n-grams, those in most prompts


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def choose_n(lengths: Sequence[int]) -> int:
    """Words of an n-gram, for prompts of so many words."""
    return int(np.clip(np.percentile(lengths, 5, method="lower"), LEAST, MOST))


def find_overlap(prompts: dict[str, str], documents: Iterable[str]) -> Figures:
    """Overlap of the prompts, {name: text}, with the documents: shares with intervals, and the prompts and n-grams concerned."""
    words = {name: words_of(text) for name, text in prompts.items()}
    n = choose_n([len(of_prompt) for of_prompt in words.values()])
    grams = {name: set(ngrams(of_prompt, n)) for name, of_prompt in words.items()}
    wanted = set().union(*grams.values())
    begins = {gram[:2] for gram in wanted}  # looked up first: few positions of a text begin an n-gram
    shared: set[tuple[str, ...]] = set()
    for document in documents:
        text = words_of(document)
        for i in range(len(text) - n + 1):
            if (text[i], text[i + 1]) in begins and (gram := tuple(text[i : i + n])) in wanted:
                shared.add(gram)
    checked = {name: of_prompt for name, of_prompt in grams.items() if of_prompt}
    shares = {name: len(of_prompt & shared) / len(of_prompt) for name, of_prompt in checked.items()}
    hits = Counter(gram for of_prompt in checked.values() for gram in of_prompt & shared)
    near = [name for name, share in shares.items() if share >= NEAR]
    return {
        "n": n,
        "prompts": len(prompts),
        "too_short": len(prompts) - len(checked),
        "contaminated": wilson(sum(share > 0 for share in shares.values()), len(checked)) if checked else None,
        "near_duplicates": wilson(len(near), len(checked)) if checked else None,
        "near_duplicate_prompts": sorted(near),
        "ngrams": [{"text": " ".join(gram), "prompts": count} for gram, count in hits.most_common(SHOWN)],
    }


def evaluate_overlap(config: Config, device: torch.device) -> Figures:
    """{"test prompts" and, with classify.data, the task: `find_overlap` with data.corpus}."""
    sets: dict[str, dict[str, str]] = {}
    if (source := data_source(config, "prompts")) is not None:
        records, _ = load_prompts(source, config.data.format, config.data.allow_partial)
        test = in_split(config, records, "test")
        sets["test prompts"] = {record.id: conversation(record.prompt) for record in test}
    if config.classify.data is not None:
        held_out = load_task(config, columns_of(config), run_folder(config) / "evaluations")[1]
        sets[str(config.classify.data)] = {example.where: "\n".join(example.rows[0]) for example in held_out}
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    if not sets:
        raise UserError(
            "evaluate.overlap: no test prompts and no classify.data: raise data.test, or name a task with classify.data"
        )
    figures: Figures = {}
    for name, prompts in sets.items():
        documents = iterate_documents(need_source(config, "corpus"), config.data.encoding)
        figures[name] = find_overlap(prompts, documents)
    return figures


def describe_overlap(results: Figures) -> list[str]:
    """A line per set of prompts."""
    lines = []
    for name, found in results.items():
        if found["contaminated"] is None:
            lines.append(f"overlap: {name}: all {found['prompts']:,} are too short for {found['n']}-grams")
            continue
        lines.append(
            f"overlap: {name}: {found['contaminated']['value']:.1%} of {found['contaminated']['n']:,} share a {found['n']}-gram with "
            f"data.corpus, {found['near_duplicates']['value']:.1%} are near-duplicates; {found['too_short']:,} are too short to check"
        )
    return lines
