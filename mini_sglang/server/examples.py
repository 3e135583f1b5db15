"""Example bodies of the routes, for the API's description: by the body's class, by what the example shows."""

from __future__ import annotations

from mini_sglang.sampling_params import Json

_QUESTION = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 64}

EXAMPLES: dict[str, dict[str, Json]] = {
    "ChatBody": {
        "A question": _QUESTION,
        "Streamed, with usage": {**_QUESTION, "stream": True, "stream_options": {"include_usage": True}},
        "With log-probabilities": {**_QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 5},
        "A system message, two answers": {
            "messages": [
                {"role": "system", "content": "Answer in one short sentence."},
                {"role": "user", "content": "Why is the sky blue?"},
            ],
            "temperature": 0.8,
            "seed": 7,
            "n": 2,
            "max_tokens": 64,
        },
    },
    "CompletionBody": {
        "One prompt": {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 20},
        "Several prompts": {"prompt": ["1, 2, 3,", "Monday, Tuesday,"], "temperature": 0, "stop": "\n"},
    },
    "ResponsesBody": {
        "A question": {"input": "Name three colours.", "max_output_tokens": 64},
        "With instructions, streamed": {
            "instructions": "Answer in one short sentence.",
            "input": "Why is the sky blue?",
            "stream": True,
        },
    },
    "MessagesBody": {
        "A question": _QUESTION,
        "With a system message, streamed": {"system": "Answer briefly.", **_QUESTION, "stream": True},
    },
    "CountTokensBody": {"A question": {"messages": _QUESTION["messages"]}},
    "GenerateBody": {
        "A prompt": {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 20},
        "Streamed": {"prompt": "Once upon a time", "max_tokens": 40, "stream": True},
    },
    "SglangBody": {
        "SGLang's form": {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 20}},
    },
    "TokenizeBody": {"A text": {"prompt": "Hello there"}, "A conversation": {"messages": _QUESTION["messages"]}},
    "DetokenizeBody": {"Token ids": {"tokens": [19556, 665]}},
    "AbortBody": {"A request": {"request_id": "gen-1"}},
    "ProfileBody": {"A few steps": {"num_steps": 20}, "Until /stop_profile": {}},
}
