"""Run the tests marked gpu with their tensors on a device; writes each test's outcome and seconds as a table and as JSON.

python scripts/gpu/tests.py --device cuda --out tests.json
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]


class Outcomes:
    """Remembers each test's outcome and seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ["RLHF_TEST_DEVICE"] = options.device
    import harness
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here: use --device cpu")
    outcomes = Outcomes()
    files = str(ROOT / "tests" / "model" / "test_on_device.py")
    code = pytest.main(["-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), files], plugins=[outcomes])
    for name, row in outcomes.tests.items():
        print(f"{row['outcome']:8} {row['seconds']:8.2f} s  {name}")
    results = {
        "subject": "tests",
        "device": options.device,
        "commit": harness.commit(),
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"CPU {platform.machine()}",
        "versions": harness.versions(),
        "tests": outcomes.tests,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(code))


if __name__ == "__main__":
    main()
