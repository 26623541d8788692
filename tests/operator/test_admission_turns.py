"""The order of the admission server's requests: by turns of their sources, and of one source the smallest."""

import asyncio

from gpushare_operator.admission.turns import COST_BYTES, ReviewTurns, TooManyError


async def test_of_those_that_wait_the_smallest_is_next_and_the_largest_is_given_up() -> None:
    turns, done = ReviewTurns(most=4), []

    async def one(size: int) -> None:
        try:
            await turns.turn("api", size)
            done.append(size)
        except TooManyError:
            done.append(-size)

    async with asyncio.TaskGroup() as tasks:
        for size in (60, 50, 40, 30, 70, 3, 70, 1):
            tasks.create_task(one(size))
    assert sorted(done, key=abs) == [1, 3, 30, 40, -50, -60, -70, -70]
    assert [size for size in done if size > 0] == [1, 3, 30, 40]
    await asyncio.wait_for(turns.turn("api", 10**6), 60)


async def test_who_gives_up_waiting_costs_nobody_a_turn() -> None:
    turns = ReviewTurns()
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(turns.turn("api", 1))
        last = tasks.create_task(turns.turn("api", 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(last, 60)


async def in_order(turns: ReviewTurns, *asked: tuple[str, int]) -> list[tuple[str, int]]:
    """Asks for all of these turns at once; who had one, in that order, and who was given up, with a minus."""
    done = []

    async def one(source: str, size: int) -> None:
        try:
            await turns.turn(source, size)
            done.append((source, size))
        except TooManyError:
            done.append((source, -size))

    async with asyncio.TaskGroup() as tasks:
        for each in asked:
            tasks.create_task(one(*each))
    return done


async def test_sources_have_turns_whatever_the_sizes_and_the_smallest_of_each_is_next() -> None:
    """Before: the smallest of all was next, so whoever kept tiny reviews waiting kept everybody else waiting."""
    asked = [*(("pod", 2) for _ in range(40)), ("api", 1500), ("api", 1200)]
    done = await in_order(ReviewTurns(), *asked)
    assert [number for number, (source, _) in enumerate(done) if source == "api"] == [1, 3]
    assert done[1] == ("api", 1200)


async def test_a_source_of_large_reviews_waits_for_as_many_small_ones_as_one_of_them_costs() -> None:
    """Ten pods with large reviews would have ten turns for each of the API server's, of milliseconds each."""
    small, large = 1000, 60_000
    floods = [(f"pod-{number}", large) for number in range(10) for _ in range(5)]
    done = await in_order(ReviewTurns(), *floods, *(("api", small) for _ in range(20)))
    at = [number for number, (source, _) in enumerate(done) if source == "api"]
    of_one = (large + COST_BYTES) // (small + COST_BYTES)
    assert at[of_one - 1] < 10 + of_one
    assert at[-1] < len(done) - 10, "and they have their turns, too"


async def test_a_source_that_leaves_and_comes_again_has_no_turn_more() -> None:
    turns, had = ReviewTurns(), list[str]()

    async def many(source: str, size: int, at_once: int) -> None:
        async def one() -> None:
            for _ in range(10):
                await turns.turn(source, size)
                had.append(source)

        async with asyncio.TaskGroup() as each:
            for _ in range(at_once):
                each.create_task(one())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(many("pod", 60_000, 1))
        tasks.create_task(many("api", 1000, 10))
    assert had[:100].count("api") > 80


async def test_when_too_many_wait_the_source_with_the_most_gives_one_up() -> None:
    flood = [("pod", 2)] * 6
    done = await in_order(ReviewTurns(most=6), *flood, ("api", 1500), ("api", 1200), ("api", 1100), ("pod", 3))
    assert sorted(done) == [
        ("api", 1100),
        ("api", 1200),
        ("api", 1500),
        *[("pod", -3)],
        *[("pod", -2)] * 3,
        *[("pod", 2)] * 3,
    ]
    own = await in_order(ReviewTurns(most=4), ("pod", 2), ("pod", 2), *[("api", size) for size in (9, 8, 7)])
    assert ("api", -9) in own, "of sources with as many each, the one that comes gives up its own"


async def test_ever_new_sources_do_not_pass_one_that_waits() -> None:
    turns, had = ReviewTurns(most=8), list[str]()

    async def keeps_on(name: str, *, is_new: bool) -> None:
        for number in range(100):
            await turns.turn(f"{name}-{number}" if is_new else name, 1)
            had.append(name)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(keeps_on("api", is_new=False))
        for name in ("pod-a", "pod-b"):
            tasks.create_task(keeps_on(name, is_new=True))
    assert had[:90].count("api") >= 28
