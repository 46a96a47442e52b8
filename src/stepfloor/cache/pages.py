"""Which pages of the key/value cache are free. No torch."""

from collections.abc import Iterable


class PageAllocator:
    """Pages 1 .. num_pages - 1, handed out all or nothing; page 0 is the scratch page of padding rows.

    Raises ValueError for a page that is freed twice or was never handed out.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a cache needs the scratch page and at least one more; got {num_pages} pages")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, or none at all (None) if fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            if page not in self._taken:
                raise ValueError(f"page {page} is not in use; pages are 1 to {self.num_pages - 1}")
            self._taken.remove(page)
            self._free.append(page)
