// The fate of everything that was issued: by training step as bars, in sums, and by length.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { card, choice, el, note, num, percent, put, table, words } = Rollmill.dom;
  const { problems } = Rollmill.now;

  const COLORS = {
    trained: "work", in_training: "c0", waiting_for_a_batch: "c0", waiting_for_siblings: "c0", being_played: "c0", masked: "c4",
    equal_rewards: "c1", too_old: "c3", surplus: "c5", truncated: "c3", resampled_away: "c5", failed: "bad", timed_out: "bad", cancelled: "c5",
  };
  const DROPPED = ["too_old", "surplus", "truncated", "resampled_away", "equal_rewards"];
  const FLYING = ["in_training", "waiting_for_a_batch", "waiting_for_siblings", "being_played"];
  const MOST_BARS = 60;

  function fates(place, page) {
    let unit = "tokens";
    let last = "";
    let told = null;
    const draw = () => put(place, problems(told.problems, ["fates", "rollouts"]), told.fates
      ? Object.entries(told.fates.policies).map(([policy, found]) => ofPolicy(policy, found, told.fates, unit, (value) => { unit = value; draw(); }, page))
      : note("Counting the fates of all rollouts …"));
    return {
      async update() {
        told = await get(`runs/${page.run}/fates`);
        const text = JSON.stringify(told);
        if (text !== last) draw();
        last = text;
      },
    };
  }

  const label = (fate) => (DROPPED.includes(fate) ? "dropped: " : FLYING.includes(fate) ? "in flight: " : "") + words(fate);

  function ofPolicy(policy, found, whole, unit, choose, page) {
    const names = Object.keys(found.total.fates);
    return [
      card(`${policy}: where its rollouts went`,
        choice("count", [["tokens", "tokens"], ["rollouts", "rollouts"], ["sequences", "sequences"], ["task_groups", "task groups"]], unit, choose),
        bars(found.steps, names, unit, page),
        el("p", { class: "legend" }, names.filter((name) => found.total.fates[name][unit]).map((name) => el("span", {}, el("i", { class: COLORS[name] ?? "idle" }), label(name))))),
      el("div", { class: "columns" }, card("In all", totals(found.total)), card("By length", lengths(found))),
      Object.keys(found.total.failures).length > 0 && card("Failures", table([["reason"], ["rollouts", "right"]], Object.entries(found.total.failures).map(([why, n]) => [why, num(n)]))),
      !whole.adds_up && note(`Sums that do not come out: ${whole.checks.filter((one) => !one.holds).map((one) => `${one.what} (${one.expected} and ${one.found})`).join("; ")}`, "bad"),
      whole.records_unreadable > 0 && note(`${whole.records_unreadable} records of the journal cannot be read.`, "bad"),
    ];
  }

  // One column for each step, or for several where there are many.
  function bars(steps, names, unit, page) {
    const each = Math.max(1, Math.ceil(steps.length / MOST_BARS));
    const columns = [];
    for (let at = 0; at < steps.length; at += each) {
      const part = steps.slice(at, at + each);
      const sums = names.map((name) => [name, part.reduce((sum, step) => sum + (step.fates[name]?.[unit] ?? 0), 0)]);
      columns.push({ name: part.length > 1 ? `${part[0].step} – ${part.at(-1).step}` : String(part[0].step), step: part[0].step, sums });
    }
    const highest = Math.max(1, ...columns.map(({ sums }) => sums.reduce((sum, [, n]) => sum + n, 0)));
    return [
      el("div", { class: "stack" }, columns.map(({ name, step, sums }) => {
        const whole = sums.reduce((sum, [, n]) => sum + n, 0);
        const told = `issued in step ${name}: ${num(whole)} ${words(unit)}\n${sums.filter(([, n]) => n).map(([fate, n]) => `${num(n)} ${label(fate)}`).join("\n")}`;
        return el("button", { type: "button", class: "column", title: told, "aria-label": told, on: { click: () => page.go("rollouts", { step }) } },
          sums.map(([fate, n]) => {
            const part = el("i", { class: COLORS[fate] ?? "idle" });
            part.style.height = `${(100 * n) / highest}%`;
            return part;
          }));
      })),
      el("p", { class: "axis soft" }, el("span", {}, `step ${columns[0]?.name ?? ""}`), el("span", {}, "issued in training step"), el("span", {}, columns.at(-1)?.name ?? "")),
    ];
  }

  function totals(total) {
    const tokens = Math.max(1, total.sampled.tokens);
    const rows = Object.entries(total.fates).map(([fate, n]) => [label(fate), num(n.task_groups), num(n.rollouts), num(n.sequences), num(n.tokens), percent(n.tokens / tokens)]);
    return table([["fate"], ["groups", "right"], ["rollouts", "right"], ["sequences", "right"], ["tokens", "right"], ["", "right"]],
      [["issued", num(total.issued.task_groups), num(total.issued.rollouts), "", "", ""], ...rows], { label: "fates in all" });
  }

  function lengths(found) {
    if (!found.lengths.length) return note("No sequence has its fate yet.");
    return [
      table([["length"], ["tokens", "right"], ["sequences", "right"], ["trained", "right"]],
        found.lengths.map((band) => [band.quantiles, `${num(band.shortest)} – ${num(band.longest)}`, num(band.sequences), percent(band.trained_share)]), { label: "by length" }),
      found.length_bias !== null && el("p", { class: "soft" },
        `Length bias ${num(found.length_bias)}: a trained sequence has ${num(found.mean_length_trained, 1)} tokens, one that was played ${num(found.mean_length_played, 1)}. 1 is none.`),
    ];
  }

  Rollmill.fates = { fates };
})();
