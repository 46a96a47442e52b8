"""Pages belong to one owner at a time: a state machine against a set of integers, and bugs that it must catch."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from stepfloor.cache.pages import SCRATCH_PAGE, PageAllocator


class PagesMachine(RuleBasedStateMachine):
    """The allocator beside the plainest model: the set of free pages and a list of what each owner holds."""

    make = PageAllocator

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = self.make(num_pages)
        self.free_pages = set(range(1, num_pages))
        self.owners: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        pages = self.allocator.allocate(count)
        if count > len(self.free_pages):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert self.free_pages.issuperset(pages), "a page went out while somebody holds it"
        self.free_pages.difference_update(pages)
        self.owners.append(pages)

    @rule(data=st.data())
    def free_part_of_an_owner(self, data: st.DataObject) -> None:
        if not self.owners:
            return
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1), label="owner"))
        kept = data.draw(st.integers(0, len(pages)), label="pages kept")
        self.allocator.free(pages[kept:])
        self.free_pages.update(pages[kept:])
        self.owners.append(pages[:kept])

    @rule(data=st.data())
    def free_something_wrong(self, data: st.DataObject) -> None:
        held = [page for pages in self.owners for page in pages]
        nobodys = [SCRATCH_PAGE, -1, self.allocator.num_pages, *sorted(self.free_pages)]
        wrong = data.draw(st.sampled_from(nobodys + held), label="wrong page")
        # A held page is wrong when named twice. Another has a held page before it, which must stay held.
        pages = (wrong, wrong) if wrong in held else (*held[:1], wrong)
        with pytest.raises(ValueError, match=str(wrong)):
            self.allocator.free(pages)

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.num_free == len(self.free_pages)

    def teardown(self) -> None:
        """Whatever happened, exactly the model's free pages can be had."""
        if hasattr(self, "allocator"):
            rest = self.allocator.allocate(len(self.free_pages))
            assert rest is not None
            assert set(rest) == self.free_pages
            assert self.allocator.allocate(1) is None


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class TakesWhatItCan(PageAllocator):
    """Bug: a refusal keeps the pages it found."""

    def allocate(self, count: int) -> tuple[int, ...] | None:
        pages = super().allocate(min(count, self.num_free))
        return pages if pages is not None and len(pages) == count else None


class FreesUntilTheMistake(PageAllocator):
    """Bug: pages before the wrong one are free although the call raised."""

    def free(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            super().free((page,))


class ForgetsWhoHolds(PageAllocator):
    """Bug: freeing twice puts a page on the list twice."""

    def free(self, pages: tuple[int, ...]) -> None:
        self._free.extend(page for page in pages if 0 < page < self.num_pages)


class GivesOutScratch(PageAllocator):
    """Bug: page 0 is a page like others."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._free[0] = SCRATCH_PAGE


@pytest.mark.parametrize("bug", [TakesWhatItCan, FreesUntilTheMistake, ForgetsWhoHolds, GivesOutScratch])
def test_the_machine_catches(bug: type[PageAllocator]) -> None:
    class Broken(PagesMachine):
        make = bug

    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                max_examples=200, stateful_step_count=30, deadline=None, database=None, report_multiple_bugs=False
            ),
        )


def test_a_fresh_allocator_counts_up_and_reuses_what_came_back_last() -> None:
    allocator = PageAllocator(6)
    assert allocator.allocate(3) == (1, 2, 3)
    allocator.free((1, 2))
    assert allocator.allocate(3) == (1, 2, 4)


def test_mistakes_are_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"at least 2, .*; got 1"):
        PageAllocator(1)
    allocator = PageAllocator(3)
    with pytest.raises(ValueError, match="got -1"):
        allocator.allocate(-1)
    with pytest.raises(ValueError, match="1 to 2; got 0"):
        allocator.free((0,))
    with pytest.raises(ValueError, match="page 1 is free already"):
        allocator.free((1,))
