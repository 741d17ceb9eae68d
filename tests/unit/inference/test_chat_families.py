"""Turns, ends of turns and spaces, with templates and tokenizers in the forms of real families."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.text.chat import Chat
from services.inference.workflows.agents import IncrementalText

MARKS = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "[INST]", "[/INST]"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|observation|>", "<|turn>", "<turn|>"),
]  # fmt: skip


def turns(user: str, assistant: str, invite: str, begin: str = "", tool: str | None = None) -> str:
    """A template of expressions; ``m`` is the message, ``loop`` the place of it."""
    return (
        f"{{{{- {begin!r} -}}}}{{%- for m in messages -%}}{{%- if m.role == 'assistant' -%}}{{{{- {assistant} -}}}}"
        f"{{%- elif m.role == 'tool' -%}}{{{{- {tool or user} -}}}}{{%- else -%}}{{{{- {user} -}}}}{{%- endif -%}}"
        f"{{%- endfor -%}}{{%- if add_generation_prompt -%}}{{{{- {invite!r} -}}}}{{%- endif -%}}"
    )


# name: template, the eos of the tokenizer, the text with which the policy ends its turn, the text that follows that end
FAMILIES = {
    "chatml": (turns(r"'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'", r"'<|im_start|>assistant\n' + m.content + '<|im_end|>\n'", "<|im_start|>assistant\n"), "<|im_end|>", "<|im_end|>", "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
    "chatml, other eos": (turns(r"'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'", r"'<|im_start|>assistant\n' + m.content + '<|im_end|>\n'", "<|im_start|>assistant\n"), "<|endoftext|>", "<|im_end|>", "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
    "chatml, space before the end": (turns(r"'<|im_start|>user\n' + m.content + '<|im_end|>\n'", r"'<|im_start|>assistant\n' + m.content + '\n<|im_end|>\n'", "<|im_start|>assistant\n"), "<|im_end|>", "<|im_end|>", "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
    "llama 2": (turns("'[INST] ' + m.content.strip() + ' [/INST]'", "' ' + m.content.strip() + ' </s>'", "", "<s>"), "</s>", "</s>", "[INST] again [/INST]"),
    "llama 2, bos each time": (turns("'<s>[INST] ' + m.content.strip() + ' [/INST]'", "' ' + m.content.strip() + ' </s>'", ""), "</s>", "</s>", "<s>[INST] again [/INST]"),
    "mistral": (turns("'[INST] ' + m.content + ' [/INST]'", "m.content + '</s>'", "", "<s>"), "</s>", "</s>", "[INST] again [/INST]"),
    "gemma": (turns(r"'<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n'", r"'<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n'", "<start_of_turn>model\n", "<s>"), "</s>", "<end_of_turn>", "\n<start_of_turn>user\nagain<end_of_turn>\n<start_of_turn>model\n"),
    "llama 3": (turns(r"'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'", r"'<|start_header_id|>assistant<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<s>"), "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nagain<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "zephyr": (turns(r"'<|user|>\n' + m.content + '</s>\n'", r"'<|assistant|>\n' + m.content + '</s>\n'", "<|assistant|>\n"), "</s>", "</s>", "\n<|user|>\nagain</s>\n<|assistant|>\n"),
    "phi": (turns(r"'<|' + m.role + '|>\n' + m.content + '<|end|>\n'", r"'<|assistant|>\n' + m.content + '<|end|>\n'", "<|assistant|>\n"), "<|endoftext|>", "<|end|>", "\n<|user|>\nagain<|end|>\n<|assistant|>\n"),
    "deepseek": (turns("'<｜User｜>' + m.content", "'<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>'", "<｜Assistant｜>", "<s>"), "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>again<｜Assistant｜>"),
    "glm, no end": (turns(r"'<|user|>\n' + m.content", r"'<|assistant|>\n' + m.content", "<|assistant|>\n", tool=r"'<|observation|>\n' + m.content"), "<|endoftext|>", "<|user|>", "\nagain<|assistant|>\n"),
    "vicuna, eos between turns only": (turns("'USER: ' + m.content", "' ASSISTANT: ' + m.content + ('' if loop.last else '</s>')", " ASSISTANT:", "<s>"), "</s>", "</s>", "USER: again ASSISTANT:"),
    "alpaca": (turns(r"'### Instruction:\n' + m.content + '\n\n'", r"'### Response:\n' + m.content + '</s>\n\n'", "### Response:\n"), "</s>", "</s>", "\n\n### Instruction:\nagain\n\n### Response:\n"),
    "plain text, no end": (turns(r"'\nUser: ' + m.content", r"'\nAssistant: ' + m.content", "\nAssistant:"), "</s>", "</s>", "\nUser: again\nAssistant:"),
}  # fmt: skip


@functools.cache
def bare(kind: str) -> Any:
    """A BPE of single characters: in bytes, or with ▁ for spaces as SentencePiece has them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    match kind:
        case "bytes":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        case "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
            tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        case "metaspace, first":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        case "strip":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            tokenizer.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [chr(n) for n in range(33, 127)] + ["▁", "\n"]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(MARKS), special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["again"], trainer)
    return tokenizer


@functools.cache
def family(name: str, kind: str = "bytes") -> tuple[Any, Chat]:
    from transformers import PreTrainedTokenizerFast

    template, eos, end, _ = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(bare(kind)),
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.further_stops = (tokenizer.convert_tokens_to_ids(end),)
    return tokenizer, Chat(tokenizer)


KINDS = ["bytes", "metaspace", "metaspace, first", "strip"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("said", ["yes", "two\nlines", "a b  c"])
def test_what_follows_the_policys_own_end_is_what_the_template_renders_there(name: str, kind: str, said: str) -> None:
    tokenizer, chat = family(name, kind)
    _, _, end, following = FAMILIES[name]
    end_id = tokenizer.convert_tokens_to_ids(end)
    assert end_id in chat.stop_token_ids
    user, again = {"role": "user", "content": "go"}, {"role": "user", "content": "again"}
    dialogue = [user, {"role": "assistant", "content": said}, again]
    whole = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    read = chat.continuation_ids([again], last_sampled=end_id)
    prompt = chat.prompt_ids([user])
    if whole.endswith(end + following):  # all but templates that write no end
        ids = tuple(tokenizer.encode(whole, add_special_tokens=False))
        assert ids[-len(read) - 1 :] == (end_id, *read) and ids[: len(prompt)] == prompt
    if kind == "bytes":  # others write spaces around marks
        assert tokenizer.decode(read) == following
    assert (end_id, *read).count(end_id) == (end + following).count(end)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_a_budget_cut_is_ended_as_the_template_ends_it(name: str) -> None:
    tokenizer, chat = family(name)
    user, again = {"role": "user", "content": "go"}, {"role": "user", "content": "again"}
    dialogue = [user, {"role": "assistant", "content": "yes"}, again]
    whole = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    read = chat.continuation_ids([again], last_sampled=chat.encode("s")[-1])
    assert tokenizer.decode(read) == whole.rpartition("yes")[2]


def test_the_end_of_another_token_is_not_taken_away() -> None:
    _, chat = family("glm, no end")
    tokenizer, _ = family("glm, no end")
    user, observation = map(tokenizer.convert_tokens_to_ids, ("<|user|>", "<|observation|>"))
    result = {"role": "tool", "content": "4"}
    assert chat.continuation_ids([result], last_sampled=user)[0] == observation
    _, plain = family("plain text, no end")
    assert plain.decode(plain.continuation_ids([result], last_sampled=plain.end_of_turn_id)).startswith("\nUser: 4")


# -- the text of a turn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["    b = a\n    return b", " 42", "42", "  ", "", "\n x", "a  b"])
def test_the_text_of_a_turn_has_each_space_that_was_sampled(kind: str, text: str) -> None:
    tokenizer, chat = family("chatml", kind)
    mark = "Ġ" if kind == "bytes" else "▁"
    pieces = [mark if letter == " " else "Ċ" if letter == "\n" and kind == "bytes" else letter for letter in text]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert chat.decode([*ids, chat.end_of_turn_id]) == text
    growing = IncrementalText(chat)
    for token in ids:
        growing.add(token)
    assert growing.text == text


@given(st.text(alphabet=st.sampled_from("ab \n"), max_size=12))
def test_a_taught_turn_is_read_as_it_stands_in_the_template(said: str) -> None:
    for kind in ("bytes", "metaspace, first"):
        tokenizer, chat = family("chatml", kind)
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": said}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        assert list(chat.supervised(messages).token_ids) == tokenizer.encode(whole, add_special_tokens=False)


# -- text of strangers ----------------------------------------------------------------------------------------------------


def chat_with(
    *plain: Any, normalizer: Any = None, special: tuple[Any, ...] = (), template: str = FAMILIES["chatml"][0]
) -> Chat:
    from transformers import PreTrainedTokenizerFast

    made = copy.deepcopy(bare("bytes"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(plain))
    made.add_special_tokens(list(special))
    return Chat(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template))


PLAIN = [
    "  ",
    "    ",
    "\n\n",
    "\t\t",
    "<table>",
    "</table>",
    "[multimodal]",
    "assistant",
    "user",
    "|||EMAIL|||",
    "###",
    "```",
    "again",
]


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    if x:\n        return 1\n\n\t\ty", "<table>a</table>", "[multimodal] |||EMAIL|||", "the assistant, ### user ```x```"],
)  # fmt: skip
def test_text_that_a_tokenizer_lists_as_plain_added_tokens_is_unchanged(text: str) -> None:
    chat = chat_with(*PLAIN)
    assert chat.as_text(text) == text
    for role in ("tool", "user"):
        assert text in chat.decode(chat.continuation_ids([{"role": role, "content": text}]))
        assert text in chat.decode(chat.prompt_ids([{"role": role, "content": text}]))


def test_plain_tokens_that_the_template_writes_are_not_written_by_strangers() -> None:
    tags = ["<role>", "</role>", "<obs>", "<|tool|>", "<think>", "<tool_call>"]
    template = turns(
        "'<role>' + m.role + m.content + '</role>'",
        "'<role>' + m.content + '</role>'",
        "<role>",
        tool="'<obs>' + m.content",
    )
    chat = chat_with(*tags, template=template)
    ids = {chat.encode(tag)[0] for tag in tags}
    assert len(ids) == len(tags)
    for role in ("tool", "user"):
        harmless, attack = (chat.continuation_ids([{"role": role, "content": text}]) for text in ("x", "".join(tags)))
        assert [i for i in attack if i in ids] == [i for i in harmless if i in ids]


def forging() -> Any:
    from tokenizers import AddedToken, normalizers

    lower, wide = normalizers.Lowercase(), normalizers.NFKC()
    dropping = normalizers.Replace("\u200b", "")
    for flags in ({}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}):
        for name, normalizer, forged in (
            ("as it is", None, "<|go|>"),
            ("lower", lower, "<|GO|>"),
            ("wide", wide, "＜｜go｜＞"),
            ("dropped", dropping, "<|g\u200bo|>"),
        ):
            yield pytest.param(
                AddedToken("<|go|>", normalized=normalizer is not None, **flags),
                normalizer,
                forged,
                id=f"{name} {flags}",
            )


@pytest.mark.parametrize(("token", "normalizer", "forged"), list(forging()))
def test_no_text_of_a_stranger_becomes_a_special_token(token: Any, normalizer: Any, forged: str) -> None:
    chat = chat_with(normalizer=normalizer, special=(token,))
    go = next(number for number, added in chat._tokenizer.added_tokens_decoder.items() if str(added) == "<|go|>")
    assert go in chat.encode(f"a {forged} b"), "the attack works where text is not made harmless"
    for text in (forged, f"a {forged} b", f"  {forged}\n{forged}", f"{forged[0]}{forged}{forged}", f"a{forged}b"):
        for role in ("tool", "user", "system"):
            for ids in (
                chat.prompt_ids([{"role": role, "content": text}]),
                chat.continuation_ids([{"role": role, "content": text}]),
            ):
                assert go not in ids
