"""Watch the radix tree grow, split, lock and evict, as five chats pass through a KV pool of 15 pages of 4 tokens."""

from __future__ import annotations

import time

from rich.console import Console
from rich.tree import Tree

from mini_sglang.request import Request
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.kv_cache import KVCacheManager
from mini_sglang.scheduling.radix_cache import Node

PAGE_SIZE, NUM_PAGES, PAUSE_S = 4, 15, 0.9
SYSTEM = "You are a terse helpful bot ."
CHATS = {
    "A": f"{SYSTEM} User : name a river in France",
    "B": f"{SYSTEM} User : name a river in Egypt please",
    "C": f"{SYSTEM} User : tell me a joke about trees",
    "D": f"{SYSTEM} User : name a river in France again",
    "E": "Once upon a time there was a tree that knew every beginning and forgot every end , as trees do "
    "in the long winters of the far north where nobody asks them anything",
}


class Words:
    """A vocabulary that grows as words are met: one token per word."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        words = list(self._ids)
        return " ".join(words[token_id] for token_id in ids)


def main() -> None:
    console, words = Console(), Words()
    kv = KVCacheManager(NUM_PAGES, PAGE_SIZE)
    running: dict[str, Request] = {}

    def admit(name: str) -> None:
        prompt = words.encode(CHATS[name])
        request = Request(name, prompt, SamplingParams(), slot=len(running))
        free = kv.num_free_pages
        found = kv.match(request)
        if not kv.admit(request, found, len(prompt)):
            console.print(f"[bold red]{name} has to wait[/]: too few pages are free or evictable")
            return
        evicted = max(len(request.page_ids) - len(found.page_ids) - free, 0)
        request.num_computed_tokens = len(prompt)
        kv.commit(request, step=len(running), tail=True)
        running[name] = request
        console.print(
            f"[bold green]{name} comes[/] with {len(prompt)} tokens: {found.num_tokens} found, "
            f"{len(prompt) - found.num_tokens} to compute, {evicted} pages evicted for it"
        )

    def leave(name: str) -> None:
        kv.release(running.pop(name))
        console.print(f"[bold yellow]{name} leaves[/]; what it computed stays, unlocked")

    for act, name in ((admit, "A"), (admit, "B"), (leave, "A"), (admit, "C"), (leave, "B"), (admit, "D"), (admit, "E")):
        act(name)
        kv.check()
        console.print(_drawn(kv, words))
        _rest(console)
    console.print("E took the pages of the leaf that was used least recently. What C and D hold, nobody can take.")


def _drawn(kv: KVCacheManager, words: Words) -> Tree:
    used = kv.num_pages - kv.num_free_pages - kv.num_cached_pages
    top = Tree(f"[dim]{used} pages held, {kv.num_cached_pages} cached and evictable, {kv.num_free_pages} free[/]")
    for node in kv._tree.nodes():  # a demo may look behind the manager's counters
        if node.parent is None:
            _hang(node, top, words)
    return top


def _hang(node: Node, branch: Tree, words: Words) -> None:
    for key in node.sorted_keys:
        child = node.children[key]
        colour = "green" if child.locks else "white"
        locks = f"{child.locks} lock{'s' * (child.locks != 1)}"
        text = words.decode(child.tokens.tolist())
        _hang(child, branch.add(f"[{colour}]{text}[/] [dim]pages {child.page_ids}, {locks}[/]"), words)


def _rest(console: Console) -> None:
    if console.is_terminal:  # else nobody watches
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
