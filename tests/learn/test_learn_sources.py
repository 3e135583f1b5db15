"""Blanking and quoting: from source text to source text, nothing imported."""

from __future__ import annotations

import ast
import textwrap

import pytest

from mini_sglang.learn.blanking import blank, blanks_in
from mini_sglang.learn.quotes import expand, quote

SOURCE = textwrap.dedent('''
    """A module."""

    LIMIT = 3  # of something


    # What this class is for.
    class Box:
        """Holds things."""

        @property
        def size(self) -> int:
            # a comment that would tell
            return len(self.things)

        # what stands above stays
        async def put(
            self,
            thing: dict[str, int] = {"a": 1},  # with a colon: here
        ) -> None:
            """Put it in.

            Raises ValueError.
            """
            if thing:
                self.things.append(thing)


    def size(boxes: list[Box]) -> int:
        """How many."""
        return sum(box.size for box in boxes)
''').lstrip()


def test_bodies_go_and_all_else_stays() -> None:
    blanked = blank(SOURCE, ["Box.size", "Box.put"], "L2")
    removed = ["            # a comment that would tell", "            return len(self.things)"]
    removed += ["            if thing:", "                self.things.append(thing)"]
    left = [line.removeprefix("    ") for line in removed]
    kept = [line for line in SOURCE.splitlines() if line not in left]
    assert [line for line in blanked.splitlines() if "NotImplementedError" not in line] == kept
    assert '        raise NotImplementedError("L2: write Box.put")' in blanked.splitlines()
    ast.parse(blanked)


def test_what_is_still_blank_is_known() -> None:
    functions = ["Box.size", "Box.put", "size"]
    blanked = blank(SOURCE, functions, "L2")
    assert blanks_in(blanked, functions, "L2") == functions
    begun = blanked.replace('raise NotImplementedError("L2: write Box.put")', "self.things = [thing]")
    assert blanks_in(begun, functions, "L2") == ["Box.size", "size"]
    assert blanks_in(SOURCE, functions, "L2") == []


@pytest.mark.parametrize(
    ("name", "message"), [("Box.weigh", "no Box.weigh"), ("Box", "Box is not a function"), ("LIMIT", "not a function")]
)
def test_what_cannot_be_blanked_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blank(SOURCE, [name], "L2")


def test_a_quote_is_the_symbols_source() -> None:
    text = quote("mini_sglang.scheduling.page_allocator:PageAllocator.count")
    assert text.startswith('def count(self, page_id: int) -> int:\n    """')
    assert text.endswith("    return self._counts[page_id]\n")
    assert '"""' not in quote("mini_sglang.scheduling.page_allocator:PageAllocator.count#body")
    head = quote("mini_sglang.scheduling.page_allocator:PageAllocator.count#head")
    assert '"""' in head
    assert "return self" not in head


def test_decorators_constants_and_docstrings_of_modules_can_be_quoted() -> None:
    assert quote("mini_sglang.scheduling.page_allocator:PageAllocator.num_free").startswith("@property\ndef num_free")
    assert quote("mini_sglang.learn.lesson:LEVELS").startswith("LEVELS = 3")
    assert quote("mini_sglang.scheduling.kv_cache:__doc__").startswith("Moves pages between requests")


def test_a_page_keeps_all_but_its_quotes() -> None:
    reference = "mini_sglang.scheduling.page_allocator:PageAllocator.count#body"
    assert expand(f'Text.\n\n```python\n--8<-- "{reference}"\n```\nMore "text".\n') == (
        f'Text.\n\n```python\n{quote(reference)}```\nMore "text".\n'
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mini_sglang.scheduling.page_allocator:PageAllocator.lost", "no PageAllocator.lost"),
        ("mini_sglang.scheduling.nowhere:Thing", "no module mini_sglang.scheduling.nowhere"),
        ("os.path:join", "os.path is not a module of mini_sglang"),
        ("mini_sglang.scheduling.page_allocator:PageAllocator#tail", "got #tail"),
    ],
)
def test_a_quote_that_does_not_resolve_is_an_error_that_names_it(reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        expand(f'--8<-- "{reference}"\n')
    assert reference in str(raised.value)
