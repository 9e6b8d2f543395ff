"""The benchmarks' JSON files as the Markdown tables of docs/benchmarks.md.

python scripts/bench/table.py pretraining.json generation.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def table(found: dict[str, Any]) -> str:
    """One subject: a row for each contestant of each case."""
    lines = [
        f"{found['machine']}; medians of {found['repeats']} rounds, the range in brackets.",
        "",
        f"| case | contestant | {found['unit']}/s | by processor time | ours is faster by | by processor time | peak MB "
        "(beyond imports) | ours needs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, figures in found["cases"].items():
        for number, (name, f) in enumerate(figures["contestants"].items()):
            low, high = f["units_per_second_range"]
            row = [
                case if not number else "",
                name,
                f"{f['units_per_second']:,.0f} [{low:,.0f}, {high:,.0f}]",
                f"{f['units_per_processor_second']:,.0f}",
            ]
            ratio = figures["ratios"].get(name)
            if ratio:
                s, p = ratio["speed"], ratio["speed_by_processor_time"]
                row += [f"{r['median']:.2f} [{r['range'][0]:.2f}, {r['range'][1]:.2f}]" for r in (s, p)]
            else:
                row += ["", ""]
            row.append(f"{f['peak_mb']:.0f} ({f['working_mb']:.0f})")
            row.append(f"{ratio['memory']:.2f} ({ratio['memory_beyond_imports']:.2f})" if ratio else "")
            lines.append("| " + " | ".join(row) + " |")
        if "roofline" in figures:
            r = figures["roofline"]
            share = figures["contestants"]["ours"]["units_per_second"] / r["tokens_per_second"]
            lines.append(
                f"| | roofline ({r['flops_per_second'] / 1e9:.0f} GFLOP/s, {r['flops_per_token'] / 1e6:.2f} MFLOP a "
                f"token) | {r['tokens_per_second']:,.0f} | | ours reaches {share:.2f} | | | |"
            )
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/bench/table.py FILE.json …")
    for name in sys.argv[1:]:
        print(table(json.loads(Path(name).read_text())), end="\n\n")


if __name__ == "__main__":
    main()
