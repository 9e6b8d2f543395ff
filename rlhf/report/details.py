"""The report's last parts: answers side by side and during PPO, settings, versions, data, and what is not shown.

The texts of models are untrusted: the template escapes them.
"""

from dataclasses import asdict
from typing import Any

from rlhf.config import Config
from rlhf.config.setting import NOTHING, flatten, settings_in
from rlhf.recipe import GOLD_STAGES, PIPELINE
from rlhf.report.drawing import format_value, spread
from rlhf.report.evaluation_tables import MODELS, Table
from rlhf.runs.run_files import RunFiles, entries, entry_at, is_figure, number_at, prompt_text, visible

SHOWN_SAMPLES, MORE_SAMPLES = 4, 20
ROLLOUT_PROMPTS, ROLLOUT_STEPS = 6, 6
MAX_TOKENS = 400
# The nats of a token from which each of the five shades begins.
SHADES = (0.05, 0.2, 0.5, 1.0, 2.0)


def make_samples(runs: list[RunFiles]) -> tuple[list[dict[str, Any]], int]:
    """Responses of the models to the same prompts, side by side; of several runs each run's own policy.

    Also returns the number of odd rows, where the reward model scores a policy's answer higher than SFT's and the judge of true scores
    lower. Not all of them are listed. extra: a row that is shown only with the odd ones.
    """
    several = len(runs) > 1
    policies = [str(run.results.get("policy") or "ppo") for run in runs]
    by_id = [{str(row.get("id")): row for row in run.samples} for run in runs]
    samples: list[dict[str, Any]] = []
    odd_ones = 0
    answered = [row for row in runs[0].samples if isinstance(row.get("responses"), dict)]
    for number, row in enumerate(answered):
        own = [rows.get(str(row.get("id")), {}) for rows in by_id]
        odd = any(is_odd(one, policy) for one, policy in zip(own, policies, strict=True))
        extra = number >= SHOWN_SAMPLES + MORE_SAMPLES
        odd_ones += odd
        if extra and (not odd or odd_ones > MORE_SAMPLES):
            continue
        shown = [(row, model, model) for model in (("sft",) if several else MODELS)]
        if several:
            named = zip(own, policies, runs, strict=True)
            shown += [(one, policy, f"{policy} of {run.name}") for one, policy, run in named]
        samples.append(
            {
                "id": visible(row.get("id", ""), 100),
                "prompt": prompt_text(row.get("prompt", "")),
                "first": number < SHOWN_SAMPLES,
                "extra": extra,
                "odd": odd,
                "responses": [
                    {
                        "title": title,
                        "look": model,
                        "text": visible(responses[model]),
                        "gold": _total(entry_at(its_row, "gold", model)),
                        "score": number_at(its_row, "scores", model),
                    }
                    for its_row, model, title in shown
                    if model in (responses := dict(entries(its_row, "responses")))
                ],
            }
        )
    return samples, odd_ones


def is_odd(row: dict[str, Any], policy: str) -> bool:
    """Whether the reward model prefers the policy's answer to SFT's and the judge of true scores does not."""
    score, of_sft = (number_at(row, "scores", model) for model in (policy, "sft"))
    gold, gold_of_sft = (_total(entry_at(row, "gold", model)) for model in (policy, "sft"))
    if score is None or of_sft is None or gold is None or gold_of_sft is None:
        return False
    return score > of_sft and gold < gold_of_sft


def _total(gold: Any) -> float | None:
    return number_at(gold, "total") if isinstance(gold, dict) else number_at(gold)


def make_rollouts(runs: list[RunFiles]) -> list[dict[str, Any]]:
    """Answers to the first few fixed prompts during PPO, each at a few steps; for several runs at the first and last."""
    prompts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run in runs:
        for row in run.stages["ppo"].samples:
            if is_figure(row.get("step")):
                prompts.setdefault(str(row.get("id")), []).append((run.name, row))
    # Prompts with many answers come first: those of rollouts seldom have two.
    often = sorted(prompts.items(), key=lambda item: -len(item[1]))[:ROLLOUT_PROMPTS]
    return [
        {
            "prompt": prompt_text(rows[0][1].get("prompt", "")),
            "answers": [
                {
                    "run": run if len(runs) > 1 else "",
                    "step": row["step"],
                    "text": visible(row.get("response", "")),
                    "tokens": shade_tokens(row.get("tokens"), row.get("kl_tokens")),
                    "score": number_at(row, "score"),
                    "kl": number_at(row, "kl"),
                    "gold": _total(row.get("gold")),
                }
                for run in dict.fromkeys(name for name, _ in rows)
                for row in spread([row for name, row in rows if name == run], ROLLOUT_STEPS if len(runs) == 1 else 2)
            ],
        }
        for _, rows in often
    ]


def shade_tokens(tokens: Any, kl_tokens: Any) -> list[tuple[str, str, str]]:
    """(text, class, nats) of each token: "u1"…"u5" if the policy gives it more probability than SFT does, "d1"…"d5" if less.

    Empty if the row has no such lists.
    """
    if not isinstance(tokens, list) or not isinstance(kl_tokens, list) or len(tokens) != len(kl_tokens):
        return []
    shaded = [
        (visible(token, 60), shade(kl), f"{kl:+.2f} nats" if is_figure(kl) else "")
        for token, kl in zip(tokens[:MAX_TOKENS], kl_tokens, strict=False)
    ]
    return shaded + ([(f" … {len(tokens) - MAX_TOKENS:,} more tokens", "", "")] if len(tokens) > MAX_TOKENS else [])


def shade(kl: Any) -> str:
    deep = sum(abs(kl) >= least for least in SHADES) if is_figure(kl) else 0
    return f"{'u' if kl > 0 else 'd'}{deep}" if deep else ""


# --- settings, versions, data -------------------------------------------------------------------------------


def settings_of_run(run: RunFiles) -> dict[str, Any]:
    """Every setting of a run. If stages were run with different ones, those in a stage's own identity count."""
    settings: dict[str, Any] = {}
    for stage in run.stages.values():
        settings |= flatten(stage.record.get("config"))
    for stage in run.stages.values():
        identity = flatten(stage.record.get("settings"))
        settings |= {key: value for key, value in identity.items() if key.partition(".")[0] == stage.name}
    # Paths, display and the like affect no result.
    unimportant = {key for key, stated in settings_in(Config).items() if stated.changes == NOTHING}
    return {key: value for key, value in settings.items() if key not in unimportant}


def make_differences(runs: list[RunFiles]) -> Table:
    """The settings that differ among several runs; those of one run that differ from the schema."""
    titles, columns = [run.name for run in runs], [settings_of_run(run) for run in runs]
    keys = {key for column in columns for key in column}
    if len(runs) == 1:
        titles, columns = ["papers", "this run"], [flatten(asdict(Config())), *columns]
        keys &= columns[0].keys()  # a setting that is newer or older than the run is not compared
    rows = []
    for key in sorted(keys):
        values = [column.get(key, "–") for column in columns]
        if any(value != values[0] for value in values[1:]):
            rows.append([visible(key, 100), *map(show_value, values)])
    return Table("", ["setting", *titles], rows, code=True)


def show_value(value: Any, limit: int = 120) -> str:
    return format_value(value) if isinstance(value, float) and is_figure(value) else visible(value, limit)


def make_provenance(run: RunFiles) -> dict[str, Any]:
    """What is needed to reproduce the run: versions, data and final numbers, each a title and its table; configs."""

    def shown(record: dict[str, Any], key: str) -> list[tuple[str, str]]:
        return [(visible(name), show_value(value, 300)) for name, value in entries(record, key)]

    versions: dict[str, dict[str, list[str]]] = {}
    data: dict[tuple[str, str], list[str]] = {}
    configs: dict[str, list[str]] = {}
    numbers = []
    for name, stage in run.stages.items():
        found = shown(stage.record, "versions")
        if isinstance(commit := entry_at(stage.record, "git", "commit"), str):
            changed = " and changes that are not committed" if entry_at(stage.record, "git", "dirty") else ""
            found.append(("code (git)", visible(commit[:12]) + changed))
        for package, version in found:
            versions.setdefault(package, {}).setdefault(version, []).append(name)
        for entry in shown(stage.record, "data"):
            data.setdefault(entry, []).append(name)
        if stage.config:
            configs.setdefault(stage.config, []).append(name)
        numbers += [(name, *number) for number in shown(stage.record, "summary")]
    of_packages = [
        [package, "; ".join(f"{v} ({', '.join(names)})" if len(by_version) > 1 else v for v, names in by_version.items())]
        for package, by_version in sorted(versions.items())
    ]  # fmt: skip
    files = [[*entry, ", ".join(names)] for entry, names in sorted(data.items())]
    parts = [
        ("Versions", Table("", (), of_packages)),
        ("Data", Table("", ("file", "sha256", "used by"), files)),
        ("Final numbers", Table("", (), numbers, code=True)),
    ]
    return {
        "run": run.name,
        "parts": [(title, table) for title, table in parts if table.rows],
        "configs": [(", ".join(names), visible(text, 50_000)) for text, names in configs.items()],
    }


def make_skipped(run: RunFiles) -> list[str]:
    """The parts that this page does not show, and why."""
    notes = []
    missing = [name for name in GOLD_STAGES if name in PIPELINE and name not in run.stages]
    if missing:
        notes.append(f"{' and '.join(missing)}: not in this run, which reads its data from files.")
    for name, stage in run.stages.items():
        if stage.status != "complete":
            notes.append(f"{name}: {stage.status}" + (f", at step {stage.last_step:,.0f}." if stage.last_step else "."))
        for count, what in (
            (stage.unreadable, "lines of metrics.jsonl cannot be read and are missing from its curves"),
            (stage.misplaced, "lines of metrics.jsonl were added to it: its curves are not the stage's alone"),
            (stage.gaps, "values that were not finite are gaps in its curves"),
        ):
            notes += [f"{name}: {count:,} {what}."] * (count > 0)
    notes += [visible(text, 300) for text in run.damage]
    if not run.results:
        notes.append("No evaluation: win rates, calibration, histograms and rank agreement are missing.")
    elif entry_at(run.results, "gold") is None:
        notes.append("No true score: win rates and parts by it are missing; the reward model's are shown.")
    before = [name for name, row in entries(run.pipeline, "stages") if entry_at(row, "state") == "complete before"]
    if before:
        names = ", ".join(visible(name, 60) for name in before)
        notes.append(f"The last call of the pipeline skipped what was complete: {names}.")
    if len(run.samples) > SHOWN_SAMPLES + MORE_SAMPLES:
        notes.append(f"{SHOWN_SAMPLES + MORE_SAMPLES} of {len(run.samples):,} held-out prompts are shown.")
    return notes
