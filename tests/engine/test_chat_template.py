"""`LLM.chat`: messages become exactly the prompt that the chat template writes, and nothing else changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from outrider import LLM, RequestError, SamplingParams
from outrider.config import EngineOptions
from outrider.engine.chat_template import render
from outrider.inspect.card import card_of
from outrider.testing import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if tools %}({{ tools[0].function.name }}){% endif %}{% if loud %}!{% endif %}"
    "{% for d in documents or () %}<{{ d.title }}>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny model whose tokenizer has no template of its own."""
    return LLM(tiny_checkpoint(tmp_path_factory.mktemp("chat")), seed=0)


def text_of(llm: LLM, messages: Any, **given: Any) -> str:
    return str(render(llm.tokenizer, {"messages": messages, "chat_template": TEMPLATE, **given})["prompt"])


def test_chat_is_generate_on_the_templated_ids() -> None:
    llm = LLM("builtin", seed=0)
    (chatted,) = llm.chat(ASKED, GREEDY)
    ids = llm.tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    (generated,) = llm.generate({"prompt_token_ids": list(ids)}, GREEDY)
    assert chatted.prompt_token_ids == list(ids)
    assert chatted.prompt == "<|bos|><|system|>be kind<|end|><|user|>hello there<|end|><|assistant|>"
    assert chatted.outputs[0].token_ids == generated.outputs[0].token_ids
    assert chatted.outputs[0].text == generated.outputs[0].text


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "conversation", "self", "tools"])
def test_what_the_renderer_sets_is_no_variable(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs: '{name}' is no variable") as error:
        text_of(llm, ASKED, chat_template_kwargs={name: "{{ 1 }}"})
    assert error.value.param == "chat_template_kwargs"


def test_several_conversations_stand_in_their_order(llm: LLM) -> None:
    several = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    together = llm.chat(several, GREEDY, chat_template=TEMPLATE)
    alone = [llm.chat(one, GREEDY, chat_template=TEMPLATE)[0] for one in several]
    assert [o.prompt for o in together] == [o.prompt for o in alone]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_the_template_writes_the_special_tokens_alone(llm: LLM) -> None:
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    assert tokenizer.encode("<|bos|>a").count(0) == 2, "this tokenizer puts one in front of every text"
    assert render(tokenizer, {"messages": ASKED, "chat_template": TEMPLATE})["prompt_token_ids"].count(0) == 1


def test_template_options_and_tools_are_applied(llm: LLM) -> None:
    assert text_of(llm, ASKED) == "<|bos|>[system] be kind<|end|>[user] hello there<|end|>[assistant]"
    assert text_of(llm, ASKED, add_generation_prompt=False).endswith("hello there<|end|>")
    assert text_of(llm, ASKED, chat_template_kwargs={"loud": True}).endswith("![assistant]")
    tool = {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    assert "(look)" in text_of(llm, ASKED, tools=[tool])
    assert "<One><Two>[" in text_of(llm, ASKED, documents=[{"title": "One"}, {"title": "Two"}])
    begun = [*ASKED, {"role": "assistant", "content": "I am"}]
    assert text_of(llm, begun, add_generation_prompt=False, continue_final_message=True).endswith(
        "[assistant] I am"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert "one\ntwo" in text_of(llm, parts)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"x": 42}'}}
    assert "42" in text_of(llm, [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}])


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def test_a_template_that_reads_lists_of_parts_gets_them(llm: LLM) -> None:
    """As those of models that read images: it would find no text in a string, and say nothing."""
    expected = "[system] be kind[user] hello there"
    assert text_of(llm, ASKED, chat_template=PARTS) == expected
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in ASKED]
    assert text_of(llm, parts, chat_template=PARTS) == expected
    turns = [*ASKED, {"role": "assistant", "content": ""}, {"role": "user", "content": "and?"}]
    assert text_of(llm, turns, chat_template=PARTS) == f"{expected}[assistant] [user] and?"


IMAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + PARTS.partition("[{{ m.role }}]")[2]


@pytest.mark.parametrize("last", ["a", "user", "start"])
def test_lists_of_parts_do_not_depend_on_the_texts(last: str, llm: LLM) -> None:
    """Each of these is found in `<|im_start|>user`, which the template writes itself."""
    messages = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": last}]
    expected = f"<|im_start|>system\n Answer in French.<|im_start|>user\n {last}"
    assert text_of(llm, messages, chat_template=IMAGES) == expected


CUT = (
    "{% for m in messages %}{% if m.content is string and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_that_changes_the_last_text_still_gets_strings(llm: LLM) -> None:
    messages = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "a plan</think>well"}]
    assert text_of(llm, messages, chat_template=CUT, add_generation_prompt=False) == "sowell"


@pytest.mark.parametrize("written", ["m.content", "m.content | tojson", "m.content | first"])
def test_a_list_that_is_written_as_such_is_not_read(written: str, llm: LLM) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content[:4] }}"
        f"{{% else %}}{{{{ {written} }}}}{{% endif %}}{{% endfor %}}"
    )
    assert text_of(llm, ASKED, chat_template=template) == "be khell"


def test_each_of_several_templates_is_decided(llm: LLM) -> None:
    tokenizer = copy.deepcopy(llm.tokenizer.full)
    tokenizer.chat_template = {"default": CUT, "tool_use": IMAGES}
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    prompt = {"messages": [{"role": "user", "content": "user"}]}
    for _ in range(2):
        assert render(tokenizer, prompt)["prompt"] == "user"
        assert render(tokenizer, {**prompt, "tools": [tool]})["prompt"] == "<|im_start|>user\n user"
        assert render(tokenizer, {**prompt, "chat_template": "tool_use"})["prompt"].endswith("user\n user")


def test_a_template_is_probed_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.deepcopy(llm.tokenizer)
    apply, calls = tokenizer.apply_chat_template, []

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return apply(*given, **more)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for _ in range(3):
        render(tokenizer, {"messages": ASKED, "chat_template": IMAGES})
    assert len(calls) == 3 + 2


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}"])
def test_a_template_that_leaves_a_message_out_still_gets_strings(template: str, llm: LLM) -> None:
    assert text_of(llm, ASKED, chat_template=template) in ("be kind", "HELLO THERE")


def test_the_template_of_a_processor_is_the_tokenizers(tmp_path: Path) -> None:
    """Older checkpoints of models that read images have it in a file of its own."""
    folder = tiny_checkpoint(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (output,) = LLM(folder, seed=0).chat(ASKED, GREEDY)
    assert output.prompt == "<|bos|>[system] be kind<|end|>[user] hello there<|end|>[assistant]"
    assert card_of(EngineOptions(folder)).chat_template


def test_a_refusal_of_an_earlier_turn_is_text(llm: LLM) -> None:
    parts = [*ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    assert text_of(llm, parts) == text_of(llm, [*ASKED, {"role": "assistant", "content": "no"}])


GPT_OSS = (  # as the template of gpt-oss, which raises for both
    "{% for message in messages %}[{{ message.role }}]"
    "{% if 'content' in message and '<|' in message.content %}{{ raise_exception('tags') }}{% endif %}"
    "{% if 'tool_calls' in message %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}"
    "{% elif message.content %}analysis:{{ message.content }}"
    "{% elif message.thinking %}analysis:{{ message.thinking }}{% endif %}"
    "call:{{ message.tool_calls[0].function.name }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"content": "I look.", "reasoning_content": "Hm."}, "analysis:Hm."),
        ({"content": None, "reasoning_content": "Hm."}, "analysis:Hm."),
        ({"content": None, "thinking": "Own.", "reasoning_content": "Hm."}, "analysis:Own."),
        ({"content": "I look."}, "analysis:I look."),
        ({"content": None}, ""),
        ({}, ""),
    ],
)
def test_thoughts_in_front_of_calls_are_written_by_the_template_of_gpt_oss(
    llm: LLM, more: dict[str, Any], expected: str
) -> None:
    calls = [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]
    messages = [ASKED[1], {"role": "assistant", "tool_calls": calls, **more},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]  # fmt: skip
    found = text_of(llm, messages, chat_template=GPT_OSS, add_generation_prompt=False)
    assert found == f"[user]hello there[assistant]{expected}call:now[tool]7[assistant]It is 7."


def test_streaming_takes_messages_too(llm: LLM) -> None:
    *_, last = llm.stream({"messages": ASKED, "chat_template": TEMPLATE}, GREEDY)
    assert (
        last.outputs[0].token_ids == llm.chat(ASKED, GREEDY, chat_template=TEMPLATE)[0].outputs[0].token_ids
    )


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": None, "tool_calls": []}], ids=str)
def test_an_assistant_message_without_content_is_empty(llm: LLM, more: dict[str, Any]) -> None:
    messages = [*ASKED, {"role": "assistant", **more}, {"role": "user", "content": "and now?"}]
    assert "[assistant] <|end|>[user] and now?" in text_of(llm, messages)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (ASKED, {"chat_template": None}, "no chat template"),
    ([], {}, "empty"),
    ("hello", {}, "list"),
    ({"role": "user", "content": "x"}, {}, "list"),
    (5, {}, "list"),
    (["hello"], {}, "message 0"),
    ([*ASKED, {"content": "x"}], {}, "message 2 needs a role"),
    ([{"role": 5, "content": "x"}], {}, "role"),
    ([{"role": "user"}], {}, "content of message 0"),
    ([{"role": "user", "content": 5}], {}, "content of message 0"),
    ([{"role": "user", "content": []}], {}, "content of message 0"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], {}, "content of message 0"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        {},
        "tool call of message 0",
    ),
    (ASKED, {"chat_template": "{{ raise_exception('only users') }}"}, "only users"),
    (ASKED, {"chat_template": "{% if"}, "template"),
    (ASKED, {"continue_final_message": True}, "add_generation_prompt=False"),
    ([{"role": "user", "content": "so long " * 200}], {}, "context"),
]


@pytest.mark.parametrize(("messages", "given", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_messages_are_refused_in_one_sentence(
    llm: LLM, messages: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, **{"chat_template": TEMPLATE, **given})


def test_an_unknown_key_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Did you mean 'chat_template'"):
        llm.generate({"messages": ASKED, "chat_templat": TEMPLATE}, GREEDY)


def test_a_bad_conversation_among_good_ones_fails_alone(llm: LLM) -> None:
    outputs = llm.chat([ASKED, [], ASKED], GREEDY, chat_template=TEMPLATE)
    assert [o.error is None for o in outputs] == [True, False, True]
    assert "empty" in str(outputs[1].error)


def test_messages_without_a_tokenizer_are_refused(tiny: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        LLM(str(tiny)).chat(ASKED, GREEDY)


def test_the_next_turn_finds_the_last_one_in_the_cache() -> None:
    llm = LLM("builtin", seed=0)
    history: list[dict[str, str]] = [
        {"role": "user", "content": "What do plants need in order to grow in a garden that is dry?"}
    ]
    (first,) = llm.chat(history, SamplingParams(temperature=0, max_tokens=40))
    assert first.num_cached_tokens == 0
    history += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And trees?"},
    ]
    (second,) = llm.chat(history, GREEDY)
    assert (
        second.num_cached_tokens is not None
        and second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 > 0
    )


# ---- the clock


def test_times_of_prefill_and_decode_are_separate() -> None:
    llm = LLM(
        "builtin",
        speculative_config={"model": "builtin-draft", "num_speculative_tokens": 3},
        max_num_batched_tokens=16,
        max_num_seqs=1,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.engine.reset()
    (output,) = llm.generate({"prompt_token_ids": list(range(100, 140))}, params)
    reading, decoding, total = llm.engine.prefill, llm.engine.decode, output.speculation
    assert (reading.known, reading.steps) == (40, 3), "16 + 16 + 8"
    assert decoding.known == decoding.steps == total.steps - 1, "the last chunk of the prompt emits, too"
    assert reading.nodes + decoding.nodes == total.drafted
    assert reading.emitted + decoding.emitted == total.emitted == 20
    assert llm.engine.steps == reading.steps + decoding.steps
    assert sum(llm.engine.times) == pytest.approx(sum(reading.times) + sum(decoding.times))
    assert reading.times.propose > 0 and decoding.times.propose > 0
    times = output.outputs[0].token_times
    assert len(times) == 20 and times == sorted(times) and times[0] > 0
    assert len(set(times)) == total.steps, "tokens of one step come together"
    llm.engine.reset()
    assert llm.engine.steps == 0 and sum(llm.engine.times) == 0
