"""Fixtures that many tests share: the built-in model, a browser, a folder of tiny checkpoints.

What needs neither a setup nor an end is a plain function in tests/tiny.py.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import mini_sglang
from mini_sglang.grammar.compiler import GrammarCompiler, Vocabulary
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import ModelSource, resolve_model
from tests import tiny


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; a shell's background jobs begin with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def dot_by_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter add up every element of a product by itself, in one order, as a GPU's tensor cores do.

    It multiplies through BLAS, which on some processors adds up a row differently at another place of the matrix.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
        dtype = acc.data.dtype
        product = (a.data.astype(dtype)[:, :, None] * b.data.astype(dtype)[None, :, :]).sum(1)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def builtin_model() -> ModelSource:
    """The built-in model, downloaded once per machine."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def builtin_tokenizer(builtin_model: ModelSource) -> Tokenizer:
    return load_tokenizer(builtin_model)


@pytest.fixture(scope="session")
def llm() -> Iterator[mini_sglang.LLM]:
    """The built-in model in float32, where its greedy output is defined token for token. Leave nothing behind in it."""
    with mini_sglang.LLM("smollm2-135m", dtype="float32", num_pages=512, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB_SIZE` tokens, trained on a few sentences, with a ChatML template."""
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> tiny.Checkpoints:
    return tiny.Checkpoints(tmp_path_factory.mktemp("checkpoints"), tiny_tokenizer)


@pytest.fixture
def thread_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of tensor parallelism are threads."""
    tiny.use_thread_workers(monkeypatch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium, driven by Playwright. Its event loop runs until the module ends: asyncio cannot begin another."""
    playwright = pytest.importorskip("playwright.sync_api", reason="drives a browser with Playwright")
    with playwright.sync_playwright() as running:
        try:
            # the sandbox needs rights that containers and root do not have
            browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium that Playwright can run: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def compiler(builtin_tokenizer: Tokenizer) -> GrammarCompiler:
    """Of the built-in model's vocabulary."""
    vocabulary = Vocabulary.of(builtin_tokenizer, builtin_tokenizer.vocab_size, builtin_tokenizer.eos_token_ids)
    return GrammarCompiler(vocabulary, lambda text: builtin_tokenizer.encode(text, add_special_tokens=False))
