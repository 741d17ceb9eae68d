"""Rows about behaviour of the references' code that no setting of theirs controls."""

from __future__ import annotations

from tests.unit.recipes.reference.names import AGENTS, CODE, M2PO, PAIRS, RSTAR2, TWO_NODES, UNFILTERED
from tests.unit.recipes.reference.table import CODE as IN_CODE
from tests.unit.recipes.reference.table import absent, departs, rows

BEHAVIOUR_ROWS = rows(
    IN_CODE, M2PO | RSTAR2,
    departs(
        "second moments of M2PO", "of each micro-batch", "policies.*.algorithm.m2po_scope", "minibatch",
        "the gradient must not depend on how sequences are packed", of=M2PO,
    ),
    departs(
        "advantage groups", "all attempts of a role in one", "policies.*.batch.group_by", "attempt",
        "a second try follows a rejection, so its mean is another one; `policy` puts them together", of=PAIRS | TWO_NODES,
    ),
    departs(
        "groups of equal rewards", "dropped by a later filter although `filter_function` is left out", "policies.*.batch.dynamic_sampling",
        False, "off means off: the variants are compared with the filtered ones", of=UNFILTERED,
    ),
    departs(
        "last evaluation", "at the last multiple of its steps", "evaluation.at_end", True,
        "the last version is the one that is kept",
    ),
    departs(
        "time limit of a rollout", "none", "rollout.timeout_s", 1800.0,
        "every wait has a deadline; a rollout that takes longer is a failure, not a reward",
    ),
    absent("sampled work is kept: the others are compared with each other, two at least", {
        "a failed sample": "drops its whole group",
    }, of=M2PO),
    absent("the ratio must be exact: the engine's log-probabilities are renormalised over what top_p and top_k keep", {
        "log-probabilities of truncated sampling": "of the untruncated distribution",
    }, of=AGENTS),
    absent("all tests are run, so that the pass rate is one of all cases", {
        "tests of a program": "stop at the first failure",
    }, of=CODE),
    absent("`run` names the file and the command that fetches it before it starts anything", {
        "LiveCodeBench's file is missing": "the first evaluation fails",
    }, of=CODE),
    departs(
        "programs at once", "one process for each", "envgateway.sandbox.num_slots", 64,
        "sandboxes beside the trainers are bounded; over Redis, workers of other nodes run more", of=CODE,
    ),
    departs(
        "staleness", "0: rollouts and training take turns", "policies.*.batch.max_staleness", 1,
        "they overlap; the clip against the recorded log-probabilities covers one update, and 0 makes them take turns",
        of=RSTAR2,
    ),
    departs(
        "how weights reach engines", "in memory", "policies.*.weights.transfer", "delta",
        "engines are other processes; every tenth version travels in full", of=RSTAR2,
    ),
    departs(
        "tries of an evaluation task", "no evaluation data is named", "evaluation.samples_per_task", 4,
        "as the other recipes, at temperature 0.6", of=RSTAR2,
    ),
    absent("a call has failed when the judge's status says so: a program that prints \"error\" has not, a time-out has", {
        "failed tool calls": "those with the word \"error\" in their response",
    }, of=RSTAR2),
)  # fmt: skip
