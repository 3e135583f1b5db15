"""From the body of a chat API to a job: the conversation becomes messages, and the messages a prompt's tokens.

/v1/chat/completions, /v1/responses and /v1/messages all come through here. Knows no body of any of them.
"""

from __future__ import annotations

from fastapi import Request

from mini_sglang.errors import FieldError
from mini_sglang.server.answers.model_format import AnswerRules
from mini_sglang.server.bodies import ConversationBody, Message, TemplateBody
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.generation import (
    INLINE_CHARACTERS,
    Job,
    check_text_length,
    make_job,
    off_loop,
    to_sampling_params,
)
from mini_sglang.server.request_body import client_errors, work_on_body

_MESSAGE_CHARACTERS = 64  # rendering a message takes as long as tokenising this many characters


async def make_chat_job(request: Request, job_id: str, body: ConversationBody) -> tuple[Job, AnswerRules]:
    """The job that answers a conversation, and the rules for its answers. Raises ApiError 400."""
    context = context_of(request)
    with client_errors(body.field_names):
        params, messages, template = await work_on_body(
            request, lambda: (to_sampling_params(body.sampling_fields()), body.chat_messages(), body.template())
        )
        prompt_ids = await encode_messages(context, messages, template)
        rules = context.model_format.rules(template, messages, prompt_ids)
        return make_job(context, job_id, [prompt_ids], rules.constrain(params), body), rules


async def encode_messages(context: ServerContext, messages: list[Message], template: TemplateBody) -> list[int]:
    """Token ids of a conversation with tools, as the chat template writes it. Raises FieldError if it refuses."""

    def encode() -> list[int]:
        # earlier answers do not count, since templates may leave out their reasoning
        texts = [message.content or "" for message in messages if message.role != "assistant"]
        texts += [str(tool.for_template()) for tool in template.offered_tools]
        check_text_length(context, "messages", texts, at_least=len(messages))
        return context.model_format.render(messages, template)

    size = len(messages) * _MESSAGE_CHARACTERS
    try:
        if size <= INLINE_CHARACTERS:
            size += sum(message.num_characters for message in messages)
            size += sum(tool.num_characters for tool in template.offered_tools)
        return await off_loop(size, encode)
    except RecursionError:
        raise FieldError("messages", "or tools are nested too deeply", "tools") from None
