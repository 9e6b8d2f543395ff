"""Direct preference optimisation: the SFT model fine-tuned on ranked comparisons, without reward model and sampling.

    loss = - mean over prompts of 1/|P| sum over (w, l) in P of log sigmoid(r_w - r_l)
    r(y) = beta (log pi(y|x) - log pi_sft(y|x))        sums over the response's tokens, its end token included

which is the reward model's loss with the policy's own log-ratio as the score; or with dpo.loss=ipo, r(y) per token of
the response,

    loss = mean over prompts of 1/|P| sum over (w, l) in P of (r_w - r_l - 1 / (2 beta))^2
    r(y) = (log pi(y|x) - log pi_sft(y|x)) / |y|

The log-probs are PPO's: a prompt is read once for its answers, and only their tokens are unembedded. A baseline for
PPO.
Source: Rafailov et al. 2023, equation 7 and appendix B; Azar et al. 2023 (IPO), equation 17, with the mean over tokens
that its authors used.
Differs: all K answers of a prompt are one batch element with one forward per answer, and each prompt's pairs weigh 1
together, as in the reward model; the paper's data are single pairs. AdamW, not RMSprop.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from rlhf.config import Config
from rlhf.data.encoding import Item
from rlhf.evaluation.scoring import collate_answers, item_encoder, item_length
from rlhf.evaluation.statistics import flatten
from rlhf.model.batching import joins_rows
from rlhf.model.heads import RewardModel
from rlhf.ppo.models import Reference, load_reference
from rlhf.runs.metric_table import Sums
from rlhf.stages.reward import item_loss, load_items, load_rankings
from rlhf.training.adapters import add_adapters, are_shared, save_output
from rlhf.training.batches import Batches, Objective, accelerate_order, evaluate_items, put, trained
from rlhf.training.divided import load_lm
from rlhf.training.engine import Engine, make_engine
from rlhf.training.setup import parent_model, running

ANSWERS = 4  # rows that dpo.micro_batch_prompts counts per prompt: the usual number of answers


def run(config: Config) -> None:
    """Write runs/<run>/dpo/model."""
    with running(config, "dpo") as (stage, device):
        folder, tokenizer = parent_model(config, "sft")

        # 1. The training rankings of the reward model, as pairs of answers
        _, records, _ = load_rankings(config, stage)
        counts: Counter[str] = Counter()
        items = load_items(stage, records, item_encoder(config, RewardModel, tokenizer, counts), counts)

        # 2. The SFT model, and a second one as the frozen reference
        model = load_lm(config, folder, device)
        reference = load_reference(config, folder, device, model if are_shared(config) else None)
        add_adapters(model, config, folder)
        settings, pad = config.dpo, tokenizer.pad_token_id
        engine = make_engine(config, Reference(model), settings, device)
        batches = Batches(items["train"], settings.batch_prompts, accelerate_order(config.seed))

        # 3. Train
        objective = make_objective(config, engine, reference, pad)
        with trained(stage, engine, batches, objective, settings.epochs, settings) as loop:
            save_output(model, tokenizer, stage)

            # 4. Held-out figures
            summary = evaluate_items(config, engine, objective, items["dev"])
            loop.log_held_out(summary)
        stage.finish(summary)


def make_objective(config: Config, engine: Engine, reference: nn.Module, pad: int) -> Objective[Item]:
    """The mean ranking loss of the log-ratios over the prompts of a batch."""
    settings, is_ipo = config.dpo, config.dpo.loss == "ipo"
    shape = {"target": 1 / (2 * settings.beta)} if is_ipo else {"label_smoothing": settings.label_smoothing}

    def loss_of(part: list[Item], count: int, sums: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        rows, answers = flatten(item.rows for item in part), flatten(item.lengths for item in part)
        batch = put(collate_answers(rows, answers, pad), engine.device)
        logp = engine(**batch).sum(1)  # (R,)
        with torch.no_grad(), engine.autocast():
            logp_ref = reference(**batch).sum(1)
        # an empty completion has no token
        factor = 1 / batch["mask"].sum(1).clamp(min=1) if is_ipo else settings.beta
        loss, scores = item_loss(part, factor * (logp - logp_ref), count, sums, "dpo", **shape)
        return loss, batch | {"scores": scores}

    most, joined = ANSWERS * settings.micro_batch_prompts, joins_rows(engine.module)
    return Objective(lambda item: item.rows, loss_of, most, length=item_length, joined=joined)
