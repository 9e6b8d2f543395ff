"""The report: complete, half-done, empty and damaged runs; untrusted text stays text; nothing is fetched."""

import hashlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli import main
from rlhf.report.page import compare_runs, write_report
from rlhf.report.pictures import Mark, Picture, Series, draw_svg, make_figure, make_frontier, make_stage_figures
from rlhf.report.sections import tables_of
from rlhf.runs.metric_table import Chart, find

ATTACK = "</div><script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>"
PARENTS = {
    "tokenizer": [], "pretrain": ["tokenizer"], "sft": ["pretrain"], "reward": ["sft"], "ppo": ["sft", "reward"],
    "evaluate": ["sft", "reward", "ppo"],
}  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_stage(run: Path, stage: str, **changes: Any) -> Path:
    folder = run / stage
    folder.mkdir(parents=True)
    record = {
        "stage": stage, "status": "complete", "seed": 7, "versions": {"python": "3.12.1", "torch": "2.13.0"},
        "parents": {parent: digest(parent) for parent in PARENTS[stage]},
        "data": {f"{stage}.jsonl": digest("data")},
        "hash": digest(stage), "seconds": 61.0, "peak_rss_mb": 1500.0, "settings": {f"{stage}.lr": 1.5e-4},
        "config": {}, "summary": {"loss": 0.5}, "run": run.name, "files": {},
    } | changes  # fmt: skip
    (folder / "stage.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(f"seed: 7\nnote: {ATTACK}\n")
    return folder


def make_run(run: Path) -> Path:
    for stage in PARENTS:
        make_stage(run, stage)
    steps = range(1, 101)
    losses = [6 * math.exp(-i / 30) + 0.1 * (i % 3) for i in steps]
    write_lines(run / "pretrain/metrics.jsonl", [
        *({"progress/step": i, "pretrain/loss": loss, "optim/lr": 1e-3} for i, loss in zip(steps, losses, strict=True)),
        {"progress/step": 100, "eval/heldout/loss": 0.9, "eval/heldout/bpb": 0.5},
    ])  # fmt: skip
    write_lines(run / "sft/metrics.jsonl", [{"progress/step": i, "sft/loss": 1 / i} for i in steps])
    write_lines(run / "reward/metrics.jsonl", [{"progress/step": i, "reward/accuracy": 0.6} for i in steps])
    write_lines(run / "ppo/metrics.jsonl", [
        {"progress/step": i, "objective/kl": 0.1 * i, "objective/scores": 0.02 * i, "gold/total": 0.7,
         "loss/policy_avg": None, "made/up": 3.0, "eval/dev/kl": 0.1 * i, "eval/dev/scores": 0.02 * i}
        for i in range(12)
    ])  # fmt: skip
    write_lines(run / "ppo/samples.jsonl", [
        {"step": i, "id": "p-1", "prompt": "Who?\nSay.", "response": f"{ATTACK} {i}", "score": 0.5, "kl": 1.0,
         "gold": {"total": 0.25}}
        for i in range(12)
    ])  # fmt: skip
    results = {
        "gold": {
            "win_rate_vs_sft": {"value": 0.7834, "ci95": [0.751, 0.8131], "n": 512},
            "win_rate_greedy": {"value": 0.834, "ci95": [0.801, 0.866], "n": 512},
            "mean_score": {"base": 0.4, "sft": 0.7521, "ppo": 0.8842},
            "parts": {"sft": {"polite": 0.63}, "ppo": {"polite": 0.9343}, "base": {"polite": 0.35}},
        },
        "reward_model": {
            "accuracy": {"value": 0.6754, "ci95": [0.661, 0.689], "n": 4210},
            "noise_ceiling": 0.7912, "length_baseline": 0.5153, "gold_order_accuracy": 0.8011,
            "labeler_agreement": 0.7353,
            "calibration": [{"gap": g, "predicted": 0.45 + g / 4, "observed": 0.6, "n": 50} for g in (0.2, 1)],
        },
        "kl_to_sft_nats": 3.021, "pretrain_bits_per_byte": 0.4683, "seed": 7,
        "seconds": {"ppo": 61.0, "demo-round-1/label": 20.0, "demo-round-1/ppo": 40.0}, "peak_rss_mb": {"ppo": 1500.0},
    }  # fmt: skip
    (run / "evaluate/results.json").write_text(json.dumps(results))
    write_lines(run / "evaluate/samples.jsonl", [
        {"id": f"e-{i}", "prompt": ATTACK, "scores": {"sft": 0.1, "ppo": 0.2},
         "responses": {"base": "b", "sft": ATTACK, "ppo": "p \u202e \x07"},
         "gold": {"base": 0.1, "sft": 0.5, "ppo": 0.99}}
        for i in range(6)
    ])  # fmt: skip
    return run


class Page(HTMLParser):
    """Counts tags, checks that they nest, and collects every attribute that could fetch something."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def check_page(text: str) -> Page:
    page = Page(text)
    assert "script" not in page.tags and "img" not in page.tags and page.handlers == []
    assert all(link == "data:," or link.startswith("#") for link in page.links), page.links
    assert not re.search(r"@import|url\((?!#)", text)  # a clip path is in the page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy.group(1).startswith("default-src 'none';")
    assert "script-src" not in policy.group(1) and "connect-src" not in policy.group(1)
    return page


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = make_run(tmp_path_factory.mktemp("runs") / "demo")
    path = write_report(run)
    return run, path.read_text(encoding="utf-8")


def test_a_complete_run_shows_its_numbers(complete: tuple[Path, str]) -> None:
    run, text = complete
    assert (run / "report.html").is_file() and not list(run.glob(".report*"))
    page = check_page(text)
    assert page.tags["svg"] >= 8
    for shown in ("78.3%", "75.1% to 81.3%", "83.4%", "67.5%", "79.1%", "51.5%", "0.801", "0.735", "3.02",
                  "0.468", "0.884", "7:06 min", "1.50 GB", "6 of 6 stages complete", "seed 7", "1.5e-4",
                  digest("data"), "PPO is preferred to SFT"):  # fmt: skip
        assert shown in text, shown
    assert "made/up" not in text and find("made/up") is None


def test_model_output_stays_text_on_a_small_page_that_fetches_nothing(complete: tuple[Path, str]) -> None:
    run, text = complete
    assert "<script" not in text and "<img" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert "p \\u202e \\x07" in text
    assert text.replace("http://evil.example", "").count("http") == 1  # the http-equiv of the policy
    assert len(text.encode()) < 1_000_000
    assert write_report(run).read_text(encoding="utf-8") == text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = tmp_path / "long"
    folder = make_stage(run, "ppo")
    names = ("objective/scores", "objective/kl", "objective/entropy", "policy/entropy_avg",
             "rollout/response_len", "val/explained_var", "gold/total", "gold/polite")  # fmt: skip
    waves = [{name: math.sin(i * (k + 1)) for k, name in enumerate(names)} for i in range(2000)]
    write_lines(folder / "metrics.jsonl", [{"progress/step": i} | wave for i, wave in enumerate(waves)])
    long = "word " * 100_000
    rows = [{"step": i, "id": f"p-{i % 50}", "prompt": long, "response": long} for i in range(60)]
    write_lines(folder / "samples.jsonl", rows)
    assert write_report(run).stat().st_size < 1_000_000


def test_a_half_done_run(tmp_path: Path) -> None:
    run = tmp_path / "half"
    make_stage(run, "tokenizer")
    parents = {"tokenizer": digest("tokenizer"), "half-round-1/ppo": digest("an earlier round")}
    make_stage(run, "pretrain", parents=parents)
    make_stage(run, "sft", status="running", parents={"pretrain": digest("an older pretrain")})
    make_stage(run, "reward", parents={"world": digest("of another run")})
    write_lines(run / "pretrain/metrics.jsonl", [{"progress/step": 40, "eval/heldout/bpb": 0.512}])
    (run / "sft/metrics.jsonl").write_text('{"progress/step": 1, "sft/loss": 2.5}\n{"progress/step": 2, "sft/lo')
    text = page_of(run)
    for shown in ("3 of 6 stages complete", "next is sft", "0.512", "eval/heldout/bpb at step 40", "of another run",
                  "changed since</span>", "Not evaluated yet", "No samples yet"):  # fmt: skip
        assert shown in text, shown


def page_of(run: Path) -> str:
    text = write_report(run).read_text(encoding="utf-8")
    check_page(text)
    return text


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    for stage in PARENTS:
        make_stage(tmp_path, stage, status="running")
        lines = b'\xff\xfe\n[1]\n{"progress/step": "x"}\n{"progress/step": 1}\n'
        (tmp_path / stage / "metrics.jsonl").write_bytes(lines)
        (tmp_path / stage / "samples.jsonl").write_text('{"responses": 3}\n{"step": null}\n"x"\n')
    (tmp_path / "evaluate/results.json").write_text(
        '{"kl_to_sft_nats": 1.0, "reward_model": {"accuracy": NaN, "calibration": [3, {"gap": 1}]}}'
    )
    (tmp_path / "evaluate/samples.jsonl").write_text(
        '{"responses": {"ppo": null}, "prompt": [{"role": "user", "content": "hi \\ud800"}], "gold": 3}\n'
    )
    text = page_of(tmp_path)
    assert "0 of 6 stages complete" in text and "user: hi \\ud800" in text


def test_every_figure_of_a_file_is_in_a_table() -> None:
    share = {"value": 0.75, "ci95": [0.5, 1.0], "n": 8}
    tree = {
        "n": 1200, "truth": "lexicon", "nothing": None, "verdict": {"decision": "go"},
        "parts": {"sft": {"polite": 0.5}, "ppo": {"polite": 0.25, "brief": 1}},
        "pairs": [{"pair": ["ppo", "sft"], "win_rate": share}],
        "by_gap": [{"gap": 1, **share}, {"gap": 2, "value": None}],
        "deep": {"er": {"a": {"rate": share}}},
        "wide": {name: {str(i): i for i in range(9)} for name in "ab"},
    }  # fmt: skip
    found = {table.caption: (list(table.columns), list(table.rows)) for table in tables_of("T", tree)}
    assert found == {
        "T": ([], [["n", "1,200"], ["truth", "lexicon"]]),
        "T: parts": (["", "polite", "brief"], [["SFT", "0.500", "–"], ["PPO", "0.250", "1"]]),
        "T: pairs": (["", "win rate"], [["ppo over sft", "0.750 (0.500 – 1.000)"]]),
        "T: by gap": ([], [["1", "0.750 (0.500 – 1.000)"], ["2", "–"]]),
        "T: deep: er: a": ([], [["rate", "0.750 (0.500 – 1.000)"]]),
        "T: wide": (["", "a", "b"], [[str(i)] * 3 for i in range(9)]),
    }


def test_a_stages_own_settings_count_before_its_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "beta")
    record = json.loads((run / "ppo/stage.json").read_text())
    record["config"] = {"kl": {"coef": 0.5}, "ppo": {"lr": 1e-4}, "run": "beta"}
    record["settings"] = {"ppo.lr": 2e-5}
    (run / "ppo/stage.json").write_text(json.dumps(record))
    rows = dict(re.findall(r"<tr><td>([^<]+)</td>(.*?)</tr>", page_of(run)))
    values = {key: re.findall(r"<td class=.n.>([^<]+)<", rows[key]) for key in ("ppo.lr", "kl.coef")}
    assert values == {"ppo.lr": ["1e-5", "2e-5"], "kl.coef": ["0.02", "0.5"]} and "run" not in rows


def test_runs_with_shared_parents_are_complete(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base")
    verdict = {"decision": "collect more labels", "labels": ["<any>", "kind"], "reasons": ["few pairs", "another"]}
    (base / "reward/audit.json").write_text(json.dumps({"verdict": verdict}))
    run = tmp_path / "first"
    lent = {stage: "base" if stage != "reward" else str(base) for stage in ("tokenizer", "pretrain", "sft", "reward")}
    make_stage(run, "ppo", config={"parents": lent})
    make_stage(run, "evaluate")
    (run / "evaluate/results.json").write_text(json.dumps({"kl_to_sft_nats": 3.75}))
    text = page_of(run)
    assert "6 of 6 stages complete" in text and "of another run" not in text and "3.75" in text
    assert "audit: collect more labels.</b> &lt;any&gt;; kind; few pairs <a" in text


def test_a_sweep_is_compared_by_its_evaluations_if_all_runs_have_one(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        write_lines(make_stage(run, "ppo") / "metrics.jsonl", [{"progress/step": 1, "eval/dev/kl": 1.25}])
    (runs[0] / "evaluate").mkdir()
    (runs[0] / "evaluate/results.json").write_text(json.dumps({"kl_to_sft_nats": 3.75}))
    assert [line.split() for line in compare_runs(runs)][1:] == [[name, "1.25", "1:01", "min"] for name in "ab"]
    assert "3.75" in compare_runs(runs[:1])[1]
    runs[0].joinpath("evaluate").rename(runs[0] / "old")
    make_stage(runs[0], "evaluate", parents={"ppo": digest("an earlier one")})
    (runs[0] / "old" / "results.json").rename(runs[0] / "evaluate" / "results.json")
    assert "3.75" not in compare_runs(runs[:1])[1]
    assert "the evaluation is of an earlier ppo" in page_of(runs[0])


def test_the_command_writes_and_refuses(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "a").mkdir()
    main(["report", f"runs_dir={tmp_path}", "run=a"])
    assert (tmp_path / "a/report.html").is_file()
    for run, words in (("c", "no such run"), ("..", "want letters, digits")):
        assert words in refused("report", f"runs_dir={tmp_path}", f"run={run}")


def test_a_long_curve_is_drawn_short_with_its_peaks() -> None:
    ys = [float(i % 2) for i in range(100_000)]
    ys[43_210], ys[87_650] = 9.0, -7.0
    svg = draw_svg(Picture("t", [Series("x", [float(i) for i in range(100_000)], ys)]))
    assert len(svg) < 60_000
    heights = [float(y) for d in re.findall(r' d="([^"]*)"', svg) for y in re.findall(r"[ML] ?[-\d.]+ ([-\d.]+)", d)]
    top, bottom = 20 + 170 * 0.07 / 1.14, 168 - 148 * 0.07 / 1.14  # the margins of the picture
    assert min(heights) < top and max(heights) > bottom - 2


def test_a_picture_is_wellformed_and_takes_the_pages_colours() -> None:
    xs = [float(x) for x in range(500)]
    noisy = Series("a <b>", xs, [x % 7 for x in xs])
    sparse = Series("dev", [0.0, 250.0, 499.0], [1.0, 2.0, 3.0], colour=1, dots=True)
    svg = draw_svg(Picture("t", [noisy, sparse], [Mark("ceiling & co", 5.0)]))
    root = ElementTree.fromstring(svg)
    assert not re.search(r"#[0-9a-f]{6}\b|url\(|<script|<style|http", svg)
    assert "var(--s0)" in svg and "var(--s1)" in svg and "var(--grid)" in svg
    assert len(root.findall(".//use")) == 3, "a dot per point of a sparse curve"


POINTS = {
    "objective/kl": ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]), "objective/scores": ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]),
    "gold/total": ([1.0, 3.0], [0.7, 0.8]), "gold/polite": ([1.0, 3.0], [0.6, 0.9]), "eval/dev/loss": ([1.0], [0.4]),
    "eval/heldout/loss": ([1.0], [0.5]), "eval/dev/gold/total": ([1.0], [0.5]), "optim/steps": ([1.0, 2.0], [3.0, 4.0]),
}  # fmt: skip


def test_names_expand_to_the_metrics_at_hand() -> None:
    assert Chart("", ("eval/*/loss",)).expand(POINTS) == [("eval/dev/loss", "dev"), ("eval/heldout/loss", "held-out")]
    assert Chart("", ("eval/*/gold/total",)).expand(POINTS) == [("eval/dev/gold/total", "dev")]
    assert Chart("", ("objective/kl=KL",)).expand(POINTS) == [("objective/kl", "KL")]
    assert Chart("", ("gold/*", "-gold/total")).expand(POINTS) == [("gold/polite", "polite")]
    assert make_figure(Chart("None", ("sft/loss",)), POINTS) is None


def test_each_curve_has_a_colour_of_its_own() -> None:
    figure = make_figure(Chart("Reward", ("objective/scores=score", "objective/kl=KL")), POINTS)
    assert figure is not None
    assert [(s.label, s.colour) for s in figure.series] == [("score", 0), ("KL", 1)]
    ElementTree.fromstring(draw_svg(figure))


def test_a_chart_has_the_unit_of_its_first_metric() -> None:
    points = {name: ([1.0, 2.0], [3.0, 4.0]) for name in ("distill/loss", "sft/loss", "eval/dev/loss")}
    pictures = (make_figure(Chart("Loss", (name, "eval/*/loss")), points) for name in ("distill/loss", "sft/loss"))
    assert [picture and picture.unit for picture in pictures] == ["", "nats per token"]


def test_scores_against_kl_join_by_step_and_no_metric_is_lost():
    pictures = {figure.title: figure for figure in make_frontier(POINTS)}
    assert set(pictures) == {"Reward against the root of KL", "Gold score against the root of KL"}
    (gold,) = pictures["Gold score against the root of KL"].series
    # Steps 1 and 3 have a gold score: KL 0.5 and 1.5, roots 0.7071 and 1.2247.
    assert gold.xs == pytest.approx([0.70711, 1.22474], abs=1e-4) and gold.ys == [0.7, 0.8]
    assert list(make_frontier({})) == []
    figures = list(make_stage_figures("ppo", POINTS, {}))
    rest = [figure.title for figure in figures if figure.rest]
    assert rest == ["optim/steps"]  # one point alone, as eval/dev/loss here, is no curve
