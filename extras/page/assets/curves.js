// Curves of one run, or of several side by side: runs that differ in the seed alone are a line with a band.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { chart } = Rollmill.chart;
  const { el, note, put } = Rollmill.dom;

  const DASHES = { "-": null, ":": "2 3", "--": "6 4", "-.": "6 3 2 3" };
  const REWARDS = { "reward by step": "step", "reward by time": "time", "reward by tokens": "tokens" };

  function curves(place, page) {
    let last = "";
    let chosen = new Set(page.runs.map((one) => one.run));
    let charts = [];
    const picked = el("div", {});
    const drawn = el("div", { class: "charts" });
    const groups = el("p", { class: "legend groups" });
    put(place, picked, groups, drawn);
    if (page.runs.length > 1) {
      put(picked, el("fieldset", { class: "picks" }, el("legend", {}, "Compare"), page.runs.map(({ run, name }) => el("label", {},
        el("input", { type: "checkbox", checked: true, on: { change: (event) => pick(run, event.target.checked) } }), name))));
    }

    function pick(run, wanted) {
      chosen = new Set([...chosen].filter((one) => one !== run).concat(wanted ? [run] : []));
      update().catch((error) => put(drawn, note(error.message, "bad")));
    }

    async function update() {
      const runs = [...chosen].sort((a, b) => a - b);
      const told = runs.length ? await get("curves", { runs: runs.join(",") }) : { groups: [], panels: [] };
      const text = JSON.stringify(told);
      if (text === last) return;
      last = text;
      const alone = told.groups.length === 1;
      put(groups, (!alone || told.groups[0]?.seeds > 1) && told.groups.map((group, n) => el("span", {}, el("i", { class: `c${n % 6}` }), group.label,
        group.seeds > 1 && el("span", { class: "soft" }, " line: mean of the seeds; band: lowest and highest"))));
      charts.forEach((one) => one.unwatch());
      charts = told.panels.filter((panel) => panel.lines.length).map((panel) => chart(styled(panel, alone)));
      put(drawn, charts.length ? charts : note("No training step has finished yet: there is nothing to draw."));
    }

    return { update, close: () => charts.forEach((one) => one.unwatch()) };
  }

  // One run: a colour for each line. Several: a colour for each run, and the kinds of lines differ in their dashes.
  function styled(panel, alone) {
    const policies = new Set(panel.lines.map((line) => line.policy)).size > 1;
    const kinds = [...new Set(panel.points.map((point) => point.label))];
    return {
      ...panel,
      title: panel.title in REWARDS ? `Reward by ${REWARDS[panel.title]}` : panel.title[0].toUpperCase() + panel.title.slice(1),
      lines: panel.lines.map((line, n) => ({
        ...line, color: `c${(alone ? n : line.group) % 6}`, dash: DASHES[line.style],
        label: [policies && line.policy, line.label].filter(Boolean).join(", ") || (alone && panel.points.length ? "training rollouts" : ""),
      })).map((line) => (alone || line.group === 0 ? line : { ...line, label: "" })),
      points: panel.points.map((point) => ({ ...point, label: `evaluation ${point.label}`, kind: alone ? `evaluation ${point.label}` : "", color: `c${(alone ? 1 + kinds.indexOf(point.label) : point.group) % 6}` })),
    };
  }

  Rollmill.curves = { curves };
})();
