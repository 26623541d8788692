"""The judge remembers its verdicts on the kinds of newcomers that it was asked about last."""

from gpushare.core.api import JobClass
from gpushare.core.placement.judge import MOST_NEWCOMERS, Judge, Newcomer
from gpushare.data import default_model


class CountingJudge(Judge):
    """Notes which newcomers it judges, instead of taking from what it remembers."""

    def __init__(self) -> None:
        super().__init__(default_model)
        self.judged: list[Newcomer] = []

    def _judge(self, newcomer, begin):
        self.judged.append(newcomer)
        return super()._judge(newcomer, begin)


def newcomer(number: int) -> Newcomer:
    return Newcomer(None, 1 + number % 99, JobClass.THROUGHPUT, 1.5 + number)


def test_a_newcomer_that_is_asked_about_again_and_again_is_not_judged_anew():
    judge = CountingJudge()
    frequent = newcomer(0)
    judge.verdicts(frequent)
    for number in range(1, MOST_NEWCOMERS + 1):
        judge.verdicts(newcomer(number))
        judge.verdicts(frequent)
    assert judge.judged.count(frequent) == 1
    assert len(judge.judged) == 1 + MOST_NEWCOMERS
    judge.verdicts(newcomer(1))
    assert judge.judged[-1] == newcomer(1), "of 257 the one that was asked about longest ago is forgotten"
