"""Which pages of the key/value cache are free: integers only, no tensor.

Rows that pad a captured batch must write somewhere that nobody reads, so page 0 is theirs and is never handed out.
A step that cannot get all the pages of its longest outcome must not run at all, so allocation is all or nothing.
"""

from collections.abc import Iterable

SCRATCH_PAGE = 0


class PageAllocator:
    """Hands out page numbers 1 to num_pages - 1, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        """Start with every page free but the scratch page. Raises ValueError if there is no page beside it."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2, one of them the scratch page; got {num_pages}")
        self.num_pages = num_pages
        # Taken from the end. The page freed last goes out first, as its lines may still be in the GPU's L2; a fresh
        # allocator counts up from 1, which keeps traces readable.
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._is_free = [page != SCRATCH_PAGE for page in range(num_pages)]

    @property
    def num_free(self) -> int:
        """Pages that allocate can still give."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take count pages; None, and nothing taken, if fewer are free. Raises ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"count must not be negative; got {count}")
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, all or none.

        Raises ValueError for a page that is not handed out (out of range, the scratch page, free already, or named
        twice): two sequences would come to share it.
        """
        returned = tuple(pages)
        seen: set[int] = set()
        for page in returned:
            if not SCRATCH_PAGE < page < self.num_pages:
                raise ValueError(f"pages are numbered 1 to {self.num_pages - 1}; got {page}")
            if self._is_free[page] or page in seen:
                raise ValueError(f"page {page} is free already; freeing {returned} would hand it out twice")
            seen.add(page)
        for page in returned:
            self._is_free[page] = True
        # reversed, so that the same pages come back in the same order
        self._free.extend(reversed(returned))
