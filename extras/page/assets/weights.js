// How weight versions reached the replicas.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { bytes, card, clock, el, note, num, put, seconds, table, words } = Rollmill.dom;

  function weights(place, page) {
    let last = "";
    return {
      async update() {
        const told = await get(`runs/${page.run}/weights`);
        const text = JSON.stringify(told);
        if (text === last) return;
        last = text;
        put(place, told.total ? shown(told) : note("No weight version has been reported yet. Scripted engines take none."));
      },
    };
  }

  function shown({ stages, replicas, transfers, total }) {
    const names = stages.map((stage) => stage.replace(/_s$/, ""));
    const newest = [...transfers].reverse();
    const sorted = newest.map((one) => one.serving_s ?? 0).sort((a, b) => a - b);
    const longest = Math.max(sorted[Math.floor(0.95 * sorted.length)] ?? 0, 1e-9); // one slow transfer does not hide the others
    return [
      card("By replica: medians", table(
        [["policy"], ["replica"], ["full", "right"], ["delta", "right"], ["failed", "right"], ["bytes", "right"], ["bits per change", "right"], ...names.map((name) => [words(name), "right"]), ["until served", "right"]],
        replicas.map((one) => [one.policy, one.replica, num(one.num_full), num(one.num_delta), failed(one.num_failed), bytes(one.bytes), num(one.bits_per_change, 1),
          ...stages.map((stage) => seconds(one[stage])), seconds(one.serving_s)]), { label: "transfers by replica" })),
      card(`Transfers: the newest ${newest.length} of ${num(total)}`,
        el("p", { class: "legend" }, names.map((name, n) => el("span", {}, el("i", { class: `c${n % 6}` }), words(name)))),
        table([["version"], ["replica"], ["as"], ["bytes", "right"], ["until served", "right"], ["stages"], ["begun"]],
          newest.map((one) => [`${one.policy}@${one.version}`, one.replica, one.error ? "" : `${one.encoding} by ${one.transport}`, bytes(one.payload_size_bytes),
            seconds(one.serving_s), one.error ? el("span", { class: "bad" }, one.error) : bar(one, stages, longest), clock(one.started_at)]), { label: "transfers" })),
    ];
  }

  const failed = (count) => (count ? el("span", { class: "bad" }, num(count)) : "0");

  function bar(one, stages, longest) {
    const told = stages.map((stage) => `${words(stage.replace(/_s$/, ""))} ${seconds(one[stage])}`).join(", ");
    const made = el("div", { class: "bar small", role: "img", "aria-label": told, title: told }, stages.map((stage, n) => {
      const part = el("span", { class: `c${n % 6}` });
      part.style.flexGrow = String(one[stage] || 0);
      return part;
    }));
    made.style.width = `${Math.min(100, Math.max(2, (100 * (one.serving_s ?? 0)) / longest))}%`;
    return made;
  }

  Rollmill.weights = { weights };
})();
