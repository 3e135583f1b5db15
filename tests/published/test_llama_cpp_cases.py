"""The reader of llama.cpp's test file leaves no case out, and reads C++ as C++ means it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.published import material
from tests.published.llama_cpp_cases import Call, Case, Message, read_cases

HEAD = """
const common_chat_msg message_user{ "user", "Hi", {}, {}, "", "", "" };
static common_chat_tool add{ "add", "Adds", R"({"type": "object"})" };
static void test_template_output_peg_parsers(bool detailed_debug) {
"""


def cases_of(body: str) -> list[Case]:
    reading = read_cases(HEAD + body + "}")
    assert not reading.unread
    return reading.cases


class TestThePublishedFile:
    def test_every_case_is_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        reading = material.chat_cases()
        counts = Counter(case.template for case in reading.cases)
        with capsys.disabled():
            print(f"\n{len(reading.cases)} cases of {len(counts)} templates of {len(material.templates())}:")
            for template, number in sorted(counts.items()):
                print(f"{number:4} {template}")
        assert reading.unread == []
        assert counts.keys() <= material.templates().keys()

    def test_arguments_are_json_unless_the_output_is_cut_off(self) -> None:
        for case in material.chat_cases().cases:
            for call in case.expect.tool_calls:
                if not case.is_partial:
                    assert isinstance(json.loads(call.arguments), dict), f"line {case.line}"


class TestTheReader:
    def test_strings_are_joined_and_escapes_and_raw_strings_are_read(self) -> None:
        [case] = cases_of(
            r"""
            auto tst = peg_tester("models/templates/T.jinja", detailed_debug);
            const std::string tail = " tail";
            tst.test("a\n" // a "comment"
                     "\"b\"\u00e9\xc3\xa9" + std::string("é") /* and ' another */ + R"x(\n)" )x" + tail).run();
            """
        )
        assert (case.template, case.input) == ("T", 'a\n"b"ééé\\n)"  tail')
        assert (case.enable_thinking, case.reasoning_format, case.is_partial) == (True, "none", False)
        assert case.messages == [Message("user", "Hi")]

    def test_every_setter_and_every_expectation(self) -> None:
        [case] = cases_of(
            """
            auto tst = peg_tester("T.jinja");
            common_chat_msg before;
            before.role = "user";
            before.content = "first";
            {
                common_chat_msg inner = before;
                inner.content = "second";
                static common_chat_tool local{ "local", "", "{}" };
                tst.test("x").tools({ add, local }).messages({ before, inner })
                    .reasoning_format(COMMON_REASONING_FORMAT_AUTO).enable_thinking(false).parallel_tool_calls(true)
                    .tool_choice(COMMON_CHAT_TOOL_CHOICE_REQUIRED).json_schema("{}").is_partial(true)
                    .add_generation_prompt(false).continue_final_message(COMMON_CHAT_CONTINUATION_CONTENT)
                    .expect(simple_assist_msg("text", "why", "f", "{}", "1")).expect_content("other")
                    .expect_tool_calls({{ "add", R"({"a": 1})", {} }, { "local", "{}", "7" }})
                    .expect_reconstruction().run();
            }
            """
        )
        assert [tool.name for tool in case.tools] == ["add", "local"]
        assert case.tools[0].parameters == {"type": "object"}
        assert [message.content for message in case.messages] == ["first", "second"]
        assert (case.reasoning_format, case.enable_thinking, case.parallel_tool_calls) == ("auto", False, True)
        assert (case.tool_choice, case.json_schema, case.is_partial) == ("required", "{}", True)
        assert (case.add_generation_prompt, case.continue_final_message) == (False, "content")
        assert (case.expect.content, case.expect.reasoning_content) == ("other", "why")
        assert case.expect.tool_calls == [Call("add", '{"a": 1}'), Call("local", "{}", "7")]
        assert case.expect_reconstruction

    def test_a_loop_runs_its_cases_for_each_template(self) -> None:
        cases = cases_of(
            """
            for (const auto & path : { "a/One.jinja", "a/Two.jinja" }) {
                auto tst = peg_tester(path, detailed_debug);
                tst.test("x").run();
            }
            """
        )
        assert [case.template for case in cases] == ["One", "Two"]

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            ('auto tst = peg_tester("T"); tst.test("x").odd(true).run();', "nothing is known of .odd()"),
            ('auto tst = peg_tester("T"); tst.test(other).run();', "other is not known"),
            ('auto tst = peg_tester("T"); tst.test("x");', "a chain that is not run"),
            ('auto tst = peg_tester("T"); if (odd) { tst.test("x").run(); }', "a statement that begins with 'if'"),
        ],
    )
    def test_a_case_that_cannot_be_read_is_named(self, body: str, why: str) -> None:
        reading = read_cases(HEAD + body + "}")
        assert reading.cases == []
        assert reading.unread == [f"line 5: {why}"]
