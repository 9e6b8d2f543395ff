"""Labels: who gets what, what is on the disk, and that the importer and the reward model read it as it is."""

import json
import os
import threading

import httpx
import pytest
import torch

from rlhf.commands.import_data import run as import_data
from rlhf.config.compose import compose_config
from rlhf.data.chat_template import encode_prompt
from rlhf.data.reading import load_comparisons, load_demonstrations
from rlhf.data.records import Message, sum_checks
from rlhf.errors import UserError
from rlhf.serving.app import make_app
from rlhf.serving.labelling import LabelFile, Labelling, RankingRequest
from rlhf.serving.managing import Staff, overview_of
from rlhf.serving.models import ModelThread
from rlhf.serving.security import RefusedError
from rlhf.training.setup import load_policy
from tests.serving.conftest import SECRETS, access, make_labelling, tasks

ASKED = [{"role": "user", "content": "what is red ?"}]
pytestmark = pytest.mark.anyio


@pytest.fixture
def labelling(tmp_path):
    return make_labelling(tmp_path / "labels.jsonl")


@pytest.fixture
def clients(thread, labelling):
    """A client per labeler, of one server with two; and one of a stranger."""
    guard = make_app(thread, access(labelers=SECRETS, labelers_chat=True), labelling)

    def client(secret):
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1", headers=headers)

    return {name: client(secret) for name, secret in {**SECRETS, "nobody": None}.items()}


def verdict(task, submission, **more):
    names = [response["id"] for response in task["responses"]]
    return {"name": task["name"], "submission": submission, "ranking": [[names[0]], names[1:]], "seconds": 3.0} | more


def ranked(name, submission, ranking=(("a",), ("b", "c"))):
    return RankingRequest(name=name, submission=submission, ranking=[list(tie) for tie in ranking])


def imported(labelling, folder, *more):
    import_data(compose_config([f"path='{labelling.file.path}'", f"out='{folder}/imported'", *more], "import"))
    return json.loads((folder / "imported" / "report.json").read_text())["counts"]


async def test_two_labelers_label_every_task_once_and_see_nobodys_answer(clients, labelling, gold_run, tmp_path):
    orders = {}
    for name in SECRETS:
        for i in range(4):
            found = (await clients[name].get("/api/rank/next")).json()
            task = found["task"]
            assert found["progress"]["done"] == i and found["progress"]["left"] == 4 - i
            assert set(task) == {"name", "messages", "responses"} and "policy" not in json.dumps(task)
            again = (await clients[name].get("/api/rank/next")).json()["task"]
            assert again == task, "a reload shows the same task in the same order"
            orders[name, task["name"]] = [response["id"] for response in task["responses"]]
            more = {"ranking": [["a"], ["b", "c"]], "ratings": {"a": 6}, "flags": {"c": ["hallucination"]}}
            answer = await clients[name].post("/api/rank", json=verdict(task, f"{name}-sub-{i}", **more))
            assert answer.status_code == 200, answer.text
            assert (await clients[name].post("/api/rank", json=verdict(task, f"{name}-again{i}"))).status_code == 409
        assert (await clients[name].get("/api/rank/next")).json()["task"] is None
    about = (await clients["anna"].get("/api/rank/next")).json()["progress"]
    assert about == {"done": 4, "left": 0}, "no agreement, from which others' answers could be told"
    assert any(orders["anna", f"t{i}"] != orders["ben", f"t{i}"] for i in range(4)), "each has an order of their own"
    records, _ = load_comparisons(str(labelling.file.path))
    assert [(r.labeler, r.metadata["task"]) for r in records] == [(n, f"t{i}") for n in SECRETS for i in range(4)]
    first = records[0]
    assert first.ratings == {"a": 6} and first.flags == {"c": ["hallucination"]}
    assert first.ranking == [["a"], ["b", "c"]] and first.metadata["order"] == orders["anna", "t0"]
    assert first.seconds <= 3.0 and first.created and first.responses[0].policy == "gold/sft@12345678"
    again = gold_run.copy(tmp_path, "reward", "second")
    written = f"data.demonstrations='{gold_run.folder / 'world' / 'demonstrations.jsonl'}'"
    settings = ["gold.enabled=false", "reward.audit=0", "reward.calibration_samples=8"]
    again.stage("reward", f"data.comparisons='{labelling.file.path}'", written, *settings)
    assert json.loads((again.folder / "reward" / "stage.json").read_text())["status"] == "complete"


async def test_only_labelers_label(clients):
    nobody = clients["nobody"]
    assert (await nobody.get("/api/rank/next")).status_code == 403
    assert (await nobody.get("/api/me")).json()["labeler"] is None
    assert (await nobody.post("/api/session", json={"token": "x" * 32})).status_code == 401
    answer = await nobody.post("/api/session", json={"token": SECRETS["ben"]})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert (await nobody.get("/api/me")).json()["labeler"] == "ben"  # the client keeps the cookie
    assert (await nobody.post("/api/session", json={"token": SECRETS["anna"]})).status_code == 200
    for tab, who in (("anna", "anna"), ("ben", "ben"), ("", None)):  # two links are open: each tab says whose it is
        me = (await nobody.get("/api/me", headers={"x-tab": tab})).json()
        assert me["labeler"] == who and me["tab"] == tab
    assert (await nobody.get("/api/rank/next")).status_code == 403
    assert (await clients["ben"].get("/api/rank/next", headers={"x-tab": "anna"})).status_code == 403
    body = {"model": "gold/ppo", "prompt": "what ?", "responses": ["this ."]}
    assert (await clients["ben"].post("/v1/score", json=body)).status_code == 403
    assert (await clients["ben"].get("/v1/models")).status_code == 200  # with labelers_chat


async def test_going_back_replaces_and_a_task_can_be_beyond_judging(clients, labelling, tmp_path):
    anna = clients["anna"]
    assert (await anna.get("/api/rank/last")).status_code == 404
    task = (await anna.get("/api/rank/next")).json()["task"]
    assert (await anna.post("/api/rank", json=verdict(task, "first-one", ranking=None))).status_code == 200
    back = (await anna.get("/api/rank/last")).json()
    assert back["task"] == task and back["answer"]["ranking"] is None
    wrong = verdict(task, "second-one", replaces="another")
    assert (await anna.post("/api/rank", json=wrong)).status_code == 409
    for submission in ("second-one", "second-one"):  # sent twice, there once
        changed = verdict(task, submission, replaces=back["answer"]["replaces"])
        assert (await anna.post("/api/rank", json=changed)).status_code == 200
    assert len(labelling.file.path.read_text().splitlines()) == 2
    [record], _ = load_comparisons(str(labelling.file.path))
    assert record.metadata["replaces"] == back["answer"]["replaces"] and record.ranking is not None
    counts = {"input": 2, "accepted": 1, "duplicates": 0, "filtered": 1, "rejected": 0}
    assert imported(labelling, tmp_path) == counts
    assert [r.id for r in load_comparisons(str(tmp_path / "imported"))[0]] == [record.id]


async def test_wrong_answers_are_refused_and_nothing_is_written(clients, labelling):
    anna = clients["anna"]
    task = (await anna.get("/api/rank/next")).json()["task"]
    for more, status in (
        ({"ranking": [["a"], ["a"]]}, 400), ({"ranking": [["z"]]}, 400), ({"ranking": []}, 400), ({"ratings": {"a": 8}}, 400),
        ({"ratings": {"z": 5}}, 400), ({"flags": {"a": ["nonsense"]}}, 400),
        ({"flags": {"a": ["breaks_hate"]}}, 400), ({"submission": "short"}, 400),
        ({"seconds": -1}, 400), ({"name": "../../etc/passwd"}, 404), ({"replaces": "nothing"}, 409),
    ):  # fmt: skip
        answer = await anna.post("/api/rank", json=verdict(task, "a-submission") | more)
        assert answer.status_code == status and answer.json()["error"]["message"], (more, answer.text)
    assert labelling.file.path.read_bytes() == b""


async def test_models_are_compared_blind_in_a_drawn_order(clients, labelling):
    """Which model is "a" is told by the judgement alone; 16 draws give one order with probability 2^-15."""
    anna, ben = clients["anna"], clients["ben"]
    asked = {"messages": ASKED, "models": ["gold/sft", "gold/ppo"], "max_tokens": 2}
    firsts = set()
    for i in range(16):
        streamed = await anna.post("/api/compare", json=asked)
        *pieces, drawn = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
        assert "gold" not in streamed.text and len(drawn["responses"]) == 2
        for response in drawn["responses"]:
            text = "".join(piece["text"] for piece in pieces if piece["id"] == response["id"])
            assert text.strip() == response["text"]
        judged = verdict(drawn, f"compare-{i:04d}")
        assert (await ben.post("/api/compare/judge", json=judged)).status_code == 404, "another's comparison"
        answer = (await anna.post("/api/compare/judge", json=judged)).json()
        assert {policy.split("@")[0] for policy in answer["policies"].values()} == {"gold/sft", "gold/ppo"}
        assert (await anna.post("/api/compare/judge", json=judged)).json() == answer, "sent twice, saved once"
        firsts.add(answer["policies"]["a"].split("@")[0])
    assert firsts == {"gold/sft", "gold/ppo"} and len(labelling.file.records) == 16


async def test_answers_of_one_model_are_drawn_apart(clients):
    asked = {"messages": ASKED, "models": ["gold/sft"] * 4, "max_tokens": 16, "temperature": 1.5}
    lines = (await clients["anna"].post("/api/compare", json=asked)).text.splitlines()
    responses = [json.loads(line[6:]) for line in lines if line][-1]["responses"]
    assert len({response["text"] for response in responses}) > 1


async def test_tokens_are_shaded(clients, thread, gold_run):
    """Token by token as in float64: the log-prob of each, and the KL of the distributions from which it was drawn."""
    tokenizer = thread.models["gold/ppo"].tokenizer
    ids = tokenizer("red is a color")["input_ids"]
    body = {"model": "gold/ppo", "reference": "gold/sft", "messages": ASKED, "token_ids": ids}
    found = (await clients["anna"].post("/api/shading", json=body)).json()
    assert len(found["tokens"]) == len(found["logprobs"]) == len(found["kl"]) == len(ids)
    prompt = encode_prompt(tokenizer, [Message(**message) for message in ASKED])
    logps = []
    for stage in ("ppo", "sft"):
        model = load_policy(gold_run.folder / stage / "model").double()
        with torch.no_grad():
            logps.append(model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1))
    places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)  # the distribution before each token
    for i, (at, token) in enumerate(zip(places, ids, strict=True)):
        kl = sum(float(p.exp() * (p - q)) for p, q in zip(logps[0][at], logps[1][at], strict=True))
        assert found["logprobs"][i] == pytest.approx(float(logps[0][at, token]), abs=1e-4)
        assert found["kl"][i] == pytest.approx(kl, abs=1e-5)
    same = (await clients["anna"].post("/api/shading", json=body | {"reference": "gold/ppo"})).json()
    assert same["logprobs"] == found["logprobs"] and max(same["kl"]) == 0


async def test_nobody_demonstrates_a_prompt_twice_and_each_goes_to_enough_labelers(clients, labelling, tmp_path):
    async def write(name, submission):
        task = (await clients[name].get("/api/demonstrate/next")).json()["task"]
        said = {"messages": task["messages"], "task": task["name"], "response": f"{name} .", "submission": submission}
        return said, await clients[name].post("/api/demonstrate", json=said)

    said, first = await write("anna", "first-tab")
    assert (await clients["anna"].post("/api/demonstrate", json=said)).json() == first.json(), "sent twice, saved once"
    again = await clients["anna"].post("/api/demonstrate", json=said | {"submission": "second-tab"})
    assert again.status_code == 409 and "you have written" in again.json()["error"]["message"]
    wrongs = ({"messages": ASKED}, 400, "messages"), ({"edited": "z"}, 400, "edited"), ({"task": "none"}, 404, "task")
    for wrong, status, name in (*wrongs, ({"task": None, "edited": "a"}, 400, "edited")):
        found = await clients["ben"].post("/api/demonstrate", json=said | wrong | {"submission": "of-ben-00"})
        assert found.status_code == status and found.json()["error"]["param"] == name
    await write("ben", "of-ben-01")
    task = labelling.tasks[said["task"]]
    assert labelling.next_prompt("cleo").id != task.id, "two labelers have written to it"
    labelling.rank("anna", ranked(task.id, "a-ranking"))
    labelling.file.close()
    again = make_labelling(labelling.file.path)
    assert again.next_prompt("ben").id == again.next_prompt("cleo").id != task.id, "a restart forgets nothing"
    counts = {"input": 3, "accepted": 3, "duplicates": 0, "filtered": 0, "rejected": 0}
    assert imported(labelling, tmp_path) == counts
    path = str(labelling.file.path)
    assert len(load_comparisons(path)[0]) == 1 and len(load_demonstrations(path)[0]) == 2


def test_what_was_acknowledged_is_there_and_what_was_torn_is_not(tmp_path):
    path = tmp_path / "labels.jsonl"
    labelling = make_labelling(path, count=3)
    for name in ("anna", "ben"):
        labelling.rank(name, ranked(labelling.next_task(name).id, f"{name}-submission"))
    labelling.file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "ranking", "id"')
    again = make_labelling(path, count=3)
    assert path.read_bytes() == whole
    assert again.progress("anna")["done"] == 1 and again.next_task("anna").id == "t1"
    with pytest.raises(UserError, match="another server writes it"):
        LabelFile(path)
    again.file.close()
    path.write_bytes(whole.rstrip(b"\n"))  # by an editor that ends no line
    make_labelling(path, count=3).file.close()
    assert path.read_bytes() == whole
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a regular file"):
        LabelFile(tmp_path / "pipe")


def test_labels_of_an_earlier_draw_are_not_those_of_a_task(tmp_path):
    """The same prompt and policy sampled again with another seed: the task has the same name and other responses."""
    path = tmp_path / "labels.jsonl"
    labelling = make_labelling(path, count=1)
    labelling.rank("anna", ranked("t0", "anna-submission"))
    assert labelling.next_task("anna") is None
    labelling.file.close()
    (task,) = tasks(1)
    redrawn = [response.model_copy(update={"text": f"{response.text} again ."}) for response in task.responses]
    changed = Labelling(LabelFile(path), [task.model_copy(update={"responses": redrawn})], labelling.settings, 0)
    assert changed.next_task("anna").id == "t0" and changed.progress("anna")["done"] == 0


async def test_a_task_whose_turns_have_further_keys_gets_its_demonstration(clients, labelling):
    task = (await clients["anna"].get("/api/demonstrate/next")).json()["task"]
    known = labelling.tasks[task["name"]]
    known.prompt[0] = Message.model_validate({**known.prompt[0].model_dump(), "toxic": 0.1})
    known.metadata["group"] = "g"
    said = {"messages": task["messages"], "task": task["name"], "response": "a .", "submission": "submission-1"}
    assert (await clients["anna"].post("/api/demonstrate", json=said)).status_code == 200
    [record] = load_demonstrations(str(labelling.file.path))[0]
    assert record.metadata["group"] == "g", "the task's split and group"


def test_a_file_of_others_is_refused_and_loses_nothing(tmp_path):
    """Only the beginning of one of its own records is taken for what a killed server left."""
    for i, content in enumerate(
        (b"my notes", b"a\nb", b'[{"kind": "rank"', b'{"kind": "prompt", "id": "a"}', b"\x00\xff")
    ):
        path = tmp_path / f"notes-{i}"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"\d:1: not a record: correct the line, or choose another serve\.labels"):
            LabelFile(path)
        assert path.read_bytes() == content


def test_a_task_shown_before_a_restart_may_be_answered_after_it_unless_others_have(tmp_path):
    labelling = make_labelling(tmp_path / "labels.jsonl", per_prompt=1)
    task = labelling.next_task("anna")
    assert labelling.next_task("ben").id != task.id
    labelling.file.close()
    again = make_labelling(tmp_path / "labels.jsonl", per_prompt=1)
    again.rank("anna", ranked(task.id, "submission-1"))
    with pytest.raises(RefusedError, match="enough labelers"):
        again.rank("ben", ranked(task.id, "submission-2"))


async def test_a_full_disk_leaves_the_file_as_it_was(clients, labelling, monkeypatch):
    async def submit(submission):
        task = (await clients["anna"].get("/api/rank/next")).json()["task"]
        return await clients["anna"].post("/api/rank", json=verdict(task, submission))

    def full(file, data):
        write(file, bytes(data)[:20])
        raise OSError(28, "No space left on device")

    await submit("submission-1")
    before, write = labelling.file.path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        answer = await submit("submission-2")
    assert answer.status_code == 507 and "No space left" in answer.json()["error"]["message"]
    assert labelling.file.path.read_bytes() == before
    assert (await submit("submission-2")).status_code == 200
    assert len(labelling.file.path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("change", ["moved", "removed", "replaced"])
async def test_a_label_is_not_acknowledged_if_its_file_has_gone(clients, labelling, change):
    task = (await clients["anna"].get("/api/rank/next")).json()["task"]
    path = labelling.file.path
    if change == "removed":
        path.unlink()
    else:
        path.rename(path.with_name("elsewhere"))
    if change == "replaced":
        path.write_text("")
    answer = await clients["anna"].post("/api/rank", json=verdict(task, "submission-1"))
    assert answer.status_code == 507 and "was moved or removed while serving" in answer.json()["error"]["message"]
    assert (await clients["anna"].get("/api/rank/next")).json()["progress"]["done"] == 0
    if change == "moved":
        path.with_name("elsewhere").rename(path)
        assert (await clients["anna"].post("/api/rank", json=verdict(task, "submission-1"))).status_code == 200


def test_checks_measure_a_labeler_and_train_nothing(tmp_path):
    """Two gold items first, of which one pair in six is wrong; then after every two tasks a gold item, or a task ranked before."""
    gold = {}
    for i, one in enumerate(tasks(4)[1:]):
        prompt = [Message(role="user", content=f"gold {i} ?")]
        given = {"id": f"g{i}", "prompt": prompt, "ranking": [["a"], ["b"], ["c"]]}
        gold[f"g{i}"] = one.model_copy(update=given)
    labelling = make_labelling(tmp_path / "labels.jsonl", 6, 1, gold, check_every=2, qualification=2, qualified=0.8)
    assert labelling.next_task("ben").id == "g0" and labelling.qualified("ben")
    for name in ("g0", "g1"):
        labelling.rank("ben", ranked(name, f"ben-{name}-sub", (("c",), ("b",), ("a",))))
    assert not labelling.qualified("ben") and sum_checks(labelling.said_by("ben").values()) == {
        "gold": {"right": 0, "pairs": 6}
    }
    seen, special = [], {"g0": (("a",), ("c",), ("b",)), "t0.2": (("a", "b"), ("c",))}
    while task := labelling.next_task("anna"):
        seen.append(task.id)
        ranking = special.get(task.id, (("a",), ("b",), ("c",)))
        labelling.rank("anna", ranked(task.id, f"submission-{len(seen)}", ranking))
        if len(seen) == 6:  # a check is undone like any other
            last = labelling.last("anna")
            changed = ranked(task.id, "submission-6b", (("a",), ("b",), ("c",)))
            changed.replaces = last.id
            labelling.rank("anna", changed)
    assert seen == ["g0", "g1", "t0", "t1", "g2", "t2", "t3", "t0.2", "t4", "t5"]
    assert labelling.qualified("anna") and labelling.progress("anna") == {"done": 10, "left": 0}
    figures = {"gold": {"right": 8, "pairs": 9}, "again": {"right": 2.5, "pairs": 3}}
    assert sum_checks(labelling.said_by("anna").values()) == figures
    with pytest.raises(RefusedError, match="you have labelled this task"):
        labelling.rank("anna", ranked("g0", "submission-x"))
    with pytest.raises(RefusedError, match="enough labelers"):
        labelling.rank("cleo", ranked("t0.2", "submission-x"))
    labelling.file.close()
    again = make_labelling(labelling.file.path, 6, 1, gold, check_every=2, qualification=2, qualified=0.8)
    assert sum_checks(again.said_by("anna").values()) == figures, "a restart forgets nothing"
    assert not again.qualified("ben")
    path = str(labelling.file.path)
    assert {r.metadata["task"] for r in load_comparisons(path)[0]} == {f"t{i}" for i in range(6)}
    counts = {"input": 13, "accepted": 0, "duplicates": 0, "filtered": 13, "rejected": 0}
    assert imported(labelling, tmp_path, "min_gold_accuracy=0.9") == counts
    assert imported(labelling, tmp_path, "min_gold_accuracy=0.8", "overwrite=true")["accepted"] == 6
    report = json.loads((tmp_path / "imported" / "report.json").read_text())
    assert report["checks"] == {"anna": figures, "ben": {"gold": {"right": 0, "pairs": 6}}}
    assert report["cleaning"]["gold_accuracy"] == 0


def test_ties_that_come_again_measure_nothing_and_the_managers_page_shows_it(tmp_path):
    labelling = make_labelling(tmp_path / "labels.jsonl", 2, 1, check_every=1)
    staff = Staff(tmp_path, ["anna"], "http://127.0.0.1/", tmp_path / "instructions.txt")
    for name in ("t0", "t0.2"):
        labelling.rank("anna", ranked(name, f"submission-{name[-1]}", [["a", "b", "c"]]))
    assert overview_of(labelling, staff)["people"][0]["again"] is None


async def test_an_assigned_task_is_offered_to_those_labelers_only(tmp_path):
    """Before other tasks, whatever labels_per_prompt; also after a restart; to all again once no labeler is left to it."""
    names, thread = ["anna", "ben", "cleo"], ModelThread({}, 1, 1, 64)

    def start():
        labelling = make_labelling(tmp_path / "labels.jsonl", count=4, per_prompt=1)
        staff = Staff(tmp_path, names, "http://127.0.0.1/", tmp_path / "instructions.txt")
        guard = make_app(thread, access(labelers=staff.secrets, manager=staff.manager), labelling, staff)
        headers = {"authorization": f"Bearer {staff.manager}"}
        boss = httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1", headers=headers)
        return labelling, boss

    def offered(name):
        return getattr(labelling.next_task(name), "id", None)

    labelling, boss = start()
    assert offered("ben") == "t0"
    for wrong in ({"tasks": ["t9"], "labelers": ["ben"]}, {"tasks": ["t3"], "labelers": ["zoe"]}):
        assert (await boss.post("/api/manage/assign", json=wrong)).status_code == 404
    for tasks_, to in ((["t0", "t1"], ["cleo"]), (["t3"], ["anna", "cleo"])):
        assert (await boss.post("/api/manage/assign", json={"tasks": tasks_, "labelers": to})).status_code == 200
    with pytest.raises(RefusedError, match="or it is assigned to others: load the next one"):
        labelling.rank("ben", ranked("t0", "submission-b"))  # on ben's screen when it was assigned
    assert offered("ben") == "t2" and labelling.progress("ben") == {"done": 0, "left": 1}
    labelling.rank("anna", ranked(offered("anna"), "submission-a"))  # t3
    assert [labelling.next_prompt(name).id for name in names] == ["t2", "t2", "t0"]
    found = (await boss.get("/api/manage")).json()
    assert [task["assigned"] for task in found["tasks"]] == [["cleo"], ["cleo"], [], ["anna", "cleo"]]
    assert (found["done"], found["wanted"]) == (1, 5)  # of cleo's two, one of t2, two of t3
    labelling.file.close()
    labelling, boss = start()
    assert (await boss.post("/api/manage/assign", json={"tasks": ["t1"], "labelers": []})).status_code == 200
    for expected in ("t0", "t3"):  # t3 needs both, although labels_per_prompt is 1
        assert offered("cleo") == expected
        labelling.rank("cleo", ranked(expected, f"submission-{expected}"))
    assert (offered("anna"), offered("ben")) == ("t1", "t2")
    both = {"tasks": ["t1", "t2"], "labelers": ["cleo"]}
    assert (await boss.post("/api/manage/assign", json=both)).status_code == 200
    assert offered("anna") is None
    await boss.post("/api/manage/labeler", json={"name": "cleo", "do": "revoke"})
    assert offered("anna") == "t1"
    thread.stop()


def test_labelers_at_once_get_different_tasks_and_every_task_enough_of_them(tmp_path):
    labelling = make_labelling(tmp_path / "labels.jsonl", count=20, per_prompt=2)

    def work(name):
        while task := labelling.next_task(name):
            labelling.rank(name, ranked(task.id, f"{name}-{task.id}-sub"))

    threads = [threading.Thread(target=work, args=(f"l{i}",)) for i in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(len(said) == 2 for said in labelling.ranked.values())
    pairs = [(r.labeler, r.metadata["task"]) for r in labelling.file.records.values()]
    assert len(pairs) == len(set(pairs)) == 40
