"""Rankings written as text, and the report of their agreement."""

from rlhf.data.agreement import AgreementCounter
from rlhf.data.records import Message, RankedResponse, Ranking


def agreement_report(rankings):
    counter = AgreementCounter()
    for ranking in rankings:
        counter.add(ranking)
    return counter.report()


FIGURES = ("pairwise", "cohen_kappa", "fleiss_kappa", "krippendorff_alpha", "kendall_tau")


def judged(prompt: str, order: str, labeler: str | None, ids: str = "abcd", **fields) -> Ranking:
    """A ranking written as "x>y=z" over response texts; `ids` are the names that this record gives them."""
    ties = [tie.split("=") for tie in order.split(">")]
    name = dict(zip(sorted(text for tie in ties for text in tie), ids, strict=False))
    return Ranking(
        id="r",
        prompt=[Message(role="user", content=prompt)],
        labeler=labeler,
        responses=[RankedResponse(id=i, text=text) for text, i in name.items()],
        ranking=[[name[text] for text in tie] for tie in ties],
        **fields,
    )
