// Rollouts: filters, a list, and one conversation beside it. The filters and the open rollout are in the address.

(() => {
  "use strict";

  const { get } = Rollmill.api;
  const { conversation } = Rollmill.conversation;
  const { el, known, note, num, pill, put, words } = Rollmill.dom;
  const { problems } = Rollmill.now;

  const FIELDS = ["words", "task", "step", "min_reward", "max_reward", "min_tokens", "max_tokens", "fate", "evaluation", "task_group", "order"];
  const ORDERS = [["newest", "newest"], ["oldest", "oldest"], ["reward", "highest reward"], ["-reward", "lowest reward"], ["tokens", "longest"], ["-tokens", "shortest"]];
  const TYPED_MS = 120;

  function rollouts(place, page) {
    let rows = [];
    let total = 0;
    let listed = "";
    let open = null;
    let asking = null;
    let timer = 0;
    let begun = false;
    const inputs = {};
    const told = el("div");
    const count = el("p", { class: "count soft", role: "status" });
    const list = el("ol", { class: "results", "aria-label": "Rollouts" });
    const more = el("button", { type: "button", class: "more", on: { click: () => load(rows.length) } }, "Show more");
    const reader = el("section", { class: "reader", "aria-label": "Conversation" });
    put(place, told, form(), el("div", { class: "panes" }, el("section", { class: "list" }, count, list, more), reader));

    function input(name, properties) {
      inputs[name] = el("input", { name, "aria-label": properties.label, placeholder: properties.label, autocomplete: "off", ...properties, label: null,
        on: { input: () => { clearTimeout(timer); timer = setTimeout(filter, TYPED_MS); } } });
      return inputs[name];
    }

    function select(name, label, options) {
      inputs[name] = el("select", { name, "aria-label": label, on: { change: filter } }, options.map(([value, text]) => el("option", { value }, text)));
      return inputs[name];
    }

    function form() {
      const range = (label, low, high, properties) => el("span", { class: "range" }, el("span", {}, label), input(low, { label: `${label} from`, placeholder: "from", ...properties }), "–", input(high, { label: `${label} to`, placeholder: "to", ...properties }));
      return el("form", { class: "filters", role: "search", on: { submit: (event) => { event.preventDefault(); filter(); } } },
        input("words", { type: "search", label: "words of the task or the answer" }),
        input("task", { type: "search", label: "task id, such as add*" }),
        input("step", { type: "number", label: "training step", min: 0 }),
        range("reward", "min_reward", "max_reward", { type: "number", step: "any" }),
        range("tokens", "min_tokens", "max_tokens", { type: "number", min: 0 }),
        select("fate", "fate", [["", "any fate"]]), select("evaluation", "training or evaluation", [["", "training and evaluations"]]),
        select("order", "order", ORDERS), el("input", { type: "hidden", name: "task_group" }),
        el("button", { type: "button", on: { click: () => page.go("rollouts", {}) } }, "Clear"));
    }

    function filter() {
      const query = {};
      for (const name of FIELDS) query[name] = inputs[name]?.value ?? page.parameters().get(name) ?? "";
      if (query.order === "newest") query.order = "";
      page.go("rollouts", query, true);
    }

    async function facets() {
      const found = await get(`runs/${page.run}/facets`);
      options(inputs.fate, [["", "any fate"], ...Object.entries(found.fates).map(([fate, n]) => [fate, `${words(fate)} (${num(n)})`])]);
      const named = Object.entries(found.evaluations).filter(([name]) => name);
      options(inputs.evaluation, [["", "training and evaluations"], ["-", "training only"], ...named.map(([name, n]) => [name, `${name} (${num(n)})`])]);
      inputs.words.placeholder = found.texts_searched ? "words of the task or the answer" : "words of the task";
      return found;
    }

    function options(place, wanted) {
      const value = place.value;
      put(place, wanted.map(([key, text]) => el("option", { value: key }, text)));
      place.value = value;
    }

    // The next page of the list, or a new list.
    async function load(offset) {
      const query = Object.fromEntries(FIELDS.map((name) => [name, page.parameters().get(name) ?? ""]));
      asking?.abort();
      asking = new AbortController();
      const answer = await get(`runs/${page.run}/rollouts`, { ...query, offset: offset || "" }, asking.signal);
      rows = offset ? [...rows, ...answer.rows] : answer.rows;
      total = answer.total;
      count.textContent = `${answer.more ? "more than " : ""}${num(total)} of ${num(answer.indexed)} rollouts` + (answer.complete ? "" : ", more are being read …") +
        (answer.unreadable ? `, ${num(answer.unreadable)} records cannot be read` : "");
      const made = answer.rows.map((row, n) => item(row, offset + n));
      if (offset) list.append(...made);
      else put(list, made.length ? made : el("li", {}, note(answer.indexed ? "No rollout matches." : answer.complete ? "No rollout has ended yet." : "Reading the journal …")));
      more.hidden = rows.length >= total;
      mark();
      return answer;
    }

    function item(row) {
      const fact = (text, name) => el("span", { class: name }, text);
      return el("li", {}, el("a", { href: link({ open: row.number }), "data-number": row.number },
        pill(row.reward), fact(row.task_id ?? "unknown task", "task"), fact(`${num(row.tokens)} tokens`), row.turns > 1 && fact(`${row.turns} turns`),
        fact(row.evaluation ? row.evaluation : row.step === null ? words(row.fate) : `step ${row.step}`), row.reward === null ? fact(row.stop, "bad") : fact(`v${row.version}, ${words(row.stop)}`)));
    }

    function link(changed) {
      const query = new URLSearchParams(page.parameters());
      for (const [name, value] of Object.entries(changed)) value === null ? query.delete(name) : query.set(name, value);
      return `#/rollouts?${query}`;
    }

    function mark() {
      for (const one of list.querySelectorAll("a")) {
        const here = Number(one.dataset.number) === open;
        one.setAttribute("aria-current", here);
        one.href = link({ open: one.dataset.number });
        if (here) one.scrollIntoView({ block: "nearest" });
      }
    }

    async function show(number) {
      open = number;
      place.classList.toggle("reading", number !== null);
      mark();
      if (number === null) {
        put(reader, note("Choose a rollout, or press j."));
        return;
      }
      const found = await get(`runs/${page.run}/rollouts/${number}`);
      if (open === number) {
        put(reader, conversation(found, { close: link({ open: null }), sibling: (other) => link({ open: other }) }));
        reader.scrollTop = 0;
        if (reader.getBoundingClientRect().top < 0) scrollTo(0, 0);
      }
    }

    function move(step) {
      // From the address: it is ahead of the shown rollout while keys come faster than conversations are drawn.
      const from = page.parameters().get("open");
      const at = from === null ? -1 : rows.findIndex((row) => row.number === Number(from));
      const next = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : at + step];
      if (next) location.hash = link({ open: next.number });
      else if (step > 0 && rows.length < total) load(rows.length).then(() => move(step));
    }

    function sibling(step) {
      const all = [...reader.querySelectorAll(".siblings a")];
      const at = all.findIndex((one) => one.getAttribute("aria-current") === "true");
      all[at + step]?.click();
    }

    async function update(query) {
      for (const name of FIELDS) {
        const value = query.get(name) ?? (name === "order" ? "newest" : "");
        if (inputs[name] && document.activeElement !== inputs[name]) inputs[name].value = value;
      }
      const wanted = FIELDS.map((name) => query.get(name) ?? "").join("\n");
      if (wanted !== listed) {
        listed = wanted;
        const answer = await load(0);
        if (!answer.complete) timer = setTimeout(waitForMore, 1500);
        if (!begun) begin();
      }
      place.dataset.listed = query.toString();
      const wantedOpen = page.parameters().get("open"); // now: somebody may have gone on while the list was loaded
      const number = wantedOpen === null || !known(Number(wantedOpen)) ? null : Number(wantedOpen);
      if (number !== open || !reader.firstChild) await show(number);
      if (query.has("find")) inputs.words.focus();
    }

    // While the journal is being read, the list is asked again, unless somebody has gone down in it.
    function waitForMore() {
      if (!place.isConnected) return;
      if (rows.length <= 100) load(0).then((answer) => (answer.complete ? facets() : (timer = setTimeout(waitForMore, 1500)))).catch(() => {});
    }

    // Once, behind the first list: what filters can be set to, and what cannot be read.
    function begin() {
      begun = true;
      facets().then(() => { for (const name of ["fate", "evaluation"]) inputs[name].value = page.parameters().get(name) ?? ""; }).catch(() => {});
      get(`runs/${page.run}/state`).then(({ problems: found }) => put(told, problems(found, ["rollouts", "texts"]))).catch(() => {});
    }

    function key(name) {
      if (name === "/") inputs.words.focus();
      else if (name === "j") move(1);
      else if (name === "k") move(-1);
      else if (name === "n") sibling(1);
      else if (name === "p") sibling(-1);
      else if (name === "Escape" && open !== null) location.hash = link({ open: null });
      else return false;
      return true;
    }

    return { update, key, close: () => { clearTimeout(timer); asking?.abort(); } };
  }

  Rollmill.rollouts = { rollouts };
})();
