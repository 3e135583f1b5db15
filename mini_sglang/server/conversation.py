"""Makes a job of a chat API's body: the body turns into messages, and the chat template renders them to token ids.

/v1/chat/completions, /v1/responses and /v1/messages all use it. Knows no API's own body.
"""

from __future__ import annotations

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
        prompt_ids = await encode_messages(request, messages, template)
        rules = context.model_format.rules(template, messages, prompt_ids)
        return make_job(context, job_id, [prompt_ids], rules.constrain(params), body), rules


async def encode_messages(request: Request, messages: list[Message], template: TemplateBody) -> list[int]:
    """Render a conversation with tools and tokenise it. Raises FieldError if the chat template refuses it."""
    context = context_of(request)

    def encode() -> list[int]:
        # earlier answers do not count, since templates may leave out their reasoning
        texts = [message.content or "" for message in messages if message.role != "assistant"]
        texts += [str(tool.for_template()) for tool in template.offered_tools]
        check_text_length(context, "messages", texts, at_least=len(messages))
        return context.model_format.render(messages, template)

    try:
        return await work_on_body(request, encode, inline_bytes=INLINE_CHARACTERS)
    except RecursionError:
        raise FieldError("messages", "or tools are nested too deeply", "tools") from None
