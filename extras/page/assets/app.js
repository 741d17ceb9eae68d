// The frame of the page: which run and which view is shown, by the address; keys; the theme; looking again.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { curves } = Rollmill.curves;
  const { el, note, put } = Rollmill.dom;
  const { events } = Rollmill.events;
  const { fates } = Rollmill.fates;
  const { now } = Rollmill.now;
  const { rollouts } = Rollmill.rollouts;
  const { weights } = Rollmill.weights;

  // A view is made with its place and the page, and has update(parameters); live ones are asked again every few seconds.
  const VIEWS = {
    now: ["Now", now, 2000],
    curves: ["Curves", curves, 5000],
    rollouts: ["Rollouts", rollouts, 0],
    fates: ["Fates", fates, 5000],
    weights: ["Weights", weights, 5000],
    events: ["Events", events, 5000],
  };

  const KEYS = [
    ["1 – 6", "the views, from the left"],
    ["/", "search rollouts"],
    ["j, k", "next and previous rollout"],
    ["n, p", "next and previous rollout of the same task"],
    ["← →", "in a turn: the next and the previous token; in a chart: along its curve"],
    ["Esc", "close the rollout"],
    ["d", "dark or light"],
    ["?", "these keys"],
  ];

  const main = document.getElementById("main");
  const page = { runs: [], run: 0, view: "", shown: null, go, parameters };

  function address() {
    const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
    return [name in VIEWS ? name : "now", new URLSearchParams(query ?? "")];
  }

  function parameters() {
    return address()[1];
  }

  // Goes to a view; `replace` leaves no step in the browser's history.
  function go(view, query = {}, replace = false) {
    const found = new URLSearchParams(Object.entries({ run: page.run || "", ...query }).filter(([, v]) => v !== "" && v !== null && v !== undefined));
    const hash = `#/${view}${found.size ? `?${found}` : ""}`;
    if (replace) {
      history.replaceState(null, "", hash);
      follow();
    } else location.hash = hash;
  }

  async function follow() {
    const [name, query] = address();
    const run = Math.min(Math.max(Number(query.get("run") ?? 0) || 0, 0), page.runs.length - 1);
    const other = name !== page.view || run !== page.run;
    page.run = run;
    document.getElementById("run").value = String(run);
    for (const tab of document.querySelectorAll("#tabs a")) {
      tab.setAttribute("aria-current", tab.dataset.view === name ? "page" : "false");
      tab.href = `#/${tab.dataset.view}${run ? `?run=${run}` : ""}`;
    }
    if (other) {
      page.view = name;
      page.shown?.close?.();
      const place = el("div", { class: `view ${name}` });
      put(main, place);
      page.shown = VIEWS[name][1](place, page);
      document.title = `${VIEWS[name][0]} · ${page.runs[run].name} · Rollmill`;
    }
    await look(query);
  }

  async function look(query = parameters()) {
    const shown = page.shown;
    try {
      await shown.update(query);
      for (const told of main.querySelectorAll(".failed")) told.remove();
    } catch (error) {
      if (error.name === "AbortError" || shown !== page.shown) return;
      for (const told of main.querySelectorAll(".failed")) told.remove();
      main.firstElementChild.prepend(note(error.message, "bad failed"));
    }
  }

  // One timer: a view that is not live is not asked again, nor is a page in the background.
  async function again() {
    const every = VIEWS[page.view]?.[2];
    if (every && !document.hidden) await look();
    await badge();
    setTimeout(again, every || 5000);
  }

  async function badge() {
    const chip = document.getElementById("state");
    try {
      const { state } = await get(`runs/${page.run}/state`);
      const word = state?.state ?? "reading";
      chip.textContent = word;
      chip.dataset.state = word.split(" ")[0];
    } catch {
      chip.textContent = "no answer";
      chip.dataset.state = "bad";
    }
  }

  function theme(next) {
    const saved = next ?? localStorage.getItem("theme");
    if (saved) document.documentElement.dataset.theme = saved;
    if (next) localStorage.setItem("theme", next);
  }

  function turnTheme() {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
  }

  function help() {
    const keys = document.getElementById("keys");
    put(keys, el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
      el("form", { method: "dialog" }, el("button", {}, "Close")));
    keys.showModal();
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing && event.key === "Escape") event.target.blur();
    if (typing || document.getElementById("keys").open) return;
    const number = Number(event.key);
    if (number >= 1 && number <= 6) go(Object.keys(VIEWS)[number - 1]);
    else if (event.key === "?") help();
    else if (event.key === "d") turnTheme();
    else if (event.key === "/") page.view === "rollouts" ? page.shown.key?.(event.key) : go("rollouts", { find: 1 });
    else if (!page.shown?.key?.(event.key)) return;
    event.preventDefault();
  }

  async function begin() {
    theme();
    document.getElementById("theme").addEventListener("click", turnTheme);
    document.getElementById("help").addEventListener("click", help);
    document.addEventListener("keydown", key);
    put(document.getElementById("tabs"), Object.entries(VIEWS).map(([view, [name]]) => el("a", { "data-view": view }, name)));
    const chosen = document.getElementById("run");
    try {
      page.runs = (await get("runs")).runs;
    } catch (error) {
      put(main, note(error.message, "bad"));
      return;
    }
    put(chosen, page.runs.map(({ run, name, path }) => el("option", { value: run, title: path }, name)));
    chosen.addEventListener("change", () => {
      page.run = Number(chosen.value);
      page.view = "";
      go(address()[0], { run: page.run || "" });
      follow();
    });
    addEventListener("hashchange", follow);
    await follow();
    await badge();
    setTimeout(again, 2000);
  }

  begin();
})();
