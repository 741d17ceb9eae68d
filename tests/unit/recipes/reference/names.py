"""The reference's recipes: AstraFlow's 343e808 and, for rStar2, RLinf's a3816b5. Knows no setting of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Recipes = frozenset[str]
"""Names of recipes, as the reference has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One recipe of the reference: the recipe here, and our names for the parts of its files."""

    here: str
    files: Mapping[str, str]  # file -> the inference service that it starts; "" for another file, "*" for all of them
    trainer: str = "trainer_base"  # the section that its trainers share
    models: Mapping[str, str]  # its name of a policy -> ours
    evaluations: Mapping[str, str]  # its name of an evaluation data set -> ours


def _math(kind: str, filtered: bool, data: str) -> str:
    return f"math-multi-agent/qwen3-8b-{kind}-m2po-delta-{'' if filtered else 'no-ds-'}{data}-data"


_BOTH = (True, False)
_DATA = ("dapo", "deepscaler")

PAIRS = frozenset(_math("actor-verifier", filtered, data) for filtered in _BOTH for data in _DATA)
SOLVERS = frozenset(_math("single-agent", filtered, data) for filtered in _BOTH for data in _DATA)
MATH = PAIRS | SOLVERS
DAPO = frozenset(name for name in MATH if name.endswith("dapo-data"))
DEEPSCALER = MATH - DAPO
UNFILTERED = frozenset(name for name in MATH if "-no-ds-" in name)
DAPO_PAIR = frozenset({_math("actor-verifier", True, "dapo")})
UNFILTERED_DAPO_PAIR = frozenset({_math("actor-verifier", False, "dapo")})
UNFILTERED_DAPO_SOLVER = frozenset({_math("single-agent", False, "dapo")})

CODE_DELTA = frozenset({"code/qwen3-8b-m2po-delta"})
CODERS = frozenset({"code/qwen3-8b-m2po-full"}) | CODE_DELTA
CODE_BASELINE = frozenset({"code-multi-agent/qwen3-8b-single-agent-m2po-full"})
TWO_NODES = frozenset({"code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node"})
CODE = CODERS | CODE_BASELINE | TWO_NODES

ALFWORLD = frozenset(f"alfworld/qwen2.5-7b-instruct-m2po-{transfer}" for transfer in ("full", "delta"))
WEBSHOP = frozenset(f"webshop/qwen2.5-7b-instruct-m2po-{transfer}" for transfer in ("full", "delta"))
AGENTS = ALFWORLD | WEBSHOP
AGENTS_DELTA = frozenset(name for name in AGENTS if name.endswith("delta"))

M2PO = MATH | CODE | AGENTS
DELTA = MATH | CODE_DELTA | AGENTS_DELTA

RSTAR2_7B = frozenset({"rstar2/rstar2-qwen2.5-7b-megatron"})
RSTAR2_1_5B = frozenset({"rstar2/rstar2-qwen2.5-1.5b-megatron"})
RSTAR2 = RSTAR2_7B | RSTAR2_1_5B

_MATH_SETS = {name: name for name in ("aime24", "aime25", "amc", "math500")} | {"minerva": "minerva_math"}
_CODE_SETS = {"humaneval": "humaneval", "lcb_v5": "livecodebench_v5", "deepcoder_codeforces": "codeforces"}


def _m2po(name: str) -> Reference:
    files = {"raas_a.yaml": "a", "raas_b.yaml": "b"} if name in TWO_NODES else {"raas.yaml": "*"}
    if name in AGENTS:
        models, evaluations = {"default": "model0"}, {"valid": name.partition("/")[0]}
    else:
        models = {model: model for model in ("model0", "model1")[: 2 if name in PAIRS | TWO_NODES else 1]}
        evaluations = _MATH_SETS if name in MATH else _CODE_SETS
    return Reference(
        here=name,
        files={"experiment.yaml": "", **files},
        trainer="trainer" if name in AGENTS | CODE_BASELINE else "trainer_base",
        models=models,
        evaluations=evaluations,
    )


def _rstar2(name: str) -> Reference:
    size = "1.5b" if name in RSTAR2_1_5B else "7b"
    file = f"{name.partition('/')[2]}.yaml"
    return Reference(here=f"rstar2/qwen2.5-{size}-instruct-grpo-roc", files={file: ""}, models={}, evaluations={})


REFERENCES: dict[str, Reference] = {name: _m2po(name) for name in sorted(M2PO)} | {
    name: _rstar2(name) for name in sorted(RSTAR2)
}
