"""Watch tokens become text: first those that are no characters yet, then a stop string that is spread over tokens."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from mini_sglang.text.detokenizer import IncrementalDetokenizer, StopChecker
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import resolve_model

TEXT = "Zoë likes 🦜 and 日本"
ANSWER = "It is Paris.\n\nUser: and Spain?"
STOP = ["\n\nUser:", "</s>"]
PAUSE_S = 0.08


def main() -> None:
    console = Console()
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    console.print(f"[bold]{TEXT!r}[/] as the built-in model's tokens\n")
    _stream(console, tokenizer, TEXT, StopChecker([]))
    console.print(f"\n[bold]{ANSWER!r}[/] with the stop strings {STOP}\n")
    _stream(console, tokenizer, ANSWER, StopChecker(STOP))
    console.print("\n[dim]Decoding each token alone gives � wherever a character has more than one token.[/]")


def _stream(console: Console, tokenizer: Tokenizer, text: str, stop: StopChecker) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("id", "bytes", "decoded alone", "text", "may be shown", "the stream so far"):
        table.add_column(column)
    detokenizer, shown = IncrementalDetokenizer(tokenizer), ""
    for token_id in tokenizer.encode(text):
        piece = detokenizer.push(token_id)
        visible = stop.push(piece)
        shown += visible
        table.add_row(
            str(token_id),
            tokenizer.token_bytes(token_id).hex(" "),
            repr(tokenizer.decode([token_id])),
            repr(piece) if piece else "[dim]–[/]",
            repr(visible) if visible else "[yellow]held[/]" if stop.matched is None else "[red]cut[/]",
            repr(shown),
        )
        _rest(console)
        if stop.matched is not None:
            break
    console.print(table)
    if stop.matched is None:
        console.print(f"at the end: {detokenizer.flush() + stop.flush()!r}")
    else:
        console.print(f"stopped by {stop.matched!r}: the engine is told to end the request")


def _rest(console: Console) -> None:
    if console.is_terminal:  # else nobody watches
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
