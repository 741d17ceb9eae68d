// Stalls, evaluations, changed settings, and the warnings and errors of every process, the newest first.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { choice, clock, el, known, note, put, seconds } = Rollmill.dom;
  const { problems } = Rollmill.now;

  const KINDS = { all: "all", stall: "stalls", error: "errors", warning: "warnings", evaluation: "evaluations", other: "other" };
  const SHOWN = 300;

  function events(place, page) {
    let kind = "all";
    let text = "";
    let found = [];
    let last = "";
    const list = el("ol", { class: "timeline" });
    const controls = el("div", { class: "controls" });
    const search = el("input", { type: "search", placeholder: "component or words", "aria-label": "Search events", on: { input: () => { text = search.value.toLowerCase(); draw(); } } });
    const kinds = el("div");
    const told = el("div");
    put(controls, kinds, search);
    put(place, told, controls, list);

    const of = (event) => (event.kind in KINDS ? event.kind : "other");
    function draw() {
      put(kinds, choice("kind", Object.entries(KINDS).map(([value, name]) => [value, `${name} ${value === "all" ? found.length : found.filter((one) => of(one) === value).length}`]), kind, (value) => { kind = value; draw(); }));
      const rows = found.filter((one) => (kind === "all" || of(one) === kind) && (!text || `${one.who} ${one.cause ?? ""} ${one.text}`.toLowerCase().includes(text)));
      put(list, rows.length ? rows.slice(0, SHOWN).map(row) : el("li", {}, note(found.length ? "No event matches." : "Nothing happened that would be told here.")),
        rows.length > SHOWN && el("li", {}, note(`${rows.length - SHOWN} older ones are not shown: search for them.`)));
    }
    return {
      async update() {
        const answer = await get(`runs/${page.run}/events`);
        const now = JSON.stringify(answer);
        if (now === last) return;
        last = now;
        found = answer.events;
        put(told, problems(answer.problems, ["metrics"]));
        draw();
      },
    };
  }

  function row(event) {
    const open = event.kind === "stall" && event.seconds === null;
    const length = event.kind === "stall" && (open ? "not over" : known(event.seconds) ? `for ${seconds(event.seconds)}` : "");
    return el("li", { class: `event ${event.kind}${open ? " open" : ""}` },
      el("time", {}, clock(event.at)), el("span", { class: "kind" }, event.kind), el("b", {}, event.who),
      el("p", {}, event.cause && el("b", {}, `${event.cause}: `), event.text, length && el("span", { class: "soft" }, ` (${length})`)));
  }

  Rollmill.events = { events };
})();
