"""The interactive shell: one conversation in the terminal, each answer streamed.

`Conversation` keeps the messages and asks the model; `run_shell` is the terminal around it. Every turn sends the whole
conversation, whose beginning the engine finds in its prefix cache. It knows `LLM`, and of the engine its settings and
counters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.table import Table

from mini_sglang.llm import LLM
from mini_sglang.outputs import RequestOutput, Usage
from mini_sglang.sampling_params import SamplingParams

HELP = """\
/reset         begin a new conversation
/system TEXT   set the system message and begin a new conversation; without TEXT: show it
/stats         tokens, speed and cache use
/help          this list
/exit          leave (so does Ctrl-D)

Enter sends; Alt-Enter, or a backslash before Enter, begins a new line.
Ctrl-C stops an answer."""


@dataclass(frozen=True)
class TurnStats:
    """How one answer went, or several together. Times are in seconds."""

    usage: Usage
    time_to_first_token: float
    decode_steps: int  # tokens after the first
    decode_time: float  # of these steps

    @classmethod
    def of_all(cls, turns: list[TurnStats]) -> TurnStats:
        """The sums of several answers; the time to the first token is their mean."""
        usage = Usage(
            prompt_tokens=sum(turn.usage.prompt_tokens for turn in turns),
            completion_tokens=sum(turn.usage.completion_tokens for turn in turns),
            cached_tokens=sum(turn.usage.cached_tokens for turn in turns),
        )
        mean = sum(turn.time_to_first_token for turn in turns) / len(turns)
        return cls(usage, mean, sum(turn.decode_steps for turn in turns), sum(turn.decode_time for turn in turns))


@dataclass
class Conversation:
    """The messages so far, and the model that answers them."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[TurnStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.turns = []

    def send(self, text: str) -> Generator[str, None, None]:
        """Add a user message and yield the answer in pieces; what was yielded becomes part of the conversation.

        Raises ValueError when the conversation no longer fits the model, and RuntimeError when the engine failed; both
        leave the conversation as it was.
        """
        self.messages.append({"role": "user", "content": text})
        start = time.perf_counter()
        arrivals: list[float] = []  # of the first token and of the latest
        deltas: list[str] = []
        output: RequestOutput | None = None
        stream = self.llm.stream_chat(self.messages, self.params)
        try:
            for output in stream:
                if output.num_new_tokens:
                    arrivals = [*arrivals[:1], time.perf_counter()]
                if output.text_delta:
                    deltas.append(output.text_delta)
                    yield output.text_delta
                if output.error is not None:
                    raise RuntimeError(output.error)
        finally:
            stream.close()
            if output is None or output.error is not None or not arrivals:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(deltas)})
                first, last = arrivals[0], arrivals[-1]
                steps = output.usage.completion_tokens - 1
                self.turns.append(TurnStats(output.usage, first - start, steps, last - first))


def run_shell(llm: LLM, params: SamplingParams, *, system: str | None = None, stdin: TextIO | None = None) -> int:
    """Read and answer messages until the input ends; returns the exit status.

    A `stdin` that is not a terminal is read line by line.
    """
    stdin = sys.stdin if stdin is None else stdin
    interactive = stdin.isatty() and sys.stdout.isatty()
    shell = Shell(Conversation(llm, params, system), Console(highlight=False))
    read = TerminalInput(llm.engine.config.model).read if interactive else partial(_read_lines, stdin)
    while True:
        try:
            text = read().strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # drops what was typed
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text.startswith("/"):
            shell.command(text)
        elif text:
            shell.answer(text)


class Shell:
    """Runs commands and shows answers."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self.conversation = conversation
        self.console = console

    def answer(self, text: str) -> None:
        """Stream the answer to the screen. Ctrl-C ends it there; the part shown stays in the conversation."""
        answer = self.conversation.send(text)
        try:
            for delta in answer:
                self._write(delta)
            self._write("\n")
        except KeyboardInterrupt:
            answer.close()
            self.console.print("\n[dim](stopped)[/]")
        except (ValueError, RuntimeError) as error:
            self.console.print("error: ", end="", style="red")
            self._write(f"{error}\n")

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        conversation = self.conversation
        if name == "/reset":
            conversation.reset()
            self.console.print("[dim]new conversation[/]")
        elif name == "/system":
            if argument.strip():
                conversation.system = argument.strip()
                conversation.reset()
                self.console.print("[dim]system message set, new conversation[/]")
            else:
                self._write(f"{conversation.system or 'no system message but what the model has by default'}\n")
        elif name == "/stats":
            self.console.print(self._stats())
        elif name == "/help":
            self._write(f"{HELP}\n")
        else:
            self._write(f"{name} is not a command; /help lists them\n")

    def _stats(self) -> Table:
        table = Table("", "last answer", "conversation", box=None, header_style="dim")
        turns = self.conversation.turns
        columns = [turns[-1], TurnStats.of_all(turns)] if turns else []
        for label, show in _STATS.items():
            table.add_row(label, *(show(turn) for turn in columns))
        stats = self.conversation.llm.engine.stats()
        cached = stats.num_cached_pages + stats.num_used_pages
        table.add_row("KV pages filled", f"{cached} of {stats.num_pages}", f"{cached / stats.num_pages:.1%}")
        return table

    def _write(self, text: str) -> None:
        """Write text as it is, without markup, and show it at once."""
        self.console.file.write(text)
        self.console.file.flush()


_STATS: Mapping[str, Callable[[TurnStats], str]] = {
    "prompt tokens": lambda turn: str(turn.usage.prompt_tokens),
    "  of them cached": lambda turn: str(turn.usage.cached_tokens),
    "generated tokens": lambda turn: str(turn.usage.completion_tokens),
    "time to first token": lambda turn: f"{turn.time_to_first_token * 1000:.0f} ms",
    "tokens per second": lambda turn: f"{turn.decode_steps / turn.decode_time:.1f}" if turn.decode_time else "-",
}


def _read_lines(stdin: TextIO) -> str:
    """A message from a pipe or a file: a line, continued by the next one after a backslash. Raises EOFError."""
    lines: list[str] = []
    for line in stdin:
        lines.append(line.rstrip("\n"))
        if not lines[-1].endswith("\\"):
            break
        lines[-1] = lines[-1][:-1]
    if not lines:
        raise EOFError
    return "\n".join(lines)


class TerminalInput:
    """Messages from a person: history, editing, multi-line text and paste."""

    def __init__(self, model: str) -> None:
        print(f"{model}. /help for help, Ctrl-D to leave.")
        bindings = KeyBindings()
        bindings.add("enter")(_send)
        bindings.add("escape", "enter")(_new_line)  # what a terminal sends for Alt-Enter
        self._session: PromptSession[str] = PromptSession(
            multiline=True, key_bindings=bindings, prompt_continuation=". "
        )

    def read(self) -> str:
        text: str = self._session.prompt("> ")
        return text


def _send(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if buffer.document.current_line_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")
