// One rollout as a person reads it: what was asked, every turn with its role, what was expected, and what training made of it.

(() => {
  "use strict";

  const { choice, clock, el, known, note, num, pill, put, seconds, table, words } = Rollmill.dom;
  const { written } = Rollmill.tokens;

  let shade = "none"; // kept from one rollout to the next

  // found: the server's answer; links: where closing and the other rollouts of the task group lead.
  function conversation(found, links) {
    return [
      el("header", { class: "about", "data-number": found.number },
        el("a", { class: "close", href: links.close, "aria-label": "Close the rollout (Esc)" }, "×"),
        el("h2", {}, pill(found.reward), el("span", {}, found.task_id ?? "unknown task")),
        el("p", { class: "soft" }, [`${found.task_group}/${found.slot}`, found.evaluation && `evaluation ${found.evaluation}`, found.step !== null && `trained in step ${found.step}`,
          found.step === null && !found.evaluation && words(found.fate), found.started_at && `${seconds(found.finished_at - found.started_at)} on ${found.replica}`, clock(found.written_at)].filter(Boolean).join(" · ")),
        siblings(found, links)),
      found.failure ? failure(found.failure) : body(found),
    ];
  }

  function siblings({ siblings: all, number }, links) {
    if (!all || all.length < 2) return null;
    return el("nav", { class: "siblings", "aria-label": "Rollouts of the same task group" }, el("span", { class: "soft" }, "same task"), all.map((one) =>
      el("a", { href: links.sibling(one.number), "aria-current": String(one.number === number), "aria-label": `slot ${one.slot}` }, pill(one.reward))));
  }

  const failure = ({ reason, detail }) => el("div", { class: "turn failed-rollout" }, el("h3", {}, `Failed: ${reason}`), el("pre", {}, detail));

  function body(found) {
    const place = el("div", { class: "conversation" });
    const draw = () => put(place,
      found.expected && el("div", { class: "expected" }, el("h3", {}, "Expected"), el("pre", {}, found.expected)),
      found.sequences.map((sequence, n) => ofSequence(sequence, n, found.sequences.length)),
      found.task_row && el("details", {}, el("summary", {}, "The task's row"), el("pre", {}, found.task_row)),
      metrics(found.metrics));
    draw();
    return [
      el("div", { class: "tools" }, el("span", { class: "soft" }, "colour tokens by"),
        choice("colour tokens by", [["none", "nothing"], ["logprob", "log-probability"], ["version", "version"]], shade, (value) => { shade = value; draw(); })),
      place,
    ];
  }

  function ofSequence(sequence, number, count) {
    const name = count > 1 ? `Sequence ${number}${known(sequence.parent) ? `, ${sequence.origin} of ${sequence.parent}` : ""}: ` : "";
    return el("section", { class: "sequence" },
      el("h3", {}, `${name}${sequence.policy} as ${sequence.role}`, sequence.attempt > 0 && `, attempt ${sequence.attempt}`, " ", count > 1 && pill(sequence.reward)),
      !sequence.are_text && note("The tokenizer of this policy is not on this machine: token ids are shown.", "warn"),
      el("ol", { class: "turns" }, sequence.turns.map((turn) => (turn.role === "policy" ? written(turn, sequence, shade) : read(turn)))),
      el("p", { class: "soft" }, `ended by ${words(sequence.stop)}`), training(sequence.use), metrics(sequence.metrics));
  }

  function read({ role, text }) {
    return el("li", { class: `turn ${role === "user" || role === "system" || role === "tool" ? role : "other"}` }, el("h4", {}, role), el("div", { class: "text" }, text));
  }

  // What the batch made of a sequence.
  function training(use) {
    if (!use) return note("In no batch.");
    const facts = [["training step", use.step], ["staleness", use.staleness], ["reward that was trained", num(use.trained_reward)],
      ["group", `mean ${num(use.group_mean)}, deviation ${num(use.group_std)} of ${use.group_size}`],
      ["advantage", use.advantage === null ? use.why : `${num(use.advantage)}${use.why ? `, ${use.why}` : ""}`],
      ["tokens before version", use.trained_from ? `${use.trained_from} are masked` : ""]];
    return el("dl", { class: "facts use" }, facts.filter(([, value]) => value !== "").map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  function metrics(found) {
    const pairs = Object.entries(found);
    return pairs.length ? el("details", {}, el("summary", {}, "Metrics"), table([["metric"], ["value", "right"]], pairs.map(([name, value]) => [name, num(value)]))) : null;
  }

  Rollmill.conversation = { conversation };
})();
