"""A program that encodes chats with mistral-common. It runs in a process of its own, where that can be imported.

Reads from stdin {"tekken": path, "version": "v11", "special_tokens": [texts], "chats": [{"messages", "tools"}]}; writes
a list with the token ids of each chat, or {"error": text} for one that Mistral refuses. The vocabulary is that of the
file; version and special tokens may be those of a newer model, whose file is not in the package.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest  # type: ignore[import-not-found]
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # type: ignore[import-not-found]

    asked = json.load(sys.stdin)
    document = json.loads(Path(asked["tekken"]).read_text(encoding="utf-8"))
    document["config"]["version"] = asked["version"]
    document["special_tokens"] = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(asked["special_tokens"])
    ]
    document.pop("image", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        tokenizer = MistralTokenizer.from_file(path)

    def encode(chat: dict[str, Any]) -> list[int] | dict[str, str]:
        try:
            request = ChatCompletionRequest.from_openai(messages=chat["messages"], tools=chat["tools"] or None)
            tokens: list[int] = tokenizer.encode_chat_completion(request).tokens
        except Exception as error:  # of the library, whatever it is, the caller is told
            return {"error": f"{type(error).__name__}: {error}"}
        return tokens

    json.dump([encode(chat) for chat in asked["chats"]], sys.stdout)


if __name__ == "__main__":
    main()
