"""Counts the holders of every page of the KV pool, and keeps the list of those without any.

A page id is an int below `num_pages`. This module does not know what lies in a page, nor who holds it and why. Only
`KVCacheManager` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """A free list and reference counts over `num_pages` page ids. Every operation is linear in the pages it names."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is taken first
        self._counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page_id: int) -> int:
        """How many holders `page_id` has; 0 means free."""
        return self._counts[page_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} pages were asked for, {len(self._free)} of {self.num_pages} are free")
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, page_ids: Iterable[int]) -> None:
        """Add one holder to each page. Raises ValueError if one of them is free."""
        counts = self._counts
        for page in page_ids:
            holders = counts[page]
            if not holders:
                raise ValueError(f"page {page} is free and cannot gain a holder")
            counts[page] = holders + 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Remove one holder from each page; pages without any become free. Raises ValueError if a page is free."""
        counts, free = self._counts, self._free
        for page in page_ids:
            holders = counts[page]
            if holders > 1:
                counts[page] = holders - 1
            elif holders:
                counts[page] = 0
                free.append(page)
            else:
                raise ValueError(f"page {page} is free already")

    def check(self, holders: Iterable[int]) -> None:
        """Raise RuntimeError unless `holders`, one page id per holder, accounts for every count and the free list."""
        expected = [0] * self.num_pages
        for page in holders:
            expected[page] += 1
        for page, (count, found) in enumerate(zip(self._counts, expected, strict=True)):
            if count != found:
                raise RuntimeError(f"page {page} counts {count} holders, but {found} hold it")
        if sorted(self._free) != [page for page, count in enumerate(expected) if count == 0]:
            raise RuntimeError("the free list is not the set of pages without a holder")
