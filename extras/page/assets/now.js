// What goes round now, and who waits for whom.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { card, clock, el, known, note, num, percent, put, seconds, table, words } = Rollmill.dom;

  const REWARD = "rollout_reward_mean", LOSS = "trainer/loss"; // of a row of a training step

  function now(place, page) {
    let last = "";
    return {
      async update() {
        const told = await get(`runs/${page.run}/state`);
        const text = JSON.stringify(told);
        if (text === last) return; // nothing new: what is open or focused stays
        last = text;
        put(place, problems(told.problems), told.state ? shown(told.state, told.why_not_live) : note("reading the run …"));
      },
    };
  }

  // Why a part of the run cannot be shown.
  function problems(found, only = null) {
    return Object.entries(found ?? {})
      .filter(([part]) => only === null || only.includes(part) || part === "run")
      .map(([, text]) => note(text, "bad"));
  }

  function shown(state, why) {
    const at = state.now;
    return [
      why && note(`The orchestrator does not answer, so this is what the files say: ${why}`, "warn"),
      at.stalls.map(stall),
      at.warnings.map((text) => note(text, "warn")),
      at.threshold && note(at.threshold),
      ring(state),
      el("div", { class: "columns" },
        card("Who waits for whom", waits(at.waits), time(state.time)),
        el("div", {}, verdict(state.verdict), evaluations(state.evaluations), facts(state))),
      at.replicas.length > 0 && replicas(at.replicas),
    ];
  }

  function stall({ component, cause, detail, since, advice }) {
    return el("section", { class: "stall", role: "alert" },
      el("h2", {}, `Stalled: ${component}, ${cause}`), el("p", {}, detail),
      advice && el("p", {}, el("b", {}, "What to do: "), advice),
      el("p", { class: "soft" }, `since ${clock(since)}`));
  }

  function ring(state) {
    const at = state.now;
    const slots = at.replicas.reduce((sum, one) => sum + one.num_slots, 0);
    const running = at.replicas.reduce((sum, one) => sum + one.num_running, 0);
    const stage = (name, value, unit, ...below) => el("li", {}, el("h3", {}, name),
      el("p", { class: "figure" }, value, unit && el("small", {}, ` ${unit}`)), below.map((text) => text && el("p", { class: "soft" }, text)));
    const many = at.policies.length > 1;
    const each = (tell) => at.policies.map((one) => (many ? `${one.policy}: ${tell(one)}` : tell(one))).join(" · ") || "–";
    return el("section", { class: "card ring", "aria-label": "What goes round" },
      el("div", { class: "head" }, el("h2", {}, state.is_live ? "What goes round now" : "Where the run stood at its last entry"),
        el("span", { class: "soft" }, at.time)),
      el("ol", { class: "stages" },
        stage("Rollouts", at.replicas.length ? `${running} / ${slots}` : num(at.rollouts), at.replicas.length ? "slots" : "finished",
          at.replicas.length > 0 && `${num(at.tokens_per_s, 0)} tokens/s on ${at.replicas.length} replica${at.replicas.length > 1 ? "s" : ""}`),
        stage("Experience", state.is_live ? each((one) => num(one.num_buffered)) : num(at.trained_tokens), state.is_live ? "buffered" : "trained tokens",
          state.is_live && `${each((one) => num(one.num_expected))} expected, quota ${each((one) => num(one.quota))}`),
        stage("Training", each((one) => `${num(one.version)} / ${num(one.num_steps)}`), "steps",
          each((one) => [one.trainer_state, known(one.metrics[LOSS]) && `loss ${num(one.metrics[LOSS])}`].filter(Boolean).join(", "))),
        stage("Weights", each((one) => `v${num(one.version)}`), "", held(at), each((one) => `staleness ≤ ${num(one.staleness_max)}`)),
        stage("Reward", each((one) => num(one.metrics[REWARD])), "", "rollouts since the batch before")),
      at.policies.map((one) => el("progress", { max: one.num_steps || 1, value: one.version, "aria-label": `steps of ${one.policy}` })));
  }

  function held(at) {
    const versions = at.replicas.flatMap((one) => Object.values(one.versions));
    if (!versions.length) return "";
    const [low, high] = [Math.min(...versions), Math.max(...versions)];
    return low === high ? `replicas hold v${high}` : `replicas hold v${low} to v${high}`;
  }

  function waits(found) {
    return found.length ? el("ul", { class: "waits" }, found.map((text) => el("li", {}, text))) : null;
  }

  // One bar for each component: work, waits by their cause, and nothing to do.
  function time(bars) {
    if (!bars.length) return note("No component has reported its time yet.");
    return [
      el("div", { class: "bars" }, bars.map(({ component, segments }) => [
        el("span", { class: "name" }, component),
        el("div", { class: "bar", role: "img", "aria-label": segments.map((s) => `${percent(s.share)} ${s.activity}`).join(", ") },
          segments.map((one) => {
            const label = `${percent(one.share)} ${one.activity.replace(" -> ", " → ")}`;
            const part = el("span", { class: one.kind, title: label }, one.share > 0.12 ? label : "");
            part.style.flexGrow = String(one.share);
            return part;
          })),
      ])),
      el("p", { class: "legend soft" }, ["work", "wait", "idle"].map((kind) => el("span", {}, el("i", { class: kind }),
        { work: "work", wait: "waits for the component behind the arrow", idle: "nothing to do" }[kind]))),
    ];
  }

  function verdict(found) {
    if (!found) return null;
    const learned = found.learning.map((one) => el("p", { class: one.learned ? "good" : one.learned === null ? "soft" : "warn" },
      one.learned === null ? `${one.policy}: too few steps for a verdict (${one.num_steps})`
        : `${one.policy} ${one.learned ? "has learned" : "has not learned"}: reward of ${one.measured} ${change(one.change)}`));
    return card("Doctor", learned, found.findings.map((one) => el("details", { class: "finding" },
      el("summary", {}, `${one.policy}: ${words(one.failure)}`), el("p", {}, one.evidence), el("p", {}, el("b", {}, "Try: "), one.remedy))));
  }

  function change(one) {
    if (!one) return "";
    const sign = (value) => `${value >= 0 ? "+" : ""}${num(value)}`;
    return `${num(one.first)} → ${num(one.last)}, change ${sign(one.last - one.first)} (95%: ${sign(one.low)} to ${sign(one.high)})`;
  }

  function evaluations(found) {
    if (!found.length) return null;
    const newest = found.slice(-8);
    const label = ({ mean_reward: mean }) => (mean && known(mean.low) ? `${num(mean.low)} – ${num(mean.high)}` : "");
    return card("Evaluations", table([["evaluation"], ["data set"], ["reward", "right"], ["95%", "right"], ["change", "right"]],
      newest.flatMap((one) => one.datasets.map((of, n) => [n ? "" : one.name + one.played_by + (one.num_failed ? `; ${one.num_failed} failed` : ""), of.name, num(of.mean_reward?.value ?? one.mean_reward), label(of),
        one.difference && !n ? `${one.difference.value >= 0 ? "+" : ""}${num(one.difference.value)}` : ""])), { label: "evaluations" }));
  }

  function facts(state) {
    const pairs = [["recipe", state.recipe.name], ["seed", state.recipe.seed], ["directory", state.directory],
      ["newest entry", state.newest_at && clock(state.newest_at)], ["processes", state.held_by || "none runs"],
      ["checkpoints", Object.entries(state.checkpoints).map(([policy, step]) => `${policy} at step ${step}`).join(", ")],
      ["lines of metrics that cannot be used", state.skipped_rows || ""]];
    return card("Run", el("p", {}, state.recipe.description), el("dl", { class: "facts" },
      pairs.filter(([, value]) => value !== "" && value !== null).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  }

  function replicas(found) {
    return card("Replicas", table([["replica"], ["rollouts", "right"], ["tokens/s", "right"], ["versions"], ["lease", "right"]],
      found.map((one) => [one.replica_id + (one.draining ? " (draining)" : ""), `${one.num_running} / ${one.num_slots}`, num(one.tokens_per_s, 0),
        Object.entries(one.versions).map(([policy, version]) => `${policy}@${version}`).join(" "), seconds(one.lease_left_s)]), { label: "replicas" }));
  }

  Rollmill.now = { now, problems };
})();
