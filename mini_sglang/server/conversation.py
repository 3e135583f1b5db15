"""Makes a job of a chat API's body: the body turns into messages, and the chat template renders them to token ids.

/v1/chat/completions, /v1/responses and /v1/messages all use it. Knows no API's own body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import Request

from mini_sglang.errors import FieldError
from mini_sglang.server.answers.model_format import AnswerRules
from mini_sglang.server.chat import ConversationBody, Message, TemplateBody
from mini_sglang.server.context import context_of
from mini_sglang.server.generation import INLINE_CHARACTERS, Job, check_text_length, make_job, to_sampling_params
from mini_sglang.server.request_body import client_errors, work_on_body


async def make_chat_job(request: Request, job_id: str, body: ConversationBody) -> tuple[Job, AnswerRules]:
    """Make the job that answers a conversation, and the rules for its answers. Raises ApiError 400."""
    context = context_of(request)
    with client_errors(body.field_names):
        params, messages, template = await work_on_body(
            request, lambda: (to_sampling_params(body.sampling_fields()), body.chat_messages(), body.template())
        )
        prompt_ids = await encode_messages(request, messages, template, body.system_field)
        rules = context.model_format.rules(template, messages, prompt_ids)
        params = rules.constrain(params)
        with _blaming_the_longest(messages, template, body.system_field):
            return make_job(context, job_id, [prompt_ids], params, body), rules


@contextlib.contextmanager
def _blaming_the_longest(messages: list[Message], template: TemplateBody, system_field: str) -> Iterator[None]:
    """Turn an error about the prompt into one about the field that most of its text comes from."""
    try:
        yield
    except FieldError as error:
        if error.field != "prompt":
            raise
        sizes = {"messages": 0, "tools": sum(len(str(tool.for_template())) for tool in template.offered_tools)}
        for index, message in enumerate(messages):
            field = system_field if index == 0 and message.role == "system" else "messages"
            sizes[field] = sizes.get(field, 0) + len(message.content or "")
        raise FieldError(max(sizes, key=sizes.__getitem__), error.problem, *error.others) from None


async def encode_messages(
    request: Request, messages: list[Message], template: TemplateBody, system_field: str = "messages"
) -> list[int]:
    """Render a conversation with tools and tokenise it. Raises FieldError if the chat template refuses it.

    `system_field`: where the first message comes from, if it is the system's.
    """
    context = context_of(request)

    def encode() -> list[int]:
        # earlier answers do not count, since templates may leave out their reasoning
        texts = [message.content or "" for message in messages if message.role != "assistant"]
        texts += [str(tool.for_template()) for tool in template.offered_tools]
        with _blaming_the_longest(messages, template, system_field):
            check_text_length(context, "prompt", texts, at_least=len(messages))
        return context.model_format.render(messages, template)

    try:
        return await work_on_body(request, encode, inline_bytes=INLINE_CHARACTERS)
    except RecursionError:
        raise FieldError("messages", "or tools are nested too deeply", "tools") from None
