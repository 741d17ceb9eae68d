// Makes elements and formats numbers. Text of a run becomes a text node, never markup.

const Rollmill = {}; // by file: what it gives to those after it

(() => {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";

  // el("p", {class: "x", on: {click: f}, title: "y"}, "text", child, ...); null and false children are left out.
  function el(name, properties = {}, ...children) {
    return fill(document.createElement(name), properties, children);
  }

  function svg(name, properties = {}, ...children) {
    return fill(document.createElementNS(SVG, name), properties, children);
  }

  function fill(made, properties, children) {
    for (const [key, value] of Object.entries(properties)) {
      if (value === null || value === undefined || value === false) continue;
      if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
      else made.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat(3)) {
      if (child === null || child === undefined || child === false) continue;
      made.append(child instanceof Node ? child : String(child));
    }
    return made;
  }

  function put(place, ...children) {
    place.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
    return place;
  }

  const known = (value) => typeof value === "number" && Number.isFinite(value);

  // A number as people read it: 0.123, 12.3, 1,234, 1.2M.
  function num(value, digits = 3) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e8 ? 0 : 1)}M`;
    if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return size >= 100 ? value.toFixed(1) : value.toFixed(digits);
  }

  const percent = (share, digits = 0) => (known(share) ? `${(100 * share).toFixed(digits)}%` : "–");

  function bytes(size) {
    if (!known(size)) return "–";
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(size) < 1024) return unit === "B" ? `${Math.round(size)} B` : `${size.toFixed(1)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(1)} TiB`;
  }

  function seconds(value) {
    if (!known(value)) return "–";
    if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
    if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
    const minutes = Math.round(value / 60);
    if (minutes < 120) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }

  function clock(epoch) {
    if (!known(epoch) || !epoch) return "–";
    const at = new Date(1000 * epoch);
    const two = (n) => String(n).padStart(2, "0");
    const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  }

  const words = (name) => String(name).replaceAll("_", " ");

  function card(title, ...children) {
    return el("section", { class: "card" }, title && el("h2", {}, title), children);
  }

  const note = (text, kind = "") => el("p", { class: `note ${kind}` }, text);

  // A table with a header; cells may be nodes. Columns: [name, "right" or ""].
  function table(columns, rows, properties = {}) {
    const side = (n) => (columns[n][1] === "right" ? "right" : null);
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": properties.label ?? "table" },
      el("table", {},
        el("thead", {}, el("tr", {}, columns.map(([name], n) => el("th", { class: side(n), scope: "col" }, name)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, n) => el("td", { class: side(n) }, cell)))))));
  }

  // A segmented choice, as radio buttons that arrow keys move.
  function choice(label, options, chosen, choose) {
    const name = `c${Math.random().toString(36).slice(2)}`;
    return el("fieldset", { class: "choice" }, el("legend", { class: "hidden" }, label),
      options.map(([value, text]) => el("label", {},
        el("input", { type: "radio", name, value, checked: value === chosen, on: { change: () => choose(value) } }),
        el("span", {}, text))));
  }

  // A reward as a coloured pill, with its number; a failure has none.
  function pill(reward) {
    if (reward === null || reward === undefined) return el("span", { class: "pill failure" }, "failed");
    return el("span", { class: `pill ${reward > 0 ? "good" : reward < 0 ? "bad" : "zero"}` }, num(reward, 2));
  }

  Rollmill.dom = { el, svg, put, known, num, percent, bytes, seconds, clock, words, card, note, table, choice, pill };
})();
