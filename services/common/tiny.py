"""Makes Hugging Face models in a second: random weights, a byte-level tokenizer, a chat template.

For trying a recipe without its model: the directory is an ordinary one and is loaded by the same code. Any text can be
encoded and decoded, because the tokenizer spells text without merges in bytes (beside a Qwen2 model, transformers
brings text into Unicode's composed form first, as Qwen's own tokenizer does). Independent of recipes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from services.common.errors import ConfigError

# --- A page of our own text from which the tiny tokenizer learns its merges: prose, formulas, programs, rooms, shops.


TEXT = r"""
What is the smallest whole number that leaves a remainder of 3 when it is divided by 7 and a remainder of 5 when divided by 11?
Let $x$ and $y$ be real numbers such that $x^2 + y^2 = 25$ and $xy = 12$. Find the value of $\frac{x}{y} + \frac{y}{x}$.
A triangle has sides of length $13$, $14$ and $15$. Compute the area of the triangle and the radius of its incircle.
Suppose that $f(x) = ax^3 + bx^2 + cx + d$ for all integers $x$, and $f(1) = 10$. Determine the sum of all possible values.
How many different ways are there to place 8 balls into 3 boxes so that no box is empty? Express your answer as a fraction
$\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers, and find $m + n$. \sqrt{2} \cdot \pi \left( \right)
The final answer is \boxed{204}. Therefore the probability is \boxed{\frac{1}{2}}. Reason step by step and put the answer
into the box. <answer>\boxed{70}</answer> Explain what you found. <verdict>approve</verdict> <verdict>reject</verdict>
Check the proposed solution of the problem and look for the first mistake. Solve the problem again from the beginning.

You are given an array of n integers and q queries. Each query contains two numbers l and r. Print the maximum of the sum
of the elements between them. The first line of the input contains a single integer t (1 <= t <= 100), the number of test
cases. Input: the only line contains two space-separated integers. Output: for each test case, print one integer, the
answer to the problem. Constraints: all values are integers. Example 1: Input: nums = [1,2,3], target = 4. Output: [0, 2]
Given a string s, return the longest substring of s without repeating characters. Write the whole program into one block.

```python
import sys
from typing import List, Optional, Dict, Tuple

class Solution:
    def maximumValue(self, nums: List[int], target: int) -> int:
        result = 0
        for i in range(len(nums)):
            for j in range(i + 1, len(nums)):
                if nums[i] + nums[j] == target:
                    return True
                else:
                    result = max(result, nums[i] - nums[j])
        return result

def check(candidate):
    assert candidate([1, 2, 3], 4) == 2
    assert candidate("abc", "") == False

def main() -> None:
    n, m = map(int, input().split())
    values = list(map(int, sys.stdin.readline().split()))
    count = {key: value for key, value in enumerate(values) if value > 0}
    while n > 0 and not count:
        n -= 1
    print(" ".join(str(value) for value in sorted(values)))
    print(n // 2, m % 10, sep="\n", end="")

if __name__ == "__main__":
    main()
```
```json
[{"input": "1 2\n", "output": "3\n"}, {"args": [[1, 2], 3], "expected": true}]
```
<tool_call>{"name": "python_code_with_standard_io", "arguments": {"code": "print(2 + 2)", "input": ""}}</tool_call>

You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, a drawer 3, a drawer 2, a shelf 1, a
cabinet 4, a countertop 1, a fridge 1, a garbagecan 1, a microwave 1, a sinkbasin 1, a stoveburner 2, and a toaster 1.
Your task is to: put a clean mug in the coffee machine. AVAILABLE ACTIONS: go to shelf 1, open drawer 2, take mug 1 from desk 1,
move mug 1 to cabinet 4, heat potato 1 with microwave 1, examine bed 1, inventory, look, help. You arrive at desk 1. On the
desk 1, you see a book 1 and a pencil 2. The drawer 2 is closed. You open the drawer 2. Nothing happens. You pick up the mug 1
from the desk 1. THOUGHT: I should look for it first. ACTION: go to desk 1

WebShop [SEP] Instruction: [SEP] i am looking for a wireless speaker that is fast charging, and price lower than 130.00 dollars
[SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] Rating: N.A. [SEP] Description [SEP] Features
[SEP] Reviews [SEP] Buy Now. Observation: Available Actions: {'has_search_bar': True, 'clickables': ['search', 'buy now']}
Thought: I think the first one fits; I look at it. Action: search[wireless speaker] Action: click[Buy Now] color: blue, size: large
You may call tools to help with the task. Write one JSON object with the name of the function and its arguments.
"""


Kind = Literal["qwen3", "qwen2"]
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING_TOKENS = ("<think>", "</think>")
QWEN_TOKENS = ("<|endoftext|>",)  # transformers adds it to every tokenizer that lies beside a Qwen2 model

# The turn layout of Qwen's models: tools listed in the system turn, neighbouring tool results in one user turn, thoughts of
# earlier turns left out, and an empty thought where thinking is switched off.
CHAT_TEMPLATE = r"""
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if told or tools -%}
{{- '<|im_start|>system\n' + told -}}
{%- if tools -%}
{{- '\n\nThese functions can be called:\n<tools>' if told else 'These functions can be called:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools>\nTo call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set said = message.content if loop.last else message.content.split('</think>')[-1].lstrip('\n') -%}
{{- '<|im_start|>assistant\n' + said + '<|im_end|>\n' -}}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


def build(directory: Path, seed: int, kind: Kind = "qwen3", vocabulary: int = 1024) -> None:
    """Write config, random weights and tokenizer into ``directory``; 0.3 M parameters."""
    tokenizer = train_tokenizer(
        [TEXT],
        vocabulary=vocabulary,
        special_tokens=[*TURN_TOKENS, *TOOL_TOKENS, *THINKING_TOKENS, *QWEN_TOKENS],
        chat_template=CHAT_TEMPLATE,
    )
    save_random_model(directory, tokenizer, seed=seed, kind=kind, num_layers=2)


def save_random_model(
    directory: Path,
    tokenizer: Any,
    *,
    seed: int,
    kind: Kind = "qwen3",
    hidden_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 24,
    intermediate_size: int = 288,
    context_length: int = 32768,
    rope_theta: float = 10_000.0,
) -> None:
    """Save the tokenizer and a causal language model of its vocabulary with seeded random weights and tied embeddings.

    ``rope_theta`` is the base of the rotary position embedding: a low one tells positions of a short context apart sooner.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": context_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "initializer_range": 0.5 / hidden_size**0.5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "qwen3":
        config = Qwen3Config(head_dim=head_dim, **sizes)
    elif kind == "qwen2":
        config = Qwen2Config(**sizes)
    else:
        raise ConfigError(f"there is no tiny model of kind {kind!r}; write qwen3 or qwen2")
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], *, vocabulary: int, special_tokens: Sequence[str], chat_template: str) -> Any:
    """A byte-level BPE with ``<|im_end|>`` at the end of turns; digits stay single, so that copying a number is copying
    digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=list(special_tokens),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


# --- Rows with reference answers for trying a recipe without its data, and for environments.


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "answer"}``.

    >>> next(sums(seed=1))["problem"]
    'What is $147 + 592$?'
    """
    draw = random.Random(seed)
    for number in itertools.count():
        left, right = draw.randrange(10, 1000), draw.randrange(10, 1000)
        yield {"id": f"sum-{number}", "problem": f"What is ${left} + {right}$?", "answer": str(left + right)}


def programs(seed: int) -> Iterator[dict[str, Any]]:
    """Endless ``{"id", "problem", "tests", "solution"}``: programs that read a number and print another."""
    draw = random.Random(seed)
    for number in itertools.count():
        factor, term = draw.randrange(2, 20), draw.randrange(1, 100)
        inputs = [draw.randrange(-50, 50) for _ in range(3)]
        cases = [{"stdin": f"{x}\n", "expected": f"{x * factor + term}\n"} for x in inputs]
        yield {
            "id": f"program-{number}",
            "problem": f"Read a whole number from standard input, multiply it by {factor}, add {term}, and print the result.",
            "tests": {"kind": "stdin", "cases": cases},
            "solution": f"print(int(input()) * {factor} + {term})\n",
        }


def places(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``{"id", "index", "messages"}``: the first tasks of an environment, by their place in its own list."""
    for index in range(count):
        yield {"id": str(index), "index": index, "messages": []}


def games(seed: int, data: str) -> Iterator[dict[str, Any]]:
    """``{"id", "game", "messages", "expert"}``: ALFWorld's games below a folder with the commands that win them, those
    with the shortest way first."""
    found = []
    for path in Path(data).rglob("game.tw-pddl"):
        walkthrough = json.loads(path.read_text(encoding="utf-8")).get("walkthrough")
        if walkthrough:
            found.append((len(walkthrough), path.relative_to(data).as_posix(), list(walkthrough)))
    for _, game, walkthrough in sorted(found):
        yield {"id": game, "game": game, "messages": [], "expert": walkthrough}
