"""The commands: module, help and the settings that each reads. Imports neither torch nor hydra."""

from rlhf.recipe import GOLD_STAGES, STAGES

# Each command's module, one line of help, and the groups of settings that its help shows; the stages have rows of their own.
_STAGES = {row.name: (row.module, row.help, row.groups) for row in STAGES.values()}
_COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "pipeline": ("rlhf.commands.pipeline", "all stages, from raw text to an aligned model and its report",
                 ("tracking", "checkpoints", "parents", "launcher", "sharding")),
    **{name: row for name, row in _STAGES.items() if name not in GOLD_STAGES},
    "report": ("rlhf.commands.report", "write the report of a run, or of several side by side, as one HTML page", ("report",)),
    "watch": ("rlhf.commands.watch", "follow a run from another terminal", ("watch",)),
    "dashboard": ("rlhf.commands.dashboard", "create or update the W&B dashboard, or write its specification offline",
                  ("tracking",)),
    "chat": ("rlhf.commands.chat", "talk to a model of a run in the terminal", ("chat",)),
    "next": ("rlhf.commands.next_tokens", "show the most likely next tokens of a text", ("next",)),
    "serve": ("rlhf.commands.serve", "serve models: an OpenAI-style API, and a page to chat, compare, rank and demonstrate",
              ("serve",)),
    "export": ("rlhf.commands.export", "write a model that plain transformers loads", ("export",)),
    "import": ("rlhf.commands.import_data", "turn labelling data of any known format into records in Arrow",
               ("columns", "words")),
    "sample": ("rlhf.commands.sample", "draw K responses per prompt and write the tasks of a labelling round",
               ("sample", "data")),
    "generate": ("rlhf.commands.generate", "have a model answer a file of prompts, for judges and labelers", ("generate",)),
    "plan": ("rlhf.commands.plan", "memory per GPU and stage, hours, and compute-optimal sizes of a planned run",
             ("model", "tokenizer")),
    **{name: row for name, row in _STAGES.items() if name in GOLD_STAGES},
}  # fmt: skip
COMMANDS = {name: (module, text) for name, (module, text, _) in _COMMANDS.items()}
HELP_GROUPS = {name: groups for name, (_, _, groups) in _COMMANDS.items()}
# Settings that every stage reads, and those that a command reads outside the groups of its help.
_EVERY_STAGE = ("tracking", "checkpoints", "parents", "gold.enabled", "gold.truth", "data.allow_partial")
_ALSO_READ = {
    "chat": ("rollout.max_new_tokens", "parents"),
    "export": ("parents",),
    "next": ("parents",),
    "generate": (
        "rollout.max_new_tokens",
        "rollout.batch_size",
        "parents",
        "gold.enabled",
        "data.prompts",
        "data.demonstrations",
        "data.comparisons",
        "data.format",
        "data.allow_partial",
    ),
    "sample": ("rollout.max_new_tokens", "rollout.batch_size", "parents", "gold.enabled"),
}
# Commands that read the settings of several, or have a schema of their own.
OF_SEVERAL = ("pipeline", "plan", "import")
# Marks overrides meant for several commands: those that this one does not use are ignored.
SHARED_FLAG = "--shared-settings"
CONFIG_GROUPS = ("model", "experiment", "tracking")
WITHOUT_GROUPS = ("import",)  # commands whose schema has no groups of YAML files


def uses(command: str, key: str) -> bool:
    """Whether a command reads a setting: for a stage, its row in rlhf/recipe.py lists them."""
    if "." not in key:
        return True
    if command in STAGES:
        row = STAGES[command]
        read = (*row.settings, *row.reads, *_EVERY_STAGE, *(("sharding",) if row.several_processes else ()))
    else:
        read = (*HELP_GROUPS[command], *_ALSO_READ.get(command, ()))
    return key in read or key.partition(".")[0] in read
