"""The benchmarks' JSON files as the Markdown tables of docs/benchmarks.md.

python scripts/bench/table.py pretraining.json generation.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def table(subject: dict[str, Any]) -> str:
    """One subject: a row for each contestant of each case."""
    lines = [
        f"{subject['machine']}; medians of {subject['repeats']} rounds, the range in brackets.",
        "",
        f"| case | contestant | {subject['unit']}/s | by processor time | ours is faster by | by processor time | peak MB "
        "(beyond imports) | ours needs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, figures in subject["cases"].items():
        for number, (name, contestant) in enumerate(figures["contestants"].items()):
            low, high = contestant["units_per_second_range"]
            row = [
                case if not number else "",
                name,
                f"{contestant['units_per_second']:,.0f} [{low:,.0f}, {high:,.0f}]",
                f"{contestant['units_per_processor_second']:,.0f}",
            ]
            ratio = figures["ratios"].get(name)
            if ratio:
                s, p = ratio["speed"], ratio["speed_by_processor_time"]
                row += [
                    f"{roofline['median']:.2f} [{roofline['range'][0]:.2f}, {roofline['range'][1]:.2f}]"
                    for roofline in (s, p)
                ]
            else:
                row += ["", ""]
            row.append(f"{contestant['peak_mb']:.0f} ({contestant['working_mb']:.0f})")
            row.append(f"{ratio['memory']:.2f} ({ratio['memory_beyond_imports']:.2f})" if ratio else "")
            lines.append("| " + " | ".join(row) + " |")
        if "roofline" in figures:
            roofline = figures["roofline"]
            share = figures["contestants"]["ours"]["units_per_second"] / roofline["tokens_per_second"]
            lines.append(
                f"| | roofline ({roofline['flops_per_second'] / 1e9:.0f} GFLOP/s, {roofline['flops_per_token'] / 1e6:.2f} MFLOP a "
                f"token) | {roofline['tokens_per_second']:,.0f} | | ours reaches {share:.2f} | | | |"
            )
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python scripts/bench/table.py FILE.json …")
    for name in sys.argv[1:]:
        print(table(json.loads(Path(name).read_text())), end="\n\n")


if __name__ == "__main__":
    main()
