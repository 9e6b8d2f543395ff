"""The report's samples: the models' answers side by side, and answers during PPO, shaded by each token's share of the KL.

All of this is untrusted text: the template escapes it.
"""

from typing import Any

from rlhf.report.evaluation_tables import MODELS
from rlhf.runs.run_files import RunFiles, entries, entry_at, is_figure, number_at, prompt_text, visible

SHOWN_SAMPLES, MORE_SAMPLES = 4, 20
ROLLOUT_PROMPTS, ROLLOUT_STEPS = 6, 6
MAX_TOKENS = 400
# The nats of a token from which each of the five shades begins.
SHADES = (0.05, 0.2, 0.5, 1.0, 2.0)


def make_samples(runs: list[RunFiles]) -> list[dict[str, Any]]:
    """Responses of the models to the same prompts, side by side; of several runs each run's own PPO model."""
    models = MODELS if len(runs) == 1 else ("sft",)
    others = [{str(row.get("id")): row for row in run.samples} for run in runs[1:]]
    samples = []
    answered = [row for row in runs[0].samples if isinstance(row.get("responses"), dict)]
    for row in answered[: SHOWN_SAMPLES + MORE_SAMPLES]:
        shown = [_answer(row, model, model) for model in models if model in row["responses"]]
        if len(runs) > 1:
            rows = [row, *(of_run.get(str(row.get("id")), {}) for of_run in others)]
            shown += [
                _answer(its_row, "ppo", f"ppo of {run.name}")
                for run, its_row in zip(runs, rows, strict=True)
                if "ppo" in dict(entries(its_row, "responses"))
            ]
        samples.append(
            {"id": visible(row.get("id", ""), 100), "prompt": prompt_text(row.get("prompt", "")), "responses": shown}
        )
    return samples


def _answer(row: dict[str, Any], model: str, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "look": model,
        "text": visible(row["responses"][model]),
        "gold": _total(entry_at(row, "gold", model)),
        "score": number_at(row, "scores", model),
    }


def _total(gold: Any) -> float | None:
    return number_at(gold, "total") if isinstance(gold, dict) else number_at(gold)


def make_rollouts(runs: list[RunFiles]) -> list[dict[str, Any]]:
    """Answers to the first few fixed prompts during PPO, each at a few steps; for several runs at the first and last."""
    prompts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run in runs:
        stage = run.stages.get("ppo")
        for row in stage.samples if stage is not None else []:
            if is_figure(row.get("step")):
                prompts.setdefault(str(row.get("id")), []).append((run.name, row))
    # Prompts with many answers come first: those of rollouts seldom have two.
    often = sorted(prompts.items(), key=lambda item: -len(item[1]))[:ROLLOUT_PROMPTS]
    return [
        {
            "id": visible(key, 100),
            "prompt": prompt_text(rows[0][1].get("prompt", "")),
            "answers": [
                _rollout(run if len(runs) > 1 else "", row)
                for run in dict.fromkeys(name for name, _ in rows)
                for row in pick([row for name, row in rows if name == run], ROLLOUT_STEPS if len(runs) == 1 else 2)
            ],
        }
        for key, rows in often
    ]


def pick(rows: list[Any], count: int) -> list[Any]:
    """At most `count` of the rows, evenly spread, first and last among them."""
    last = len(rows) - 1
    return [rows[i] for i in sorted({round(i * last / (count - 1)) for i in range(count)})]


def _rollout(run: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": run,
        "step": row["step"],
        "text": visible(row.get("response", "")),
        "tokens": shade_tokens(row.get("tokens"), row.get("kl_tokens")),
        "score": number_at(row, "score"),
        "kl": number_at(row, "kl"),
        "gold": _total(row.get("gold")),
    }


def shade_tokens(tokens: Any, kl_tokens: Any) -> list[tuple[str, str, str]]:
    """(text, class, nats) of each token: "u1"…"u5" if the policy likes it more than SFT does, "d1"…"d5" less.

    Empty if the row has no such lists.
    """
    if not isinstance(tokens, list) or not isinstance(kl_tokens, list) or len(tokens) != len(kl_tokens):
        return []
    shaded = [
        (visible(token, 60), level(kl), f"{kl:+.2f} nats" if is_figure(kl) else "")
        for token, kl in zip(tokens[:MAX_TOKENS], kl_tokens, strict=False)
    ]
    return shaded + ([(f" … {len(tokens) - MAX_TOKENS:,} more tokens", "", "")] if len(tokens) > MAX_TOKENS else [])


def level(kl: Any) -> str:
    if not is_figure(kl):
        return ""
    deep = sum(abs(kl) >= least for least in SHADES)
    return "" if deep == 0 else f"{'u' if kl > 0 else 'd'}{deep}"
