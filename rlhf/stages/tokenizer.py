"""Before step 0: the byte-level BPE, trained on the pretraining text; or the tokenizer of the model to adopt."""

from collections.abc import Iterable, Iterator

from rlhf.config import Config
from rlhf.data.chat_template import use_completion
from rlhf.data.corpus import iterate_documents
from rlhf.data.tokenizer import train_tokenizer
from rlhf.runs.sources import need_source
from rlhf.runs.stage import open_stage


def run(config: Config) -> None:
    """Write runs/<run>/tokenizer/model."""
    checkpoint = None
    if config.model.pretrained is not None:  # a wrong name is refused before anything starts
        from rlhf.model.adopt import adopt_tokenizer
        from rlhf.model.checkpoint import read_checkpoint

        checkpoint = read_checkpoint(config.model.pretrained)
        if checkpoint.revision is None:
            checkpoint.weight_files()  # refuse a local model without weights here, not one stage later
    with open_stage(config, "tokenizer") as stage:
        if checkpoint is not None:
            tokenizer, notes = adopt_tokenizer(checkpoint, config.data.form, config.model.native)
            stage.say(*notes, f"{len(tokenizer)} entries, adopted from {config.model.pretrained}")
        else:
            documents = iterate_documents(need_source(config, "corpus"), config.data.encoding)
            tokenizer = train_tokenizer(
                limited(documents, config.tokenizer.max_characters),
                config.tokenizer.vocab_size,
                context_length=config.model.context_length,
                single_digits=config.tokenizer.digits == "single",
            )
            if config.data.form == "completion":
                use_completion(tokenizer)
            stage.say(f"{len(tokenizer)} entries")
        tokenizer.save_pretrained(str(stage.model))
        stage.finish({"vocab_size": len(tokenizer)})


def limited(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Documents up to `characters` of text in all."""
    total = 0
    for document in documents:
        yield document
        total += len(document)
        if total >= characters:
            return
