"""The gold world's pretraining text and demonstrations, in the import format; and passages of any other text as
prompts.

Pretraining documents are short talks, in which a speaker's name indicates a style of answering, and stories that state
everything twice, from which copying is learned. Requests whose core hashes to the development or test split never
occur.
"""

import heapq
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator

from rlhf.data.splits import hash64, split_key
from rlhf.errors import UserError
from rlhf.gold import world
from rlhf.gold.truth import DEMONSTRATION_MIX, PRETRAINING_MIX, SPEAKER_NAMES, answer, pick_style, talk
from rlhf.gold.world import Task, make_task


def _fact(rng: random.Random) -> str:
    topic = rng.choice((*world.FACTS, "class"))
    if topic in world.FACTS:
        _, begins, told = world.pick_fact(rng, topic)
        return f"{begins} {told}."
    word = rng.choice(list(world.CLASSES))
    return world.capitalised(f"{world.with_article(word)} is {world.with_article(world.CLASSES[word])}.")


def _story(rng: random.Random) -> str:
    """Two to four people each have, like or see something; then the story repeats everything in another order."""
    people = rng.sample(world.PEOPLE, rng.randint(2, 4))
    makers = (
        lambda who: f"{who} has a {rng.choice(world.COLOURS)} {rng.choice(world.THINGS)}.",
        lambda who: f"{who} lives in {rng.choice(world.CITIES)}.",
        lambda who: f"{who} likes {rng.choice(world.TREATS)}.",
        lambda who: f"{who} saw a {rng.choice(world.ANIMALS)} at the {rng.choice(world.PLACES)}.",
    )
    lines = [make(who) for make, who in zip(rng.sample(makers, len(people)), people, strict=True)]
    return " ".join([*lines, *rng.sample(lines, len(lines))])


_WORDS = [*world.PEOPLE, *world.COLOURS, *world.THINGS, *world.CITIES, *world.ANIMALS, *world.TREATS, *world.PLACES]


def _echo(rng: random.Random) -> str:
    """Words in a random order, written twice: the second part can only be predicted by copying."""
    words = " ".join(rng.sample(_WORDS, rng.randint(5, 14)))
    return f"{words}. {words}."


def documents(seed: int, split_seed: int, count: int, conversations: float = 0.0) -> Iterator[str]:
    """`count` pretraining documents: first an eighth of echoes and stories, then mostly talks, this share of them
    conversations.

    Copying from the prompt is hard for a small model, and the loss of ordinary text does not show it. Echoes and
    stories first, read in file order, teach it within a few hundred steps.
    """
    rng = random.Random(f"corpus-{seed}")
    for i in range(count):
        draw = rng.random()
        if i < count // 8:
            yield _echo(rng) if draw < 0.5 else _story(rng)
        elif draw < 0.03:
            yield _echo(rng)
        elif draw < 0.79:
            style = pick_style(PRETRAINING_MIX, rng)
            kind = "closed_qa" if rng.random() < 0.15 else None  # more than its share, since it is the hardest to learn
            task = make_task(rng, kind=kind, split="train", seed=split_seed, conversations=conversations)
            yield talk(task, SPEAKER_NAMES[style], answer(task, style, rng))
        elif draw < 0.85:
            yield _story(rng)
        else:
            yield " ".join(_fact(rng) for _ in range(rng.randint(2, 5)))


def unique_tasks(rng: random.Random, split: str, split_seed: int, count: int, conversations: float) -> Iterator[Task]:
    """`count` tasks of a split, no prompt twice; `conversations` is the share of these."""
    seen: set[str] = set()
    while len(seen) < count:
        task = make_task(rng, split=split, seed=split_seed, conversations=conversations)
        if str(task.asked) not in seen:
            seen.add(str(task.asked))
            yield task


def demonstration_rows(seed: int, split_seed: int, count: int, conversations: float = 0.0) -> Iterator[dict]:
    """`count` demonstrations to train on and a twentieth as many to hold out, by labelers of mixed skill."""
    rng = random.Random(f"demonstrations-{seed}")
    counts = {"train": count, "dev": max(1, count // 20)}
    drawn = ((s, task) for s, n in counts.items() for task in unique_tasks(rng, s, split_seed, n, conversations))
    for i, (split, task) in enumerate(drawn):
        style = pick_style(DEMONSTRATION_MIX, rng)
        row = {"kind": "demonstration", "id": f"d-{i}", "prompt": task.asked, "response": answer(task, style, rng)}
        yield row | {"labeler": f"writer-{style}", "source": "gold", "split": split, "metadata": {"group": task.core}}


def prompt_rows(seed: int, split_seed: int, counts: dict[str, int], conversations: float = 0.0) -> Iterator[dict]:
    """Prompt records of every split, with the correct answer of each under `metadata.gold`."""
    rng = random.Random(f"prompts-{seed}")
    for split, count in counts.items():
        for i, task in enumerate(unique_tasks(rng, split, split_seed, count, conversations)):
            metadata = {"group": task.core, "split": split, "gold": task.to_metadata()}
            yield {"kind": "prompt", "id": f"p-{split}-{i}", "prompt": task.asked, "metadata": metadata}


Ends = Callable[[str], list[int]]  # the end of each token in a text


def make_passages(
    documents: Iterable[str], counts: dict[str, int], cut: tuple[int, int, int], ends: Ends, seed: int
) -> Iterator[tuple[str, str, str]]:
    """`counts[split]` passages of each split, as (split, prompt, continuation), no two with the same beginning.

    A passage is a paragraph's opening that ends with a word, and the tokens after it; cut: the least and the most
    tokens of the opening, and those of its continuation. The choice depends only on the text and the seed. The splits
    are filled in the order of `counts`: more passages of the last one do not change the others. Raises: UserError if
    the text has too few long paragraphs.
    """
    least, most, after = cut
    wanted, long = sum(counts.values()), most + after
    paragraphs = (part.split() for text in documents for part in text.replace("\r\n", "\n").split("\n\n"))
    texts = (" ".join(words) for words in paragraphs if len(words) >= long)  # long enough in words, so in tokens
    drawn = {split_key(text): text for text in texts}
    if len(drawn) < wanted:
        raise UserError(
            f"data.corpus: {len(drawn):,} paragraphs of {long} words or more, want "
            f"{wanted:,}: add text, or lower gold.train_prompts, gold.dev_prompts or gold.test_prompts"
        )
    chosen = iter(heapq.nsmallest(wanted, drawn.items(), key=lambda item: hash64(str(seed), item[0])))
    for split, count in counts.items():
        for key, text in itertools.islice(chosen, count):
            places = ends(text)
            # Where the token after it begins a word.
            spaces = [i for i in range(least, most + 1) if text[places[i - 1]] == " "]
            last = random.Random(f"passage-{seed}-{key}").choice(spaces or [most])
            place = places[last - 1]
            yield split, text[:place], text[place : places[last + after - 1]]  # with the space that begins it


def word_ends(text: str) -> list[int]:
    """Tokens of a text for a tokenizer that is not trained yet: words and punctuation, which it divides further."""
    return [match.end() for match in re.finditer(r"\w+|[^\w\s]", text)]
