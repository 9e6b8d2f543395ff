"""`rlhf next`: the most likely next tokens of a text, with their probabilities."""

from rlhf.commands.chat import as_text
from rlhf.config import Config
from rlhf.config.precision import inference
from rlhf.errors import UserError
from rlhf.runs.folders import check_output, stage_folder
from rlhf.system.terminal import say


def run(config: Config) -> None:
    """Print one line per token: probability, their running sum, and the token as text."""
    folder = stage_folder(config, config.next.stage)
    check_output(folder)
    if not config.next.text:
        raise UserError("next.text is not set: want a text, such as `rlhf next run=x -- The capital of France is`")
    as_text(config.next.text, "next.text")

    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.engines.likely import document_tokens, likeliest, show
    from rlhf.training.setup import load_frozen, set_up

    with inference(config, set_up(config)) as device:
        model, tokenizer = load_frozen(config, folder / "model", device), load_tokenizer(folder / "model")
        tokens = document_tokens(tokenizer, config.next.text, tokenizer.model_max_length)
        total = 0.0
        for token, probability in likeliest(model, tokens, config.next.count):
            total += probability
            say(f"{probability:8.4f}  {total:6.3f}  {show(tokenizer, token)}")
