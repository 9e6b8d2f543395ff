"""Settings of `rlhf classify`. The defaults are the paper's values."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.setting import ROUNDING, setting


@dataclass(slots=True)
class ClassifyConfig:
    """Fine-tuning on a labelled task (Radford et al. 2018, sections 3.2, 3.3 and 4.1)."""

    data: Any = setting(
        None, "labelled examples; gold:topic, entailment, similarity or choice: the gold world's", kind="paths"
    )
    test: Any = setting(None, "held-out examples; none: a fraction of classify.data", kind="paths")
    text: str | None = setting(None, "column with the text, the premise or the context")
    second: str | None = setting(None, "column with a second text: a hypothesis, a question, a text to compare")
    choices: Any = setting(None, "columns with the choices, or one with lists", kind="columns")
    label: str | None = setting(None, "column with the label; for choices the right one's text, column or number")
    both_orders: bool = setting(False, "similarity: read the two texts in both orders")
    held_out: float = setting(0.2, "fraction of the examples kept for the figures", above=0, below=1)
    examples: int | None = setting(None, "training examples, drawn at random; none: all", min=1)
    layers: int | None = setting(None, "blocks taken from the base; the rest is random; none: all", min=0)
    from_scratch: bool = setting(False, "transfer nothing from the base: its shape with random weights")
    epochs: int = setting(3, "passes over the examples", min=1)
    batch_size: int = setting(32, "examples per optimizer step", min=1)
    micro_batch_size: int = setting(32, "examples per forward", min=1, changes=ROUNDING)
    lr: float = setting(6.25e-5, "learning rate of AdamW; linear warm-up, then linear decay to 0", above=0, max=10)
    warmup_fraction: float = setting(0.002, "fraction of the steps of warm-up", min=0, below=1)
    lm_coef: float = setting(0.5, "weight lambda of the language model's loss on the same text", min=0)
    dropout: float = setting(0.1, "dropout on the classifier's hidden state", min=0, below=1)
    weight_decay: float = setting(0.01, "weight decay, on matrices only", min=0, max=10)
    max_grad_norm: float = setting(1.0, "maximum norm of the gradient; larger ones are scaled down", above=0)
