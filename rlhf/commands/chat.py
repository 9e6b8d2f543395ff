"""`rlhf chat`: talk to a model of a run in the terminal, with its chat template, token by token."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, stage_folder
from rlhf.system.terminal import printable, say, write


def run(config: Config) -> None:
    """Read messages from the terminal (or `chat.message`) and stream the answers until the input ends."""
    settings, folder = config.chat, stage_folder(config, config.chat.stage)
    check_output(folder, config.chat.stage)
    talking = settings.message is None and sys.stdin is not None and sys.stdin.isatty()
    lines = read_lines(talking) if settings.message is None else [settings.message]

    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.training.setup import load_frozen, set_up

    with inference(config, set_up(config)) as device:
        policy, tokenizer = load_frozen(config, folder / "model", device), load_tokenizer(folder / "model")
        if talking:
            say(f"{folder} answers. An empty line starts a new dialogue, Ctrl-D ends.")
        opening = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        dialogue, turn = list(opening), 0
        for line in lines:
            if line:
                dialogue.append({"role": "user", "content": line})
                dialogue.append({"role": "assistant", "content": answer(config, policy, tokenizer, dialogue, turn)})
                turn += 1
            else:
                dialogue = list(opening)


def read_lines(talking: bool) -> Iterator[str]:
    if sys.stdin is None:
        raise UserError("chat: standard input is closed: connect it, or ask one question with chat.message='…'")
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if talking else "").strip()


def answer(config: Config, policy: Any, tokenizer: Any, dialogue: list[dict[str, str]], turn: int) -> str:
    """Stream one answer to the screen and return it. The oldest turns are dropped if the context is too short for all."""
    from rlhf.data.chat_template import end_ids, response_text
    from rlhf.data.encoding import encode_prompt_within
    from rlhf.data.records import Message
    from rlhf.engines.choosing import Choice
    from rlhf.engines.running import Response, RunningBatch, TextStream
    from rlhf.evaluation.policies import room_for

    try:
        messages = [Message.model_validate(message) for message in dialogue]
    except ValueError:  # in some locales a byte that is no text arrives as a lone surrogate
        raise UserError("chat: the message is not UTF-8: convert the input to UTF-8") from None
    length, room = room_for(tokenizer.model_max_length, config.rollout.max_new_tokens)
    fitted = encode_prompt_within(tokenizer, messages, room)
    if fitted is None:
        raise UserError("the message does not fit the model's context: write a shorter one")
    ends = frozenset(end_ids(tokenizer, base=config.chat.stage == "pretrain"))
    choice = Choice(config.chat.temperature, greedy=config.chat.greedy)
    response = Response(fitted[0], choice, config.seed, ("chat", turn), length, ends)
    text, batch = TextStream(tokenizer, ends), RunningBatch(policy, 1)
    batch.advance([response])
    while not response.finished:
        write(printable(text.add(response.tokens[-1:]), keep="\n\t"))
        batch.advance()
    write(printable(text.add(response.tokens[-1:], over=True), keep="\n\t"))
    say()
    return response_text(tokenizer, text.ids)
