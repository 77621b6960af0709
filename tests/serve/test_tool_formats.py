"""Calls in the formats of vLLM's list: whole, as their texts grow, cut off, and beside other texts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from outrider.serve.chat import Reply, called
from outrider.serve.tool_calls import Parsed, ToolCall
from outrider.serve.tool_choice import ToolUse
from outrider.serve.tools import PARSERS, parser_for

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "c": {"type": "string"}},
}
TOOLS = {"add": SCHEMA, "now": {}}
ADD = {"a": 1, "b": [2, "x"], "c": 'Æ "q"\n<b>\\ \'s'}
LIST = json.dumps(ADD, ensure_ascii=False)
OBJECTS = [f'{{"name": "add", "arguments": {LIST}}}', '{"name": "now", "arguments": {}}']
PYTHON = "add(a=1, b=[2, 'x'], c='Æ \"q\"\\n<b>\\\\ \\'s')"
DS, DE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
LINES = '\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, "x"]\n</parameter>\n'
LINES += "<parameter=c>\n{}\n</parameter>\n"
XML = ["<function=add>" + LINES.format(ADD["c"]) + "</function>", "<function=now>\n</function>"]


def quoted(prefix: str, call: str, parameter: str, dsml: bool = False) -> list[str]:
    values = {"a": "1", "b": '[2, "x"]', "c": ADD["c"]}
    kinds = {key: f' string="{str(key == "c").lower()}"' if dsml else "" for key in values}
    parts = [
        f'<{prefix}{parameter} name="{k}"{kinds[k]}>{v}</{prefix}{parameter}>' for k, v in values.items()
    ]
    add = f'<{prefix}{call} name="add">\n' + "\n".join(parts) + f"\n</{prefix}{call}>"
    return [add, f'<{prefix}{call} name="now">\n</{prefix}{call}>']


def glm(lines: str, separator: str = "") -> list[str]:
    values = {"a": "1", "b": '[2, "x"]', "c": ADD["c"]}
    parts = [f"<arg_key>{k}</arg_key>{lines}<arg_value>{v}</arg_value>{lines}" for k, v in values.items()]
    add = f"<tool_call>add{separator}{lines}{''.join(parts)}</tool_call>"
    return [add, f"<tool_call>now{separator}{lines}</tool_call>"]


def gemma(opening: str, closing: str, quote: str) -> str:
    values = f"a:1,b:[2,{quote}x{quote}],c:{quote}{ADD['c']}{quote}"
    return f"{opening}call:add{{{values}}}{closing}{opening}call:now{{}}{closing}"


def steps(parts: list[str]) -> str:
    begin, end = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
    return (
        "<｜tool_calls_begin｜>" + "".join(f"{begin}{part}{end}" for part in parts) + "<｜tool_calls_end｜>"
    )


def kimi(number: int, name: str, arguments: str) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{arguments}<|tool_call_end|>"


TEXTS = {
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜>{DS}function<｜tool▁sep｜>add\n```json\n{LIST}\n```{DE}\n"
        f"{DS}function<｜tool▁sep｜>now\n```json\n{{}}\n```{DE}<｜tool▁calls▁end｜>"
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜>{DS}add<｜tool▁sep｜>{LIST}{DE}{DS}now<｜tool▁sep｜>{{}}{DE}<｜tool▁calls▁end｜>"
    ],
    "deepseek_v32": [
        "<｜DSML｜function_calls>\n{}\n{}\n</｜DSML｜function_calls>".format(
            *quoted("｜DSML｜", "invoke", "parameter", True)
        )
    ],
    "deepseek_v4": [
        "<｜DSML｜tool_calls>\n{}\n{}\n</｜DSML｜tool_calls>".format(
            *quoted("｜DSML｜", "invoke", "parameter", True)
        )
    ],
    "glm45": [
        "\n".join(glm("\n")),
        "".join(glm("")),
        "<tool_calls>" + "".join(glm("", "<tool_sep>")) + "</tool_calls>",
    ],
    "kimi_k2": [
        f"<|tool_calls_section_begin|>{kimi(0, 'add', LIST)}{kimi(1, 'now', '{}')}<|tool_calls_section_end|>"
    ],
    "pythonic": [f"[{PYTHON}, now()]", f"\n[ {PYTHON} ,\n now( ) ]"],
    "llama4_pythonic": [f"<|python_start|>[{PYTHON}, now()]<|python_end|>", f"[{PYTHON}, now()]"],
    "lfm2": [f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>"],
    "olmo3": [
        f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>",
        f"<function_calls>{PYTHON}\nnow()</function_calls>",
    ],
    "functiongemma": [gemma("<start_function_call>", "<end_function_call>", "<escape>")],
    "gemma4": [gemma("<|tool_call>", "<tool_call|>", '<|"|>')],
    "phi4_mini_json": [
        f"functools[{', '.join(OBJECTS)}]",
        f"<|tool_call|>[{', '.join(OBJECTS)}]<|/tool_call|>",
    ],
    "internlm": ["\n".join(f"<|action_start|><|plugin|>\n{each}<|action_end|>" for each in OBJECTS)],
    "jamba": [f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>"],
    "hunyuan_a13b": [f"<tool_calls>\n[{', '.join(OBJECTS)}]\n</tool_calls>"],
    "minimax": ["<tool_calls>\n{}\n{}\n</tool_calls>".format(*OBJECTS)],
    "minimax_m2": [
        "<minimax:tool_call>\n{}\n{}\n</minimax:tool_call>".format(*quoted("", "invoke", "parameter")),
        "".join(
            f"<minimax:tool_call>{each}</minimax:tool_call>" for each in quoted("", "invoke", "parameter")
        ),
    ],
    "minicpm5": ["\n".join(quoted("", "function", "param"))],
    "seed_oss": ["\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in XML)],
    "step3": [steps(quoted("steptml:", "invoke", "parameter"))],
    "xlam": [
        f"[{', '.join(OBJECTS)}]",
        *(
            f"{a}[{', '.join(OBJECTS)}]{b}"
            for a, b in (("```json\n", "\n```"), ("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>"))
        ),
    ],
    "longcat": ["\n".join(f"<longcat_tool_call>\n{each}\n</longcat_tool_call>" for each in OBJECTS)],
    "apertus": [f'<|tools_prefix|>[{{"add": {LIST}}}, {{"now": {{}}}}]<|tools_suffix|>'],
    "nemotron_json": [f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>"],
    "granite": [f"<|tool_call|>[{', '.join(OBJECTS)}]", f"<tool_call>[{', '.join(OBJECTS)}]"],
    "granite-20b-fc": ["<function_call> {}\n<function_call> {}".format(*OBJECTS)],
    "llama4_json": ["; ".join(OBJECTS).replace('"arguments"', '"parameters"')],
    "qwen3_coder": ["\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in XML)],
    "hermes": ["\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in OBJECTS)],
    "mistral": [f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{LIST}[TOOL_CALLS]now[ARGS]{{}}"],
}
WHOLE = [(name, text) for name, texts in TEXTS.items() for text in texts]
BARE = {"pythonic", "llama4_pythonic", "xlam", "llama4_json"}  # which may lack a marker in front


def read(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def grown(name: str, text: str) -> Parsed:
    """The last parse of a text that grows by a character; nothing that was given is taken back."""
    content, calls, parts = "", list[ToolCall](), set[str]()
    for end in range(len(text) + 1):
        now = PARSERS[name].parse(text[:end], end == len(text), TOOLS)
        assert now.content.startswith(content), text[:end]
        assert len(now.calls) >= len(calls), text[:end]
        for before, call in zip(calls, now.calls):
            assert call == before if before.complete else call.name == before.name, text[:end]
            assert call.arguments.startswith(before.arguments), text[:end]
        content, calls = now.content, now.calls
        parts.add(calls[0].arguments if calls else "")
    assert len(parts) > len(ADD["c"]), "arguments come in parts, also within a text"
    return now


@pytest.mark.parametrize(("name", "text"), WHOLE)
def test_calls_come_in_parts(name: str, text: str) -> None:
    parsed = grown(name, text)
    assert not parsed.content and read(parsed.calls) == [("add", ADD), ("now", {})]
    assert all(call.complete for call in parsed.calls)
    assert parsed == PARSERS[name].parse(text, True, TOOLS)


@pytest.mark.parametrize(("name", "text"), WHOLE)
def test_texts_in_front_of_calls_and_behind_are_content(name: str, text: str) -> None:
    lead = "" if name in BARE and text[0] in "[{\n" and not text.startswith("[TOOL") else "Let me see.\n"
    if name in ("granite-20b-fc", "mistral", "pythonic", "xlam", "granite", "phi4_mini_json") or not lead:
        text += "\n"  # there is no closing marker
    parsed = grown(name, f"{lead}{text} Done: 1 < 2.")
    assert read(parsed.calls) == [("add", ADD), ("now", {})]
    assert parsed.content == f"{lead}Done: 1 < 2."


@pytest.mark.parametrize(("name", "text"), WHOLE)
def test_a_call_that_is_cut_off_is_not_complete(name: str, text: str) -> None:
    parsed = PARSERS[name].parse(text[: text.index("<b>")], True, TOOLS)
    (call,) = parsed.calls
    assert call.name == "add" and not call.complete and not parsed.content
    written = LIST[: LIST.index("<b>")]  # a line break in front of a tag is no part of a value in tags
    assert call.arguments in (written, written.removesuffix("\\n"))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", "1 < 2", "[1] says so.", "<tool", "import functools", "{not json"])
def test_other_texts_are_content(name: str, text: str) -> None:
    assert PARSERS[name].parse(text, True, TOOLS) == Parsed(text, [])


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("x=None, y=True, z=false", {"x": None, "y": True, "z": False}),
        ("x={'k': (1, -2.5), 3: []}", {"x": {"k": [1, -2.5], "3": []}}),
        ("x={'b', 'a'}, y={}, z=()", {"x": ["b", "a"], "y": {}, "z": []}),
        ("month=07, big=1e3, word=celsius", {"month": 7, "big": 1000.0, "word": "celsius"}),
        (r"x='a\x41\u00c6\'\n\d', y=" + '"it\'s"', {"x": "aAÆ'\n\\d", "y": "it's"}),
        ("x='''a\n'b' c''', y='', z=\"\"", {"x": "a\n'b' c", "y": "", "z": ""}),
        ("command='sed -n '360,450p' f.py'", {"command": "sed -n '360,450p' f.py"}),
        ("c='python -c \"f(3, s='x')\"', d=('x', 'y')", {"c": "python -c \"f(3, s='x')\"", "d": ["x", "y"]}),
        ("command='cat << E\nprint(1)\nE'", {"command": "cat << E\nprint(1)\nE"}),
        ("1, [2], c='d'", {"a": 1, "b": [2], "c": "d"}),
        ("x=[1, 2,],", {"x": [1, 2]}),
    ],
)
def test_literals_of_python_become_json(python: str, expected: object) -> None:
    text, arguments = f"[add({python})]", ""
    for end in range(len(text) + 1):
        for call in PARSERS["pythonic"].parse(text[:end], end == len(text), TOOLS).calls:
            assert call.arguments.startswith(arguments), text[:end]
            arguments = call.arguments
    assert json.loads(arguments) == expected and call.complete


@pytest.mark.parametrize("text", ["[add(1, 2, 3, 4)]", "[add(a=1 b=2)]", "[add(" + "[" * 200, "[add(a=)]"])
def test_a_call_that_is_no_python_is_not_complete(text: str) -> None:
    (call,) = PARSERS["pythonic"].parse(text, True, TOOLS).calls
    assert not call.complete


def test_a_list_that_calls_no_tool_is_content() -> None:
    for text in ("[print(1)]", "[see(a)](https://example.com)", "[add]"):
        assert PARSERS["pythonic"].parse(text, True, TOOLS) == Parsed(text, [])
    assert PARSERS["pythonic"].parse("[1] says", False, TOOLS).content == "[1] says", "it does not wait"


def test_a_marker_within_arguments_is_part_of_them() -> None:
    """The text was cut there before: a call that writes about calls was lost."""
    given = {"c": 'Write <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'}
    text = f'<tool_call>{{"name": "add", "arguments": {json.dumps(given)}}}</tool_call>'
    (call,) = PARSERS["hermes"].parse(text, True, TOOLS).calls
    assert call == ToolCall("add", json.dumps(given))


def test_wrong_json_spoils_no_other_call() -> None:
    for name in ("deepseek_v31", "kimi_k2", "jamba", "internlm", "longcat"):
        text = TEXTS[name][0].replace("[2, ", "[NaN, ")
        add, *others = PARSERS[name].parse(text, True, TOOLS).calls
        assert add.name == "add" and not add.complete and add.arguments.startswith('{"a": 1, "b": [NaN')
        assert name == "jamba" or read(others) == [("now", {})]
        assert not any(mark in add.arguments for mark in ("<｜", "<|tool", "<|action", "</longcat"))


FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS]


def test_kimis_calls_have_the_ids_that_its_template_repeats() -> None:
    reply = Reply(PARSERS["kimi_k2"], ToolUse.of(FUNCTIONS, "auto"), calls_before=3)
    ids = [call.id for call in reply.read(TEXTS["kimi_k2"][0], "stop").calls]
    assert ids == ["functions.add:0", "functions.now:1"], "those that the model wrote"
    forced = Reply(PARSERS["kimi_k2"], ToolUse.of(FUNCTIONS, "required"), calls_before=3)
    (call,) = forced.read('[{"name": "now", "parameters": {}}]', "stop").calls
    assert called(call)["id"] == "functions.now:3"


def test_mistrals_calls_have_ids_of_nine_letters() -> None:
    """Its chat templates refuse others, in the next turn of the conversation."""
    reply = Reply(PARSERS["mistral"], ToolUse.of(FUNCTIONS, "auto"), id="x")
    first, second = reply.read(TEXTS["mistral"][0], "stop").calls
    assert first.id == "abcdefghi" and len(second.id) == 9 and second.id.isalnum()
    assert reply.read(TEXTS["mistral"][0], "stop").calls[1] == second, "the same in every part of a stream"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>", "seed_oss"),
        ("<|tool_call_start|>", "lfm2"),
        ("<function_calls>", "olmo3"),
        ("<start_function_call>", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<tool_calls>", "jamba"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("'<steptml:invoke name='", "step3"),
        ("<|tools_prefix|>", "apertus"),
    ],
)
def test_the_template_names_the_format(template: str, name: str) -> None:
    assert parser_for("auto", template) is PARSERS[name]


@pytest.mark.parametrize(
    "name", ["qwen3_coder", "openai", "glm45", "mistral", "pythonic", "gemma4", "hermes"]
)
def test_texts_that_repeat_themselves_take_linear_time(name: str) -> None:
    marker = next(iter(PARSERS[name].markers), "[")
    for part in (" ", "<", "{", "\\", "a", marker, "<function=", "f('"):
        text = f"{marker}f{part * (20_000 // len(part))}"
        began = time.perf_counter()
        PARSERS[name].parse(text, True, TOOLS)
        assert time.perf_counter() - began < 0.5, repr(part)
