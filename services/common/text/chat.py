"""Converts between messages and token ids: prompts, continuations after an assistant turn, supervised masks, stop
tokens.

Used by workflows while they sample and by the trainer's warm start, so that both see the same tokens. It works on
any Hugging Face tokenizer with a chat template that is passed in, and imports neither transformers nor torch.

The invariant: **sampled text is never tokenised again**. A conversation grows by concatenation,

    prompt_ids(messages)  +  sampled ids  +  continuation_ids(tool result)  +  sampled ids  + ...

and ``continuation_ids`` asks the chat template for the text after an assistant turn: renders a dummy turn and cuts
behind the turn. Rendering the whole dialogue anew would be wrong twice: text does not tokenise back to the sampled ids,
and templates such as Qwen3's drop the thinking of earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from services.common.errors import ConfigError, DatasetError, InvalidRequestError, ModelMismatchError
from services.common.safetensors_files import INDEX, read_object, weight_files
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT
from services.common.text.tools import CLOSE, OPEN

if TYPE_CHECKING:
    import torch


# --- Keeps text that looks like a token of the chat template from acting as one, so that no message begins or ends a
# turn.


Message = Mapping[str, Any]
Split = Callable[[str], str]
_TAG = re.compile(r"</?[A-Za-z_]+>")
_BRACKETS = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_MARK = re.compile(r"<([|｜]).+\1>", re.DOTALL)  # of a role, which a template may put together


class SpecialText:
    """The texts of a tokenizer's special and added tokens of more than one character."""

    def __init__(self, tokenizer: Any, frame: str) -> None:
        """``frame``: a dialogue rendered by the template, for the tokens around its turns."""
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        marked = {str(text) for text in tokenizer.all_special_tokens}
        marked |= {str(token) for token in added.values() if getattr(token, "special", True)}
        own = {str(getattr(tokenizer, f"{name}_token", None) or "") for name in ("bos", "eos", "pad", "unk")}
        brackets = {text for text in map(str, added.values()) if _BRACKETS.fullmatch(text)}
        marks = {text for text in brackets if _MARK.fullmatch(text) or text in frame}
        written = f"{tokenizer.chat_template}{THOUGHT}{END_OF_THOUGHT}{OPEN}{CLOSE}"
        control = {text for text in marked if not _TAG.fullmatch(text) or text in frame} | marks | own
        every = marked | marks | own | {text for text in brackets if text in written}
        # A tokenizer searches for some tokens in the text as it is, and for others in the text as its normalizer leaves it.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        normalized = {str(token) for token in added.values() if getattr(token, "normalized", False)}
        normalise = getattr(normalizer, "normalize_str", None) if every & normalized else None
        self._any, self._control = (_splitter(texts, texts & normalized, normalise) for texts in (every, control))

    def as_text(self, text: str) -> str:
        """The text with a space inside every match of one of the tokens."""
        return self._any(text)

    def of_stranger(self, message: Message) -> Message:
        """A message of a tool, a program or a later user: none of the tokens is written."""
        return self._harmless(message, self._any)

    def of_prompt(self, message: Message) -> Message:
        """A message of a prompt: no control token is written; of a tool's message, no special token."""
        return self._harmless(message, self._any if message.get("role") == "tool" else self._control)

    def of_tools(self, tools: Any) -> Any:
        """Schemas of tools: names, descriptions and values write no control token."""
        return _deep(tools, self._control)

    def _harmless(self, message: Message, split: Split) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            message = {**message, "content": "" if content is None else joined_parts(content)}
        found: Message = _deep(message, split)
        return found


def joined_parts(content: Any, where: str = "content", kinds: Sequence[str] = ("text",), between: str = "") -> str:
    """The text of a content that is a list of ``{"type": "text", "text": ...}``, or of parts of other ``kinds``.

    Joined before the search: a token may extend over two parts. Raises ``InvalidRequestError`` for parts of other
    types, and for other types than a list.
    """
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is {type(content).__name__}; it must be text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        if not isinstance(part, Mapping):
            raise InvalidRequestError(f'{at} is {type(part).__name__}; a part is {{"type": "text", "text": ...}}')
        if (kind := part.get("type")) not in kinds:
            told = f"{at} is of type {kind!r}; must be {', '.join(kinds)}: the policies read text alone"
            raise InvalidRequestError(told, param=at)
        if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise InvalidRequestError(f"{at}.text is {type(text).__name__}; it must be text")
        texts.append(text)
    return between.join(texts)


def _splitter(texts: Iterable[str], normalized: Iterable[str], normalise: Callable[[str], str] | None) -> Split:
    """Puts a space inside every match of a token, and of ``normalized`` ones in the text after ``normalise``."""
    plain = _matching(texts)
    if normalise is None:
        return lambda text: _split(text, plain)
    normal, read = _matching(map(normalise, normalized)), normalise

    def split(text: str) -> str:
        text = _split(text, plain)
        return _split(seen, normal) if normal.search(seen := read(text)) else text

    return split


def _matching(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")


def _split(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda m: f"{m.group()[0]} {m.group()[1:]}", text)


def _deep(value: Any, split: Split) -> Any:
    if isinstance(value, str):
        return split(value)
    if isinstance(value, Mapping):
        return {_deep(name, split): _deep(inner, split) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_deep(inner, split) for inner in value]
    return value


_DUMMY_USER: Message = {"role": "user", "content": "question"}
_MARKER = "ROLLMILL-TURN-"  # plain ASCII that no template looks for and no tokenizer holds as a special token
_DUMMY_TURN: Message = {"role": "assistant", "content": _MARKER}
_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedExample:
    """A dialogue as token ids, and which of them the assistant is taught to write (its text and its stop token)."""

    token_ids: tuple[int, ...]
    is_assistant: tuple[bool, ...]  # as long as token_ids


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the beginning that two sequences share."""
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


class Chat:
    """A tokenizer with its chat template, for growing conversations.

    Results are cached: the samples of a task group share their prompt and most of their tool results.
    """

    def __init__(
        self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None, assistant_prefill: str = ""
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template: save the model with one (chat_template.jinja)")
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments or {})
        self._prefill = assistant_prefill
        # The Rust tokenizer behind a transformers one: the same ids at a fraction of the wrapper's time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cached_prompt = lru_cache(_CACHE_SIZE)(self._prompt_of_json)
        self._cached_encode = lru_cache(_CACHE_SIZE)(self._encode_inside)
        self._followed: set[tuple[str, ...]] = set()
        self._by_thinking: dict[bool, Chat] = {}
        self._by_prefill: dict[str, Chat] = {"": self}
        self._special = SpecialText(tokenizer, self._render([_DUMMY_USER, _DUMMY_TURN, _DUMMY_USER], invite=False))
        self.end_of_turn_id, self._end = self._find_end_of_turn()
        self._inside = self._end if self.encode(f"{self._end}x")[1:] != self.encode("x") else ""
        self._before = self._find_context()
        self.stop_token_ids = self._find_stop_tokens()
        self._closing = self._find_closing()
        self.lists_tools = self._find_whether_tools_are_listed()

    # -- text <-> ids -------------------------------------------------------------------------------------------

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text; special tokens are recognised and none are added."""
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens such as ``<tool_call>`` kept, but without stop tokens at the end."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.stop_token_ids:
            end -= 1
        ids = list(token_ids[:end])
        # Behind another token: a decoder may take the first space of a text, which is one of the turn's here.
        return self._decode([self.end_of_turn_id, *ids])[len(self._before) :] if self._before else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        source = self._backend if self._backend is not None else self._tokenizer
        return str(source.decode(ids, skip_special_tokens=False))

    def _encode_inside(self, text: str) -> tuple[int, ...]:
        """Token ids of text within a dialogue: without the space that some tokenizers put before the first word of a text."""
        return self.encode(self._inside + text)[bool(self._inside) :]

    def _find_context(self) -> str:
        """The text of the end of a turn, behind which turns are decoded; empty for a decoder that puts spaces between tokens."""
        if self._backend is None:
            return ""
        before, token = self._decode([self.end_of_turn_id]), self.encode("x")[-1]
        alone, behind = self._decode([token]), self._decode([self.end_of_turn_id, token])
        spaced = behind != before + alone and self._backend.id_to_token(token) == alone
        return before if behind.startswith(before) and not spaced else ""

    # -- conversations ------------------------------------------------------------------------------------------

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Ids of the messages and of the template's invitation to the assistant.

        No text of a message or a schema becomes a control token (``special_text``); a tool's message writes no added
        token at all. Raises ``InvalidRequestError`` for content that is neither text nor a list of text parts.
        """
        key = orjson.dumps([list(messages), list(tools) if tools else None])
        return self._cached_prompt(key)

    def continuation_ids(self, messages: Sequence[Message], last_sampled: int | None = None) -> tuple[int, ...]:
        """Ids that follow an assistant turn: its end, ``messages``, and the invitation to the next turn.

        ``last_sampled`` is the last id of the turn: when the policy ended its turn itself, with any stop token, the end of
        turn is there already and is not repeated. Text of special tokens in a message stays text: the output of a program cannot end
        a turn or begin one.
        """
        text = self._after_dummy_turn([self._special.of_stranger(m) for m in messages], invite=True)
        ids = self._cached_encode(text)
        closing = self._closing
        if last_sampled in self.stop_token_ids and closing and ids[: len(closing)] == closing:
            return ids[closing.index(last_sampled) + 1 if last_sampled in closing else len(closing) :]
        # Templates without an end of turn: a policy ends its turn with the token that begins the next one.
        return ids[1:] if last_sampled in self.stop_token_ids and ids[:1] == (last_sampled,) else ids

    def check_follows(self, messages: Sequence[Message]) -> None:
        """Raises ``InvalidRequestError`` for a message that the template does not show after an assistant turn."""
        roles = tuple(str(message.get("role")) for message in messages)
        if roles not in self._followed:
            self._check_shown(messages, "", [_DUMMY_USER, _DUMMY_TURN])
            self._followed.add(roles)

    def supervised(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> SupervisedExample:
        """A dialogue for supervised training, built from the same pieces as in a rollout."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise DatasetError("a dialogue needs a user turn and then an assistant turn")
        ids = list(self.prompt_ids(messages[: turns[0]], tools))
        mask = [False] * len(ids)
        for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            content = messages[turn]["content"]
            if not isinstance(content, str):
                raise DatasetError(f"the content of assistant turn {turn} is {type(content).__name__}; it must be text")
            written = (*self._cached_encode(content), self.end_of_turn_id)
            ids += written
            mask += [True] * len(written)
            if following == len(messages):
                break  # text after the last assistant turn has no target
            between = messages[turn + 1 : following]
            if not between:
                raise DatasetError(f"assistant turns {turn} and {following} have no message between them")
            read = self.continuation_ids(between, last_sampled=self.end_of_turn_id)
            ids += read
            mask += [False] * len(read)
        return SupervisedExample(token_ids=tuple(ids), is_assistant=tuple(mask))

    def as_text(self, text: str) -> str:
        """The text with a space inside every match of a special token, so that no part of the text begins or ends a
        turn."""
        return self._special.as_text(text)

    def with_thinking(self, thinking: bool | None) -> Chat:
        """The same chat with the template's thinking on or off (its ``enable_thinking``); None leaves its default.

        A template that knows no such switch gives the same chat back.
        """
        if thinking is None:
            return self
        if thinking not in self._by_thinking:
            made = Chat(self._tokenizer, {**self._arguments, "enable_thinking": thinking}, self._prefill)
            other = Chat(self._tokenizer, {**self._arguments, "enable_thinking": not thinking}, self._prefill)
            differs = made._invitation() != other._invitation()
            self._by_thinking |= {thinking: made, not thinking: other} if differs else {True: self, False: self}
        return self._by_thinking[thinking]

    def with_prefill(self, text: str) -> Chat:
        """The same chat in which every invitation to the assistant ends with ``text``: the assistant goes on from there.

        The text is part of the prompt or of the continuation, and tokenised together with it.
        """
        if self._prefill:
            assert text == self._prefill, "a chat has one prefill"
            return self
        if text not in self._by_prefill:
            self._by_prefill[text] = Chat(self._tokenizer, self._arguments, text)
        return self._by_prefill[text]

    @cached_property
    def thinks(self) -> bool:
        """Whether the template's invitation opens a thought, so that a turn begins within the thought."""
        return self._invitation().rstrip().endswith(THOUGHT)

    def _invitation(self) -> str:
        return self._render([_DUMMY_USER], invite=True)

    # -- the template -------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, invite: bool, tools: Any = None) -> str:
        text = self._tokenizer.apply_chat_template(
            [dict(m) for m in messages], tools=tools, tokenize=False, add_generation_prompt=invite, **self._arguments
        )
        return f"{text}{self._prefill}" if invite else str(text)

    def _prompt_of_json(self, key: bytes) -> tuple[int, ...]:
        messages, tools = orjson.loads(key)
        shown = [self._special.of_prompt(message) for message in messages]
        text = self._render(shown, invite=True, tools=self._special.of_tools(tools))
        self._check_shown(shown, text)
        return self.encode(text)

    def _check_shown(self, messages: Sequence[Message], text: str, before: Sequence[Message] = ()) -> None:
        """Raises ``InvalidRequestError`` for a message that the template leaves out; a content that it changes, say trims,
        is none."""
        unseen = [place for place, message in enumerate(messages) if str(message.get("content")).strip() not in text]
        if not unseen:
            return
        marked = [{**message, "content": f"{_MARKER}{place}."} for place, message in enumerate(messages)]
        text = self._render([*before, *marked], invite=False)
        for place in unseen:
            if marked[place]["content"] not in text:
                raise InvalidRequestError(
                    f"the chat template leaves out message {place + 1} of {len(messages)}, of the role "
                    f"{messages[place].get('role')!r}: the policy would not read it; put its text into another message"
                )

    def _after_dummy_turn(self, messages: Sequence[Message], *, invite: bool) -> str:
        """The text that the template writes after the content of an assistant turn."""
        text = self._render([_DUMMY_USER, _DUMMY_TURN, *messages], invite=invite)
        _, found, after = text.partition(_MARKER)
        if not found:
            raise ConfigError("the chat template does not show the content of assistant turns")
        return after

    def _find_end_of_turn(self) -> tuple[int, str]:
        """The token that ends an assistant turn, and its text. A template may write it between turns only."""
        ids = {str(token): number for number, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()}
        ids |= dict(zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True))
        last = self._after_dummy_turn([], invite=False)
        found = [(last.find(text), -len(text), text) for text in ids if text.strip() and text in last]
        eos = self._tokenizer.eos_token_id
        if not found and eos is None:
            raise ConfigError(
                "the chat template ends assistant turns with no special token and the tokenizer has no eos token: "
                "a policy could never end its turn"
            )
        end = min(found)[2] if found else next(text for text, number in ids.items() if number == eos)
        return ids[end], end

    def _find_closing(self) -> tuple[int, ...]:
        """The tokens after a turn up to the last stop token that ends it; empty if the template writes none.

        A template may write an end between turns that differs from the last one, several ends, and space before them. A token
        that begins the next turn ends none, unless no other does: it stands before a user's first turn too, and not before an
        assistant's.
        """
        user = {"role": "user", "content": f"{_MARKER}0."}
        opening, answered = self._render([user, _DUMMY_TURN], invite=False).partition(_MARKER + "0.")[::2]
        after = self._after_dummy_turn([user], invite=False).partition(_MARKER + "0.")[0]
        first, between, next_ = map(self._cached_encode, (opening, after, answered.partition(_MARKER)[0]))
        own = max(len(between) - _num_equal(between[::-1], first[::-1]), _num_equal(between, next_))
        ends = [place + 1 for place, token in enumerate(between[:own]) if token in self.stop_token_ids]
        if self.end_of_turn_id in between:
            ends.append(between.index(self.end_of_turn_id) + 1)
        return between[: max(ends, default=0)]

    def _find_stop_tokens(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        ids = {self.end_of_turn_id, *getattr(self._tokenizer, "further_stops", ())}
        return tuple(sorted(ids | ({int(eos)} if eos is not None else set())))

    def _find_whether_tools_are_listed(self) -> bool:
        """Whether the template shows the schemas of tools itself."""
        schema = {"name": _MARKER, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": schema}]
        return _MARKER in self._render([_DUMMY_USER], invite=True, tools=tools)


# --- Hugging Face models and tokenizers: loading, weight names, and the question whether two of them belong together.


_CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
)


def load_model(path: str | Path, dtype: str | torch.dtype = "float32") -> Any:
    """A causal language model in evaluation mode on the CPU, from a local directory or a hub name."""
    import torch

    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}; write float32, bfloat16 or float16")
    local = _is_local(path, "config.json")
    from transformers import AutoModelForCausalLM

    if local:
        read_object(Path(path) / "config.json")
        if (Path(path) / INDEX).is_file():
            weight_files(Path(path))  # transformers opens any path that an index names
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=resolved,
            local_files_only=local,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickled
        )
    except RuntimeError as error:  # transformers' word for weights whose shapes do not fit the config
        raise ModelMismatchError(f"{path}: weights do not fit config.json: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # the code of any architecture, with numbers of any author
        pickled = sorted(each.name for each in Path(path).glob("*.bin")) if local else []
        hint = f"; {pickled[0]} is pickled and is not read: convert the weights to safetensors" if pickled else ""
        raise ConfigError(
            f"{path}: cannot load a causal language model: {type(error).__name__}: {error}{hint}"
        ) from error
    model, found = loaded
    # transformers only warns about these, and goes on with random weights.
    wrong = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    if wrong:
        raise ModelMismatchError(
            f"{path}: weights do not fit config.json: "
            + "; ".join(f"{kind.replace('_', ' ')} {', '.join(map(str, keys[:4]))}" for kind, keys in wrong.items())
        )
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in the directory of a model, with the stop tokens of its generation_config.json as ``further_stops``, which
    ``Chat`` reads: the model ends turns with them too."""
    local = _is_local(path, "tokenizer_config.json")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=local, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises the base class
        raise ConfigError(
            f"{path}: cannot load a tokenizer: {type(error).__name__}: {error}; copy its files again from where the model came from"
        ) from error
    tokenizer.further_stops = _stops_of_generation(path, local, len(tokenizer))
    return tokenizer


def _stops_of_generation(path: str | Path, local: bool, num_tokens: int) -> tuple[int, ...]:
    from transformers import GenerationConfig

    if local and not (Path(path) / "generation_config.json").is_file():
        return ()
    try:
        told = GenerationConfig.from_pretrained(str(path), local_files_only=local).eos_token_id
    except OSError as error:
        if local:
            raise ConfigError(f"{path}/generation_config.json cannot be read: {error}") from error
        return ()  # the hub has none of this model
    stops = () if told is None else tuple(told) if isinstance(told, list) else (told,)
    if not all(isinstance(stop, int) and 0 <= stop < num_tokens for stop in stops):
        ids = f"the ids of the tokens that end a turn, of 0 to {num_tokens - 1}"
        raise ConfigError(f"{path}/generation_config.json: eos_token_id is {told!r}: write {ids}")
    return stops


def check_model_matches(
    model: Any, *, tokenizer: Any = None, config: Any = None, where: str = "the other model"
) -> None:
    """``ModelMismatchError`` when a tokenizer has ids that the model lacks, or a config is of another architecture."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise ModelMismatchError(
            f"vocabulary does not match: the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size} "
            "embedding rows; use the tokenizer that was saved with the model, or resize the embeddings"
        )
    if config is not None:
        differences = [
            f"{name} is {getattr(model.config, name, None)} here but {getattr(config, name, None)} there"
            for name in _CONFIG_FIELDS
            if getattr(model.config, name, None) != getattr(config, name, None)
        ]
        if differences:
            raise ModelMismatchError(f"architecture does not match {where}: {'; '.join(differences)}")


def check_same_vocabulary(own: Any, other: Any, where: str) -> None:
    """``ModelMismatchError`` unless two tokenizers give every token the same id; ``where`` names the other's model."""
    difference = vocabulary_difference(own.get_vocab(), other.get_vocab())
    if difference is not None:
        raise ModelMismatchError(f"vocabulary does not match {where}: {difference}")


def vocabulary_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """The difference between two maps of token to id, with the first tokens, and the remedy; None where they are equal.

    >>> vocabulary_difference({"a": 0}, {"a": 0, "b": 1})
    "1 tokens here, 2 there, 1 differ ('b' is missing here and 1 there); use models that share one tokenizer"
    """
    if own == other:
        return None
    differing = sorted(
        (token for token in own.keys() | other.keys() if own.get(token) != other.get(token)),
        key=lambda token: (own.get(token, len(own)), token),
    )
    examples = ", ".join(
        f"{token!r} is {own.get(token, 'missing')} here and {other.get(token, 'missing')} there"
        for token in differing[:3]
    )
    return (
        f"{len(own)} tokens here, {len(other)} there, {len(differing)} differ ({examples}); "
        "use models that share one tokenizer"
    )


def _is_local(path: str | Path, marker: str) -> bool:
    """Whether ``path`` is a directory; an absolute or dotted path that is none is a mistake, not a hub name."""
    if Path(path).is_dir():
        if not (Path(path) / marker).is_file():
            raise ConfigError(f"{path}: no {marker} in this directory")
        return True
    if isinstance(path, Path) or str(path).startswith(("/", ".", "~")):
        raise ConfigError(f"{path}: no such directory")
    return False
