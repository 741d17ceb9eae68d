"""Rows about behaviour of the references' code that no setting of theirs controls."""

from __future__ import annotations

from tests.unit.recipes.reference.names import (
    AGENTS,
    CODE,
    M2PO,
    PAIRS,
    RSTAR2,
    TWO_NODES,
    UNFILTERED,
    UNFILTERED_DAPO_SOLVER,
    WEBSHOP,
)
from tests.unit.recipes.reference.reading import renamed
from tests.unit.recipes.reference.table import CODE as IN_CODE
from tests.unit.recipes.reference.table import absent, departs, rows, same

BEHAVIOUR_ROWS = rows(
    IN_CODE, M2PO | RSTAR2,
    absent("always of the whole minibatch: the gradient must not depend on how sequences are packed", {
        "second moments of M2PO": "of each micro-batch",
    }, of=M2PO),
    departs(
        "advantage groups", "all attempts of a role in one", "policies.*.batch.group_by", "attempt",
        "a second try follows a rejection, so its mean is another one; `policy` puts them together", of=PAIRS | TWO_NODES,
    ),
    same(
        "sequences older than `max_staleness`", "dropped", "policies.*.batch.late", renamed({"dropped": "drop"}), of=M2PO,
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
        "every wait has a deadline; a rollout that takes longer is in no statistics (`rollout.on_timeout: as_scored`)",
    ),
    absent("sampled work is kept: the others are compared with each other, two at least", {
        "a failed sample": "drops its whole group",
    }, of=M2PO),
    absent("the ratio must be exact: engine and trainer take log-probabilities over what top_p and top_k keep", {
        "log-probabilities of truncated sampling": "of the untruncated distribution",
    }, of=AGENTS),
    absent("the same turns, and `agent` is the chat template's `assistant`", {
        "opening of an episode": "a chat of instruction, example turns and task, with the roles `user` and `agent`",
    }, of=AGENTS),
    absent("BM25 over whole words, without Java: hits can differ", {
        "WebShop's search": "Lucene, which stems words and drops stop words",
    }, of=WEBSHOP),
    absent("drawn with `envgateway.webshop.seed`, or read from a file: runs can be compared", {
        "WebShop's prices and price limits": "drawn anew by each server",
    }, of=WEBSHOP),
    departs(
        "time of all tests of a program together", "100 s", "envgateway.sandbox.judging_time_s", 300.0,
        "a right program that is slow on many tests passes; one that takes longer has failed, as there", of=CODE - TWO_NODES,
    ),
    departs(
        "time of all tests of a program together", "300 s, 100 s in evaluations", "envgateway.sandbox.judging_time_s", 300.0,
        "evaluations judge as training does", of=TWO_NODES,
    ),
    departs(
        "memory of a program", "5 GiB of address space", "envgateway.sandbox.memory_bytes", 2147483648,
        "of resident memory; 64 programs run at once beside the trainers", of=CODE,
    ),
    absent("blocks labelled python go before others; then the last of at least 20 characters, closed or cut off by the end", {
        "the program in an answer": "the last closed fenced block of at least 20 characters, whatever its label",
    }, of=CODE),
    absent("exact, also as `100000001.0` for `100000000`; decimals within 1e-5 (relative) or 1e-6, also beside words", {
        "printed integers": "within 1e-5 where a line is no plain integer; decimals where all lines are one number each",
    }, of=CODE),
    absent("a list of one as itself or as its part, and a text as itself or as its JSON where the row does not say which", {
        "an expected value of a call": "a list as itself or as its first part, a text as its JSON",
    }, of=CODE),
    absent("of all arguments, which a call keeps", {
        "text keys of a dictionary that are integers": "become integers in the first argument, and the other arguments are dropped",
    }, of=CODE),
    absent("other than 0 is a runtime error", {"the exit code of a program": "ignored"}, of=CODE),
    absent("a program is what Python runs as one: it does not compile, and names of the module are global", {
        "`return` outside of a function": "ends the program, whose text becomes the body of a function",
    }, of=CODE),
    absent("`run` names the file and the command that fetches it before any process starts", {
        "LiveCodeBench's file is missing": "the first evaluation fails",
    }, of=CODE),
    absent("the program alone: it is what is run", {"text of the coder that the verifier reads": "the whole answer"}, of=TWO_NODES),
    absent("then there is none, and nothing is earned for validity: a wrong program does not show the right answer", {
        "no solution of a row passes all tests": "the best of them is the reference solution",
    }, of=TWO_NODES),
    absent("a test case counts once", {"a generated case that stands twice": "counts twice"}, of=TWO_NODES),
    absent("they are run: the decision to try again reads no ground truth", {
        "generated cases with fewer lines than the task's own tests": "refused as fragments",
    }, of=TWO_NODES),
    absent("gRPC over TLS, with keys of the run; node 1 is not dialled, so there is no handshake port", {
        "between two nodes": "HTTP at the address of node 0, and a handshake port for weights",
    }, of=TWO_NODES),
    absent("the last tag decides: the review may weigh both before", {"several verdict tags": "the first decides"}, of=PAIRS),
    absent("whole words in reviews that ended: `disapprove` does not approve, and a budget is no verdict", {
        "a verdict without a tag": "`approve` or `reject` anywhere in the text",
    }, of=PAIRS),
    departs(
        "evaluations in flight", "at most 128, unless `max_concurrent_evals` says otherwise", "evaluation.max_in_flight", None,
        "the slots of the replicas that evaluate are the bound: one of two services, or the only one",
        of=M2PO - UNFILTERED_DAPO_SOLVER,
    ),
    absent("written for this project, for the same protocol", {"texts of prompts": "its own"}),
    departs(
        "programs at once", "no setting bounds them", "envgateway.sandbox.num_slots", 64,
        "sandboxes beside the trainers are bounded; over Redis, workers of other nodes run more", of=CODE,
    ),
    departs(
        "staleness", "0: rollouts and training take turns", "policies.*.batch.max_staleness", 1,
        "they overlap, and slow rollouts are trained later: no token at an age above `max_token_age`, which is 4; 0 makes them take "
        "turns",
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
    absent("the update is left out, and those after it in its step: the gradient must not depend on packing", {
        "a mean ratio above `early_stop_imp_ratio`": "a micro-batch of all ranks loses its gradient",
    }, of=RSTAR2),
    absent("the text of the last turn: a number that only a tool printed is no answer", {
        "text that is graded": "the whole response, tool output included",
    }, of=RSTAR2),
    absent("all turns: an answer in the first turn is well formed", {
        "turns of the format term": "all but the first, whose header is in the prompt",
    }, of=RSTAR2),
    absent("a call has failed when the judge's status says so: a program that prints \"error\" has not, a time-out has", {
        "failed tool calls": "those with the word \"error\" in their response",
    }, of=RSTAR2),
)  # fmt: skip
