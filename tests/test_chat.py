"""The shell: a conversation that remembers, commands, and an input line for more than one line."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from mini_sglang import LLM, SamplingParams
from mini_sglang.chat import Conversation, Shell, TerminalInput, run_shell

FRANCE = "What is the capital of France?"
SHORT = SamplingParams(temperature=0, max_tokens=6)


def screen_of(shell: Shell) -> str:
    assert isinstance(shell.console.file, io.StringIO)
    return shell.console.file.getvalue()


@pytest.fixture
def shell(llm: LLM) -> Shell:
    return Shell(Conversation(llm, SHORT), Console(file=io.StringIO(), width=100))


def test_an_answer_arrives_in_pieces_and_is_remembered(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=10), system="Be brief.")
    pieces = list(conversation.send(FRANCE))
    assert len(pieces) > 3
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": "".join(pieces)},
    ]
    assert "Paris" in "".join(pieces)


def test_the_next_turn_finds_all_of_the_conversation_in_the_cache(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=10))
    for text in (FRANCE, "And of Spain?", "And of Italy?"):
        list(conversation.send(text))
    for earlier, later in zip(conversation.turns, conversation.turns[1:], strict=False):
        assert later.usage.cached_tokens >= earlier.usage.prompt_tokens + earlier.usage.completion_tokens - 1


def test_an_answer_that_is_left_keeps_its_beginning(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=500))
    answer = conversation.send("Tell me a long story.")
    beginning = next(answer) + next(answer)
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": beginning}
    assert not llm.engine.has_work


def test_a_conversation_too_long_for_the_model_is_refused_and_stays_as_it_was(shell: Shell) -> None:
    shell.answer("word " * 9000)
    assert "8192" in screen_of(shell)
    assert shell.conversation.messages == []
    shell.answer(FRANCE)
    assert [message["role"] for message in shell.conversation.messages] == ["user", "assistant"]


def test_ctrl_c_stops_the_answer_and_not_the_program(llm: LLM, interrupts: None) -> None:
    console = Console(file=io.StringIO())
    shell = Shell(Conversation(llm, SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)), console)
    timer = threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    shell.answer("Tell me a long story.")
    timer.join()
    assert "(stopped)" in screen_of(shell)
    assert not llm.engine.has_work
    assert [message["role"] for message in shell.conversation.messages] in ([], ["user", "assistant"])


def test_commands(shell: Shell) -> None:
    shell.answer(FRANCE)
    shell.command("/system  You are a pirate. ")
    assert shell.conversation.messages == [{"role": "system", "content": "You are a pirate."}]
    shell.answer("Hi")
    shell.command("/reset")
    assert shell.conversation.messages == [{"role": "system", "content": "You are a pirate."}]
    shell.command("/system")
    assert "You are a pirate.\n" in screen_of(shell)
    shell.command("/nonsense")
    assert "/nonsense is not a command" in screen_of(shell)
    shell.command("/help")
    assert "Ctrl-C stops an answer" in screen_of(shell)


def test_stats_show_tokens_speed_and_cache(shell: Shell) -> None:
    shell.command("/stats")  # before any answer: no division by zero
    shell.answer(FRANCE)
    shell.answer("And of Spain?")
    shell.command("/stats")
    last = shell.conversation.turns[-1].usage
    rows = dict(line.strip().split("  ", 1) for line in screen_of(shell).splitlines() if "  " in line.strip())
    assert rows["prompt tokens"].split()[0] == str(last.prompt_tokens)
    assert rows["generated tokens"].split() == ["6", "12"]
    assert rows["of them cached"].split()[0] == str(last.cached_tokens)
    assert "ms" in rows["time to first token"]
    assert "of 512" in rows["KV pages filled"]


def test_piped_input_is_answered_line_by_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "What is the capital\\\nof France?\n\n/nonsense\n/exit\nnever read\n"
    status = run_shell(llm, SamplingParams(temperature=0, max_tokens=8), stdin=io.StringIO(lines))
    assert status == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n/nonsense is not a command; /help lists them\n"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    """Keys typed at a terminal."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("hello\r", "hello"),
        ("one\\\rtwo\r", "one\ntwo"),  # backslash, Enter
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ("\x1b[200~def f():\n    return 1\n\x1b[201~\r", "def f():\n    return 1\n"),  # a bracketed paste
    ],
)
def test_a_message_may_have_several_lines(keys: PipeInput, typed: str, text: str) -> None:
    keys.send_text(typed)
    assert TerminalInput("model").read() == text


@pytest.mark.parametrize(("key", "error"), [("\x04", EOFError), ("\x03", KeyboardInterrupt)])
def test_ctrl_d_ends_the_input_and_ctrl_c_drops_the_line(keys: PipeInput, key: str, error: type[BaseException]) -> None:
    keys.send_text(key)
    with pytest.raises(error):
        TerminalInput("model").read()
