// A chart as SVG: lines, bands, points with intervals; a reading line that the pointer or the arrow keys move.

(() => {
  "use strict";

  const { el, known, num, svg } = Rollmill.dom;

  const HEIGHT = 190;
  const EDGE = { left: 46, right: 10, top: 8, bottom: 24 };

  function ticks(low, high, count = 5) {
    const span = high - low || 1;
    const rough = span / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5, 10].find((n) => n * power >= 0.75 * rough) ?? 10);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
    return found;
  }

  function range(values, fromZero) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (!known(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return [0, 1];
    if (fromZero) low = Math.min(low, 0);
    if (low === high) return [low - (fromZero ? 0 : 0.5), high + 0.5];
    const room = 0.04 * (high - low);
    return [fromZero && low === 0 ? 0 : low - room, high + room];
  }

  // panel: {title, x, y, from_zero, lines: [{x, y, low, high, color, dash, label}], points: [{x, y, low, high, color, label}]}
  function chart(panel) {
    const canvas = svg("svg", { class: "chart", tabindex: "0", role: "img", "aria-label": described(panel) });
    const reading = el("p", { class: "value", "aria-live": "polite" });
    const legend = el("p", { class: "legend" }, panel.lines.filter((line) => line.label).map((line) => el("span", {},
      svg("svg", { width: 18, height: 8 }, svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: line.color, "stroke-dasharray": line.dash })), line.label)),
      kinds(panel.points).map(({ label, color }) => el("span", {}, svg("svg", { width: 10, height: 10 }, svg("circle", { cx: 5, cy: 5, r: 4, class: color })), label)));
    const made = el("figure", { class: "card" }, el("figcaption", {}, el("h2", {}, panel.title), el("span", { class: "soft" }, panel.y)),
      el("div", { class: "canvas" }, canvas, reading), legend.childElementCount > 0 && legend);
    let at = null;
    let scales = null;
    const draw = () => { scales = drawn(canvas, panel, canvas.parentElement.clientWidth || 320); read(at); };
    const read = (x) => {
      at = x;
      canvas.querySelector(".cursor")?.remove();
      reading.textContent = "";
      if (x === null || !scales) return;
      const found = panel.lines.map((line) => [line, nearest(line, x)]).filter(([, n]) => n !== null);
      if (!found.length) return;
      const exact = found[0][0].x[found[0][1]];
      canvas.append(svg("g", { class: "cursor" }, svg("line", { x1: scales.x(exact), x2: scales.x(exact), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
        found.map(([line, n]) => svg("circle", { cx: scales.x(line.x[n]), cy: scales.y(line.y[n]), r: 3, class: line.color }))));
      const told = found.map(([line, n]) => `${line.label || panel.lines.length > 1 ? `${line.label || panel.title} ` : ""}${num(line.y[n])}` +
        (line.low ? ` (${num(line.low[n])} – ${num(line.high[n])})` : ""));
      reading.textContent = `${short(panel.x)} ${num(exact, 1)}: ${told.join(", ")}`;
    };
    canvas.addEventListener("pointermove", (event) => {
      if (scales) read(scales.back(event.clientX - canvas.getBoundingClientRect().left));
    });
    canvas.addEventListener("pointerleave", () => read(null));
    canvas.addEventListener("blur", () => read(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const line = panel.lines[0];
      if (!step || !line) return;
      const n = at === null ? (step > 0 ? 0 : line.x.length - 1) : Math.min(Math.max(nearest(line, at) + step, 0), line.x.length - 1);
      read(line.x[n]);
      event.preventDefault();
    });
    const watch = new ResizeObserver(draw);
    watch.observe(canvas.parentElement);
    made.unwatch = () => watch.disconnect();
    return made;
  }

  const kinds = (points) => [...new Map(points.map((point) => [point.kind, { label: point.kind, color: point.color }])).values()].filter((one) => one.label);

  const short = (name) => ({ "training step": "step", "seconds since the start of the run": "second", "trained tokens": "tokens" })[name] ?? name;

  function described(panel) {
    const told = panel.lines.map((line) => `${line.label || panel.title} from ${num(line.y[0])} to ${num(line.y.at(-1))}`);
    return `${panel.title}, by ${panel.x}: ${told.join("; ") || "no values"}. Arrow keys read values.`;
  }

  function nearest(line, x) {
    if (!line.x.length) return null;
    let [low, high] = [0, line.x.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.x[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - line.x[low - 1] < line.x[low] - x ? low - 1 : low;
  }

  function drawn(canvas, panel, width) {
    const all = (key) => [...panel.lines.flatMap((line) => line[key] ?? []), ...panel.points.map((point) => point[key])];
    const [left, right] = range(all("x"), panel.x !== "training step" && panel.from_zero);
    const [bottom, top] = range([...all("y"), ...all("low"), ...all("high")], panel.from_zero);
    const inner = { w: width - EDGE.left - EDGE.right, h: HEIGHT - EDGE.top - EDGE.bottom };
    const x = (value) => EDGE.left + ((value - left) / (right - left)) * inner.w;
    const y = (value) => EDGE.top + (1 - (value - bottom) / (top - bottom)) * inner.h;
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    canvas.setAttribute("height", HEIGHT);
    canvas.replaceChildren(grid(ticks(bottom, top, 4), ticks(left, right, width > 420 ? 6 : 4), x, y, width),
      ...panel.lines.flatMap((line) => [line.low && area(line, x, y), path(line, x, y)]).filter(Boolean),
      ...panel.points.map((point) => spot(point, x, y)));
    return { x, y, back: (pixel) => left + ((pixel - EDGE.left) / inner.w) * (right - left) };
  }

  function grid(rows, columns, x, y, width) {
    return svg("g", { class: "grid" },
      rows.map((value) => [svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
        svg("text", { x: EDGE.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, tick(value))]),
      columns.map((value) => svg("text", { x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, tick(value))));
  }

  function tick(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
    return size && size < 0.001 ? value.toExponential(0) : String(+value.toPrecision(4));
  }

  function path(line, x, y) {
    let open = false;
    const steps = line.x.map((at, n) => {
      if (!known(line.y[n])) { open = false; return ""; }
      const step = `${open ? "L" : "M"}${x(at).toFixed(1)} ${y(line.y[n]).toFixed(1)}`;
      open = true;
      return step;
    });
    return svg("path", { d: steps.join(""), class: `line ${line.color}`, "stroke-dasharray": line.dash });
  }

  function area(line, x, y) {
    const there = line.x.map((at, n) => `${x(at).toFixed(1)} ${y(line.high[n]).toFixed(1)}`);
    const back = line.x.map((at, n) => `${x(at).toFixed(1)} ${y(line.low[n]).toFixed(1)}`).reverse();
    return svg("path", { d: `M${[...there, ...back].join("L")}Z`, class: `band ${line.color}` });
  }

  function spot(point, x, y) {
    const bar = known(point.low) && known(point.high) &&
      svg("line", { x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high), class: `line ${point.color}` });
    const told = `${point.label}: ${num(point.y)}` + (known(point.low) ? ` (95%: ${num(point.low)} – ${num(point.high)})` : "");
    return svg("g", {}, svg("title", {}, told), bar, svg("circle", { cx: x(point.x), cy: y(point.y), r: 4, class: `dot ${point.color}` }));
  }

  Rollmill.chart = { ticks, chart };
})();
