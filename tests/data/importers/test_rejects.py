"""Bad rows of every format beside a good one: the reject names the field, what came and what was wanted."""

import pytest

from tests.data.importers.samples import (
    ALPACA,
    ARGILLA_1,
    AXES,
    CHOICES,
    COMPARED,
    COMPARISON,
    HH,
    KTO,
    MESSAGES,
    NECTAR,
    OASST,
    PAIR,
    QA_FEEDBACK,
    QUESTION,
    SCORED,
    SEED,
    SHAREGPT,
    TRL,
    ULTRAFEEDBACK,
    USER,
    WEBGPT,
    answer,
    says,
)

TOOL = [says("human", "Hi"), says("tool", "x"), says("gpt", "y")]
NATIVE = {"kind": "prompt", "prompt": "Hi"}
NO_ANSWER = "response: got no text, want the demonstrated answer"
ROLE = "want system, user (human) or assistant (gpt): remove the row"
WEIGHTS = {"messages": [USER, answer("a") | {"loss_weight": 0}]}


@pytest.mark.parametrize(
    ("format", "good", "change", "message"),
    [
        ("native", NATIVE, {"kind": "rank"}, "kind: got 'rank', want demonstration, ranking, prompt"),
        ("alpaca", ALPACA, {"output": ""}, NO_ANSWER),
        ("sharegpt", SHAREGPT, {"conversations": TOOL}, f"conversations.1.from: got 'tool', {ROLE}"),
        ("sharegpt", COMPARED, {"rejected": says("human", "b")}, "rejected: got ['user'], want one assistant turn"),
        ("messages", MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content: got"),
        ("messages", MESSAGES, WEIGHTS, "messages: every assistant turn has weight 0, want one to learn"),
        ("self_instruct", SEED, {"instances": [{"input": "x"}]}, "output: missing"),
        ("question_answer", QUESTION, {"answer": " "}, NO_ANSWER),
        ("hh", HH, {"rejected": None}, "rejected: got None, want a string"),
        ("hh", HH, {"chosen": "\n\nHuman: Ho\n\nAssistant: x"}, "chosen: the two dialogues part before the last answer"),
        ("hh", SCORED, {"text": [HH["chosen"]]}, "want two dialogues"),
        ("trl", TRL, {"rejected": None}, "rejected: got None, want a string"),
        ("pairs", PAIR, {"rejected_response": None}, "rejected_response: got None, want a string"),
        ("choices", CHOICES, {"rejected": [3]}, "rejected: got [3], want a list of strings"),
        ("kto", KTO, {"label": None}, "label: got None, want true or false: remove rows without a judgement"),
        ("kto", {"messages": [USER, answer("a")], "label": True}, {"messages": [USER]}, "messages: got 'user', want a last turn"),
        ("openai_comparisons", COMPARISON, {"choice": None}, "choice: got None, want 0 or 1, the better of two summaries"),
        ("openai_comparisons", AXES, {"summary": {"text": "x", "axes": {"overall": None}}}, "summary.axes.overall: got None"),
        ("webgpt", WEBGPT, {"score_1": None}, "score_1: got None, want a number"),
        ("ultrafeedback", ULTRAFEEDBACK, {"completions": [{"response": "x"}]}, "completions: some have no score"),
        ("nectar", NECTAR, {"answers": [{"answer": "x", "rank": 1}]}, "answers: got {'a': 1}, want two ranks or more"),
        ("qa_feedback", QA_FEEDBACK, {"preference": [1, 2, 1, 1, 1, 1]}, "the judgements go in a circle, 1 over 2 over 3 over 1"),
        ("oasst", OASST, {"prompt": OASST["prompt"] | {"role": "bot"}}, f"message.0.role: got 'bot', {ROLE}"),
        ("argilla", ARGILLA_1, {"responses": {}}, "responses: got none, want one that judges response-1, response-2"),
        ("argilla", ARGILLA_1, {"responses": {"comment": [{"value": "Hm."}]}}, "responses: got ['comment'], want one that"),
    ],
)  # fmt: skip
def test_a_bad_row_says_what_came_and_what_was_wanted(rejects, format, good, change, message):
    [(field, said)] = rejects(format, good, good | change)
    assert message in said and (not field or field in said)
