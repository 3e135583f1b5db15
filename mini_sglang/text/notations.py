"""The notations of tool calls and thoughts that families of models use: a new family is an entry here, and its cases.

Facts come from the models' chat templates, and from the cases in llama.cpp's tests/test-chat.cpp; the names are those
of vLLM's and SGLang's --tool-call-parser and --reasoning-parser, where they have one.
"""

from __future__ import annotations

from mini_sglang.text.notation import Notation, Thoughts

HERMES = Notation(
    names=("hermes", "qwen", "qwen25", "qwen3", "mimo", "granite4"),
    call="<tool_call>\n{object}\n</tool_call>",
    separator="\n",
    families="Qwen 2.5, Qwen 3, QwQ, Hermes 2 and 3, MiMo, Granite 4, Bielik, Reka Edge; models that know no tools",
)
QWEN3_CODER = Notation(
    names=("qwen3_coder", "qwen3_xml", "nemotron_3", "step3p5", "mimo_v2"),
    call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    separator="\n",
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
    also=(r"<function=(?P<name>[\w.\-]++)>\s*(?=\S)",),
    families="Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step 3.5",
)
SEED_OSS = Notation(
    names=("seed_oss",),
    call="<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
    separator="\n",
    parameter="<parameter={key}>{value}</parameter>\n",
    families="Seed-OSS",
)
GLM45 = Notation(
    names=("glm45", "glm", "ling3", "poolside_v1"),
    call="<tool_call>{name}\n{parameters}</tool_call>",
    separator="\n",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    shown=("<arg_key>argument-key</arg_key>\\n<arg_value>",),
    families="GLM 4.5 and 4.6, Ling 3, Laguna",
)
GLM47 = Notation(
    names=("glm47", "spark25"),
    call="<tool_call>{name}{parameters}</tool_call>",
    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    families="GLM 4.7, Spark 2.5",
)
HUNYUAN3 = Notation(
    names=("hunyuan", "hunyuan3"),
    begin="<tool_calls:opensource>\n",
    call="<tool_call:opensource>{name}<tool_sep:opensource>\n{parameters}</tool_call:opensource>",
    separator="\n",
    end="\n</tool_calls:opensource>",
    parameter=(
        "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
    ),
    families="Hunyuan 3",
)
DEEPSEEK_V3 = Notation(
    names=("deepseek_v3", "deepseekv3", "deepseek_r1"),
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    separator="\n",
    end="<｜tool▁calls▁end｜>",
    shown=("function<｜tool▁sep｜>", "'<｜tool▁sep｜>' + tool["),
    families="DeepSeek V3 and R1, R1 distills",
)
DEEPSEEK_V31 = Notation(
    names=("deepseek_v31", "deepseekv31"),
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    families="DeepSeek V3.1",
)
DEEPSEEK_V32 = Notation(
    names=("deepseek_v32", "deepseekv32"),
    begin="<｜DSML｜function_calls>\n",
    call='<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',
    separator="\n",
    end="\n</｜DSML｜function_calls>",
    parameter='<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    marks=("｜DSML｜",),
    families="DeepSeek V3.2",
)
DEEPSEEK_V4 = Notation(
    names=("deepseek_v4", "deepseekv4"),
    begin="<｜DSML｜tool_calls>\n",
    call=DEEPSEEK_V32.call,
    separator=DEEPSEEK_V32.separator,
    end="\n</｜DSML｜tool_calls>",
    parameter=DEEPSEEK_V32.parameter,
    marks=DEEPSEEK_V32.marks,
    families="DeepSeek V4",
)
KIMI_K2 = Notation(
    names=("kimi_k2",),
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    call_id="functions.{name}:{index}",
    shown=("<|tool_call_argument_begin|>",),
    families="Kimi K2",
)
KIMI_K3 = Notation(
    names=("kimi_k3",),
    begin="<|open|>tools<|sep|>",
    call='<|open|>call tool="{name}" index="{number}"<|sep|>{parameters}<|close|>call<|sep|>',
    end="<|close|>tools<|sep|>",
    parameter='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
    families="Kimi K3",
)
MINIMAX_M1 = Notation(
    names=("minimax", "minimax_m1"),
    begin="<tool_calls>\n",
    call="{object}",
    separator="\n",
    end="\n</tool_calls>",
    families="MiniMax M1",
)
MINIMAX_M2 = Notation(
    names=("minimax_m2", "minimax-m2"),
    begin="<minimax:tool_call>\n",
    call='<invoke name="{name}">\n{parameters}</invoke>',
    separator="\n",
    end="\n</minimax:tool_call>",
    parameter='<parameter name="{key}">{value}</parameter>\n',
    families="MiniMax M2",
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = Notation(
    names=("minimax_m3", "minimax-m3"),
    begin=f"{_M3}<tool_call>\n",
    call=f'{_M3}<invoke name="{{name}}">{{parameters}}{_M3}</invoke>',
    separator="\n",
    end=f"\n{_M3}</tool_call>",
    parameter=f"{_M3}<{{key}}>{{value}}{_M3}</{{key}}>",
    families="MiniMax M3",
)
GEMMA4 = Notation(
    names=("gemma4",),
    call="<|tool_call>call:{name}{{dict}}<tool_call|>",
    marks=('<|"|>',),
    families="Gemma 4",
)
LFM2 = Notation(
    names=("lfm2",),
    begin="<|tool_call_start|>[",
    call="{name}({keywords})",
    separator=", ",
    end="]<|tool_call_end|>",
    shown=("<|tool_list_start|>", "<|tool_call_start|>", "List of tools: ["),
    families="LFM 2 and 2.5",
)
COMMAND_R7B = Notation(
    names=("cohere_command", "cohere_command4", "command_r7b"),
    begin="<|START_ACTION|>[\n    ",
    call='{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
    separator=",\n    ",
    end="\n]<|END_ACTION|>",
    shown=("<|START_ACTION|>[",),
    families="Command R7B, Command A, North",
)
COMMAND_R_PLUS = Notation(
    names=("command_r_plus",),
    begin="Action:\n```json\n[\n    ",
    call="{object}",
    separator=",\n    ",
    end="\n]\n```",
    keys=("tool_name", "parameters"),
    families="Command R+",
)
FUNCTIONARY31 = Notation(
    names=("functionary31",),
    call="<function={name}>{arguments}</function>",
    families="functionary v3.1",
)
FUNCTIONARY32 = Notation(
    names=("functionary", "functionary32"),
    call=">>>{name}\n{arguments}",
    families="functionary v3.2",
)
FIREFUNCTION = Notation(
    names=("firefunction", "firefunction_v2"),
    begin=" functools[",
    call="{object}",
    separator=", ",
    end="]",
    shown=("functools[",),
    families="FireFunction v2",
)
GRANITE = Notation(
    names=("granite",),
    begin="<|tool_call|>[",
    call="{object}",
    separator=", ",
    end="]",
    shown=("<|tool_call|> followed by a JSON list",),
    families="Granite 3",
)
NEMOTRON_V2 = Notation(
    names=("nemotron_v2",),
    begin="<TOOLCALL>[",
    call="{object}",
    separator=", ",
    end="]</TOOLCALL>",
    families="Nemotron Nano 2",
)
APRIEL = Notation(
    names=("apriel",),
    begin="<tool_calls>[",
    call="{object}",
    separator=", ",
    end="]</tool_calls>",
    families="Apriel",
)
APERTUS = Notation(
    names=("apertus2509", "apertus"),
    begin="<|tools_prefix|>[",
    call="{object}",
    separator=", ",
    end="]<|tools_suffix|>",
    keys=None,
    families="Apertus",
)
GIGACHAT3 = Notation(
    names=("gigachat3",),
    call="<|message_sep|>\n\nfunction call<|role_sep|>\n{object}",
    families="GigaChat 3",
)
GIGACHAT31 = Notation(
    names=("gigachat31",),
    call="<|function_call|>{object}",
    families="GigaChat 3.1",
)
MINICPM5 = Notation(
    names=("minicpm5",),
    call='<function name="{name}">{parameters}</function>',
    separator="\n",
    parameter='<param name="{key}">{cdata}</param>',
    families="MiniCPM 5",
)
SOLAR = Notation(
    names=("solar_open",),
    begin="<|tool_calls|>",
    call="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
    end="<|calls|>",
    call_id="{id}",
    families="Solar Open",
)
MUSE = Notation(
    names=("muse",),
    call=(
        '<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        "{parameters}</atem:invoke>\n</atem:function_calls>"
    ),
    separator="<|eom|>",
    parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
    families="Muse Glimmer",
)
_HARMONY_END = r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*(?=\{)"
HARMONY = Notation(
    names=("openai", "gpt-oss", "harmony"),
    call="<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    also=(
        r"<\|start\|>assistant to=functions\.(?P<name>[\w.\-]++)\s*<\|channel\|>(?:commentary|analysis|final)"
        + _HARMONY_END,
        r"(?:<\|start\|>assistant\s*)?<\|channel\|>(?:commentary|analysis|final) to=functions\.(?P<name>[\w.\-]++)"
        + _HARMONY_END,
    ),
    shown=("<|channel|>commentary",),
    families="gpt-oss",
)
MISTRAL = Notation(
    names=("mistral",),
    begin="[TOOL_CALLS][",
    call="{object}",
    separator=", ",
    end="]",
    also=(r"\[TOOL_CALLS\]\s*(?P<name>[\w\-]++)(?:\[CALL_ID\](?P<id>\w*+))?(?:\[ARGS\])?\s*(?=\{)",),
    nine_letters=True,
    marks=("[CALL_ID]", "[ARGS]"),
    shown=("[TOOL_CALLS]",),
    families="Mistral up to v7: Nemo, Large, Small 3",
)
MISTRAL_V11 = Notation(
    names=("mistral_v11",),
    call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    call_id="{id}",
    also=MISTRAL.also,
    nine_letters=True,
    shown=("[CALL_ID]",),
    families="Mistral v11: Small 3.2",
)
MISTRAL_V13 = Notation(
    names=("mistral_v13",),
    call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    call_id="{id}",
    also=MISTRAL.also,
    nine_letters=True,
    marks=MISTRAL.marks,
    shown=("[ARGS]",),
    families="Mistral v13: Devstral, Magistral, Ministral 3",
)
LLAMA3 = Notation(
    names=("llama3_json", "llama3", "llama4_json"),
    call="{object}",
    separator="; ",
    keys=("name", "parameters"),
    also=(r"<\|python_tag\|>\s*(?=\{)", r",\s*(?=\{)"),
    leading=True,
    marks=("<|python_tag|>",),
    shown=("<|python_tag|>", '"parameters": dictionary'),
    families="Llama 3.1, 3.2 and 3.3",
)
PYTHONIC = Notation(
    names=("pythonic", "llama4_pythonic", "olmo3"),
    begin="[",
    call="{name}({keywords})",
    separator=", ",
    end="]",
    leading=True,
    shown=("[func_name1(params_name1=params_value1",),
    families="Llama 4, Llama 3.2 without JSON, OLMo 3",
)
# In the order in which a template's calls are compared with them: one that is part of another comes after it.
NOTATIONS = (
    HERMES,
    QWEN3_CODER,
    SEED_OSS,
    GLM45,
    GLM47,
    HUNYUAN3,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI_K2,
    KIMI_K3,
    MINIMAX_M1,
    MINIMAX_M2,
    MINIMAX_M3,
    GEMMA4,
    LFM2,
    COMMAND_R7B,
    COMMAND_R_PLUS,
    FUNCTIONARY31,
    FUNCTIONARY32,
    FIREFUNCTION,
    GRANITE,
    NEMOTRON_V2,
    APRIEL,
    APERTUS,
    GIGACHAT3,
    GIGACHAT31,
    MINICPM5,
    SOLAR,
    MUSE,
    HARMONY,
    MISTRAL_V11,
    MISTRAL_V13,
    MISTRAL,
    PYTHONIC,
    LLAMA3,
)

THINK = Thoughts(
    names=(
        *("think", "qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45"),
        *("kimi_k2", "minimax", "minimax_m2", "nemotron_3", "step3", "step3p5"),
    ),
    opening="<think>",
    closings=("</think>",),
    shown=("</think>", "<|im_assistant|>"),
    families="Qwen 3, QwQ, DeepSeek, GLM, Kimi K2, MiniMax M2, Nemotron, Step, LFM 2.5 and most others",
)
MISTRAL_THINK = Thoughts(
    names=("mistral",), opening="[THINK]", closings=("[/THINK]",), shown=("[THINK]",), families="Magistral, Ministral 3"
)
SEED_THINK = Thoughts(
    names=("seed_oss",),
    opening="<seed:think>",
    closings=("</seed:think>",),
    shown=("<seed:think>",),
    families="Seed-OSS",
)
M3_THINK = Thoughts(
    names=("minimax_m3",),
    opening="<mm:think>",
    closings=("</mm:think>",),
    dropped=(r"</mm:think>",),
    shown=("<mm:think>",),
    families="MiniMax M3",
)
HUNYUAN_THINK = Thoughts(
    names=("hunyuan3",),
    opening="<think:opensource>",
    closings=("</think:opensource>",),
    shown=("<think:opensource>", "<think{}>"),
    families="Hunyuan 3",
)
COHERE_THINK = Thoughts(
    names=("command_r7b", "cohere"),
    opening="<|START_THINKING|>",
    closings=("<|END_THINKING|>",),
    dropped=(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",),
    shown=("<|START_THINKING|>",),
    families="Command R7B, Command A, North",
)
COMMAND_R_TEXT = Thoughts(
    names=("command_r_plus",),
    opening="",
    closings=(),
    dropped=(r"<\|CHATBOT_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"),
    marks=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    shown=("<|CHATBOT_TOKEN|>",),
    families="Command R+ (none, only marks around the answer)",
)
GEMMA4_THINK = Thoughts(
    names=("gemma4",),
    opening="<|channel>thought\n",
    closings=("<channel|>",),
    anywhere=True,
    dropped=(r"<channel\|>", r"<\|channel>(?=<\|channel>)"),
    shown=("<|channel>thought",),
    families="Gemma 4",
)
HARMONY_THINK = Thoughts(
    names=("openai_gptoss", "gpt-oss", "harmony"),
    opening="<|channel|>analysis<|message|>",
    closings=("<|end|>",),
    anywhere=True,
    forced="<|start|>assistant",
    dropped=(
        r"<\|start\|>assistant(?=\s*<\|channel\|>(?:analysis|final|commentary)\s*<\|(?:message|constrain)\|>)",
        r"<\|start\|>assistant(?=\s*<\|channel\|>commentary to=assistant<\|channel\|>)",
        r"<\|channel\|>commentary to=assistant(?=<\|channel\|>)",
        r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
        r"<\|(?:end|return|call)\|>",
    ),
    muted=(
        r"(?:<\|start\|>assistant)?(?: to=[\w.]++)?\s*<\|channel\|>\w++(?: to=[\w.]++)?\s*"
        r"(?:<\|constrain\|>)?\w*+<\|message\|>"
    ),
    muted_ends=("<|call|>", "<|end|>"),
    marks=("<|start|>", "<|constrain|>"),
    shown=("<|channel|>analysis<|message|>",),
    families="gpt-oss",
)
MUSE_THINK = Thoughts(
    names=("muse",),
    opening="<|start|>assistant to=self<|message|>",
    closings=("<|eom|>",),
    anywhere=True,
    forced="<|start|>assistant",
    dropped=(r"<\|start\|>assistant to=user<\|message\|>", r"<\|eo[mt]\|>"),
    marks=("<|message|>",),
    shown=("to=self<|message|>", "to=self"),
    families="Muse Glimmer",
)
KIMI_K3_THINK = Thoughts(
    names=("kimi_k3",),
    opening="<|open|>think<|sep|>",
    closings=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
    dropped=(r"<\|(?:open|close)\|>response<\|sep\|>", r"<\|close\|>message<\|sep\|>", r"<\|end_of_msg\|>"),
    marks=("<|end_of_msg|>",),
    shown=("<|open|>think", "<|open|>"),
    families="Kimi K3",
)
SOLAR_THINK = Thoughts(
    names=("solar_open",),
    opening="<|begin|>assistant<|think|>",
    closings=("<|end|>",),
    anywhere=True,
    forced="<|begin|>assistant",
    dropped=(
        r"<\|begin\|>assistant\s*<\|content\|>",
        r"<\|begin\|>assistant(?=\s*<\|tool_calls\|>)",
        r"<\|(?:end|calls|flush)\|>",
    ),
    marks=("<|content|>", "<|tool_calls|>"),
    shown=("assistant<|think|>",),
    families="Solar Open",
)
APRIEL_THINK = Thoughts(
    names=("apriel",),
    opening="Here are my reasoning steps:\n",
    closings=("[BEGIN FINAL RESPONSE]",),
    dropped=(r"\[END FINAL RESPONSE\]", r"<\|end\|>"),
    marks=("<|end|>",),
    shown=("[BEGIN FINAL RESPONSE]",),
    families="Apriel 1.5 and 1.6",
)
FUNCTIONARY_TEXT = Thoughts(
    names=("functionary",),
    opening="",
    closings=(),
    forced=">>>",
    dropped=(r">>>all\n",),
    shown=(">>>all", ">>>"),
    families="functionary v3.2 (none, only marks around the answer)",
)
LING_THINK = Thoughts(
    names=("ling",),
    opening="<think>",
    closings=("</think>",),
    dropped=(r"<\|role_end\|>",),
    marks=("<|role_end|>",),
    shown=("<|role_end|>",),
    families="Ling 3",
)
GRANITE_THINK = Thoughts(
    names=("granite",),
    opening="<think>",
    closings=("</think>",),
    dropped=(r"</?response>",),
    shown=("<response></response>",),
    families="Granite 3",
)
# In the order in which they are looked for in a template: the peculiar ones first.
THOUGHTS = (
    LING_THINK,
    GRANITE_THINK,
    HARMONY_THINK,
    MUSE_THINK,
    KIMI_K3_THINK,
    GEMMA4_THINK,
    SOLAR_THINK,
    COHERE_THINK,
    APRIEL_THINK,
    FUNCTIONARY_TEXT,
    SEED_THINK,
    M3_THINK,
    HUNYUAN_THINK,
    MISTRAL_THINK,
    THINK,
    COMMAND_R_TEXT,
)
# By the names of the options; several are other servers' words for the same.
TOOL_CALL_PARSERS = {name: notation for notation in NOTATIONS for name in notation.names}
REASONING_PARSERS = {name: thoughts for thoughts in THOUGHTS for name in thoughts.names}


def check_parsers(calls: str, reasoning: str) -> None:
    """Raise ValueError unless the options --tool-call-parser and --reasoning-parser have known names."""
    for option, name, parsers in (
        ("tool_call_parser", calls, TOOL_CALL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        names = ("auto", "none", *parsers)
        if name not in names:
            raise ValueError(f"{option} must be one of {', '.join(names)}, got {name!r}")
