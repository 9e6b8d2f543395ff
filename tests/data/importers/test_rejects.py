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
        ("native", NATIVE, {"prompt": None}, "prompt: got None, want a valid list"),
        ("alpaca", ALPACA, {"output": ""}, NO_ANSWER),
        ("alpaca", ALPACA, {"output": None}, "response: got None, want a valid string"),
        ("alpaca", ALPACA, {"input": ["x"]}, "input: got ['x'], want a string"),
        ("alpaca", ALPACA, {"instruction": " "}, "prompt: got no text, want at least one turn that says something"),
        ("alpaca", ALPACA, {"history": ["x"]}, "got a shape that alpaca cannot read (ValueError"),
        ("sharegpt", SHAREGPT, {"conversations": []}, "conversations: got [], want a list of turns"),
        ("sharegpt", SHAREGPT, {"conversations": TOOL}, f"conversations.1.from: got 'tool', {ROLE}"),
        ("sharegpt", SHAREGPT, {"conversations": [says("gpt", "x")]}, "prompt: it has no turns"),
        ("sharegpt", COMPARED, {"rejected": "b"}, "rejected.0: got 'b', want a turn with {role, content}"),
        ("sharegpt", COMPARED, {"rejected": says("human", "b")}, "rejected: got ['user'], want one assistant turn"),
        ("messages", MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content: got"),
        ("messages", MESSAGES, WEIGHTS, "messages: every assistant turn has weight 0, want one to learn"),
        ("self_instruct", SEED, {"instances": []}, "got a row that gives no record, want keys instruction and instances"),
        ("self_instruct", SEED, {"instances": [{"input": "x"}]}, "output: missing"),
        ("question_answer", QUESTION, {"answer": " "}, NO_ANSWER),
        ("hh", HH, {"rejected": None}, "rejected: got None, want a string"),
        ("hh", HH, {"chosen": "Hello"}, "want two dialogues that begin with"),
        ("hh", HH, {"chosen": "\n\nHuman: Ho\n\nAssistant: x"}, "chosen: the two dialogues part before the last answer"),
        ("hh", SCORED, {"score": [1, None]}, "score: got None, want a number"),
        ("hh", SCORED, {"score": [True, 0]}, "score: got True, want a number"),
        ("hh", SCORED, {"text": [HH["chosen"]]}, "want two dialogues"),
        ("trl", TRL, {"rejected": None}, "rejected: got None, want a string"),
        ("trl", TRL, {"prompt": None, "chosen": "x", "rejected": "y"}, "chosen: chosen and rejected share no beginning"),
        ("pairs", PAIR, {"rejected_response": None}, "rejected_response: got None, want a string"),
        ("pairs", PAIR, {"prompt": None}, "prompt: missing: want prompt, question or instruction"),
        ("choices", CHOICES, {"rejected": [3]}, "rejected: got [3], want a list of strings"),
        ("kto", KTO, {"label": None}, "label: got None, want true or false: remove rows without a judgement"),
        ("kto", KTO, {"label": 1}, "label: got 1, want true or false"),
        ("kto", KTO, {"completion": [answer("a")] * 2}, "completion: got ['assistant', 'assistant'], want one assistant turn"),
        ("kto", {"messages": [USER, answer("a")], "label": True}, {"messages": [USER]}, "messages: got 'user', want a last turn"),
        ("openai_comparisons", COMPARISON, {"choice": None}, "choice: got None, want 0 or 1, the better of two summaries"),
        ("openai_comparisons", COMPARISON, {"choice": 2}, "choice: got 2, want 0 or 1"),
        ("openai_comparisons", COMPARISON, {"summaries": [{"text": "x"}, {}]}, "text: missing"),
        ("openai_comparisons", COMPARISON, {"info": {"title": "x"}}, "info: got {'title': 'x'}, want a post or an article"),
        ("openai_comparisons", AXES, {"summary": {"text": "x", "axes": {"overall": None}}}, "summary.axes.overall: got None"),
        ("openai_comparisons", AXES, {"summary": {"text": "x", "axes": {"overall": 9}}}, 'ratings gives "a" 9, want a number'),
        ("webgpt", WEBGPT, {"score_1": None}, "score_1: got None, want a number"),
        ("webgpt", WEBGPT, {"question": {"id": "x"}}, "full_text: missing"),
        ("ultrafeedback", ULTRAFEEDBACK, {"completions": [{"response": "x"}]}, "completions: some have no score"),
        ("nectar", NECTAR, {"answers": [{"answer": "x", "rank": 1}]}, "answers: got {'a': 1}, want two ranks or more"),
        ("nectar", NECTAR, {"answers": [{"answer": "x", "rank": "best"}]}, "answers.rank: got 'best', want a number"),
        ("qa_feedback", QA_FEEDBACK, {"preference": [1, 2, 1, 1, 1, 1]}, "the judgements go in a circle, 1 over 2 over 3 over 1"),
        ("qa_feedback", QA_FEEDBACK, {"preference": [1, 1]}, "preference: got [1, 1], want six of 0 (tie)"),
        ("oasst", OASST, {"prompt": OASST["prompt"] | {"role": "bot"}}, f"message.0.role: got 'bot', {ROLE}"),
        ("oasst", OASST, {"prompt": "Hi"}, "got a shape that oasst cannot read"),
        ("argilla", ARGILLA_1, {"responses": {}}, "responses: got none, want one that judges response-1, response-2"),
        ("argilla", ARGILLA_1, {"responses": {"comment": [{"value": "Hm."}]}}, "responses: got ['comment'], want one that"),
        ("argilla", ARGILLA_1, {"responses": [3]}, "got a shape that argilla cannot read"),
    ],
)  # fmt: skip
def test_a_bad_row_says_what_came_and_what_was_wanted(rejects, format, good, change, message):
    [(field, said)] = rejects(format, good, good | change)
    assert message in said and (not field or field in said)
