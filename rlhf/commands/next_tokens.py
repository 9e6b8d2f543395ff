"""`rlhf next`: the most likely next tokens of a text, with their probabilities."""

from typing import Any

from rlhf.commands.chat import as_text
from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, stage_folder
from rlhf.system.terminal import printable, say


def run(config: Config) -> None:
    """Print one line per token: probability, their running sum, and the token as text."""
    folder = stage_folder(config, config.next.stage)
    check_output(folder)
    if not config.next.text:
        raise UserError("next.text is not set: want a text, such as `rlhf next run=x -- The capital of France is`")
    as_text(config.next.text, "next.text")

    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.training.setup import load_frozen, set_up

    with inference(config, set_up(config)) as device:
        model, tokenizer = load_frozen(config, folder / "model", device), load_tokenizer(folder / "model")
        tokens = document_tokens(tokenizer, config.next.text, tokenizer.model_max_length)
        total = 0.0
        for token, probability in likeliest(model, tokens, config.next.count):
            total += probability
            say(f"{probability:8.4f}  {total:6.3f}  {show(tokenizer, token)}")


def document_tokens(tokenizer: Any, text: str, context: int) -> list[int]:
    """The tokens of a text that begins a document; one longer than the context loses its beginning. Special tokens that it
    spells stay text.
    """
    from rlhf.data.tokenizer import encode_text, separator_id

    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    begin = tokenizer.bos_token_id if begins else separator_id(tokenizer)
    return [begin, *encode_text(tokenizer, text)][-context:]


def likeliest(model: Any, tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The `count` most likely next tokens with their probabilities, the most likely first."""
    import torch

    from rlhf.model.interface import lm

    row = torch.tensor([tokens], device=next(model.parameters()).device)
    [logits] = lm(model).logits(row, torch.tensor([len(tokens) - 1], device=row.device))
    top = logits.float().softmax(-1).topk(min(count, len(logits)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def show(tokenizer: Any, token: int) -> str:
    """A token as text in quotes, so that a leading space is visible; special tokens by their names."""
    if token in tokenizer.all_special_ids:
        return printable(tokenizer.convert_ids_to_tokens(token))
    return printable(repr(tokenizer.decode([token])))
